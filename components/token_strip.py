"""The token strip on a page: draws a board, returns picks of a target.

Hovering, locking and the color intensity stay in the browser. Only a pick comes back, once: with the passage it was
made on, because a component's state outlives its data, and with a number, because it outlives the run as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from backend.io.board import answer_board, board_script, board_style
from backend.io.board_types import Board
from backend.types import Answer, Explanation

_board = st.components.v2.component(
    "attriscope_token_strip", html='<div class="board"></div>', css=board_style(), js=board_script()
)


@dataclass(frozen=True, slots=True)
class Pick:
    """A span of answer tokens that a person chose; half-open."""

    start: int
    stop: int


def token_board(board: Board, *, key: str) -> Pick | None:
    """Draw a board.

    Args:
        board: What to draw.
        key: Key of the component; unique on the page.

    Returns:
        The pick that was made since the last run on this passage, or None.
    """
    state = _board(key=key, data=board.to_json(), default={"pick": None}, on_pick_change=lambda: None)
    return _new_pick(state.pick, board, key)


def answer_picker(source: Answer | Explanation, span: tuple[int, int] | None, *, key: str) -> tuple[int, int] | None:
    """Draw the answer to pick a target from.

    Args:
        source: Whose answer.
        span: Half-open span of answer tokens that is chosen now; None if none is.
        key: Key of the component; unique on the page.

    Returns:
        The span that was picked since the last run, or None. Store it: the next run returns None again.
    """
    pick = token_board(answer_board(source, span), key=key)
    return None if pick is None else (pick.start, pick.stop)


def _new_pick(value: object, board: Board, key: str) -> Pick | None:
    """Read what the browser sent; it may be old, or anything."""
    if not isinstance(value, dict) or board.answer is None or value.get("passage") != board.passage:
        return None
    seen = f"{key}_seen"
    if st.session_state.get(seen) == value.get("number"):
        return None
    st.session_state[seen] = value.get("number")
    start, stop = value.get("start"), value.get("stop")
    if isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop <= len(board.answer.facts):
        return Pick(start, stop)
    return None
