"""How far a map can be trusted on this very prompt: budgets against random orders, seeds, a broken model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import streamlit as st

from backend.evaluation.badge import badge, shipped_table
from backend.evaluation.faithfulness import Faithfulness
from backend.io.board_types import Note
from backend.registry import find_label
from backend.types import Check, Explanation, FaithfulnessRequest, ModelRef, SanityRequest
from components.heatmap import chart_layout
from components.job_panel import job_panel, keep_only
from components.page import engine

if TYPE_CHECKING:
    from backend.evaluation.sanity import MethodSanity

MARKS = {"ok": "✓", "warn": "△", "fail": "✕", "info": "·"}
_COLORS = ("#3a86c8", "#e08a2c", "#2e9e8c", "#a35bb5")
_RANDOM = "rgba(138,148,160,0.28)"


def needle_remarks(explanation: Explanation) -> dict[str, tuple[Note, ...]]:
    """Return, by method, how it did on planted needles on this very model, where that was measured."""
    remarks: dict[str, tuple[Note, ...]] = {}
    table, model, length = shipped_table(), explanation.model, explanation.passage.prompt_length
    for result in explanation.results:
        found = badge(model.id, model.revision, result.method, length, table)
        if found is not None:
            text = f"{found.text[:1].upper()}{found.text[1:]} (by chance {found.chance:.2f})."
            warning = (Note("warn", found.warning),) if found.warning else ()
            remarks[result.method] = (Note("info", text), *warning)
    return remarks


def check_line(check: Check) -> str:
    """Return a check as one line of text."""
    value = "" if check.value is None else f" {check.value:.4g}"
    return f"{MARKS[check.verdict]} {check.name.replace('_', ' ')}{value}: {check.text}"


def faithfulness_view(explanation: Explanation, ref: ModelRef, key: str) -> None:
    """Draw deletion and insertion curves of all methods, once asked for.

    Args:
        explanation: What is shown.
        ref: The model.
        key: Key under which the explanation was saved.
    """
    st.caption(
        "Hides what a method ranks highest, then shows nothing else. If the map is right, the first makes the target "
        "unlikely and the second keeps it likely, both faster than hiding at random (gray)."
    )
    request = FaithfulnessRequest(ref, key)
    found = _asked("faithfulness", request, "Measure on this prompt", "s_faith")
    if not isinstance(found, Faithfulness):
        return
    share = [0, *found.budgets]
    for title, kind, better in (
        ("Hide the top k %", "deletion", "lower is better"),
        ("Show only the top k %", "insertion", "higher is better"),
    ):
        figure = go.Figure()
        mean, low, high = found.random_band("deletion" if kind == "deletion" else "insertion")
        figure.add_scatter(x=share, y=high, mode="lines", line_width=0, showlegend=False, hoverinfo="skip")
        figure.add_scatter(
            x=share, y=low, mode="lines", line_width=0, fill="tonexty", fillcolor=_RANDOM, name="random orders",
            hoverinfo="skip",
        )  # fmt: skip
        figure.add_scatter(x=share, y=mean, mode="lines", line={"color": "#8a94a0", "dash": "dot"}, name="their mean")
        measured = [method for method in found.methods if method.descending is not None]
        for color, method in zip(_COLORS, measured, strict=False):
            ratios = found.ratios(getattr(method.descending, kind))
            figure.add_scatter(
                x=share, y=ratios, mode="lines+markers", line_color=color, name=find_label(method.method)
            )
        figure.update_xaxes(title="k, in percent of the units", fixedrange=True, automargin=True)
        figure.update_yaxes(title="p(target), relative", rangemode="tozero", fixedrange=True, automargin=True)
        figure.update_layout(height=300, hovermode="x", **chart_layout())
        st.markdown(f"**{title}** ({better})")
        st.plotly_chart(figure, key=f"s_{kind}", theme=None, config={"displayModeBar": False})
    st.dataframe(
        [
            {
                "method": find_label(method.method),
                "deletion, below random by": method.deletion_gap,
                "insertion, above random by": method.insertion_gap,
                "comprehensiveness": method.comprehensiveness,
                "sufficiency": method.sufficiency,
                "remark": method.reason,
            }
            for method in found.methods
        ],
        hide_index=True,
        column_config={
            name: st.column_config.NumberColumn(format="%.3f")
            for name in (
                "deletion, below random by", "insertion, above random by", "comprehensiveness", "sufficiency"
            )
        },
    )  # fmt: skip
    for note in found.notes:
        st.text(note)
    st.caption(f"{found.units} units, {found.passes:.0f} forward passes, {found.seconds:.1f} s.")


def sanity_view(ref: ModelRef, key: str) -> None:
    """Draw the sanity block, once asked for: same model afterwards, seeds, a broken model."""
    st.caption(
        "Runs every method again: with other seeds, and on a copy of the model whose last block has lost what it "
        "learned. A map that does not change then says little about this model."
    )
    found: tuple[MethodSanity, ...] | None = _asked("sanity", SanityRequest(ref, key), "Test the methods", "s_sanity")
    for method in found or ():
        st.markdown(f"**{find_label(method.method)}**")
        st.text("\n".join(check_line(check) for check in method.checks) or method.refusal)


def _asked(slot: Any, request: FaithfulnessRequest | SanityRequest, label: str, key: str) -> Any:
    """Return the result of a run that a person asks for by a button, or draw the button and return None."""
    asked = f"{key}_asked"
    if st.button(label, key=key, icon=":material/play_arrow:"):
        st.session_state[asked] = request
    if st.session_state.get(asked) != request:
        keep_only(slot, None)
        if not engine().is_loaded(request.model):
            st.caption("This loads the model first.")
        return None
    return job_panel(slot, request)
