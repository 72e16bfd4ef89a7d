"""The model's own answer, or the reading of a given one: ids, probabilities, ranks. Knows nothing of methods.

An answer is generated with exactly the settings that were asked for. What a model's ``generation_config`` adds
(temperature, repetition penalty, suppressed tokens) is left out, except for its end-of-turn tokens.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from backend.errors import BadRequest, ModelUnavailable
from backend.models.characters import token_text
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.settings import Settings
from backend.types import Answer, AnswerRequest, Decoding, TargetToken, Tick, no_tick

_CERTAIN = 0.99  # above this probability gradients are tiny (specification 2.2)
_GenerationConfig = cast(Any, GenerationConfig)  # its constructor carries no types
_ROWS = 64  # rows of logits turned to float32 at once


def answer(
    model: LanguageModel, request: AnswerRequest, tick: Tick = no_tick, settings: Settings | None = None
) -> Answer:
    """Let the model answer, or read the given continuation, and say how likely the model finds each token.

    Args:
        model: The model.
        request: Prompt, and either decoding settings or a continuation.
        tick: Called once per generated token.
        settings: Limits; None for the process-wide ones.

    Raises:
        BadRequest: If prompt, continuation or decoding settings are not usable.
        PromptTooLong: If prompt and answer do not fit.
        Cancelled: If ``tick`` raised it; takes effect within one token.
    """
    start = time.perf_counter()
    notes: list[str] = [*model.notes]
    given = request.continuation
    if given is None:
        _check_decoding(request.decoding)
        passage = encode_prompt(model, request.prompt, settings, room=request.decoding.max_new_tokens)
        ids = generate_ids(model, passage.ids, request.decoding, tick)
        if len(ids) >= request.decoding.max_new_tokens and ids[-1] not in end_ids(model):
            notes.append(f"The answer stopped at the limit of {len(ids)} tokens, not at an end of its own.")
    else:
        ids = encode_text(model, given)
        passage = encode_prompt(model, request.prompt, settings, room=len(ids))
    passage = append_answer(model, passage, ids)
    logits = answer_logits(model, passage.ids, passage.prompt_length)
    targets = _statistics(model, passage.ids, passage.prompt_length, logits)
    if given is not None:
        notes += _spacing_note(model, given, ids, logits[0])
    notes += passage.notes
    notes += _certainty_note(targets)
    return Answer(
        model=model.info,
        prompt=request.prompt,
        decoding=request.decoding if given is None else None,
        passage=passage,
        targets=targets,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def generate_ids(
    model: LanguageModel, prompt_ids: Sequence[int], decoding: Decoding, tick: Tick = no_tick
) -> tuple[int, ...]:
    """Generate an answer's ids, at least one. A model that ends at once answers with its end-of-turn token.

    The random state of the process is the same before and after; the answer depends on ``decoding.seed`` alone.
    """
    config = _GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        do_sample=decoding.temperature > 0,
        **({"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0} if decoding.temperature else {}),
    )
    ends = end_ids(model)
    config.eos_token_id = sorted(ends) or None
    config.pad_token_id = min(ends) if ends else 0  # never written: there is one sequence, and it stops at its end
    inputs = torch.tensor([list(prompt_ids)], device=model.device)
    stop = StoppingCriteriaList([_Ticking(tick, len(prompt_ids), decoding.max_new_tokens)])
    with _own_defaults(model), _own_randomness(model.device, decoding.seed):
        output: Any = cast(Any, model.module).generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config, stopping_criteria=stop
        )
    return tuple(int(i) for i in output[0, len(prompt_ids) :].tolist())


def end_ids(model: LanguageModel) -> frozenset[int]:
    """Return the ids that end an answer: the model's own and its tokenizer's."""
    config = getattr(model.module, "generation_config", None)
    found: list[Any] = [model.tokenizer.eos_token_id]
    listed = getattr(config, "eos_token_id", None)
    found += listed if isinstance(listed, list) else [listed]
    return frozenset(int(i) for i in found if i is not None and 0 <= int(i) < model.vocabulary_rows)


def token_statistics(model: LanguageModel, ids: Sequence[int], prompt_length: int) -> tuple[TargetToken, ...]:
    """Return probability, rank and runner-up of every token after the prompt, from one forward pass.

    Args:
        model: The model.
        ids: Prompt ids, then answer ids.
        prompt_length: Number of prompt ids, at least 1.
    """
    return _statistics(model, ids, prompt_length, answer_logits(model, ids, prompt_length))


@torch.no_grad()
def answer_logits(model: LanguageModel, ids: Sequence[int], prompt_length: int) -> Tensor:
    """Return the logits that predict each answer token, shape ``(answer, vocabulary)``, in the model's dtype."""
    count = len(ids) - prompt_length
    if not 1 <= prompt_length < len(ids):
        raise ValueError("at least one prompt id and one answer id are needed")
    inputs = torch.tensor([list(ids)], device=model.device)
    options: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.module.forward).parameters:
        options["logits_to_keep"] = count + 1  # the last row predicts what follows the answer
    logits: Tensor = model.module(input_ids=inputs, attention_mask=torch.ones_like(inputs), **options).logits
    return logits[0, -count - 1 : -1]


@torch.no_grad()
def _statistics(
    model: LanguageModel, ids: Sequence[int], prompt_length: int, logits: Tensor
) -> tuple[TargetToken, ...]:
    targets = torch.tensor(list(ids[prompt_length:]), device=logits.device)
    out: list[TargetToken] = []
    for first in range(0, len(targets), _ROWS):
        rows = logits[first : first + _ROWS].float()  # (rows, vocabulary)
        chosen = targets[first : first + _ROWS, None]  # (rows, 1)
        if not bool(torch.isfinite(rows.max(dim=-1).values).all()):
            raise ModelUnavailable(
                "The model computes numbers that are infinite or not numbers.", "Choose dtype float32 or bfloat16."
            )
        probabilities = rows.softmax(dim=-1)
        own = probabilities.gather(1, chosen)[:, 0]
        ranks = 1 + (rows > rows.gather(1, chosen)).sum(dim=-1)
        rival_id = rows.scatter(1, chosen, -torch.inf).argmax(dim=-1)
        rival_probability = probabilities.gather(1, rival_id[:, None])[:, 0]
        for k, (p, rank, other, q) in enumerate(
            zip(own.tolist(), ranks.tolist(), rival_id.tolist(), rival_probability.tolist(), strict=True)
        ):
            position = prompt_length + first + k
            out.append(
                TargetToken(
                    position=position,
                    id=int(ids[position]),
                    text=token_text(model.tokenizer, int(ids[position])),
                    probability=p,
                    rank=int(rank),
                    runner_up_id=int(other),
                    runner_up_text=token_text(model.tokenizer, int(other)),
                    runner_up_probability=q,
                )
            )
    return tuple(out)


def _check_decoding(decoding: Decoding) -> None:
    if decoding.max_new_tokens < 1:
        raise BadRequest("The answer must have room for at least one token.", "Raise the length limit.")
    if not 0 <= decoding.temperature <= 100:
        raise BadRequest(f"The temperature must lie between 0 and 100, not {decoding.temperature}.", "0 is greedy.")
    if not 0 < decoding.top_p <= 1:
        raise BadRequest(f"The nucleus mass must lie above 0 and up to 1, not {decoding.top_p}.", "1 keeps all tokens.")


class _Ticking(StoppingCriteria):
    """Reports one step per token; a cancelled job raises out of the decoding loop."""

    def __init__(self, tick: Tick, prompt_length: int, total: int) -> None:
        self._tick = tick
        self._prompt_length = prompt_length
        self._total = total

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self._tick(min(input_ids.shape[1] - self._prompt_length, self._total), self._total)
        return cast(torch.BoolTensor, torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device))


@contextmanager
def _own_defaults(model: LanguageModel) -> Iterator[None]:
    """Hide the model's generation settings, which would fill everything that a request leaves open."""
    module = cast(Any, model.module)
    saved = module.generation_config
    module.generation_config = _GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = saved


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_rng_kind(device)):
        torch.manual_seed(seed)
        yield


def _rng_kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def _spacing_note(model: LanguageModel, given: str, ids: Sequence[int], logits: Tensor) -> list[str]:
    """Compare a continuation with its twin that starts with a space, or without one: people forget it easily."""
    twin = given[1:] if given.startswith(" ") else " " + given
    if not twin.strip():
        return []
    twin_id = encode_text(model, twin)[0]
    own_logit, twin_logit = float(logits[ids[0]]), float(logits[twin_id])
    if twin_id == ids[0] or twin_logit <= own_logit:
        return []
    own_rank, twin_rank = (1 + int((logits > logit).sum()) for logit in (own_logit, twin_logit))
    words = ("without", "with") if twin.startswith(" ") else ("with", "without")
    return [
        f"The model would rather read this continuation {words[1]} a space at its start (first token: rank "
        f"{twin_rank:,}) than {words[0]} one, as given (rank {own_rank:,})."
    ]


def _certainty_note(targets: Sequence[TargetToken]) -> list[str]:
    sure = sum(t.probability > _CERTAIN for t in targets)
    if not sure:
        return []
    which = "The token is" if len(targets) == 1 else f"{sure} of {len(targets)} answer tokens are"
    return [f"{which} nearly certain (p > {_CERTAIN}), where gradients fade; a foil asks a sharper question."]
