"""Opening a result that exists already: by link, from the gallery, from an exported file. Needs no model."""

from __future__ import annotations

import streamlit as st

from backend.errors import AppError, BadFile
from backend.io import bundle
from backend.io.examples import list_examples, load_example
from backend.types import Explanation, SaliencyRequest
from components.explain_form import fill_explain_form
from components.job_panel import let_go
from components.page import engine, show_error
from components.prompt_form import fill_prompt_form

_OPENED = "s_opened"
_OPENED_AS = "s_opened_as"  # the request that the filled controls described when the result was opened
_RESULT, _SHOWN = "s_shown_result", "s_shown_run"  # what was put into the address last: the result and its key


def open_controls() -> None:
    """Draw the gallery and the file chooser, and follow ``?run=`` and ``?example=`` in the address."""
    _follow_link()
    with st.container(horizontal=True, gap="small"):
        with st.popover("Examples", icon=":material/auto_awesome:"):
            st.caption("Computed before; they open at once and need no model.")
            for example in list_examples():
                st.button(
                    example.title, key=f"s_example_{example.name}", help=example.about,
                    on_click=_open_example, args=(example.name,), width="stretch",
                )  # fmt: skip
        with st.popover("Open a file", icon=":material/folder_open:"):
            upload = st.file_uploader("A result exported as JSON", type=["json"], key="s_upload")
            if upload is not None and st.session_state.get("s_upload_seen") != upload.file_id:
                st.session_state["s_upload_seen"] = upload.file_id
                _open_file(upload.getvalue())
    error = st.session_state.pop("s_open_error", None)
    if isinstance(error, AppError):
        show_error(error)


def opened_result() -> Explanation | None:
    """Return the result that was opened and not replaced by a new question."""
    found = st.session_state.get(_OPENED)
    return found if isinstance(found, Explanation) else None


def close_opened() -> None:
    """Go back to asking; called when a new question is asked."""
    let_go()
    st.session_state.pop(_OPENED, None)
    st.session_state.pop(_OPENED_AS, None)
    st.query_params.clear()


def still_as_opened(request: SaliencyRequest | None) -> bool:
    """Whether the controls still stand as opening the result set them, which is as near to it as they come."""
    if opened_result() is None:
        return False
    return bool(st.session_state.setdefault(_OPENED_AS, request) == request)


def remember_shown(explanation: Explanation) -> str:
    """Put the shown result into the address, so that a reload and a shared link bring it back; return its key."""
    state = st.session_state
    if state.get(_RESULT) is not explanation:  # saved once, not at every run of the page
        state[_RESULT], state[_SHOWN] = explanation, engine().save(explanation)
    key = str(state[_SHOWN])
    if st.query_params.get("run") != key:
        st.query_params.from_dict({"run": key})
    return key


def _follow_link() -> None:
    run, example = st.query_params.get("run"), st.query_params.get("example")
    if example is not None:
        st.query_params.clear()
        _open_example(example)
    elif run is not None and run != st.session_state.get(_SHOWN):
        found = engine().load(run)
        if found is not None:
            st.session_state[_RESULT], st.session_state[_SHOWN] = found, run
            _open(found)
        else:
            st.query_params.clear()
            st.session_state["s_open_error"] = BadFile(
                "This link has expired: the server no longer keeps its result.",
                "Ask for a new link, or for the exported JSON file, which never expires.",
            )


def _open_example(name: str) -> None:
    try:
        _open(load_example(name))
    except AppError as error:
        st.session_state["s_open_error"] = error


def _open_file(data: bytes) -> None:
    limit = engine().settings.max_upload_mb
    try:
        if len(data) > limit * 1_000_000:
            raise BadFile(f"The file has {len(data) / 1e6:.1f} MB; the limit is {limit} MB.")
        result = bundle.decode(data)
        if not isinstance(result, Explanation):
            raise BadFile("This file holds an answer without an explanation.", "Choose an exported explanation.")
        _open(result)
    except AppError as error:
        st.session_state["s_open_error"] = error


def _open(explanation: Explanation) -> None:
    st.session_state[_OPENED] = explanation
    st.session_state.pop(_OPENED_AS, None)
    st.session_state.pop("s_span", None)
    let_go()
    fill_prompt_form(explanation)
    fill_explain_form(explanation)
