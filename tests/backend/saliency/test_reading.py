from dataclasses import replace

import numpy as np
import pytest

from backend.errors import BadRequest, UnknownMethod
from backend.saliency import reading as module
from backend.saliency.reading import Traits, combine_rows, display_scale, read, segment_shares, to_units
from backend.types import Check
from tests.support.explanations import explanation, result, token

GRADIENT = Traits("norm", "Norm", "gradient", signed=False, additive=False, reading="Higher matters more.")
SIGNED = Traits("ixg", "Input x gradient", "gradient", signed=True, additive=True, reading="Signed.")
ABLATION = Traits("occlude", "Leave out", "ablation", signed=True, additive=False, reading="Drop.")


@pytest.fixture(autouse=True)
def known_methods(monkeypatch):
    traits = {t.name: t for t in (GRADIENT, SIGNED, ABLATION)}

    def find(name):
        if name not in traits:
            raise UnknownMethod(f"no {name}")
        return traits[name]

    monkeypatch.setattr(module, "get_method", find)


BOS = token("<s>", "bos", group=0, special=True)
PROMPT = (BOS, token("The", group=1), token(" cat", group=2), token(" sat", group=3))
ANSWER = (token(" on", "answer", group=4), token(" mat", "answer", group=5), token(".", "answer", group=6))


def explain(*results, target=(0, 1), prompt=PROMPT, **more):
    return explanation(prompt, ANSWER, results, target=target, **more)


def test_one_row_is_returned_as_it_is():
    values, rule = combine_rows(result("ixg", [[1, -2], [3, 4]], signed=True), [1])
    assert values.tolist() == [3, 4]
    assert rule == ""


def test_rows_of_signed_methods_are_added_and_of_unsigned_averaged():
    scores = [[1, -2], [3, 4]]
    added, rule = combine_rows(result("ixg", scores, signed=True), [0, 1])
    assert added.tolist() == [4, 2]
    assert "added" in rule
    averaged, rule = combine_rows(result("norm", np.abs(scores), signed=False), [0, 1])
    assert averaged.tolist() == [2, 3]
    assert "averaged" in rule


@pytest.mark.parametrize("rows", [[], [2], [-1]])
def test_rows_that_do_not_exist_are_refused(rows):
    with pytest.raises(BadRequest):
        combine_rows(result("ixg", [[1, 2], [3, 4]], signed=True), rows)


def test_a_refused_method_has_no_rows():
    with pytest.raises(BadRequest, match="no backward pass"):
        combine_rows(result("ixg", None, signed=True, refusal="This model has no backward pass."), [0])


FINE = ((0, 1), (1, 2), (2, 3))
COARSE = ((0, 1), (1, 3))


def values(*numbers):
    return np.array(numbers, np.float32)


def test_signed_scores_are_added():
    out, units, rule = to_units(values(1, 3, -2), FINE, COARSE, SIGNED)
    assert (out.tolist(), units) == ([1, 1], COARSE)
    assert "added" in rule


def test_unsigned_scores_are_mass_or_density():
    assert to_units(values(1, 3, 2), FINE, COARSE, GRADIENT)[0].tolist() == [1, 5]
    out, _, rule = to_units(values(1, 3, 2), FINE, COARSE, GRADIENT, density=True)
    assert out.tolist() == [1, 2.5]
    assert "density" in rule


def test_mass_of_a_unit_is_the_sum_of_shares():
    numbers = values(1, 3, 2)
    shares = numbers / numbers.sum()
    out, _, _ = to_units(numbers, FINE, COARSE, GRADIENT)
    assert np.allclose(out / out.sum(), [shares[0], shares[1] + shares[2]])


def test_ablation_scores_are_never_added():
    out, units, rule = to_units(values(1, 3, -2), FINE, COARSE, ABLATION)
    assert (out.tolist(), units) == ([1, 3, -2], FINE)
    assert "measured" in rule


def test_coarse_scores_are_never_split():
    out, units, _ = to_units(values(1, 3), COARSE, FINE, SIGNED)
    assert (out.tolist(), units) == ([1, 3], COARSE)


def test_unmeasured_tokens_do_not_become_zero():
    out, _, _ = to_units(values(np.nan, np.nan, 2), FINE, COARSE, SIGNED)
    assert np.isnan(out[0])
    assert out[1] == 2


def test_reading_at_word_level_adds_pieces_of_a_word():
    prompt = (BOS, token("un", group=1), token("do", group=2), token(" it", group=3))
    e = explain(result("ixg", [[9, 1, 2, 4]], signed=True), prompt=prompt)
    r = read(e, e.results[0], [0], "word")
    assert r.units == ((0, 1), (1, 3), (3, 4))
    assert r.values.tolist() == [9, 3, 4]
    assert r.roles == ("bos", "user", "user")
    assert not r.notes


def test_pieces_of_a_character_are_one_unit_at_every_level():
    prompt = (BOS, token("👍", group=1), token("", group=1), token("!", group=2))
    e = explain(result("norm", [[0, 1, 2, 4]], signed=False), prompt=prompt)
    r = read(e, e.results[0], [0], "token")
    assert r.units == ((0, 1), (1, 3), (3, 4))
    assert r.values.tolist() == [0, 3, 4]


def test_ablation_measured_elsewhere_keeps_its_units_and_says_so():
    words = ((0, 1), (1, 2), (2, 4))
    e = explain(result("occlude", [[0, 1, 2]], signed=True, units=words), level="word")
    r = read(e, e.results[0], [0], "token")
    assert r.units == words
    assert r.values.tolist() == [0, 1, 2]
    assert "word" in r.notes[0]


def test_ablation_measured_where_it_is_shown_has_no_note():
    words = ((0, 1), (1, 2), (2, 3), (3, 4))
    e = explain(result("occlude", [[0, 1, 2, 3]], signed=True, units=words), level="word")
    r = read(e, e.results[0], [0], "word")
    assert (r.units, r.notes) == (words, ())


def test_units_with_gaps_are_filled_with_unmeasured_ones():
    e = explain(result("occlude", [[1, 2]], signed=True, units=((1, 2), (3, 4))))
    r = read(e, e.results[0], [0])
    assert r.units == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert r.measured.tolist() == [False, True, False, True]
    assert np.isnan(r.values[[0, 2]]).all()


def test_the_measured_mask_of_the_result_is_kept():
    e = explain(result("occlude", [[5, 1, 2, 3]], signed=True, measured=np.array([False, True, True, True])))
    r = read(e, e.results[0], [0])
    assert r.measured.tolist() == [False, True, True, True]
    assert np.isnan(r.shares()[0])
    assert "1 units were not measured" in segment_shares(r).note


def test_a_target_sees_only_what_stands_before_it():
    e = explain(result("norm", [[1, 1, 1, 1, 0], [1, 1, 1, 1, 4]], signed=False), target=(0, 2))
    first, both = read(e, e.results[0], [0]), read(e, e.results[0], [0, 1])
    assert first.visible.tolist() == [True] * 4 + [False]
    assert both.visible.all()
    assert "answer" not in segment_shares(first).shares
    assert segment_shares(both).shares["answer"] == pytest.approx(1 / 3)


def test_shares_of_gradient_methods_use_absolute_scores():
    e = explain(result("ixg", [[4, 1, -3, 0]], signed=True))
    r = read(e, e.results[0], [0])
    assert r.shares().tolist() == pytest.approx([0.5, 0.125, 0.375, 0])
    segments = segment_shares(r)
    assert dict(segments.shares) == pytest.approx({"bos": 0.5, "user": 0.5})
    assert "absolute" in segments.share_name


def test_shares_of_ablation_methods_use_the_positive_part():
    e = explain(result("occlude", [[0, 1, -3, 3]], signed=True))
    r = read(e, e.results[0], [0])
    assert r.shares().tolist() == pytest.approx([0, 0.25, 0, 0.75])
    assert "positive" in segment_shares(r).share_name


def test_bos_and_template_can_be_left_out_of_shares():
    e = explain(result("norm", [[6, 1, 2, 1]], signed=False))
    r = read(e, e.results[0], [0])
    assert segment_shares(r).shares["bos"] == pytest.approx(0.6)
    without = segment_shares(r, count_outside=False)
    assert dict(without.shares) == pytest.approx({"user": 1.0})
    assert "BOS" in without.note


def test_padding_never_counts():
    prompt = (token("x", "pad", group=0), *PROMPT[1:])
    e = explain(result("norm", [[6, 1, 2, 1]], signed=False), prompt=prompt)
    assert dict(segment_shares(read(e, e.results[0], [0])).shares) == pytest.approx({"user": 1.0})


@pytest.mark.parametrize("row", [[0, 0, 0, 0], [0, -1, -2, 0]])
def test_nothing_to_share_is_said(row):
    e = explain(result("occlude", [row], signed=True))
    segments = segment_shares(read(e, e.results[0], [0]))
    assert segments.shares == {}
    assert segments.note


def test_own_scale_ignores_bos_and_clips_it():
    e = explain(result("ixg", [[100, 1, -4, 2]], signed=True))
    (scaled,) = display_scale([read(e, e.results[0], [0])])
    assert scaled.reach == 4
    assert scaled.values.tolist() == [1, 0.25, -1, 0.5]
    assert "Own scale" in scaled.rule


def test_shared_scale_gives_equal_color_to_equal_shares():
    e = explain(result("ixg", [[0, 1, 3, 0]], signed=True), result("norm", [[0, 500, 300, 200]], signed=False))
    readings = [read(e, r, [0]) for r in e.results]
    first, second = display_scale(readings, shared=True)
    assert first.values[2] == 1  # share 3/4 is the largest
    assert second.values[1] == pytest.approx(0.5 / 0.75)
    assert first.values[1] / second.values[1] == pytest.approx(0.25 / 0.5)
    assert "75.0%" in first.rule


def test_shared_scale_follows_what_counts():
    e = explain(result("norm", [[8, 1, 1, 0]], signed=False), result("norm", [[0, 2, 1, 1]], signed=False))
    readings = [read(e, r, [0]) for r in e.results]
    assert display_scale(readings, shared=True)[0].values[1] == pytest.approx(0.1 / 0.5)
    assert display_scale(readings, shared=True, count_outside=False)[0].values[1] == 1


def test_zero_scores_are_no_signal():
    e = explain(result("ixg", [[0, 0, 0, 0]], signed=True), result("norm", [[1, 1, 2, 1]], signed=False))
    empty, other = display_scale([read(e, r, [0]) for r in e.results], shared=True)
    assert np.isnan(empty.values).all()
    assert empty.reach == 0
    assert "No signal" in empty.rule
    assert other.values[2] == 1


def test_scores_below_the_noise_floor_are_no_signal():
    noisy = result("occlude", [[0, 1e-7, 2e-7, 0]], signed=True, checks=(Check("noise_floor", 1.5e-7, "info", "."),))
    e = explain(noisy, replace(noisy, scores=np.array([[0, 1e-7, 4e-7, 0]], np.float32)))
    quiet, loud = [read(e, r, [0]) for r in e.results]
    assert not quiet.has_signal
    assert loud.has_signal
    (scaled,) = display_scale([loud])
    assert scaled.values.tolist() == [0, 0, 1, 0]


def test_unmeasured_and_unseen_units_have_no_color():
    e = explain(
        result(
            "ixg", [[1, 1, 2, 1, 0], [1, 1, 2, 1, 1]], signed=True, measured=np.array([True, False, True, True, True])
        ),
        target=(0, 2),
    )
    (scaled,) = display_scale([read(e, e.results[0], [0])])
    assert np.isnan(scaled.values).tolist() == [False, True, False, False, True]


def test_unknown_methods_are_read_by_their_sign():
    e = explain(result("from_elsewhere", [[0, 1, 2, 1]], signed=True))
    r = read(e, e.results[0], [0])
    assert r.traits.signed
    assert r.traits.label == "from_elsewhere"
