"""Curves against a model whose answer to every hidden set is known, areas by hand, and what a good order must do."""

import numpy as np
import pytest

from backend.errors import Cancelled, NotApplicable
from backend.evaluation.faithfulness import BUDGETS, FAVORS, faithfulness
from backend.types import no_tick
from tests.support.explanations import explanation, result, token
from tests.support.toys import Ticks, toy_model

IDS = [3, 7, 1, 9, 4, 2, 8, 5, 6, 10, 0, 11]
ROLES = ["bos", *["user"] * 11]
TARGETS = [5, 2]
FREE = np.arange(1, 12)


@pytest.fixture(scope="module")
def model():
    return toy_model("linear", scale=0.3)


def explained(*results, ids=IDS, roles=ROLES, answer=TARGETS, **more):
    prompt = [token(f" w{i}", role, group=g, id=i) for g, (i, role) in enumerate(zip(ids, roles, strict=True))]
    said = [token(f" w{i}", "answer", group=len(ids) + g, id=i) for g, i in enumerate(answer)]
    return explanation(prompt, said, results, target=(0, len(answer)), **more)


def log_prob(model, hidden, ids=IDS, answer=TARGETS):
    """Sum of log-probabilities with prompt positions hidden; a position always sees itself."""
    embed, weight = (w.numpy().astype(np.float64) for w in (model.module.embed.weight, model.module.weight))
    text, total = [*ids, *answer], 0.0
    for k, target in enumerate(answer):
        read = len(ids) + k - 1
        seen = [i for i in range(read + 1) if i == read or i not in hidden]
        logits = weight @ embed[[text[i] for i in seen]].sum(axis=0)
        total += logits[target] - np.log(np.exp(logits).sum())
    return total


def scores(order):
    """Two rows of scores that rank the free positions in this order; the column of an answer token is 0."""
    values = np.zeros((2, len(IDS) + 1))
    values[:, order] = np.arange(len(order), 0, -1)
    return values


def true_effects(model):
    """What hiding each free position alone takes away."""
    whole = log_prob(model, set())
    return np.array([whole - log_prob(model, {i}) for i in FREE])


def test_curves_are_what_hiding_does(model):
    order = np.random.default_rng(3).permutation(FREE)
    found = faithfulness(model, explained(result("gradient_norm", scores(order), signed=False)), no_tick)
    (method,) = found.methods
    assert found.units == 11 and found.budgets == BUDGETS
    assert found.counts == (1, 1, 1, 1, 2, 6)
    assert found.log_prob == pytest.approx(log_prob(model, set()), abs=1e-5)
    for curves, ranked in ((method.descending, order), (method.ascending, order[::-1])):
        deletion = [log_prob(model, set(ranked[:k])) for k in (0, *found.counts)]
        insertion = [log_prob(model, set(FREE) - set(ranked[:k])) for k in (0, *found.counts)]
        np.testing.assert_allclose(curves.deletion, deletion, atol=1e-5)
        np.testing.assert_allclose(curves.insertion, insertion, atol=1e-5)


def test_numbers_follow_from_the_curves_by_hand(model):
    order = np.random.default_rng(4).permutation(FREE)
    found = faithfulness(model, explained(result("gradient_norm", scores(order), signed=False)), no_tick)
    (method,) = found.methods
    whole = np.exp(log_prob(model, set()))
    without = np.array([np.exp(log_prob(model, set(order[:k]))) for k in found.counts])
    alone = np.array([np.exp(log_prob(model, set(FREE) - set(order[:k]))) for k in found.counts])
    nothing = np.exp(log_prob(model, set(FREE)))
    assert method.comprehensiveness == pytest.approx((whole - without).mean(), abs=1e-6)
    assert method.sufficiency == pytest.approx((whole - alone).mean(), abs=1e-6)
    np.testing.assert_allclose(method.log_prob_drop, np.log(whole) - np.log(without), atol=1e-5)
    # trapezoids between 0, 1, 2 and 6 of 11 units; budgets that hide the same number of units count once
    d, i = ([start, c[0], c[4], c[5]] for start, c in ((whole, without), (nothing, alone)))
    for heights, auc in ((d, method.deletion_auc), (i, method.insertion_auc)):
        area = (heights[0] + heights[1]) / 2 + (heights[1] + heights[2]) / 2 + 4 * (heights[2] + heights[3]) / 2
        assert auc == pytest.approx(area / 6 / whole, rel=1e-5)
    areas = [np.trapezoid(found.ratios(c.deletion), [0, *found.counts]) / 6 for c in found.random]
    assert len(areas) == 5
    assert method.deletion_gap == pytest.approx(np.mean(areas) - method.deletion_auc, abs=1e-9)
    mean, low, high = found.random_band("insertion")
    stacked = np.stack([found.ratios(curves.insertion) for curves in found.random])
    np.testing.assert_allclose([mean, low, high], [stacked.mean(0), stacked.min(0), stacked.max(0)])
    assert found.notes == (FAVORS,)


def test_the_true_order_beats_random_and_the_reverse_loses(model):
    effects = true_effects(model)
    values = np.zeros((2, len(IDS) + 1))
    values[:, FREE] = effects / 2
    found = faithfulness(
        model,
        explained(result("occlusion", values, signed=True), result("input_x_gradient", -values, signed=True)),
        no_tick,
    )
    good, bad = found.methods
    assert good.deletion_gap > 0 > bad.deletion_gap
    assert good.insertion_gap > 0 > bad.insertion_gap
    np.testing.assert_allclose(good.ascending.deletion, bad.descending.deletion)
    assert good.deletion_auc < bad.deletion_auc


def test_methods_share_the_random_curves_and_nothing_is_run_twice(model):
    order = np.random.default_rng(5).permutation(FREE)
    one = result("gradient_norm", scores(order), signed=False)
    alone = faithfulness(model, explained(one), no_tick)
    both = faithfulness(model, explained(one, result("smooth", scores(order), signed=False)), no_tick)
    for a, b in zip(alone.random, both.random, strict=True):
        np.testing.assert_array_equal(a.deletion, b.deletion)
    np.testing.assert_array_equal(both.methods[0].descending.deletion, both.methods[1].descending.deletion)
    assert both.passes == alone.passes
    other = faithfulness(model, explained(one), no_tick, seed=1)
    assert not np.array_equal(other.random[0].deletion, alone.random[0].deletion)


def test_frame_query_and_the_answer_so_far_always_stay(model):
    roles = ["bos", "template", *["user"] * 4, "query", *["user"] * 5]
    found = faithfulness(model, explained(result("gradient_norm", scores(FREE), signed=False), roles=roles), no_tick)
    assert found.units == 9
    free = {i for i, role in enumerate(roles) if role == "user"}
    assert found.random[0].insertion[0] == pytest.approx(log_prob(model, free), abs=1e-5)


def test_a_method_without_scores_says_why_and_the_others_go_on(model):
    words = tuple((i, min(i + 2, 13)) for i in range(1, 13, 2))
    found = faithfulness(
        model,
        explained(
            result("gradient_norm", None, signed=False, refusal="No backward pass."),
            result("occlusion", np.ones((2, 6)), signed=True, units=words),
            result("input_x_gradient", scores(FREE), signed=True),
        ),
        no_tick,
    )
    refused, coarse, fine = found.methods
    assert refused.reason == "No backward pass." and refused.descending is None
    assert "other units" in coarse.reason
    assert fine.descending is not None and not fine.reason


def test_units_without_a_score_come_last(model):
    values = scores(FREE)
    measured = np.ones(13, bool)
    measured[1] = False  # ranked first otherwise
    found = faithfulness(
        model, explained(result("input_x_gradient", values, signed=True, measured=measured)), no_tick, budgets=(10, 50)
    )
    assert found.methods[0].descending.deletion[1] == pytest.approx(log_prob(model, {2}), abs=1e-5)


def test_progress_and_cancel(model):
    ticks = Ticks()
    faithfulness(model, explained(result("gradient_norm", scores(FREE), signed=False)), ticks)
    done = [d for d, _ in ticks.calls]
    assert done == sorted(done) and done[0] == 0 and done[-1] == ticks.calls[-1][1]
    for at in range(1, len(ticks.calls) + 1):
        stopping, calls = Ticks(stop_at=at), model.module.calls
        with pytest.raises(Cancelled):
            faithfulness(model, explained(result("gradient_norm", scores(FREE), signed=False)), stopping)
        assert len(stopping.calls) == at
        assert model.module.calls - calls <= at + 4  # the plain pass and the checks of the set-up


def test_too_few_units_are_said(model):
    with pytest.raises(NotApplicable, match="Fewer than two"):
        faithfulness(
            model,
            explained(result("gradient_norm", np.ones((1, 2)), signed=False), ids=[3, 4], roles=["bos", "user"],
                      answer=[5]),
            no_tick,
        )  # fmt: skip


def test_a_hopeless_target_is_noted():
    model = toy_model("linear", scale=9.0)
    found = faithfulness(model, explained(result("gradient_norm", scores(FREE), signed=False)), no_tick)
    assert np.exp(found.log_prob) < 1e-9
    assert "mean little" in found.notes[1]
