"""Needle metrics against numbers worked out by hand."""

from itertools import pairwise

import numpy as np
import pytest

from backend.errors import BadRequest
from backend.evaluation.needle_metrics import TokenSets, measure, token_scores
from backend.types import TokenAttribution

# position: 0 bos, 1-2 template, 3 system, 4-6 distractor, 7-8 needle (8 is the answer), 9 query
SETS = TokenSets((0,), (1, 2), (3,), (4, 5, 6), (7, 8), (9,), (8,), (7,))


def test_absolute_shares_by_hand():
    scores = np.array([10.0, 1, -1, 1, 0.5, -0.5, 0, 3, -4, 1])
    found = measure(scores, SETS)
    # counted: system 1, distractor 1, needle 7, query 1 -> 10; causal 9 of 10 in 4 of 7 tokens
    assert found.mass == pytest.approx(0.9)
    assert found.lift == pytest.approx(0.9 / (4 / 7))
    assert found.needle_mass == pytest.approx(0.7)
    assert found.needle_lift == pytest.approx(0.7 / (2 / 7))
    # with BOS 10 and template 2 the whole map is 22
    assert found.bos_share == pytest.approx(10 / 22)
    assert found.template_share == pytest.approx(2 / 22)
    assert (found.recall_at_k, found.auprc, found.secret_rank) == (1.0, 1.0, 1)
    assert found.chance == pytest.approx(2 / 7)
    assert found.unmeasured == 0


def test_positive_shares_by_hand():
    scores = np.array([10.0, 1, -1, 1, 0.5, -0.5, 0, 3, -4, 1])
    found = measure(scores, SETS, part="positive")
    # counted positive parts: 1 + 0.5 + 3 + 1 = 5.5; causal 5; needle 3
    assert found.mass == pytest.approx(5 / 5.5)
    assert found.needle_mass == pytest.approx(3 / 5.5)
    assert found.bos_share == pytest.approx(10 / 16.5)
    # by sign: 7, then 3 and 9 (tie), 4, 6, 5, and 8 last
    assert found.recall_at_k == 0.5
    assert found.secret_rank == 7
    assert found.auprc == pytest.approx((1 / 1 + 2 / 7) / 2)


def test_the_ranking_by_hand():
    scores = np.array([0.0, 0, 0, 5, 9, 1, 2, 8, 3, 4])
    found = measure(scores, SETS)  # 4, 7, 3, 9, 8, 6, 5
    assert found.recall_at_k == 0.5
    assert found.secret_rank == 5
    assert found.auprc == pytest.approx((1 / 2 + 2 / 5) / 2)


@pytest.mark.parametrize("value", [1.0, 1 / 137, np.float32(1 / 77), 1e-30, 3e7])
@pytest.mark.parametrize("counts", [(1, 3, 2, 1), (15, 77, 13, 20), (9, 402, 11, 18)])
def test_a_uniform_map_has_a_lift_of_exactly_one(value, counts):
    edges = np.cumsum([1, *counts])
    system, hay, needle, query = (tuple(range(a, b)) for a, b in pairwise(edges))
    sets = TokenSets((0,), (), system, hay, needle, query, needle[-1:], needle[:1])
    found = measure(np.full(int(edges[-1]), value, np.float64), sets)
    assert found.lift == 1.0
    assert found.needle_lift == 1.0


def test_ties_are_broken_at_random_but_always_alike():
    scores = np.ones(10)
    first = [measure(scores, SETS, seed=seed) for seed in range(400)]
    assert first == [measure(scores, SETS, seed=seed) for seed in range(400)]
    assert len({found.secret_rank for found in first}) == 7
    assert np.mean([found.recall_at_k for found in first]) == pytest.approx(2 / 7, abs=0.05)


def test_what_was_not_measured_has_no_share_and_ranks_last():
    scores = np.array([np.nan, np.nan, np.nan, 1, 0, 0, 0, -1, np.nan, 0])
    found = measure(scores, SETS, part="positive")
    assert (found.bos_share, found.template_share) == (None, None)
    assert found.secret_rank == 7
    assert found.unmeasured == 1
    assert found.mass == 1.0


def test_nothing_to_share_out_is_no_number():
    found = measure(np.zeros(10), SETS)
    assert (found.mass, found.lift, found.needle_mass, found.needle_lift, found.bos_share) == (None,) * 5
    negative = measure(-np.ones(10), SETS, part="positive")
    assert negative.mass is None
    assert negative.template_share is None


def test_without_a_template_its_share_is_zero():
    sets = TokenSets((0,), (), (1,), (2,), (3,), (4,), (3,), ())
    assert measure(np.ones(5), sets).template_share == 0.0


def result(scores, **more):
    return TokenAttribution("m", {}, more.pop("signed", True), np.array(scores, np.float32), **more)


def test_token_scores_put_rows_together():
    rows = [[1, -2, 0], [1, 1, 4]]
    np.testing.assert_array_equal(token_scores(result(rows), 3), [2, -1, 4])
    np.testing.assert_array_equal(token_scores(result(np.abs(rows), signed=False), 3), [1, 1.5, 2])


def test_a_unit_shares_its_score_among_its_tokens():
    found = token_scores(result([[6, 2, 0]], units=((1, 4), (4, 5), (5, 6)), measured=np.array([True, True, False])), 6)
    np.testing.assert_array_equal(found, [np.nan, 2, 2, 2, 2, np.nan])


def test_a_refusal_has_no_scores():
    with pytest.raises(BadRequest):
        token_scores(TokenAttribution("m", {}, True, None, refusal="No."), 3)
