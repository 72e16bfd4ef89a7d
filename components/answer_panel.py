"""The answer, and the choice of the token or span to explain."""

from __future__ import annotations

import streamlit as st

from backend.io.board import passage_hash
from backend.types import Answer, Explanation, TargetToken
from components.token_strip import answer_picker

Choice = tuple[tuple[int, ...], tuple[int, int], TargetToken | None]


def answer_panel(scene: Answer | Explanation) -> Choice:
    """Draw the answer; return its ids, the chosen half-open span, and the first chosen token's statistics if known."""
    tokens = scene.passage.answer_tokens
    passage, state = passage_hash(scene.passage), st.session_state
    if isinstance(scene, Answer):
        for note in scene.notes:
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                st.markdown(":material/info:", width="content")
                st.text(note)
    made_on, span = state.get("s_span", (None, None))
    if made_on != passage:  # the answer is another one
        span = _first_span(scene)
    picked = answer_picker(scene, span, key="s_answer")
    if picked is not None and picked != span:
        state["s_span"] = (passage, picked)
        st.rerun()  # draw the answer again with the new choice
    known = {target.position - scene.passage.prompt_length: target for target in scene.targets}
    return tuple(token.id for token in tokens), span, known.get(span[0])


def _first_span(scene: Answer | Explanation) -> tuple[int, int]:
    if isinstance(scene, Explanation):
        start = scene.passage.prompt_length
        return scene.targets[0].position - start, scene.targets[-1].position - start + 1
    # the first token that says something; answers often begin with a line break
    tokens = scene.passage.answer_tokens
    index = next((i for i, token in enumerate(tokens) if token.text.strip() and not token.special), 0)
    stop = index + 1
    while stop < len(tokens) and tokens[stop].group == tokens[index].group:
        stop += 1
    return index, stop
