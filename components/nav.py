"""The list of pages: one place for titles, addresses and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

PAGES_DIR = Path(__file__).resolve().parent.parent / "pages"


def pages() -> list[Any]:
    """Return all pages, in menu order. The first is the default and lives only at "/".

    Pages have no icons: the browser would ask an outside host for a picture of each.
    """
    return [
        st.Page(PAGES_DIR / "home.py", title="Home", default=True),
        st.Page(
            PAGES_DIR / "saliency.py",
            title="Token saliency",
            url_path="saliency",
        ),
        st.Page(PAGES_DIR / "benchmarks.py", title="Benchmarks", url_path="benchmarks"),
    ]


def go_to_saliency(**params: str) -> None:
    """Open the token saliency page with these query parameters."""
    # always with query_params: switch_page raises when a bound widget is off its default and none are given
    st.switch_page(pages()[1], query_params=params)
