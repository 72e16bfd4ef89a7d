"""A prompt that is too long: say by how much, and cut it where the person wants it cut. Never on its own accord."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from backend.errors import PromptTooLong
from backend.types import AnswerRequest, CutRequest, Prompt, visible
from components.job_panel import job_panel
from components.page import engine, session_id
from components.prompt_form import CUT_NOTE

KEEP: dict[Literal["start", "end", "ends"], str] = {"start": "its start", "end": "its end", "ends": "both ends"}


def cut_offer(asked: AnswerRequest) -> Prompt | None:
    """Draw the offer where the answer failed for its length; return the shortened prompt once there is one."""
    ticket = engine().ticket_for((session_id(), "answer"), asked)
    if ticket is None or not isinstance(ticket.error, PromptTooLong):
        return None
    keep = st.segmented_control(
        "Cut the prompt, and keep",
        list(KEEP),
        default="start",
        required=True,
        format_func=lambda name: KEEP[name],
        key="s_cut_keep",
    )
    request = CutRequest(asked.model, asked.prompt, keep, asked.decoding.max_new_tokens, asked.continuation)
    if st.button("Cut", icon=":material/content_cut:", key="s_cut"):
        st.session_state["s_cut_asked"] = request
    if st.session_state.get("s_cut_asked") != request:
        return None
    cut = job_panel("cut", request)
    if cut is None:
        return None
    st.session_state.pop("s_cut_asked")
    dropped = visible(cut.dropped)
    st.session_state[CUT_NOTE] = (
        f"{len(cut.dropped):,} characters were cut out after the first {cut.position:,}; {cut.tokens:,} tokens stay. "
        f"The cut began with: {dropped[:80]}"
    )
    return cut.prompt if isinstance(cut.prompt, Prompt) else None
