"""The board: an explanation as rows of colored tokens, as plain data.

``build_board`` decides everything that is drawn: cells, colors on a scale, shares, ranks, words. The page's component
and the exported HTML both draw this data with the same script from ``assets/`` and compute nothing of their own.
Knows neither Streamlit nor HTML.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from backend.io.board_types import AnswerRow, Board, Cell, HeatRow, Note, State, encodable, plain_line, short
from backend.saliency.reading import Reading, Scaled, display_scale, read, segment_shares, traits_of
from backend.saliency.units import Units, make_units, unit_text
from backend.types import (
    Answer,
    Explanation,
    FloatArray,
    Level,
    Objective,
    Passage,
    Passes,
    Token,
    TokenAttribution,
    visible,
)

ASSETS = Path(__file__).resolve().parents[2] / "assets"

OBJECTIVE_NAMES: dict[Objective, str] = {"log_prob": "log-probability", "logit": "logit", "prob": "probability"}


@lru_cache(maxsize=1)
def board_script() -> str:
    """JavaScript module that draws a board; its default export takes ``{data, parentElement, setStateValue}``."""
    names = ("token_strip_parts.js", "token_strip_build.js", "token_strip_png.js", "token_strip.js")
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


@lru_cache(maxsize=1)
def board_style() -> str:
    """Style sheet of a board."""
    return (ASSETS / "token_strip.css").read_text(encoding="utf-8")


def build_board(
    explanation: Explanation,
    results: Sequence[TokenAttribution] | None = None,
    *,
    level: Level = "token",
    shared_scale: bool = False,
    rows: Sequence[int] | None = None,
    count_outside: bool = True,
    density: bool = False,
    pick: bool = False,
    remarks: Mapping[str, Sequence[Note]] | None = None,
) -> Board:
    """Lay out an explanation.

    Args:
        explanation: The explanation.
        results: Which of its results, in which order; all by default. Refusals are drawn as such.
        level: Units to draw.
        shared_scale: One color scale for all methods instead of one each.
        rows: Target rows to draw together; all by default.
        count_outside: Whether BOS and template tokens count in shares.
        density: Average unsigned scores within a unit instead of adding them.
        pick: Whether to add the answer as a row to pick from.
        remarks: By method: further notes under its row, e.g. how it did on planted needles.
    """
    chosen = tuple(range(len(explanation.targets))) if rows is None else tuple(rows)
    shown = explanation.results if results is None else tuple(results)
    readings = [
        None if result.scores is None else read(explanation, result, chosen, level, density=density) for result in shown
    ]
    scales = iter(
        display_scale([r for r in readings if r is not None], shared=shared_scale, count_outside=count_outside)
    )
    targets = frozenset(explanation.targets[row].position for row in chosen)
    layouts: dict[Units, int] = {}
    heat = []
    for result, reading in zip(shown, readings, strict=True):
        if reading is None:
            heat.append(_refused(result))
        else:
            layout = layouts.setdefault(reading.units, len(layouts))
            row = _heat_row(explanation, result, reading, next(scales), layout, count_outside)
            heat.append(replace(row, notes=(*row.notes, *(remarks or {}).get(result.method, ()))))
    passage = explanation.passage
    return Board(
        passage=passage_hash(passage),
        caption=_caption(explanation, chosen),
        layouts=tuple(_layout(explanation, units, targets) for units in layouts),
        rows=tuple(heat),
        answer=_answer_row(explanation, _span(explanation, chosen)) if pick else None,
    )


def answer_board(source: Answer | Explanation, span: tuple[int, int] | None) -> Board:
    """Lay out only the answer, to pick a target from.

    Args:
        source: Whose answer.
        span: Half-open span of answer tokens that is chosen now.
    """
    return Board(passage_hash(source.passage), "", (), (), _answer_row(source, span))


def passage_hash(passage: Passage) -> str:
    """Content hash of token ids and texts, and of where the answer begins."""
    text = json.dumps([passage.prompt_length, *((token.id, token.text) for token in passage.tokens)])
    return hashlib.sha256(text.encode()).hexdigest()


def passes_text(passes: Passes) -> str:
    """Passes in words, e.g. "1 forward, 1 backward"."""
    parts = [
        f"{count:.3g} {name}" for count, name in ((passes.forward, "forward"), (passes.backward, "backward")) if count
    ]
    return ", ".join(parts) or "no passes"


def _cell(tokens: Sequence[Token], unit: tuple[int, int], state: State) -> Cell:
    part = tokens[slice(*unit)]
    return Cell(*unit, encodable(unit_text(tokens, unit)), part[0].role, tuple(token.id for token in part), state)


def _layout(explanation: Explanation, units: Units, targets: frozenset[int]) -> tuple[Cell, ...]:
    """Cells for the sources' units and, token by token, for what follows them."""
    tokens = explanation.passage.tokens
    count = explanation.source_count
    rest = make_units(tokens[count:], "token")
    last = max(targets)
    cells = []
    for start, stop in (*units, *((count + a, count + b) for a, b in rest)):
        state: State = "source"
        if not targets.isdisjoint(range(start, stop)):
            state = "target"
        elif start > last:
            state = "later"
        cells.append(_cell(tokens, (start, stop), state))
    return tuple(cells)


def _answer_row(source: Answer | Explanation, span: tuple[int, int] | None) -> AnswerRow:
    tokens = source.passage.tokens
    base = source.passage.prompt_length
    cells = tuple(
        _cell(tokens, (base + start, base + stop), "source")
        for start, stop in make_units(source.passage.answer_tokens, "token")
    )
    known = {target.position: target for target in source.targets}
    facts = tuple(known.get(position) for position in range(base, len(tokens)))
    return AnswerRow(base, cells, span, facts, "Answer")


def _heat_row(
    explanation: Explanation,
    result: TokenAttribution,
    reading: Reading,
    scaled: Scaled,
    layout: int,
    count_outside: bool,
) -> HeatRow:
    traits = reading.traits
    segments = segment_shares(reading, count_outside=count_outside)
    rest = len(make_units(explanation.passage.tokens[explanation.source_count :], "token"))
    ranks, ranked = _ranks(reading, shown=scaled.reach > 0)
    reach = f"{scaled.reach:.3g}"
    notes = [Note("warn", scaled.rule)] if not scaled.reach else []
    notes += [Note("info", text) for text in (*reading.notes, segments.note) if text and scaled.reach]
    notes += [Note(c.verdict, c.text) for c in result.checks if c.verdict == "warn" or c.verdict == "fail"]
    facts = [f"{result.seconds:.3g} s", passes_text(result.passes)]
    if result.from_cache:
        facts.append("from the store")
    none = (None,) * rest
    return HeatRow(
        method=result.method,
        label=traits.label,
        signed=traits.signed,
        layout=layout,
        reading=traits.reading,
        low=f"against the target, −{reach}" if traits.signed else "less, 0",
        high=f"for the target, +{reach}" if traits.signed else f"more, {reach}",
        scale_rule=scaled.rule,
        rule=reading.rule,
        facts=tuple(facts),
        notes=tuple(notes),
        segments=tuple(segments.shares.items()),
        share_name=segments.share_name,
        values=_plain(np.where(reading.visible, reading.values, np.nan), 5) + none,
        colors=_plain(scaled.values, 3) + none,
        shares=_plain(reading.shares(count_outside), 4) + none,
        ranks=ranks + none,
        ranked=ranked,
        noise=short(2 * reading.noise),
    )


def _refused(result: TokenAttribution) -> HeatRow:
    traits = traits_of(result)
    return HeatRow(
        method=result.method,
        label=traits.label,
        signed=traits.signed,
        layout=-1,
        reading=traits.reading,
        refusal=result.refusal or "There are no scores.",
    )


def _ranks(reading: Reading, shown: bool) -> tuple[tuple[int | None, ...], int]:
    """Rank by absolute score among the units that set the scale; equal scores share the better rank."""
    scaled = reading.scaled
    sizes = np.abs(reading.values)
    order = np.sort(sizes[scaled])
    above = len(order) - np.searchsorted(order, sizes, side="right")
    ranks = tuple(int(n) + 1 if ok else None for n, ok in zip(above, scaled, strict=True))
    return (ranks if shown else (None,) * len(ranks)), len(order)


def _plain(values: FloatArray, digits: int) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(value) else short(value, digits) for value in values.tolist())


def _span(explanation: Explanation, rows: Sequence[int]) -> tuple[int, int]:
    base = explanation.passage.prompt_length
    positions = [explanation.targets[row].position - base for row in rows]
    return min(positions), max(positions) + 1


def _caption(explanation: Explanation, rows: Sequence[int]) -> str:
    text = _quoted("".join(explanation.targets[row].text for row in rows))
    foil = "".join(token.text for token in explanation.foil)
    rather = f" rather than {_quoted(foil)}" if foil else ""
    model = explanation.model
    return (
        f"What drove {text}{rather}? Explained: {OBJECTIVE_NAMES[explanation.objective]}. "
        f"Model: {plain_line(model.id)}, {model.dtype} on {model.device}."
    )


def _quoted(text: str) -> str:
    """Quote a text so that its direction does not reach the sentence around it (first-strong isolate)."""
    return f"“\u2068{plain_line(visible(text))}\u2069”"
