"""Attention manipulation against models written out in float64, limits that can be proven, and what it leaves alone."""

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.saliency import atman
from backend.saliency.atman import Params, unit_factors
from backend.saliency.own_attention import NAME, _attention, suppressed, suppressing
from backend.saliency.suppression import Suppressor
from backend.types import no_tick
from tests.support.naive import naive_logits
from tests.support.tiny import FAMILIES, WINDOW, tiny_model
from tests.support.toys import question_of, toy_model

LONG = WINDOW + 9  # longer than the sliding windows
IDS = torch.randint(3, 300, (LONG + 4,), generator=torch.Generator().manual_seed(1)).tolist()
IDS[11] = IDS[5]  # a repeated token
COUNT = LONG + 2  # sources


def ask(model, target=(1, 3), **more):
    return question_of(model, IDS, LONG, target, **more)


def run(question, **params):
    return atman.run(question.model, question, Params(**params), no_tick)


def check_of(scores, name):
    return next(check for check in scores.checks if check.name == name)


def random_scores(heads=3, length=9, size=2.0):
    generator = torch.Generator().manual_seed(2)
    scores = size * torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
    return scores, torch.ones(length, length, dtype=torch.bool).tril()


# ------------------------------------------------------------------------------------- against the definition


def by_hand(model, question, factor, threshold):
    """Each unit in turn on the model written out in float64, from the formulas, token by token."""
    embedded = model.embedding.weight[list(question.ids)].double()
    embedded = embedded / embedded.norm(dim=-1, keepdim=True)

    def log_p(factors):
        def change(scores, allowed):
            out = scores.clone()
            for row in range(scores.shape[1]):
                lowest = scores[:, row, allowed[row]].min(dim=-1).values
                out[:, row] = (scores[:, row] - lowest[:, None]) * factors
            return out

        return naive_logits(model.module, question.ids, change).log_softmax(-1)[[LONG, LONG + 1], IDS[LONG + 1 : -1]]

    plain = log_p(torch.ones(COUNT, dtype=torch.float64))
    out = np.zeros((2, COUNT))
    for unit in range(COUNT):
        factors = torch.ones(COUNT, dtype=torch.float64)
        for other in range(COUNT):
            cosine = float(embedded[unit] @ embedded[other])
            if other == unit:
                factors[other] = factor
            elif threshold is not None and cosine >= threshold:
                factors[other] = factor + (1 - factor) * (1 - cosine)
        out[:, unit] = plain - log_p(factors)
    out[0, LONG + 1 :] = 0
    return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("factor", [0.1, 0.0])
def test_scores_equal_a_model_written_out_in_float64(family, factor):
    model = tiny_model(family)
    question = ask(model)
    scores = run(question, factor=factor, threshold=0.4)
    wanted = by_hand(model, question, factor, 0.4)
    np.testing.assert_allclose(scores.values, wanted, atol=1e-4 * np.abs(wanted).max())
    alone = run(question, factor=factor, similar=False)
    np.testing.assert_allclose(alone.values, by_hand(model, question, factor, None), atol=1e-4 * np.abs(wanted).max())
    assert np.abs(alone.values - scores.values).max() > 1e-3


def test_similar_tokens_go_along_by_their_cosine():
    model = toy_model("linear", width=3)
    with torch.no_grad():
        model.module.embed.weight[:4] = torch.tensor([[1.0, 0, 0], [3.0, 4.0, 0], [0, 2.0, 0], [0, 0, 1.0]])
    factors = unit_factors(model, (0, 1, 2, 3, 0), [(0, 1), (2, 4)], Params(factor=0.1, threshold=0.6))
    # cosines with the first: 1, 0.6, 0, 0, 1; the largest with the second unit: 0, 0.8, own, own, 0
    np.testing.assert_allclose(factors[0], [0.1, 0.1 + 0.9 * 0.4, 1, 1, 0.1], atol=1e-6)
    np.testing.assert_allclose(factors[1], [1, 0.1 + 0.9 * 0.2, 0.1, 0.1, 1], atol=1e-6)
    only = unit_factors(model, (0, 1, 2, 3, 0), [(0, 1)], Params(factor=0.3, similar=False))
    np.testing.assert_allclose(only, [[0.3, 1, 1, 1, 1]])


def test_what_went_along_is_said():
    scores = run(ask(tiny_model("llama")), threshold=0.95)
    check = check_of(scores, "co_suppressed")
    assert check.value == 2  # the repeated token takes its copy along, and the other way round
    assert "with token 12" in check.text and "with token 6" in check.text
    assert not [c for c in run(ask(tiny_model("llama")), similar=False).checks if c.name == "co_suppressed"]
    assert scores.values[1, 5] == scores.values[1, 11]


# ------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_a_factor_of_one_changes_nothing(family):
    """Windows are shorter than the text, and Gemma 2 has a soft cap."""
    model = tiny_model(family)
    ids = torch.tensor([IDS])
    mask = torch.ones(len(IDS), len(IDS), dtype=torch.bool)
    with torch.no_grad():
        plain = model.module(input_ids=ids, use_cache=False).logits
        with suppressing(model.module, torch.ones(1, len(IDS))):  # the library makes the mask, by our name
            found = model.module(input_ids=ids, use_cache=False).logits
        assert torch.equal(model.module(input_ids=ids, use_cache=False).logits, plain)
    np.testing.assert_allclose(found, plain, atol=2e-5)
    assert mask.all() and Suppressor(ask(model), lambda: None).gap < 1e-5
    assert (run(ask(model), factor=1.0).values == 0).all()


def test_a_factor_of_zero_levels_a_token_with_the_least_attended_one():
    scores, allowed = random_scores()
    factors = torch.ones(9, dtype=torch.float64)
    factors[3] = 0
    found = suppressed(scores, allowed, factors)
    smallest = found.masked_fill(~allowed, torch.inf).amin(-1)
    np.testing.assert_allclose(found[:, 3:, 3], smallest[:, 3:], rtol=1e-12)
    assert float(found[:, 4:, 3].min()) > 0  # so it is not removed
    # with one other token, which then is the least attended one, both get one half: nothing like masking
    two = suppressed(torch.tensor([[[5.0, 0.0], [-40.0, 40.0]]]), torch.ones(2, 2, dtype=torch.bool).tril(),
                     torch.tensor([1.0, 0.0]))  # fmt: skip
    np.testing.assert_allclose(two[0, 1], [0.5, 0.5])


def test_a_factor_of_zero_comes_to_masking_where_attention_is_sharp():
    """The token's weight is at most exp(lowest - highest other score): it vanishes as scores spread."""
    for size, bound in ((2.0, 1.0), (20.0, 1e-3), (400.0, 1e-12)):
        scores, allowed = random_scores(size=size)
        factors = torch.ones(9, dtype=torch.float64)
        factors[3] = 0
        found = suppressed(scores, allowed, factors)[:, 5:]
        hidden = allowed.clone()
        hidden[:, 3] = False
        masked = scores.masked_fill(~hidden, -torch.inf).softmax(-1)[:, 5:]
        lowest = scores.masked_fill(~allowed, torch.inf).amin(-1)[:, 5:]
        highest = scores.masked_fill(~hidden, -torch.inf).amax(-1)[:, 5:]
        weight = (lowest - highest).exp()
        assert (found[..., 3] <= weight + 1e-15).all()
        assert ((found - masked).abs().amax(-1) <= weight + 1e-15).all()
        assert float(weight.max()) <= bound


def test_a_constant_added_to_a_row_changes_nothing():
    scores, allowed = random_scores()
    factors = torch.linspace(0.1, 1.0, 9, dtype=torch.float64)
    found = suppressed(scores, allowed, factors)
    shift = torch.arange(9, dtype=torch.float64)[:, None] * 7 - 20
    np.testing.assert_allclose(suppressed(scores + shift, allowed, factors), found, atol=1e-12)
    assert float((suppressed(scores * 1.1, allowed, factors) - found).abs().max()) > 1e-3
    # a forbidden key does not count for the minimum
    low = torch.where(allowed, scores, -1e6)
    np.testing.assert_allclose(suppressed(low, allowed, factors), found, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_never_count(family):
    model = tiny_model(family)
    ids = [*IDS[:LONG], 7, IDS[3], IDS[3], 8]  # answer tokens that are copies of a prompt token
    question = question_of(model, ids, LONG, (0, 4))
    scores = run(question)
    for row, target in enumerate(question.targets):
        assert (scores.values[row, target:] == 0).all()
    fewer = run(question_of(model, ids[: LONG + 1], LONG, (0, 1)))
    np.testing.assert_allclose(scores.values[0, :LONG], fewer.values[0], atol=1e-5)


# ------------------------------------------------------------------------------------------- the way it is run


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shared_beginning_changes_no_score(family, monkeypatch):
    model = tiny_model(family)
    question = ask(model, foil=[5, 6, 7])
    assert Suppressor(question, lambda: None)._runners[0].layers is not None
    with_prefix = run(question)
    monkeypatch.setattr("backend.saliency.suppression.read_prefix", lambda *args: None)
    whole = run(question)
    np.testing.assert_allclose(with_prefix.values, whole.values, atol=1e-4)
    assert with_prefix.passes.forward < 0.8 * whole.passes.forward


def test_groups_are_cut_where_memory_is_short(monkeypatch):
    model = tiny_model("llama")
    wanted = run(ask(model))
    monkeypatch.setattr("backend.saliency.suppression._SCORES_AT_ONCE", 1)
    np.testing.assert_allclose(run(ask(model)).values, wanted.values, atol=1e-5)
    monkeypatch.undo()
    failed = []

    def fail(module, args, kwargs):
        if len(kwargs["input_ids"]) > 2:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")

    handle = model.module.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        np.testing.assert_allclose(run(ask(model)).values, wanted.values, atol=1e-5)
    finally:
        handle.remove()
    assert failed


def test_words_are_turned_down_whole():
    model = tiny_model("llama")
    groups = [i // 3 for i in range(LONG + 4)]
    question = ask(model, groups=groups, target=(2, 3))
    assert question.units is not None
    scores = run(question, similar=False)
    assert scores.units == question.units and scores.values.shape == (1, len(question.units))
    first = [1.0] * COUNT
    first[:3] = [0.1] * 3
    factors = torch.tensor(first + [1.0] * (question.source_count - COUNT), dtype=torch.float64)

    def change(values, allowed):
        lowest = values.masked_fill(~allowed, torch.inf).amin(-1, keepdim=True)
        return (values - lowest) * factors

    said = IDS[LONG + 2]
    plain, lowered = (
        float(naive_logits(model.module, question.ids, way)[-1].log_softmax(-1)[said])
        for way in (lambda values, allowed: values, change)
    )
    assert scores.values[0, 0] == pytest.approx(plain - lowered, abs=1e-4)


def test_frame_tokens_are_left_out_unless_asked():
    roles = ["bos", "template", *["user"] * (LONG - 2), *["answer"] * 4]
    scores = run(ask(tiny_model("llama"), roles=roles))
    assert not scores.measured[:2].any() and np.isnan(scores.values[:, :2]).all() and scores.measured[2:].all()
    assert run(ask(tiny_model("llama"), roles=roles), include_template=True).measured.all()
    with pytest.raises(NotApplicable, match="BOS and template"):
        run(question_of(tiny_model("llama"), IDS[:3], 2, roles=["bos", "template", "answer"]))


# ------------------------------------------------------------------------------------ one model at a time, undone


def test_two_models_do_not_disturb_each_other():
    one, two = tiny_model("llama"), tiny_model("llama", seed=5)
    ids = torch.tensor([IDS])
    factors = torch.ones(1, len(IDS))
    factors[0, 4] = 0.1
    with torch.no_grad():
        plain = two.module(input_ids=ids, use_cache=False).logits
        alone = one.module(input_ids=ids, use_cache=False).logits
        with suppressing(one.module, factors):
            assert torch.equal(two.module(input_ids=ids, use_cache=False).logits, plain)
            with suppressing(two.module, torch.ones_like(factors)):
                np.testing.assert_allclose(two.module(input_ids=ids, use_cache=False).logits, plain, atol=1e-5)
                lowered = one.module(input_ids=ids, use_cache=False).logits
        assert float((lowered - alone).abs().max()) > 1e-3
        assert torch.equal(one.module(input_ids=ids, use_cache=False).logits, alone)
        assert torch.equal(two.module(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_kernel_is_put_back_after_an_error(kernel):
    model = tiny_model("gpt2")
    model.module.set_attn_implementation(kernel)
    with pytest.raises(OverflowError), suppressing(model.module, torch.ones(1, 4)):
        assert model.module.config._attn_implementation == NAME
        raise OverflowError
    assert model.module.config._attn_implementation == kernel


def test_models_whose_attention_cannot_be_exchanged_are_refused():
    toy = toy_model("copy")
    with pytest.raises(NotApplicable, match="cannot be exchanged") as refusal:
        run(question_of(toy, [3, 7, 1, 9, 4, 2, 4], 6))
    assert "occlusion" in refusal.value.hint and toy.module.config._attn_implementation == "sdpa"
    with pytest.raises(TypeError, match="explicit mask"):
        _attention(toy.module, *[torch.zeros(1, 1, 2, 4)] * 3, None)


def test_attention_that_does_more_than_we_know_is_refused():
    model = tiny_model("llama")
    attention = model.module.model.layers[0].self_attn

    def more(module, args, output):  # on top of what goes through the attention function
        return (output[0] * (2 if model.module.config._attn_implementation == NAME else 1), *output[1:])

    handle = attention.register_forward_hook(more)
    try:
        with pytest.raises(NotApplicable, match="more than we know of"):
            run(ask(model))
    finally:
        handle.remove()
