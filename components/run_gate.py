"""Between a request and its run: short runs start at once, long ones say what they cost and ask."""

from __future__ import annotations

import streamlit as st

from backend.registry import get_method
from backend.types import Estimate, Explanation, SaliencyRequest
from components.job_panel import job_panel
from components.page import engine, session_id


def run_gate(request: SaliencyRequest) -> Explanation | None:
    """Return the explanation if it exists or has just been computed; else draw what it takes and return None."""
    found = engine().peek(request)
    if found is not None:
        return found
    slot = "explain"
    started = engine().ticket_for((session_id(), slot), request) is not None
    if not started:
        estimate = engine().estimate(request)
        if estimate is None or estimate.seconds > engine().settings.auto_run_s:
            _say(estimate)
            if not st.button("Run", type="primary", icon=":material/play_arrow:", key="s_run"):
                return None
    result = job_panel(slot, request)
    return result if isinstance(result, Explanation) else None


def _say(estimate: Estimate | None) -> None:
    if estimate is None:
        st.text("The model is not loaded yet, so the cost is unknown; loading it comes first.")
        return
    parts = ", ".join(f"{get_method(name).label} {_time(s)}" for name, s in estimate.per_method.items())
    st.text(f"This will take about {_time(estimate.seconds)} and {estimate.peak_bytes / 1e9:.1f} GB ({parts}).")
    st.caption(estimate.basis)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.1):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
