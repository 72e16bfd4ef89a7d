"""Controls generated from a method's ``Params`` dataclass: one widget per field, limits and help from its metadata."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import streamlit as st

from backend.errors import BadRequest
from backend.registry import Method, default_params, make_params, params_dict
from backend.types import MethodSpec, Scalar

LARGEST_SEED = 2**31 - 1

Number = TypeVar("Number", int, float)


def method_controls(method: Method, prefix: str) -> MethodSpec:
    """Draw a widget for each parameter; return the method with the values that differ from its defaults."""
    defaults = default_params(method)
    chosen: dict[str, Scalar] = {}
    for field in dataclasses.fields(method.params):
        value = _control(field, f"{prefix}_{method.name}_{field.name}")
        if value != defaults[field.name]:
            chosen[field.name] = value
    return MethodSpec.of(method.name, chosen)


def _control(field: dataclasses.Field[object], key: str) -> Scalar:
    info, default = field.metadata, field.default
    label = str(info.get("label", field.name.replace("_", " ").capitalize()))
    st.session_state.setdefault(key, default)  # not as the widget's value: an opened result sets it the same way
    help_text = info.get("help")
    if "choices" in info:
        options = list(info["choices"])
        picked: Scalar = st.selectbox(label, options, key=key, help=help_text, persist_state="session")
        return picked
    if isinstance(default, bool):
        return bool(st.toggle(label, key=key, help=help_text, persist_state="session"))
    if isinstance(default, (int, float)):
        kind = type(default)
        step = kind(info.get("step", 1 if kind is int else 0.01))
        if "min" in info and "max" in info:
            low, high = kind(info["min"]), kind(info["max"])
            slid = st.slider(label, low, high, step=step, key=key, help=help_text, persist_state="session")
            return kind(slid)
        typed = st.number_input(label, step=step, key=key, help=help_text, persist_state="session")
        return kind(typed)
    return st.text_input(label, key=key, help=help_text, persist_state="session") or ""


def fill_controls(method: Method, prefix: str, params: Mapping[str, Scalar]) -> None:
    """Set a method's widgets to these values, or to its defaults where it would not take one. Call before drawing."""
    for name, usual in default_params(method).items():
        value = usual
        with suppress(BadRequest):
            value = params_dict(make_params(method, {name: params.get(name, usual)}))[name]
        st.session_state[f"{prefix}_{method.name}_{name}"] = value


def plain_label(text: str) -> str:
    """Escape text for a widget label, which Streamlit would read as Markdown."""
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!|$:~])", r"\\\1", text)


def within(value: Number, low: Number, high: Number) -> Number:
    """Return the value, or the nearest that a widget can show."""
    return min(max(value, low), high)
