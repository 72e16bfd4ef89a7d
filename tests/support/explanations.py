"""Hand-made explanations: results with known numbers, without a model."""

import numpy as np

from backend.types import (
    Decoding,
    Explanation,
    ModelInfo,
    Passage,
    Passes,
    Prompt,
    TargetToken,
    Token,
    TokenAttribution,
)

MODEL = ModelInfo(
    id="tiny-test-model",
    revision="0123456789abcdef",
    dtype="float32",
    device="cpu",
    device_reason="no GPU here",
    architecture="LlamaForCausalLM",
    attention="sdpa",
    parameters=1234,
    context_length=64,
)


def token(text, role="user", *, group, id=None, special=False):
    return Token(id=100 + group if id is None else id, text=text, role=role, group=group, special=special)


def result(method, scores, *, signed, **more):
    scores = None if scores is None else np.array(scores, np.float32)
    more.setdefault("passes", Passes(forward=1.0))
    return TokenAttribution(method=method, params={}, signed=signed, scores=scores, seconds=0.25, **more)


def explanation(prompt_tokens, answer_tokens, results, *, target=None, **more):
    """Explain ``target`` (a span of the answer; by default its first token)."""
    tokens = (*prompt_tokens, *answer_tokens)
    start, stop = target or (0, 1)
    targets = tuple(
        TargetToken(
            position=len(prompt_tokens) + i,
            id=answer_tokens[i].id,
            text=answer_tokens[i].text,
            probability=0.5,
            rank=1,
            runner_up_id=7,
            runner_up_text=" other",
            runner_up_probability=0.25,
        )
        for i in range(start, stop)
    )
    passage = Passage(tokens, len(prompt_tokens), "".join(t.text for t in prompt_tokens))
    return Explanation(
        model=MODEL,
        prompt=more.pop("prompt", Prompt("hi")),
        decoding=more.pop("decoding", Decoding()),
        passage=passage,
        targets=targets,
        foil=more.pop("foil", ()),
        objective="log_prob",
        level=more.pop("level", "token"),
        seed=0,
        results=tuple(results),
        versions={"torch": "2.14.1", "transformers": "5.24.0"},
        created="2026-01-02T03:04:05Z",
        **more,
    )
