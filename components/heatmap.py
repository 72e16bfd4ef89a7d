"""Target × source heatmap for spans: which source mattered for which target token.

Same colors and the same rules as the token strip. Plotly reads texts as a kind of HTML; user text is escaped here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from backend.io.board_types import PALETTE, plain_line
from backend.saliency.reading import Reading, read
from backend.types import Explanation, Level, TokenAttribution, visible

MOST_LABELS = 128
"""With more columns than this, texts are shown on hover only. With fewer, Plotly leaves out labels that do not fit."""

_LABEL_LENGTH = 18
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"}


def target_source_heatmap(explanation: Explanation, result: TokenAttribution, level: Level = "token") -> go.Figure:
    """Draw one method's scores, one row per target token and one column per source unit.

    Signed scores diverge around zero, unsigned ones start at zero; zero is transparent and shows the page. BOS and
    template tokens do not set the scale. Sources that a target cannot see, and sources that were not measured, are
    gaps.

    Raises:
        BadRequest: If the result has no scores.
    """
    readings = [read(explanation, result, [row], level) for row in range(len(explanation.targets))]
    first = readings[0]
    values = np.stack([np.where(r.visible, r.values, np.float32(np.nan)) for r in readings])  # (target, unit)
    reach = max(_reach(r) for r in readings) or 1.0
    columns = [plain_label(_text(explanation, unit)) for unit in first.units]
    rows = [plain_label(target.text) for target in explanation.targets]
    signed = first.traits.signed
    labels = len(columns) <= MOST_LABELS
    heat = go.Heatmap(
        z=values,
        x=_distinct(columns) if labels else None,
        zmin=-reach if signed else 0.0,
        zmax=reach,
        zmid=0.0 if signed else None,
        colorscale=_colorscale(signed),
        hovertext=[[f"{row} ← {column}" for column in columns] for row in rows],
        hovertemplate="%{hovertext}<br>%{z:.4~g}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "score", "side": "right"}, "thickness": 10, "outlinewidth": 0},
    )
    figure = go.Figure(heat)
    figure.update_xaxes(
        type="category" if labels else "linear",
        showticklabels=labels,
        tickangle=-60,
        automargin=True,
        title=None if labels else f"{len(columns)} sources, in reading order",
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(rows))),
        ticktext=rows,
        autorange="reversed",
        automargin=True,
        showgrid=False,
        zeroline=False,
    )
    figure.update_layout(
        height=110 + 26 * len(rows) + (60 if labels else 0),
        **chart_layout(),
    )
    return figure


def chart_layout() -> dict[str, Any]:
    """Layout that all charts share: the page's background, its quiet text color, no dragging."""
    return {
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#a3adb6" if st.context.theme.type == "dark" else "#5a6570", "size": 12},
        "dragmode": False,
    }


def plain_label(text: str) -> str:
    """Make a text a Plotly label that shows exactly these characters: short, visible, escaped."""
    shown = plain_line(visible(text)) or "▯"
    if len(shown) > _LABEL_LENGTH:
        shown = shown[: _LABEL_LENGTH - 1] + "…"
    return "".join(_ESCAPES.get(char, char) for char in shown)


def _distinct(labels: list[str]) -> list[str]:
    """Tell equal labels apart by invisible characters: on a category axis each label names one column."""
    seen: Counter[str] = Counter()
    out = []
    for label in labels:
        out.append(label + "\u200b" * seen[label])
        seen[label] += 1
    return out


def _text(explanation: Explanation, unit: tuple[int, int]) -> str:
    return "".join(token.text for token in explanation.sources[unit[0] : unit[1]])


def _reach(reading: Reading) -> float:
    return float(np.abs(reading.values[reading.scaled]).max(initial=0.0))


def _colorscale(signed: bool) -> list[tuple[float, str]]:
    """Opaque full colors; zero is the same color without opacity, so that it shows the page's background."""
    hue = {name: f"rgba({int(c[1:3], 16)},{int(c[3:5], 16)},{int(c[5:7], 16)}," for name, c in PALETTE["light"].items()}
    if signed:
        against, support = hue["against"], hue["for"]
        return [(0.0, against + "1)"), (0.5, against + "0)"), (0.5, support + "0)"), (1.0, support + "1)")]
    return [(0.0, hue["more"] + "0)"), (1.0, hue["more"] + "1)")]
