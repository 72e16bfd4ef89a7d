"""What a board consists of: cells, rows, the answer to pick from. Plain data with a JSON form for the script."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from backend.types import Role, TargetToken

State = Literal["source", "target", "later"]
Tone = Literal["info", "warn", "fail"]

PALETTE = {
    # Blue and orange stay apart in every common color vision; their lightness keeps the theme's text readable.
    "light": {"against": "#6aa9e9", "for": "#f0953f", "more": "#3db5a2"},
    "dark": {"against": "#2a64a8", "for": "#9c520d", "more": "#107064"},
}
"""Full color of scores against the target, for it, and of unsigned scores, on light and dark pages."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A unit as it is drawn.

    Attributes:
        start: First token, an index into the passage.
        stop: One past the last token.
        text: Its characters; lone surrogates are spelled out.
        role: Role of its tokens.
        ids: Token ids.
        state: "target" if it is (part of) what is explained, "later" if no target can see it.
    """

    start: int
    stop: int
    text: str
    role: Role
    ids: tuple[int, ...]
    state: State


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence under a row."""

    tone: Tone
    text: str


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One method's scores, ready to draw. Tuples hold one entry per cell of the layout, None where there is none.

    Attributes:
        method: Registry name.
        label: Its name for people.
        signed: Whether colors diverge around zero.
        layout: Index into ``Board.layouts``; -1 if there are no scores.
        reading: Legend in words.
        low: Label of the scale's lower end.
        high: Label of its upper end.
        scale_rule: What full color means.
        rule: How targets and tokens were put together; may be empty.
        facts: Short measured facts: time, passes.
        notes: Warnings and remarks.
        segments: Role and share in [0, 1], in reading order.
        share_name: Which share is meant.
        values: Raw scores.
        colors: Place on the scale, [-1, 1] or [0, 1].
        shares: Shares in [0, 1].
        ranks: 1 for the largest absolute score among the units that set the scale.
        ranked: How many units are ranked.
        noise: Scores below this size are numerical noise.
        refusal: Why there are no scores; empty if there are.
    """

    method: str
    label: str
    signed: bool
    layout: int
    reading: str
    low: str = ""
    high: str = ""
    scale_rule: str = ""
    rule: str = ""
    facts: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    segments: tuple[tuple[Role, float], ...] = ()
    share_name: str = ""
    values: tuple[float | None, ...] = ()
    colors: tuple[float | None, ...] = ()
    shares: tuple[float | None, ...] = ()
    ranks: tuple[int | None, ...] = ()
    ranked: int = 0
    noise: float = 0.0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The answer, to pick a target from.

    Attributes:
        base: Index of the first answer token in the passage.
        cells: Display groups of the answer.
        selected: Half-open span of answer tokens that is chosen now; None if none is.
        facts: Per answer token: what the model gave it; None where that is not known.
        label: Heading.
    """

    base: int
    cells: tuple[Cell, ...]
    selected: tuple[int, int] | None
    facts: tuple[TargetToken | None, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Board:
    """Everything that is drawn.

    Attributes:
        passage: Content hash of the passage; picks made on another passage are dropped.
        caption: What is explained, one line.
        layouts: Distinct sequences of cells; rows point to one each.
        rows: One per method.
        answer: The row to pick from; None if nothing can be picked.
    """

    passage: str
    caption: str
    layouts: tuple[tuple[Cell, ...], ...]
    rows: tuple[HeatRow, ...]
    answer: AnswerRow | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the script; cells as columns, to keep it small. ``version`` is its content hash."""
        data = {
            "passage": self.passage,
            "caption": self.caption,
            "palette": PALETTE,
            "layouts": [_columns(cells) for cells in self.layouts],
            "rows": [asdict(row) for row in self.rows],
            "answer": None if self.answer is None else _answer_json(self.answer),
        }
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return {**data, "version": hashlib.sha256(text.encode()).hexdigest()}


def encodable(text: str) -> str:
    """Spell out lone surrogates, which no encoding takes; everything else stays."""
    return "".join(code_point(char) if "\ud800" <= char <= "\udfff" else char for char in text)


def plain_line(text: str) -> str:
    """Spell out whatever could hide in a line of text or reorder it: controls, format characters, surrogates."""
    return "".join(code_point(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def code_point(char: str) -> str:
    """Name a character by its number."""
    return f"[U+{ord(char):04X}]"


def short(value: float, digits: int = 5) -> float:
    """Round to significant digits, to keep the JSON form small."""
    return float(f"{value:.{digits}g}")


def _columns(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    names = ("start", "stop", "text", "role", "ids", "state")
    return {name: [getattr(cell, name) for cell in cells] for name in names}


def _answer_json(row: AnswerRow) -> dict[str, Any]:
    facts = [
        None
        if fact is None
        else {
            "probability": short(fact.probability),
            "rank": fact.rank,
            "other": encodable(fact.runner_up_text),
            "other_probability": short(fact.runner_up_probability),
        }
        for fact in row.facts
    ]
    return {
        "base": row.base,
        "cells": _columns(row.cells),
        "selected": row.selected,
        "facts": facts,
        "label": row.label,
    }
