import pytest
from streamlit.testing.v1 import AppTest

from backend.io.board import answer_board
from tests.support.board_cases import demo, hostile

PASSAGE = answer_board(demo(), None).passage


def page():
    import streamlit as st

    from components.token_strip import answer_picker
    from tests.support.board_cases import demo

    st.text(f"picked {answer_picker(demo(), None, key='picker')}")


def run(pick):
    at = AppTest.from_function(page, default_timeout=30)
    if pick is not None:
        at.session_state["picker"] = {"pick": pick}
    at.run()
    assert not at.exception
    return at


def test_without_a_pick_there_is_none():
    assert run(None).text[0].value == "picked None"


def test_a_pick_comes_back_once():
    at = run({"passage": PASSAGE, "start": 3, "stop": 5, "number": "1"})
    assert at.text[0].value == "picked (3, 5)"
    at.run()
    assert at.text[0].value == "picked None"


def test_a_second_pick_of_the_same_span_comes_back_too():
    at = run({"passage": PASSAGE, "start": 3, "stop": 5, "number": "1"})
    at.session_state["picker"] = {"pick": {"passage": PASSAGE, "start": 3, "stop": 5, "number": "2"}}
    at.run()
    assert at.text[0].value == "picked (3, 5)"


@pytest.mark.parametrize(
    "pick",
    [
        {"passage": answer_board(hostile(), None).passage, "start": 0, "stop": 1, "number": "1"},
        {"passage": PASSAGE, "start": 0, "stop": 999, "number": "1"},
        {"passage": PASSAGE, "start": -1, "stop": 1, "number": "1"},
        {"passage": PASSAGE, "start": 2, "stop": 2, "number": "1"},
        {"passage": PASSAGE, "start": "0", "stop": 1, "number": "1"},
        {"passage": PASSAGE},
        "nonsense",
    ],
)
def test_old_and_broken_picks_are_dropped(pick):
    assert run(pick).text[0].value == "picked None"
