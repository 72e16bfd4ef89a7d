"""A job as a person sees it: waiting, running, cancelled, failed; and the result when there is one."""

from __future__ import annotations

from typing import Any, Literal, get_args

import streamlit as st

from backend.engine import Request
from backend.errors import AppError, Busy
from backend.jobs import Ticket
from components.page import engine, session_id, show_error

Slot = Literal["answer", "cut", "measure", "explain", "what_if", "regenerate", "prune", "faithfulness", "sanity"]
SLOTS: tuple[Slot, ...] = get_args(Slot)


def job_panel(slot: Slot, request: Request, *, start: bool = True) -> Any:
    """Return the request's result, or draw where its job stands and return None.

    Args:
        slot: Name of the panel; a panel holds one job, and a new request cancels the earlier one.
        request: What to compute.
        start: Whether to submit the request if nobody did. An answer that exists already is returned in any case.
    """
    found = engine().peek(request)
    if found is not None:
        return found
    owner = (session_id(), slot)
    ticket = engine().ticket_for(owner, request)
    if ticket is None:
        if not start:
            return None
        try:
            ticket = engine().submit(owner, request)
        except Busy as busy:
            show_error(busy)
            if st.button("Try again", key=f"{slot}_retry"):
                st.rerun()
            return None
    if ticket.state == "done":
        return ticket.result
    _watch(slot, ticket, request)
    return None


def keep_only(slot: Slot, request: Request | None) -> None:
    """Let go of the panel's job unless it is for this request; otherwise it would run on with nobody to see it."""
    owner = (session_id(), slot)
    if request is None or engine().ticket_for(owner, request) is None:
        engine().forget(owner)


def let_go() -> None:
    """Let go of every job of this session's panels, in whatever state: a new question is asked, or a result opened."""
    for slot in SLOTS:
        engine().forget((session_id(), slot))


def _watch(slot: Slot, ticket: Ticket, request: Request) -> None:
    was_active = ticket.active  # fixed for this run of the page: decides whether the fragment polls

    @st.fragment(run_every=0.4 if was_active else None)
    def panel() -> None:
        if ticket.active:
            done, total = ticket.progress
            with st.container(horizontal=True, vertical_alignment="center"):
                st.progress(min(done / total, 1.0), text=_status(ticket))
                st.button("Cancel", key=f"{slot}_cancel", on_click=ticket.cancel)
        elif was_active:
            st.rerun()  # once: the page draws the result, or the reason why there is none
        else:
            _stopped(slot, ticket, request)

    panel()


def _status(ticket: Ticket) -> str:
    if ticket.state == "waiting":
        ahead = ticket.ahead
        running = ticket.blocked_by
        return f"Waiting: {ahead} ahead of you" + (f" · now: {running}" if running else "") if ahead else "Starting"
    done, total = ticket.progress
    steps = f" · {done} of {total}" if total > 1 else ""
    return f"{ticket.stage or 'Starting'}{steps} · {ticket.seconds:.0f} s"


def _stopped(slot: Slot, ticket: Ticket, request: Request) -> None:
    error = ticket.error
    if ticket.state == "cancelled":
        st.text("Cancelled. Nothing was lost; run it again when you like.")
    elif error is not None:
        show_error(error)
    else:
        show_error(AppError("The job ended without a result.", "Run it again."))
    if st.button("Run again", key=f"{slot}_again"):
        engine().forget(ticket.owner)
        try:
            engine().submit(ticket.owner, request)
        except Busy as busy:
            show_error(busy)
        else:
            st.rerun()  # a click in a fragment reruns only the fragment
