"""What if the model had read the prompt differently? Weigh, hide or take out words, and see what it says then."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from backend.saliency.reading import read, traits_of
from backend.saliency.units import make_units, unit_text
from backend.types import Explanation, Intervention, InterventionRequest, ModelRef, TokenAttribution, visible
from components.heatmap import chart_layout, plain_label
from components.job_panel import Slot, job_panel, keep_only
from components.page import engine

WEIGH, HIDE, TAKE_OUT = "Weigh", "Hide", "Take out"
STRONGEST = 5.0
BEFORE, AFTER = "#8a94a0", "#3a86c8"


def what_if(explanation: Explanation, shown: list[TokenAttribution], ref: ModelRef) -> None:
    """Draw the controls and, once asked, what changes.

    Args:
        explanation: Whose prompt and answer.
        shown: Results with scores; their strongest words are offered first.
        ref: The model.
    """
    if not engine().is_loaded(ref):
        st.caption("This runs the model, which is not in memory now.")
        if not st.toggle("Load it when something is tried", key="s_if_load"):
            return
    by_words, by_rank = st.columns(2, gap="large")
    with by_words:
        _change_words(explanation, shown, ref)
    with by_rank:
        _prune(explanation, shown, ref)


# ------------------------------------------------------------------------------------------------ chosen words


def _change_words(explanation: Explanation, shown: list[TokenAttribution], ref: ModelRef) -> None:
    st.markdown("**Change single words**")
    tokens = explanation.passage.prompt_tokens
    units = make_units(tokens, "word")
    first = _ranked(explanation, shown[0])[:1]
    at_start = [i for i, unit in enumerate(units) if first and unit[0] <= first[0] < unit[1]]
    key = f"s_if_words_{hash(explanation.passage.ids)}"  # other words, other widget
    st.session_state.setdefault(key, at_start)
    chosen = st.multiselect(
        "Words of the prompt",
        range(len(units)),
        format_func=lambda i: f"{i + 1}: {visible(unit_text(tokens, units[i])) or '▯'}",
        key=key,
    )
    how = st.segmented_control(
        "What to do with them", [WEIGH, HIDE, TAKE_OUT], default=WEIGH, required=True, key="s_how"
    )
    bias = 0.0
    if how == WEIGH:
        bias = st.slider(
            "Attention bias",
            -STRONGEST,
            STRONGEST,
            0.0,
            0.5,
            key="s_if_bias",
            help="Added to the attention scores of these words in every layer and head: +1 multiplies the attention "
            "to them by e, before the weights are made to sum to 1 again.",
        )
    indices = tuple(i for number in chosen for i in range(*units[number]))
    changed = bool(indices) and (how != WEIGH or bias != 0)
    base = _request(explanation, ref, how or WEIGH, indices, bias)
    if not changed:
        keep_only("what_if", None)
        st.caption("Choose words, then move the bias or hide them.")
        return
    keep_only("what_if", base)
    found = job_panel("what_if", base)
    if isinstance(found, Intervention):
        _distribution(found)
        _answer_anew(explanation, _with_answer(base, explanation), "s_if_anew", "Answer anew with this change")


def _request(
    explanation: Explanation, ref: ModelRef, how: str, indices: tuple[int, ...], bias: float
) -> InterventionRequest:
    return InterventionRequest(
        model=ref,
        prompt=explanation.prompt,
        answer_ids=tuple(token.id for token in explanation.passage.answer_tokens),
        at=explanation.targets[0].position - explanation.passage.prompt_length,
        biases=tuple((i, bias) for i in indices) if how == WEIGH else (),
        hidden=indices if how == HIDE else (),
        removed=indices if how == TAKE_OUT else (),
    )


def _with_answer(request: InterventionRequest, explanation: Explanation) -> InterventionRequest:
    longest = max(8, len(explanation.passage.answer_tokens))
    return InterventionRequest(
        request.model, request.prompt, request.answer_ids, request.at, request.biases, request.hidden, request.removed,
        new_tokens=longest,
    )  # fmt: skip


def _distribution(found: Intervention) -> None:
    """Draw what could stand at the target's place, before and after."""
    names = [plain_label(candidate.text) for candidate in found.candidates]
    names[found.target] = f"<b>{names[found.target]}</b>"
    places = list(range(len(names)))
    figure = go.Figure()
    for label, color, values in (
        ("as it was", BEFORE, [c.before for c in found.candidates]),
        ("with the change", AFTER, [c.after for c in found.candidates]),
    ):
        figure.add_bar(
            y=places, x=values, name=label, orientation="h", marker_color=color, hovertemplate="%{x:.1%}<extra></extra>"
        )
    figure.update_yaxes(tickmode="array", tickvals=places, ticktext=names, autorange="reversed", automargin=True)
    figure.update_xaxes(tickformat=".0%", range=[0, 1], fixedrange=True, automargin=True)
    figure.update_layout(
        height=80 + 34 * len(names),
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        barmode="group",
        **chart_layout(),
    )
    st.plotly_chart(figure, key="s_if_chart", theme=None, config={"displayModeBar": False})
    st.caption(
        f"In bold: the explained token. The two distributions differ by {found.distance:.1%} "
        "(total variation distance, over the whole vocabulary)."
    )


# ------------------------------------------------------------------------------------------------ the best of them


def _prune(explanation: Explanation, shown: list[TokenAttribution], ref: ModelRef) -> None:
    st.markdown("**Keep only the strongest**")
    labels = [traits_of(result).label for result in shown]
    place = st.selectbox("By the scores of", range(len(shown)), format_func=lambda i: labels[i], key="s_prune_by")
    share = st.slider("Share of the prompt's tokens to keep", 5, 100, 50, 5, format="%d %%", key="s_prune_share")
    order = _ranked(explanation, shown[place or 0])
    count = max(1, round(len(order) * share / 100))
    removed = tuple(sorted(order[count:]))
    tokens = explanation.passage.prompt_tokens
    st.text("Kept: " + _with_gaps([None if i in set(removed) else tokens[i].text for i in range(len(tokens))]))
    st.caption("BOS, template tokens and what the method did not measure always stay.")
    request = _with_answer(_request(explanation, ref, TAKE_OUT, removed, 0.0), explanation)
    _answer_anew(explanation, request, "s_prune_go", "Answer from what is kept")


def _ranked(explanation: Explanation, result: TokenAttribution) -> list[int]:
    """Prompt tokens that set the color scale, most supporting first; of one unit in reading order."""
    reading = read(explanation, result, range(len(explanation.targets)), explanation.level)
    scaled = np.flatnonzero(reading.scaled)
    values = reading.values if reading.traits.signed else np.abs(reading.values)
    best = scaled[np.argsort(-values[scaled], kind="stable")]
    length = explanation.passage.prompt_length
    return [token for unit in best for token in range(*reading.units[int(unit)]) if token < length]


def _with_gaps(parts: list[str | None]) -> str:
    out: list[str] = []
    for part in parts:
        if part is not None:
            out.append(visible(part))
        elif not out or out[-1] != " … ":
            out.append(" … ")
    return "".join(out)


# ------------------------------------------------------------------------------------------------ a new answer


def _answer_anew(explanation: Explanation, request: InterventionRequest, key: str, label: str) -> None:
    slot: Slot = "regenerate" if key == "s_if_anew" else "prune"
    asked = f"{key}_asked"
    if st.button(label, key=key, icon=":material/refresh:"):
        st.session_state[asked] = request
    if st.session_state.get(asked) != request:
        keep_only(slot, None)
        return
    found = job_panel(slot, request)
    if not isinstance(found, Intervention):
        return
    original = explanation.passage.answer_tokens
    new = visible("".join(token.text for token in found.answer))
    st.text(f"Before: {visible(''.join(token.text for token in original))}")
    if found.first_change is None:
        st.text(f"Now the same: {new}")
        return
    kept = visible("".join(token.text for token in found.answer[: found.first_change]))
    rest = visible("".join(token.text for token in found.answer[found.first_change :]))
    st.text(f"Now: {kept}⟦{rest}⟧")
    st.caption(f"In ⟦ ⟧: what differs, from token {found.first_change + 1} on. Both answers are greedy or as given.")
