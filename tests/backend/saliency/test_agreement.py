import numpy as np
import pandas as pd
import pytest

from backend.errors import UnknownMethod
from backend.saliency import reading as module
from backend.saliency.agreement import agreement, spearman, top_overlap
from backend.saliency.reading import Traits
from tests.support.explanations import explanation, result, token

ABLATION = Traits("occlude", "Leave out", "ablation", signed=True, additive=False, reading="Drop.")


@pytest.fixture(autouse=True)
def known_methods(monkeypatch):
    def find(name):
        if name != "occlude":
            raise UnknownMethod(name)
        return ABLATION

    monkeypatch.setattr(module, "get_method", find)


def explain(*results, count, **more):
    prompt = [token("<s>", "bos", group=0, special=True)]
    prompt += [token(f" w{i}" if i % 2 else "x", group=i) for i in range(1, count)]
    return explanation(tuple(prompt), (token(" a", "answer", group=count),), results, **more)


@pytest.mark.parametrize("seed", range(5))
def test_spearman_equals_pandas_with_ties(seed):
    a, b = np.random.default_rng(seed).integers(0, 6, (2, 30)).astype(float)
    assert spearman(a, b) == pytest.approx(pd.DataFrame({"a": a, "b": b}).corr(method="spearman").loc["a", "b"])


def test_spearman_by_hand():
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert spearman([1, 2, 3], [30, 20, 10]) == -1
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1], [1]) is None


def test_overlap_by_hand():
    assert top_overlap([5, 4, 3, 2], [5, 1, 4, 3], 2) == 0.5
    assert top_overlap([5, 4, 3, 2], [1, 2, 8, 9], 2) == 0
    # Three tie for the second place: each holds a third of it.
    assert top_overlap([9, 1, 1, 1], [9, 8, 0, 0], 2) == pytest.approx((1 + 1 / 3) / 2)


def test_a_method_agrees_with_itself():
    scores = [np.random.default_rng(0).normal(size=24)]
    e = explain(result("a", scores, signed=True), result("b", scores, signed=True), count=24)
    (pair,) = agreement(e, e.results, [0])
    assert (pair.first, pair.second) == ("a", "b")
    assert pair.spearman == pytest.approx(1)
    assert (pair.overlap, pair.k, pair.count) == (1, 5, 23)  # BOS is left out
    assert pair.chance == pytest.approx(5 / 23)


def test_bos_does_not_decide():
    first = np.arange(12.0)
    second = first[::-1].copy()
    first[0] = second[0] = 1000
    e = explain(result("a", [first], signed=True), result("b", [second], signed=True), count=12)
    assert agreement(e, e.results, [0])[0].spearman == pytest.approx(-1)


def test_signed_and_unsigned_are_compared_by_size():
    scores = np.array([0.0, 1, -2, 3, -4, 5, -6, 7])
    e = explain(result("a", [scores], signed=True), result("b", [np.abs(scores)], signed=False), count=8)
    (pair,) = agreement(e, e.results, [0])
    assert pair.spearman == pytest.approx(1)
    assert "by size" in pair.basis


def test_a_constant_method_has_a_reason_instead_of_a_number():
    e = explain(result("flat", [[0.1] * 12], signed=False), result("b", [np.arange(12)], signed=False), count=12)
    (pair,) = agreement(e, e.results, [0])
    assert pair.spearman is None
    assert pair.overlap is None
    assert "flat" in pair.reason


def test_too_few_units_have_a_reason():
    e = explain(result("a", [[1, 2]], signed=True), result("b", [[1, 2]], signed=True), count=2)
    assert agreement(e, e.results, [0])[0].reason


def test_unmeasured_units_are_dropped():
    scores = np.arange(12.0)
    odd = scores.copy()
    odd[5] = -50
    measured = np.ones(12, bool)
    measured[5] = False
    e = explain(result("a", [scores], signed=True), result("occlude", [odd], signed=True, measured=measured), count=12)
    (pair,) = agreement(e, e.results, [0])
    assert (pair.spearman, pair.count) == (1, 10)


def test_token_scores_are_brought_to_the_units_of_an_ablation():
    units = ((0, 1), *((i, i + 2) for i in range(1, 13, 2)))
    tokens = np.arange(13.0)
    e = explain(
        result("a", [tokens], signed=True),
        result("occlude", [[0, *(tokens[i] + tokens[i + 1] for i in range(1, 13, 2))]], signed=True, units=units),
        count=13,
        level="word",
    )
    for results in (e.results, e.results[::-1]):
        (pair,) = agreement(e, results, [0])
        assert pair.count == 6
        assert pair.spearman == pytest.approx(1)


def test_two_ablations_on_different_units_are_not_compared():
    units = ((0, 1), *((i, i + 2) for i in range(1, 13, 2)))
    e = explain(
        result("occlude", [np.arange(13)], signed=True),
        result("occlude", [np.arange(7)], signed=True, units=units),
        count=13,
    )
    assert "different units" in agreement(e, e.results, [0])[0].reason


def test_refused_methods_are_skipped():
    scores = [np.arange(12.0)]
    refused = result("c", None, signed=True, refusal="no")
    e = explain(result("a", scores, signed=True), refused, result("b", scores, signed=True), count=12)
    assert [(p.first, p.second) for p in agreement(e, e.results, [0])] == [("a", "b")]
