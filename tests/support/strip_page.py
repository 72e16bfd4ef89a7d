"""The board on one of the cases, chosen in the address; says what was picked."""

import streamlit as st

from backend.io.board import build_board
from components.heatmap import target_source_heatmap
from components.token_strip import answer_picker, token_board
from tests.support.board_cases import CASES

st.set_page_config(layout="wide")
name = st.query_params.get("case", "demo")
level = st.query_params.get("level", "token")
explanation = CASES[name]()
shared = st.toggle("Shared scale", key="shared")
span = answer_picker(explanation, st.session_state.get("span"), key="picker")
if span:
    st.session_state["span"] = span
    st.rerun()
st.text(f"picked {st.session_state.get('span')}")
token_board(build_board(explanation, level=level, shared_scale=shared), key="board")
if len(explanation.targets) > 1:
    st.plotly_chart(target_source_heatmap(explanation, explanation.results[1], level), theme=None)
