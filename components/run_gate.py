"""Between a request and its run: short runs start at once, long ones say what they cost and ask."""

from __future__ import annotations

import streamlit as st

from backend.registry import get_method
from backend.saliency.planning import planned_passes
from backend.types import Estimate, Explanation, MeasureRequest, Passage, SaliencyRequest
from components.job_panel import job_panel, keep_only
from components.page import engine, session_id

FEW_PASSES = 8.0
"""Runs of at most so many passes through a loaded model start without an estimate."""


def run_gate(request: SaliencyRequest | None, passage: Passage) -> Explanation | None:
    """Return the explanation if it exists or has just been computed; else draw what it takes and return None.

    Args:
        request: What the controls ask now; None if they ask nothing. Whatever ran for other controls is cancelled.
        passage: Prompt and answer of the request.
    """
    keep_only("explain", request)
    keep_only("measure", MeasureRequest(request.model) if request else None)
    if request is None:
        return None
    found = engine().peek(request)
    if found is not None:
        return found
    if engine().ticket_for((session_id(), "explain"), request) is None and not _starts(request, passage):
        return None
    result = job_panel("explain", request)
    return result if isinstance(result, Explanation) else None


def _starts(request: SaliencyRequest, passage: Passage) -> bool:
    """Whether the run may start: it is short, or the person pressed Run on seeing the estimate."""
    loaded = engine().is_loaded(request.model)
    passes = planned_passes(passage, request)
    if loaded and passes.forward + 2 * passes.backward <= FEW_PASSES:
        return True
    estimate = engine().estimate(request, passage)
    if estimate is None:
        measure = MeasureRequest(request.model)
        ticket = engine().ticket_for((session_id(), "measure"), measure)
        if loaded and (ticket is None or ticket.active):
            job_panel("measure", measure)  # reruns the page when it is done
            return False
        if loaded:
            st.text("How long this takes is not known: the model's speed was not measured.")
        else:
            st.text("The model is not in memory yet. Running these settings loads it first.")
        return st.button("Run", type="primary", icon=":material/play_arrow:", key="s_run")
    if estimate.seconds <= engine().settings.auto_run_s:
        return True
    _say(estimate)
    return st.button("Run", type="primary", icon=":material/play_arrow:", key="s_run")


def _say(estimate: Estimate) -> None:
    parts = ", ".join(f"{get_method(name).label} {_time(s)}" for name, s in estimate.per_method.items())
    st.text(f"This will take about {_time(estimate.seconds)} and {estimate.peak_bytes / 1e9:.1f} GB ({parts}).")
    st.caption(estimate.basis)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.1):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
