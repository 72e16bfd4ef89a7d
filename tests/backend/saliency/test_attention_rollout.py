"""Rollout against a two-layer example by hand and against the full product in float64."""

import numpy as np
import pytest
import torch

from backend.registry import get_method
from backend.saliency.attention_rollout import Params, rollout_rows, run
from backend.types import no_tick
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import question_of

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(2)).tolist()


def test_two_layers_by_hand():
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    second = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    # last row: (0.125, 0.875) of the second layer, then through (1, 0) and (0.25, 0.75) of the first
    rows = rollout_rows([first, second], [1, 0])
    np.testing.assert_allclose(rows, [[0.125 + 0.875 * 0.25, 0.875 * 0.75], [1, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_full_product(family):
    model = tiny_model(family)
    question = question_of(model, IDS, 21, (0, 3))
    scores = run(model, question, Params(), no_tick)

    double = tiny_model(family)
    double.module.double()
    double.module.set_attn_implementation("eager")
    with torch.no_grad():
        maps = double.module(torch.tensor([IDS[:23]]), output_attentions=True, use_cache=False).attentions
    product = np.eye(23)
    for weights in maps:
        mean = sum(weights[0, head].double().numpy() for head in range(4)) / 4
        product = (0.5 * mean + 0.5 * np.eye(23)) @ product
    np.testing.assert_allclose(scores.values, product[[20, 21, 22]], atol=1e-5)
    np.testing.assert_allclose(scores.values.sum(1), 1, atol=1e-5)
    assert scores.passes.forward == 1
    checks = {check.name: check for check in scores.checks}
    assert checks["sums_to_one"].verdict == checks["hooked_equals_plain"].verdict == "ok"


def test_another_target_or_a_foil_changes_nothing_and_the_check_says_so():
    model = tiny_model("llama")
    plain = run(model, question_of(model, IDS, 21, (0, 1)), Params(), no_tick)
    other = run(model, question_of(model, [*IDS[:21], 7], 21, (0, 1)), Params(), no_tick)
    foil = run(model, question_of(model, IDS, 21, (0, 1), foil=[5, 6]), Params(), no_tick)
    assert np.array_equal(plain.values, other.values) and np.array_equal(plain.values, foil.values)
    texts = ["".join(c.text for c in scores.checks if c.name == "not_target_specific") for scores in (plain, foil)]
    assert "any other target" in texts[0] and "foil" not in texts[0] and "the foil plays no part" in texts[1]


def test_sums_that_miss_one_are_told():
    model = tiny_model("llama")
    for layer in model.module.model.layers:  # as if an attention sink that is no token took a tenth
        layer.self_attn.register_forward_hook(
            lambda part, args, output: output if output[1] is None else (output[0], output[1] * 0.9)
        )
    scores = run(model, question_of(model, IDS, 21, (0, 1)), Params(), no_tick)
    check = next(check for check in scores.checks if check.name == "sums_to_one")
    # each layer keeps half of everything, and nine tenths of the other half
    assert check.verdict == "warn" and check.value == pytest.approx(1 - 0.95**2, abs=1e-4)


def test_it_is_registered_as_unsigned_attention():
    method = get_method("attention_rollout")
    assert (method.family, method.signed, method.needs_gradient) == ("attention", False, False)
