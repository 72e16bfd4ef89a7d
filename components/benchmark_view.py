"""The needle benchmark as a table and as a map of depth × length. Draws a document; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from backend.registry import find_label
from components.heatmap import chart_layout

METRICS = {
    "recall_at_k": "recall@k",
    "needle_mass": "needle mass",
    "mass": "mass",
    "lift": "lift",
    "secret_rank": "secret's rank",
    "bos_share": "BOS share",
}
"""Columns of the table that are also offered for the map; names as in the document."""

_FLAGS = {
    "lift": "no better than a uniform map in mass",
    "recall": "no better than chance in recall",
}

EXPLAINED = (
    "**Recall@k**: of the k highest tokens, how many belong to the needle, k being the needle's length. **Needle "
    "mass**: the needle's share of the scores. **Mass**: the share of needle, question and system text together. "
    "**Lift**: mass divided by what a uniform map gives. **Secret's rank**: 1 if the secret itself is on top. BOS and "
    "template tokens do not count, except in the **BOS share**. Of methods with signs the positive part counts for "
    "ablation methods, the absolute value for gradient methods."
)


def benchmark_view(table: Mapping[str, Any]) -> None:
    """Draw a benchmark document, see ``backend.evaluation.bench_table``."""
    summary: Sequence[Mapping[str, Any]] = table["summary"]
    lengths = sorted({one["length"] for one in summary})
    length = st.segmented_control(
        "Length of the prompt, in tokens", lengths, default=lengths[0], required=True, key="b_length"
    )
    rows = [_row(one) for one in summary if one["length"] == length]
    rows.sort(key=lambda row: -(row["recall@k"] or 0.0))
    number = st.column_config.NumberColumn
    st.dataframe(
        rows,
        hide_index=True,
        column_config={
            **{name: number(format="%.2f") for name in (*METRICS.values(), "chance")},
            "secret's rank": number(format="%.1f"),
            "seconds": number(format="%.1f"),
        },
    )
    st.caption(EXPLAINED)
    _map(table["rows"], lengths)
    _about(table["about"])


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    remarks = [_FLAGS.get(flag, flag) for flag in one["flags"]] + ([one["refusal"]] if one["refusal"] else [])
    return {
        "method": find_label(one["method"]),
        **{label: one[name] for name, label in METRICS.items()},
        "chance": one["chance"],
        "seconds": one["seconds"],
        "prompts": one["needles"],
        "settings": ", ".join(f"{key} = {value}" for key, value in one["params"].items()) or "defaults",
        "remarks": "; ".join(remarks),
    }


def _map(rows: Sequence[Mapping[str, Any]], lengths: list[int]) -> None:
    st.subheader("By depth and length")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    which, what = st.columns(2)
    method = which.selectbox("Method", methods, format_func=find_label, key="b_method")
    metric = what.selectbox(
        "Number", ["recall_at_k", "needle_mass", "mass"], format_func=lambda name: METRICS[name], key="b_metric"
    )
    depths = sorted({row["depth"] for row in rows})
    cells = [[_mean(rows, method, metric, length, depth) for length in lengths] for depth in depths]
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            x=[f"{length:,} tokens" for length in lengths],
            y=[f"{depth} %" for depth in depths],
            zmin=0.0,
            zmax=1.0,
            colorscale=[(0.0, "rgba(61,181,162,0)"), (1.0, "rgba(61,181,162,1)")],
            texttemplate="%{z:.2f}",
            hovertemplate="%{x}, depth %{y}: %{z:.3f}<extra></extra>",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            showscale=False,
        )
    )
    figure.update_yaxes(title="depth of the needle", autorange="reversed", showgrid=False, automargin=True)
    figure.update_xaxes(showgrid=False, automargin=True)
    figure.update_layout(height=120 + 44 * len(depths), **chart_layout())
    st.plotly_chart(figure, key="b_map", theme=None, config={"displayModeBar": False})


def _mean(
    rows: Sequence[Mapping[str, Any]], method: str | None, metric: str | None, length: int, depth: int
) -> float | None:
    """Mean over seeds and needles of a cell; None where nothing was measured."""
    found = [
        (row[metric or ""], row["needles"])
        for row in rows
        if (row["method"], row["length"], row["depth"]) == (method, length, depth) and row[metric or ""] is not None
    ]
    weight = sum(needles for _, needles in found)
    return sum(value * needles for value, needles in found) / weight if weight else None


def _about(about: Mapping[str, Any]) -> None:
    with st.expander("What was measured, when, on what"):
        st.text("\n".join(f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in about.items()))
        st.caption("Measure it again, also on your own model: `attriscope bench saliency --model NAME`.")


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
