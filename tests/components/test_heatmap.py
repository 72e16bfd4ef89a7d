import numpy as np
import pytest

from components.heatmap import MOST_LABELS, plain_label, target_source_heatmap
from tests.support.board_cases import demo, hostile, large
from tests.support.explanations import explanation, result, token

PROMPT = (token("<s>", "bos", group=0, special=True), token("A", group=1), token(" b", group=2), token("c", group=3))
ANSWER = (token(" x", "answer", group=4), token(" y", "answer", group=5))
SCORES = [[9, 1, -4, 2, 0], [9, 3, 1, 0, -5]]


def draw(scores, *, signed, level="token"):
    e = explanation(PROMPT, ANSWER, [result("from_elsewhere", scores, signed=signed)], target=(0, 2))
    return target_source_heatmap(e, e.results[0], level)


def test_rows_are_targets_and_columns_sources():
    (heat,) = draw(SCORES, signed=True).data
    assert np.asarray(heat.z).shape == (2, 5)
    assert np.asarray(heat.z).dtype == np.float32
    assert np.isnan(heat.z[0][4])  # the first target cannot see itself
    assert np.asarray(heat.z)[1].tolist() == SCORES[1]


def test_signed_scores_diverge_around_zero_and_bos_does_not_set_the_scale():
    (heat,) = draw(SCORES, signed=True).data
    assert (heat.zmin, heat.zmid, heat.zmax) == (-5, 0, 5)
    assert heat.colorscale[0][1] != heat.colorscale[-1][1]


def test_unsigned_scores_start_at_zero_with_one_hue():
    (heat,) = draw(np.abs(SCORES), signed=False).data
    assert (heat.zmin, heat.zmid, heat.zmax) == (0, None, 5)
    hues = {color[: color.rindex(",")] for _, color in heat.colorscale}
    assert len(hues) == 1


def test_columns_follow_the_level():
    figure = draw(SCORES, signed=True, level="word")
    assert list(figure.data[0].x) == ["&lt;s&gt;", "A", "·bc", "·x"]
    assert figure.data[0].z[0][2] == -2


def test_nothing_to_show_is_no_error():
    (heat,) = draw(np.zeros((2, 5)), signed=True).data
    assert (heat.zmin, heat.zmax) == (-1, 1)


def test_hostile_text_is_no_markup():
    figure = target_source_heatmap(hostile(), hostile().results[0])
    texts = [*figure.data[0].x, *figure.layout.yaxis.ticktext, *np.ravel(figure.data[0].hovertext)]
    assert not any("<" in text or "$" in text or "\u202e" in text for text in texts)
    figure.to_json().encode("utf-8")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("<b>", "&lt;b&gt;"),
        ("&lt;", "&amp;lt;"),
        (" a\n", "·a↵"),
        ("$x$", "&#36;x&#36;"),
        ("", "▯"),
        ("\ud800", "[U+D800]"),
        ("x" * 40, "x" * 17 + "…"),
    ],
)
def test_labels(text, label):
    assert plain_label(text) == label


def test_equal_labels_keep_their_own_columns():
    prompt = tuple(token(" a", group=i) for i in range(4))
    e = explanation(prompt, ANSWER, [result("from_elsewhere", [[1, 2, 3, 4]], signed=True)])
    x = list(target_source_heatmap(e, e.results[0]).data[0].x)
    assert len(set(x)) == 4
    assert {label.strip("\u200b") for label in x} == {"·a"}


def test_too_many_columns_are_not_labelled():
    few = target_source_heatmap(demo(), demo().results[0])
    many = target_source_heatmap(large(512), large(512).results[0])
    assert few.layout.xaxis.showticklabels
    assert len(few.data[0].x) <= MOST_LABELS
    assert not many.layout.xaxis.showticklabels
    assert "512 sources" in many.layout.xaxis.title.text


def test_the_page_shows_through():
    figure = draw(SCORES, signed=True)
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
