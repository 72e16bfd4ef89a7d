"""From raw scores to what a reader is shown: rows combined, units, shares, color scale.

Works on results alone, with numpy; knows neither models nor drawing. Every number keeps the sentence that says how it
came about. Raw scores are never shifted, rescaled in place, or filled in where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.errors import BadRequest, UnknownMethod
from backend.registry import Family, get_method
from backend.saliency.units import Units, make_units
from backend.types import SCALED_ROLES, Explanation, FloatArray, Level, Role, TokenAttribution

BoolArray = npt.NDArray[np.bool_]

OUTSIDE_ROLES: frozenset[Role] = frozenset({"bos", "template"})
"""Roles that may be left out of shares by the reader's choice."""

NOISE_FLOOR = "noise_floor"
"""Name of the check that carries a method's numerical noise, in the unit of its scores."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a reader must know of a method; from the registry, or guessed for a method that is not registered."""

    name: str
    label: str
    family: Family
    signed: bool
    additive: bool
    reading: str

    @property
    def share_name(self) -> str:
        """Which share (specification 1.4) numbers of this method use."""
        return "share of positive scores" if self.positive_share else "share of absolute scores"

    @property
    def positive_share(self) -> bool:
        """Whether shares count only scores that support the target."""
        return self.family == "ablation" and self.signed

    @property
    def fixed_units(self) -> bool:
        """Whether scores hold only for the units that were measured and must not be added up."""
        return self.family == "ablation" or (self.signed and not self.additive)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One method's scores for the chosen targets, one value per unit.

    Attributes:
        traits: The method.
        values: float32 ``(unit,)``, raw; NaN where nothing was measured.
        units: Half-open token spans that cover the sources.
        roles: Role of each unit.
        measured: bool ``(unit,)``.
        visible: bool ``(unit,)``; False where no chosen target can see the unit.
        rule: How target rows and tokens were put together, one or two sentences.
        notes: What the reader must know, e.g. that the method was measured at another level.
        noise: Scores below twice this value are numerical noise; 0 if it was not measured.
    """

    traits: Traits
    values: FloatArray
    units: Units
    roles: tuple[Role, ...]
    measured: BoolArray
    visible: BoolArray
    rule: str
    notes: tuple[str, ...] = ()
    noise: float = 0.0

    def counted(self, count_outside: bool = True) -> BoolArray:
        """Units that enter totals: seen, measured, not padding; BOS and template on request."""
        left_out = {"pad"} if count_outside else {"pad", *OUTSIDE_ROLES}
        return _both(self.measured & self.visible, [role not in left_out for role in self.roles])

    @property
    def scaled(self) -> BoolArray:
        """Units that set the color scale."""
        return _both(self.measured & self.visible, [role in SCALED_ROLES for role in self.roles])

    def shares(self, count_outside: bool = True) -> FloatArray:
        """Share of each unit, float32 ``(unit,)`` in [0, 1]; NaN where the unit is not counted or all scores are 0."""
        weight = np.maximum(self.values, 0) if self.traits.positive_share else np.abs(self.values)
        counted = self.counted(count_outside)
        total = float(weight[counted].sum(dtype=np.float64))
        out = np.full(len(weight), np.nan, np.float32)
        if total > 0:
            out[counted] = weight[counted] / total
        return out

    @property
    def has_signal(self) -> bool:
        """Whether any score stands out from zero and from the method's noise."""
        counted = self.counted()
        top = float(np.abs(self.values[counted]).max()) if counted.any() else 0.0
        return top > 0 and top >= 2 * self.noise


@dataclass(frozen=True, slots=True)
class Segments:
    """Share of each role.

    Attributes:
        shares: Role to share in [0, 1], in reading order; they sum to 1. Empty if there is nothing to share.
        share_name: Which share it is.
        note: Why there is nothing, or what was left out; may be empty.
    """

    shares: Mapping[Role, float]
    share_name: str
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Scores on the color scale.

    Attributes:
        values: float32 ``(unit,)``; [-1, 1] for signed methods, else [0, 1]; larger scores are clipped. NaN where
            there is no color: not measured, unseen, or no signal.
        reach: Raw score at full color; 0 if there is no signal.
        rule: The scale in words.
    """

    values: FloatArray
    reach: float
    rule: str


def traits_of(result: TokenAttribution) -> Traits:
    """Return the traits of a result's method. An unknown method is read as a gradient method of the result's sign."""
    try:
        method = get_method(result.method)
    except UnknownMethod:
        reading = "Positive speaks for the target, negative against it." if result.signed else "Higher matters more."
        return Traits(result.method, result.method, "gradient", result.signed, result.signed, reading)
    return Traits(method.name, method.label, method.family, result.signed, method.additive, method.reading)


def combine_rows(result: TokenAttribution, rows: Sequence[int]) -> tuple[FloatArray, str]:
    """Put the scores of several targets together: the sum for signed scores, the mean for unsigned ones.

    Args:
        result: A result with scores.
        rows: Indices of target rows, at least one.

    Returns:
        float32 ``(source,)`` and the rule in words (empty for a single row).

    Raises:
        BadRequest: If there are no scores or a row does not exist.
    """
    if result.scores is None:
        raise BadRequest(f"{result.method} has no scores.", result.refusal)
    if not rows or min(rows) < 0 or max(rows) >= len(result.scores):
        raise BadRequest("There is no such target.", f"Choose from {len(result.scores)} target tokens.")
    chosen = result.scores[list(rows)].astype(np.float64)
    if len(rows) == 1:
        return chosen[0].astype(np.float32), ""
    if result.signed:
        return chosen.sum(axis=0).astype(np.float32), f"Scores of {len(rows)} target tokens are added."
    return chosen.mean(axis=0).astype(np.float32), f"Scores of {len(rows)} target tokens are averaged."


def to_units(
    values: FloatArray, from_units: Units, units: Units, traits: Traits, *, density: bool = False
) -> tuple[FloatArray, Units, str]:
    """Bring scores to coarser units.

    Signed additive scores are added. Unsigned scores are added too ("mass"; the share of a unit is then the sum of
    its shares), or averaged ("density"). Scores of ablation methods stay as they were measured: what removing a
    sentence does is not the sum of what removing its words does.

    Args:
        values: float32 ``(from_unit,)``; NaN where not measured.
        from_units: Token spans of ``values``.
        units: Wanted token spans.
        traits: The method.
        density: Average unsigned scores instead of adding them.

    Returns:
        float32 ``(unit,)``, the units that the values now belong to, and the rule in words (empty if nothing was
        put together). The units are ``from_units`` where the scores cannot be brought to ``units``.
    """
    if from_units == units:
        return values, units, ""
    owner = _owners(from_units, units)
    if traits.fixed_units or owner is None:
        return values, from_units, "Shown in the units that were measured, not added up."
    measured = ~np.isnan(values)
    count = np.bincount(owner[measured], minlength=len(units))
    total = np.bincount(owner[measured], weights=values[measured].astype(np.float64), minlength=len(units))
    averaged = density and not traits.signed
    with np.errstate(invalid="ignore", divide="ignore"):
        out = np.where(count > 0, total / count if averaged else total, np.nan).astype(np.float32)
    if averaged:
        return out, units, "Token scores are averaged (density)."
    return out, units, "Token scores are added." if traits.signed else "Token scores are added (mass)."


def read(
    explanation: Explanation,
    result: TokenAttribution,
    rows: Sequence[int],
    level: Level = "token",
    *,
    units: Units | None = None,
    density: bool = False,
) -> Reading:
    """Read a result for the chosen targets at the wanted level.

    Args:
        explanation: The explanation that the result belongs to.
        result: A result with scores.
        rows: Indices of target rows; each unit gets one score for all of them.
        level: Wanted level.
        units: Wanted token spans, instead of those of the level.
        density: Average unsigned token scores instead of adding them.

    Returns:
        The scores, in the wanted units where the method allows it, else in those that were measured.

    Raises:
        BadRequest: If the result has no scores or a row does not exist.
    """
    traits = traits_of(result)
    values, row_rule = combine_rows(result, rows)
    if result.measured is not None:
        values = np.where(result.measured, values, np.float32(np.nan))
    sources = explanation.sources
    wanted = make_units(sources, level) if units is None else units
    values, own = _cover(values, result.units, make_units(sources, "token"), len(sources))
    values, shown, unit_rule = to_units(values, own, wanted, traits, density=density)
    notes: tuple[str, ...] = ()
    if shown != wanted:
        notes = (
            f"{traits.label} was measured on units of level “{explanation.level}”; they are shown as measured. "
            f"Run it again at level “{level}” to have it there.",
        )
        unit_rule = ""  # the note says it
    last = max(explanation.targets[row].position for row in rows)
    return Reading(
        traits=traits,
        values=values,
        units=shown,
        roles=tuple(sources[start].role for start, _ in shown),
        measured=~np.isnan(values),
        visible=np.array([start < last for start, _ in shown], bool),
        rule=" ".join(part for part in (row_rule, unit_rule) if part),
        notes=notes,
        noise=next((check.value or 0.0 for check in result.checks if check.name == NOISE_FLOOR), 0.0),
    )


def segment_shares(reading: Reading, *, count_outside: bool = True) -> Segments:
    """Share of each role: |s| for gradient methods, the positive part for ablation methods.

    Args:
        reading: The scores as read.
        count_outside: Whether BOS and template tokens count.
    """
    shares = reading.shares(count_outside)
    name = reading.traits.share_name
    if np.isnan(shares).all():
        return Segments({}, name, "There is no score to share out.")
    out: dict[Role, float] = {}
    for role, share in zip(reading.roles, shares, strict=True):
        if not np.isnan(share):
            out[role] = out.get(role, 0.0) + float(share)
    missing = int((~reading.measured & reading.visible).sum())
    note = f"{missing} units were not measured and do not count." if missing else ""
    if not count_outside:
        note = f"BOS and template do not count. {note}".strip()
    return Segments(out, name, note)


def display_scale(
    readings: Sequence[Reading], *, shared: bool = False, count_outside: bool = True
) -> tuple[Scaled, ...]:
    """Put scores on the color scale.

    Own scale: full color is the method's largest score. Shared scale: full color is the largest share of the total
    that any of the methods gives to one unit, so that colors of different methods mean the same share. BOS and
    template tokens do not set the scale; they and others beyond it are clipped. Numerical noise is drawn as zero.

    Args:
        readings: One per method.
        shared: Whether methods share one scale.
        count_outside: Whether BOS and template tokens count in the totals of the shared scale.
    """
    totals = [float(np.abs(r.values[r.counted(count_outside)]).sum(dtype=np.float64)) for r in readings]
    tops = [float(np.abs(r.values[r.scaled]).max(initial=0.0)) for r in readings]
    signal = [r.has_signal and top > 0 for r, top in zip(readings, tops, strict=True)]
    best = max((top / total for top, total, ok in zip(tops, totals, signal, strict=True) if ok), default=0.0)
    out = []
    for reading, total, top, ok in zip(readings, totals, tops, signal, strict=True):
        if not ok:
            empty = np.full(len(reading.values), np.nan, np.float32)
            out.append(Scaled(empty, 0.0, "No signal: every score is zero or numerical noise."))
            continue
        reach = best * total if shared else top
        rule = (
            f"Shared scale: full color is {best:.1%} of a method's total."
            if shared
            else f"Own scale: full color is {reach:.3g}."
        )
        values = np.clip(reading.values / np.float32(reach), -1 if reading.traits.signed else 0, 1)
        values[np.abs(reading.values) < 2 * reading.noise] = 0
        values[~(reading.measured & reading.visible)] = np.nan
        out.append(Scaled(values.astype(np.float32), reach, rule))
    return tuple(out)


def _both(first: BoolArray, second: Sequence[bool]) -> BoolArray:
    out: BoolArray = first & np.array(second, bool)
    return out


def _owners(fine: Units, coarse: Units) -> npt.NDArray[np.intp] | None:
    """Index of the coarse unit that holds each fine unit; None if a fine unit crosses a border."""
    starts = np.array([start for start, _ in coarse])
    owner = np.searchsorted(starts, [start for start, _ in fine], side="right") - 1
    inside = all(at >= 0 and stop <= coarse[at][1] for at, (_, stop) in zip(owner, fine, strict=True))
    return owner if inside else None


def _cover(values: FloatArray, units: Units | None, groups: Units, length: int) -> tuple[FloatArray, Units]:
    """Give scores units that cover all tokens without tearing characters; what was left out becomes NaN.

    Token scores of pieces of one character are added: nobody can read them apart.
    """
    spans = units if units is not None else tuple((i, i + 1) for i in range(length))
    if _owners(spans, groups) is not None:
        owner = np.array(_owners(spans, groups), int)
        out = np.full(len(groups), np.nan)
        known = ~np.isnan(values)
        np.copyto(out, 0.0, where=np.bincount(owner[known], minlength=len(groups)) > 0)
        np.add.at(out, owner[known], values[known].astype(np.float64))
        return out.astype(np.float32), groups
    taken = {token for start, stop in spans for token in range(start, stop)}
    gaps = [(g, np.nan) for g in groups if not taken & set(range(*g))]
    cells = sorted([*zip(spans, values.tolist(), strict=True), *gaps])
    return np.array([value for _, value in cells], np.float32), tuple(span for span, _ in cells)
