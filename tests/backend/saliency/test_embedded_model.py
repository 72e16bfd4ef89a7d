"""Occlusion on the embedded model: against one full pass per variant, and on text where the evidence is known."""

import numpy as np
import pytest
import torch

from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method, list_methods
from backend.saliency.question import ask
from backend.types import ModelRef, Prompt, SaliencyRequest, Turn, no_tick

pytestmark = pytest.mark.smollm


def question(model, prompt, answer, **more):
    ids = encode_text(model, answer)
    passage = append_answer(model, encode_prompt(model, prompt), ids)
    return passage, ask(model, passage, SaliencyRequest(ModelRef(), prompt, ids, (0, 1), (), **more))


def run(name, asked, **params):
    method = get_method(name)
    return method.run(asked.model, asked, method.params(**params), no_tick)


def test_hiding_equals_one_full_pass_per_token(smollm):
    _, asked = question(smollm, Prompt("Anna put the red ball into the box. The ball in the box is"), " red")
    count, target = asked.source_count, asked.strands[0].tokens[0]
    found = run("occlusion", asked)
    ids, plain = torch.tensor([asked.ids]), asked.plain.values[0]
    wanted = []
    for u in range(count):
        keep = torch.ones(count, count).tril().bool()
        keep[u + 1 :, u] = False
        mask = torch.where(keep, 0.0, -1e9)[None, None]
        with torch.no_grad():
            logits = smollm.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -1]
        wanted.append(plain - float(logits.log_softmax(-1)[target]))
    np.testing.assert_allclose(found.values[0], wanted, atol=2e-4)
    assert np.abs(wanted).max() > 0.5


def test_the_word_that_decides_comes_first(smollm):
    prompt = Prompt(turns=(Turn("user", "The secret word is banana. What is the secret word?"),))
    passage, asked = question(smollm, prompt, "banana", level="word")
    found = run("occlusion", asked)
    best = int(np.nanargmax(found.values[0]))
    begin, end = found.units[best] if found.units else (best, best + 1)
    assert "banana" in "".join(token.text for token in passage.tokens[begin:end])


@pytest.mark.parametrize("method", list_methods(), ids=lambda m: m.name)
def test_the_same_scores_twice_bit_by_bit(smollm, method):
    _, asked = question(smollm, Prompt("The capital of France is"), " Paris")
    params = {"steps": 8} if method.name == "integrated_gradients" else {}
    first, second = (run(method.name, asked, **params).values for _ in range(2))
    assert np.array_equal(first, second)


def test_integrated_gradients_says_when_its_scores_do_not_add_up(smollm):
    _, asked = question(smollm, Prompt("The capital of France is Paris. The capital of Italy is"), " Rome")
    found = run("integrated_gradients", asked, steps=16)
    check = next(check for check in found.checks if check.name == "completeness_residual")
    total = float(found.values.astype(np.float64).sum())
    assert check.verdict in ("warn", "fail")
    assert ("do not rank tokens" in check.text) == (check.value > 0.2)
    assert f"{total:.3g}" in check.text
