import csv
import io

import numpy as np
import pandas as pd
import pytest

from backend.io.export import CSV_ENCODING, to_csv
from tests.support.board_cases import demo, hostile, scripts
from tests.support.explanations import explanation, result, token


def lines(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_every_score_of_every_method_is_there():
    e = demo((3, 5))
    table = pd.read_csv(io.BytesIO(to_csv(e).encode(CSV_ENCODING)), keep_default_na=True)
    assert list(table.columns)[:4] == ["method", "target_position", "target_id", "target_text"]
    for scored in e.results:
        mine = table[table.method == scored.method].score.to_numpy(np.float32).reshape(scored.scores.shape)
        known = np.ones(len(e.sources), bool) if scored.measured is None else scored.measured
        assert np.array_equal(mine[:, known], scored.scores[:, known])
        assert np.isnan(mine[:, ~known]).all()


def test_unmeasured_sources_are_empty_not_zero():
    prompt = (token("a", group=0), token("b", group=1))
    scored = result("occlusion", [[0, 5]], signed=True, measured=np.array([True, False]))
    rows = lines(to_csv(explanation(prompt, (token("c", "answer", group=2),), [scored])))
    assert [row["score"] for row in rows] == ["0", ""]


def test_units_are_named_by_their_spans():
    prompt = tuple(token(text, group=i) for i, text in enumerate(["a", "b", " c"]))
    scored = result("occlusion", [[1, 2]], signed=True, units=((0, 2), (2, 3)))
    first, second = lines(to_csv(explanation(prompt, (token("d", "answer", group=3),), [scored], level="word")))
    assert (first["source_start"], first["source_stop"], first["source_ids"]) == ("0", "2", "100 101")
    assert (first["source_text"], second["source_text"]) == ("ab", " c")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\nx"])
def test_no_text_is_a_formula(text):
    prompt = (token(text, group=0),)
    (row,) = lines(to_csv(explanation(prompt, (token("-y", "answer", group=1),), [result("m", [[-1]], signed=True)])))
    assert row["source_text"] == "'" + text
    assert row["target_text"] == "'-y"
    assert row["score"] == "-1"  # a number stays a number


@pytest.mark.parametrize("make", [hostile, scripts])
def test_texts_come_back_whole(make):
    e = make()
    text = to_csv(e)
    text.encode("utf-8")
    rows = [row for row in lines(text) if row["method"] == "gradient_norm"][: len(e.sources)]
    for row, source in zip(rows, e.sources, strict=True):
        if "\ud800" not in source.text and "\x00" not in source.text:
            assert row["source_text"].removeprefix("'") == source.text


def test_lines_end_as_the_standard_says():
    text = to_csv(demo())
    assert text.endswith("\r\n")
    assert text.splitlines()[0] == (
        "method,target_position,target_id,target_text,source_start,source_stop,source_ids,source_text,source_role,score"
    )


def test_refused_methods_have_no_lines():
    e = explanation(
        (token("a", group=0),), (token("b", "answer", group=1),), [result("m", None, signed=True, refusal="no")]
    )
    assert lines(to_csv(e)) == []
