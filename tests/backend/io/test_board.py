import json
from dataclasses import replace

import numpy as np
import pytest

from backend.io.board import answer_board, board_script, board_style, build_board, passage_hash
from backend.io.board_types import PALETTE, plain_line
from backend.types import Passage
from tests.support.board_cases import demo, hostile, large, scripts
from tests.support.explanations import explanation, result, token

PROMPT = (token("<s>", "bos", group=0, special=True), token("A", group=1), token(" b", group=2), token("c", group=3))
ANSWER = (token(" x", "answer", group=4), token(" y", "answer", group=5))


def small(*results, target=(0, 1), **more):
    return explanation(PROMPT, ANSWER, results, target=target, **more)


def test_a_row_holds_raw_values_colors_shares_and_ranks():
    board = build_board(small(result("from_elsewhere", [[6, 1, -3, 0]], signed=True)))
    (row,) = board.rows
    assert row.values == (6, 1, -3, 0, None, None)  # the target and what follows have no score
    assert row.colors == (1, 0.333, -1, 0, None, None)  # BOS is clipped, it does not set the scale
    assert row.shares == (0.6, 0.1, 0.3, 0, None, None)
    assert row.ranks == (None, 2, 1, 3, None, None)  # nor does it take a rank
    assert row.ranked == 3
    assert dict(row.segments) == pytest.approx({"bos": 0.6, "user": 0.4})


def test_cells_say_what_they_are():
    board = build_board(small(result("from_elsewhere", [[6, 1, -3, 0]], signed=True)))
    (cells,) = board.layouts
    assert [cell.state for cell in cells] == ["source"] * 4 + ["target", "later"]
    assert [cell.text for cell in cells] == ["<s>", "A", " b", "c", " x", " y"]
    assert cells[2].ids == (102,)
    assert cells[0].role == "bos"


def test_words_take_the_place_of_tokens():
    board = build_board(small(result("from_elsewhere", [[6, 1, -3, 1]], signed=True)), level="word")
    (cells,), (row,) = board.layouts, board.rows
    assert [cell.text for cell in cells] == ["<s>", "A", " bc", " x", " y"]
    assert row.values == (6, 1, -2, None, None)
    assert "added" in row.rule


def test_methods_on_the_same_units_share_a_layout_and_others_do_not():
    words = ((0, 1), (1, 2), (2, 4))
    e = small(
        result("gradient_norm", [[6, 1, 3, 0]], signed=False),
        result("input_x_gradient", [[6, 1, -3, 0]], signed=True),
        result("occlusion", [[0, 1, -3]], signed=True, units=words),
        level="word",
    )
    assert [row.layout for row in build_board(e, level="token").rows] == [0, 0, 1]
    assert [row.layout for row in build_board(e, level="word").rows] == [0, 0, 0]
    assert any("word" in note.text for note in build_board(e, level="token").rows[2].notes)


def test_a_span_can_be_drawn_target_by_target():
    e = small(result("from_elsewhere", [[0, 1, 2, 0, 0], [0, 3, 1, 0, 5]], signed=True), target=(0, 2))
    both, first, second = (build_board(e, rows=rows).rows[0] for rows in (None, [0], [1]))
    assert both.values[:5] == (0, 4, 3, 0, 5)
    assert first.values[:5] == (0, 1, 2, 0, None)
    assert second.values[:5] == (0, 3, 1, 0, 5)
    assert [cell.state for cell in build_board(e, rows=[0]).layouts[0]][-2:] == ["target", "later"]
    assert [cell.state for cell in build_board(e).layouts[0]][-2:] == ["target", "target"]


def test_refusals_and_failed_checks_are_drawn():
    board = build_board(demo())
    warned = next(row for row in board.rows if row.method == "input_x_gradient")
    assert [note.tone for note in warned.notes] == ["warn"]
    e = small(result("gradient_norm", None, signed=False, refusal="No backward pass."))
    (row,) = build_board(e).rows
    assert row.refusal == "No backward pass."
    assert row.values == ()


def test_a_row_without_signal_has_no_colors_and_says_so():
    row = build_board(demo()).rows[-1]
    assert set(row.colors) == {None}
    assert set(row.ranks) == {None}
    assert "No signal" in row.notes[0].text


def test_unmeasured_cells_have_no_value():
    measured = np.array([True, False, True, True])
    row = build_board(small(result("occlusion", [[1, 9, 2, 1]], signed=True, measured=measured))).rows[0]
    assert row.values[1] is row.colors[1] is row.shares[1] is None


def test_counting_bos_changes_shares_only():
    e = small(result("gradient_norm", [[6, 1, 3, 0]], signed=False))
    counted, left_out = (build_board(e, count_outside=flag).rows[0] for flag in (True, False))
    assert counted.colors == left_out.colors
    assert (counted.shares[1], left_out.shares[1]) == (0.1, 0.25)
    assert left_out.shares[0] is None


def test_from_the_store_is_said():
    scored = replace(result("gradient_norm", [[6, 1, 3, 0]], signed=False), from_cache=True)
    assert "from the store" in build_board(small(scored)).rows[0].facts


@pytest.mark.parametrize("make", [demo, scripts, hostile])
def test_the_json_form_is_plain_and_encodable(make):
    data = build_board(make(), pick=True).to_json()
    assert json.loads(json.dumps(data, allow_nan=False).encode("utf-8"))["version"] == data["version"]


def test_the_version_follows_the_content():
    first, second = demo(), demo((0, 1))
    assert build_board(first).to_json()["version"] == build_board(demo()).to_json()["version"]
    assert build_board(first).to_json()["version"] != build_board(second).to_json()["version"]
    assert build_board(first).to_json()["version"] != build_board(first, shared_scale=True).to_json()["version"]
    assert build_board(first).passage == build_board(second).passage
    assert build_board(first).passage != build_board(hostile()).passage


def test_the_answer_row_knows_probabilities_where_they_are_known():
    board = answer_board(demo((3, 4)), (3, 4))
    data = board.to_json()["answer"]
    assert data["selected"] == (3, 4)
    assert data["facts"][3]["rank"] == 1
    assert data["facts"][0] is None
    assert "".join(data["cells"]["text"]) == "She buys it in Lyon, because she works there.<|im_end|>"


def test_many_cells_stay_small_enough_to_send():
    data = build_board(large()).to_json()
    assert len(json.dumps(data)) < 2_000_000


def test_hidden_characters_are_spelled_out():
    assert plain_line("a\u202eb\x00\ud800\u200b") == "a[U+202E]b[U+0000][U+D800][U+200B]"


def contrast(a, b):
    """WCAG 2.2 contrast ratio of two #rrggbb colors."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "text"), [("light", "#1c2733"), ("dark", "#e4e9ee")])
def test_text_is_readable_on_full_color(theme, text):
    assert min(contrast(color, text) for color in PALETTE[theme].values()) >= 4.5


def test_nothing_in_the_script_can_end_a_script_element_or_make_markup():
    script = board_script().lower()
    for forbidden in ("</script", "<!--", "innerhtml", "insertadjacenthtml", "document.write", "eval(", "http"):
        assert forbidden not in script
    assert "http" not in board_style()
    assert "@import" not in board_style()


def test_two_passages_that_differ_in_where_the_answer_begins_are_two():
    tokens = (token("a", group=0), token("b", group=1), token("c", group=2))
    assert passage_hash(Passage(tokens, 1, "a")) != passage_hash(Passage(tokens, 2, "ab"))
