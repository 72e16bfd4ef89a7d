"""What every page begins with, and the objects that pages share: the engine, the session, how errors are shown."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import streamlit as st

from backend.engine import Engine
from backend.errors import AppError
from backend.settings import get_settings

log = logging.getLogger(__name__)

ICON = str(Path(__file__).resolve().parent.parent / "assets" / "icon.png")

_STYLE = """
<style>
.block-container { padding-top: 3.4rem; padding-bottom: 4rem; max-width: 80rem; }
@media (max-width: 40rem) { .block-container { padding-left: 1rem; padding-right: 1rem; } }
</style>
"""


@st.cache_resource(show_spinner=False)
def engine() -> Engine:
    """Return the one engine of this server."""
    return Engine(get_settings())


@st.cache_resource(show_spinner=False, scope="session", on_release=lambda session: engine().drop_session(session))
def session_id() -> str:
    """Return an id of this browser tab's session; when the tab is gone its jobs are cancelled."""
    return uuid.uuid4().hex


def bootstrap(title: str) -> None:
    """Set up a page: title, width, style. No page may rely on the menu for this."""
    st.set_page_config(page_title=f"{title} · Attriscope", page_icon=ICON, layout="wide")
    st.html(_STYLE)
    session_id()
    engine().warm_up()


def show_error(error: AppError) -> None:
    """Draw an error as text; nothing in it is interpreted as Markdown."""
    with st.container(border=True):
        st.markdown(":material/error: **This did not work**")
        st.text(error.message)
        if error.hint:
            st.text(error.hint)


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show an ``AppError`` of the block instead of ending the page."""
    try:
        yield
    except AppError as error:
        show_error(error)


def report_error(error: BaseException) -> bool:
    """Draw what ends a page run unexpectedly; the details go to the log, not to the browser."""
    if isinstance(error, AppError):
        show_error(error)
        return True
    log.error("page failed", exc_info=error)
    show_error(
        AppError(
            "Something went wrong inside the application.",
            "Reload the page. If it happens again, the server's log has the details.",
        )
    )
    return True
