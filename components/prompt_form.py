"""Where a person says what to ask: model, prompt or chat turns, and how the answer comes about."""

from __future__ import annotations

import streamlit as st

from backend.saliency.asked import answer_request_of
from backend.types import EMBEDDED_MODEL, AnswerRequest, Decoding, Explanation, ModelRef, Prompt, Turn
from components.controls import LARGEST_SEED, within
from components.page import engine

PLAIN, CHAT = "Plain text", "Chat"
GENERATE, GIVEN = "Let the model answer", "Explain a given answer"
ROLES = ("user", "assistant")
LONGEST_ANSWER = 256

_TO_FILL = "s_prompt_to_fill"
CUT_NOTE = "s_cut_note"  # what was cut out of the prompt, until the next question

_FIRST: dict[str, object] = {
    "s_answering": GENERATE,
    "s_max_new_tokens": 24,
    "s_temperature": 0.0,
    "s_top_p": 1.0,
    "s_seed": 0,
    "s_mode": PLAIN,
    "s_turn_count": 1,
}
"""What the widgets show first. Not given to the widgets as values: opened results set them in the session, too."""

EXAMPLE_PROMPT = (
    "The key is in the kitchen. The phone is in the garden. Question: Where is the phone? Answer: The phone is in the"
)


def prompt_form() -> tuple[AnswerRequest | None, bool]:
    """Draw the form; return what was last asked (None before the first question), and whether it was asked just now."""
    state = st.session_state
    for key, value in {**_FIRST, "s_text": EXAMPLE_PROMPT}.items():
        state.setdefault(key, value)
    if _TO_FILL in state:
        _fill_prompt(state.pop(_TO_FILL))
    with st.container(border=True):
        ask, settings = st.columns([5, 3], gap="medium")
        with settings:
            model = _model()
            given, decoding = _answering()
        with ask:
            prompt = _prompt()
        anew = st.button(
            "Answer" if given is None else "Read", type="primary", icon=":material/play_arrow:", key="s_ask"
        )
        if anew:
            state.pop(CUT_NOTE, None)
            state["s_asked"] = AnswerRequest(model, prompt, decoding, given)
        if CUT_NOTE in state:
            st.text(state[CUT_NOTE])
    asked: AnswerRequest | None = state.get("s_asked")
    return asked, anew


def fill_prompt_form(explanation: Explanation) -> None:
    """Set the form to what an explanation was asked with. Call before the form is drawn."""
    state = st.session_state
    asked = answer_request_of(explanation)
    model, decoding = asked.model, asked.decoding
    state["s_model"], state["s_revision"] = model.id, model.revision or ""
    state["s_device"], state["s_dtype"] = model.device, model.dtype
    _fill_prompt(explanation.prompt)
    state["s_answering"] = GENERATE if asked.continuation is None else GIVEN
    if asked.continuation is None:
        state["s_max_new_tokens"] = within(decoding.max_new_tokens, 1, LONGEST_ANSWER)
        state["s_temperature"] = within(decoding.temperature, 0.0, 2.0)
        state["s_top_p"] = within(decoding.top_p, 0.01, 1.0)
        state["s_seed"] = within(decoding.seed, 0, LARGEST_SEED)
    else:
        state["s_given"] = asked.continuation


def fill_prompt_later(prompt: Prompt) -> None:
    """Set the prompt at the next run of the page; for use after the form was drawn."""
    st.session_state[_TO_FILL] = prompt


def _fill_prompt(prompt: Prompt) -> None:
    state = st.session_state
    state["s_mode"] = CHAT if prompt.is_chat else PLAIN
    if not prompt.is_chat:
        state["s_text"] = prompt.text
        return
    turns = list(prompt.turns)
    state["s_system"] = turns.pop(0).content if turns[0].role == "system" else ""
    state["s_turn_count"] = max(1, len(turns))
    for i, turn in enumerate(turns):
        state[f"s_turn_{i}_role"] = turn.role if turn.role in ROLES else ROLES[0]
        state[f"s_turn_{i}_text"] = turn.content


def _model() -> ModelRef:
    known = list(dict.fromkeys([EMBEDDED_MODEL, *engine().known_models()]))
    current = st.session_state.get("s_model")
    if current and current not in known:
        known.append(current)
    name = st.selectbox(
        "Model",
        known,
        key="s_model",
        accept_new_options=True,
        persist_state="session",
        help="The embedded model works offline. Or type a hub id (owner/name), a local folder, or a .gguf file.",
    )
    with st.popover("Model settings", icon=":material/tune:"):
        revision = st.text_input("Revision", key="s_revision", persist_state="session", help="Branch, tag or commit.")
        device = st.selectbox("Device", ["auto", "cpu", "cuda", "mps"], key="s_device", persist_state="session")
        dtype = st.selectbox(
            "Number format", ["auto", "float32", "bfloat16", "float16"], key="s_dtype", persist_state="session"
        )
    ref = ModelRef((name or EMBEDDED_MODEL).strip(), revision.strip() or None, device or "auto", dtype or "auto")
    info = engine().info(ref)
    if info is not None:
        st.caption(f"{info.architecture} on {info.device}, {info.dtype}: {info.device_reason}")
    return ref


def _answering() -> tuple[str | None, Decoding]:
    mode = st.segmented_control(
        "The answer", [GENERATE, GIVEN], key="s_answering", required=True, persist_state="session"
    )
    if mode == GIVEN:
        given = st.text_area(
            "Answer to explain",
            key="s_given",
            persist_state="session",
            height=80,
            help="Appended to the prompt as it stands: mind the leading space.",
        )
        return given or "", Decoding()
    length = st.slider("Longest answer, in tokens", 1, LONGEST_ANSWER, key="s_max_new_tokens", persist_state="session")
    with st.popover("Generation settings", icon=":material/casino:"):
        temperature = st.slider(
            "Temperature", 0.0, 2.0, step=0.05, key="s_temperature", persist_state="session", help="0 is greedy."
        )
        top_p = st.slider("Top p", 0.01, 1.0, step=0.01, key="s_top_p", persist_state="session")
        seed = st.number_input("Seed", 0, LARGEST_SEED, key="s_seed", persist_state="session")
    return None, Decoding(length, float(temperature), float(top_p), int(seed))


def _prompt() -> Prompt:
    mode = st.segmented_control("Prompt as", [PLAIN, CHAT], key="s_mode", required=True, persist_state="session")
    if mode == PLAIN:
        text = st.text_area("Prompt", key="s_text", height=200, persist_state="session")
        return Prompt(text or "")
    system = st.text_area(
        "System message",
        key="s_system",
        height=68,
        persist_state="session",
        placeholder="empty: the template's own default",
    )
    turns = [Turn("system", system)] if system else []
    count = st.session_state["s_turn_count"]
    for i in range(count):
        st.session_state.setdefault(f"s_turn_{i}_role", "user" if i % 2 == 0 else "assistant")
        who, what = st.columns([1, 4])
        role = who.selectbox(f"Turn {i + 1}", ROLES, key=f"s_turn_{i}_role", persist_state="session")
        content = what.text_area(
            "Message",
            key=f"s_turn_{i}_text",
            height=100,
            persist_state="session",
            placeholder="What do you want to know?",
        )
        turns.append(Turn(role or "user", content or ""))
    with st.container(horizontal=True):
        st.button("Add a turn", key="s_turn_add", on_click=_set_turns, args=(count + 1,), disabled=count >= 12)
        st.button("Remove the last", key="s_turn_drop", on_click=_set_turns, args=(count - 1,), disabled=count <= 1)
    return Prompt(turns=tuple(turns))


def _set_turns(count: int) -> None:
    st.session_state["s_turn_count"] = count
