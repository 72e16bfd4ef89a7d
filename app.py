"""Entry point: ``streamlit run app.py``, or ``attriscope run``. The pages begin in components/shell.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from components.page import engine, report_error
from components.security import SecurityHeaders


async def healthz(request: Request) -> JSONResponse:
    """Say whether the engine stands, and how busy it is."""
    return JSONResponse(engine().readiness())


@asynccontextmanager
async def lifespan(app: st.App) -> AsyncIterator[None]:
    """Stop all jobs when the server stops."""
    yield
    engine().close()


app = st.App(
    Path(__file__).parent / "components" / "shell.py",  # not this folder: a deep link would then bypass the shell
    lifespan=lifespan,
    routes=[Route("/healthz", healthz)],
    middleware=[Middleware(SecurityHeaders)],
    on_script_error=report_error,
)
