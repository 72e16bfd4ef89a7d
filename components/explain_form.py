"""Where a person says how to explain: methods and their settings, units, foil, scalar."""

from __future__ import annotations

import dataclasses

import streamlit as st

from backend.registry import Method, get_method, list_methods
from backend.types import (
    AnswerRequest,
    Explanation,
    Level,
    MethodSpec,
    Objective,
    SaliencyRequest,
    TargetToken,
    visible,
)
from components.controls import LARGEST_SEED, fill_controls, method_controls, plain_label, within

MOST_METHODS = 4
LEVELS: tuple[Level, ...] = ("token", "word", "sentence")
OBJECTIVES: dict[Objective, str] = {
    "log_prob": "log-probability of the target",
    "logit": "logit of the target",
    "prob": "probability of the target",
}


def explain_form(
    asked: AnswerRequest, answer_ids: tuple[int, ...], span: tuple[int, int], target: TargetToken | None
) -> SaliencyRequest | None:
    """Draw the controls; return the request they describe, or None while no method is chosen.

    Args:
        asked: Model, prompt and decoding that the answer came from.
        answer_ids: Ids of the whole answer.
        span: Chosen half-open span of answer tokens.
        target: First chosen token, if its statistics are known; its runner-up is offered as a foil.
    """
    known = {method.name: method for method in sorted(list_methods(), key=_place)}
    st.session_state.setdefault("s_methods", [name for name, method in known.items() if method.default])
    st.session_state.setdefault("s_level", "token")
    st.session_state.setdefault("s_method_seed", 0)
    names = st.pills(
        "Methods, side by side",
        list(known),
        selection_mode="multi",
        format_func=lambda name: known[name].label,
        key="s_methods",
        persist_state="session",
        help="\n".join(f"* **{method.label}**: {method.summary}" for method in known.values()),
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        level = st.segmented_control(
            "Look at",
            LEVELS,
            required=True,
            format_func=lambda name: f"{name}s",
            key="s_level",
            persist_state="session",
            help="Ablation methods remove whole units and are run again; the scores of others are put together.",
        )
        foil = st.text_input(
            "Rather than (foil)",
            key="s_foil",
            persist_state="session",
            placeholder="empty: explain the target alone",
            help="Explains why the answer is the target and not this text. Mind the leading space.",
            width=320,
        )
        if target is not None:
            st.button(
                f"Use the runner-up “{plain_label(visible(target.runner_up_text))}”",
                key="s_foil_runner_up",
                on_click=_use_foil,
                args=(target.runner_up_text,),
                help=f"The model's next choice, p = {target.runner_up_probability:.3f}",
            )
        with st.popover("Method settings", icon=":material/tune:"):
            objective = st.selectbox(
                "What is explained",
                list(OBJECTIVES),
                format_func=lambda name: OBJECTIVES[name],
                key="s_objective",
                persist_state="session",
                help="With a foil: the difference between target and foil.",
            )
            seed = st.number_input(
                "Seed of sampling methods", 0, LARGEST_SEED, key="s_method_seed", persist_state="session"
            )
            specs = _settings([known[name] for name in names])
    if not specs:
        st.info("Choose at least one method.", icon=":material/touch_app:")
        return None
    if len(specs) > MOST_METHODS:
        st.info(f"Up to {MOST_METHODS} methods fit side by side; the first {MOST_METHODS} are shown.")
    return SaliencyRequest(
        model=asked.model,
        prompt=asked.prompt,
        answer_ids=answer_ids,
        target=span,
        methods=specs[:MOST_METHODS],
        foil=foil or "",
        objective=objective,
        level=level or "token",
        decoding=asked.decoding if asked.continuation is None else None,
        seed=int(seed),
    )


def fill_explain_form(explanation: Explanation) -> None:
    """Set the controls to what an explanation was made with. Call before they are drawn."""
    state = st.session_state
    known = {method.name for method in list_methods()}
    names = dict.fromkeys(result.method for result in explanation.results if result.method in known)
    state["s_methods"] = list(names)[:MOST_METHODS]
    state["s_level"] = explanation.level
    state["s_foil"] = "".join(token.text for token in explanation.foil)
    state["s_objective"] = explanation.objective
    state["s_method_seed"] = within(explanation.seed, 0, LARGEST_SEED)
    for result in reversed(explanation.results):  # of two results of one method the first counts
        if result.method in known:
            fill_controls(get_method(result.method), "s", result.params)


def _place(method: Method) -> tuple[int, int]:
    """Order of menus: what runs at once first, the baseline last; within a family as registered."""
    order = ("gradient", "attention", "prediction", "ablation", "baseline")
    return (order.index(method.family) if method.family in order else len(order), not method.default)


def _settings(methods: list[Method]) -> tuple[MethodSpec, ...]:
    specs = []
    for method in methods:
        if dataclasses.fields(method.params):
            st.markdown(f"**{method.label}**")
            st.caption(method.summary)
        specs.append(method_controls(method, "s"))
    return tuple(specs)


def _use_foil(text: str) -> None:
    st.session_state["s_foil"] = text
