"""A small app around the board alone, under the real security headers; tests/support/strip_page.py is its page."""

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from components.security import SecurityHeaders

app = st.App(Path(__file__).parent / "strip_page.py", middleware=[Middleware(SecurityHeaders)])
