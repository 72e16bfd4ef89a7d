"""How far methods agree with each other: rank correlation and overlap of the highest units.

Works on results alone. A number that would mean nothing (constant scores, different units, too few units) is None
with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from backend.saliency.reading import Reading, read
from backend.types import Explanation, Level, TokenAttribution


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two methods agree on the units that set the color scale.

    Attributes:
        first: Method name.
        second: Method name.
        spearman: Rank correlation in [-1, 1], ties averaged; None with a reason.
        overlap: Part of the ``k`` highest units that both name, in [0, 1]; None with a reason.
        k: Size of the top list.
        count: Units compared.
        basis: What was compared, one sentence.
        reason: Why there is no number; empty if there is.
    """

    first: str
    second: str
    spearman: float | None
    overlap: float | None
    k: int
    count: int
    basis: str
    reason: str = ""

    @property
    def chance(self) -> float:
        """Overlap that two random orders reach on average."""
        return self.k / self.count if self.count else 0.0


def agreement(
    explanation: Explanation,
    results: Sequence[TokenAttribution],
    rows: Sequence[int],
    level: Level = "token",
    *,
    k: int | None = None,
) -> tuple[Agreement, ...]:
    """Compare every pair of methods that have scores.

    Two signed methods are compared with their signs; otherwise signed scores enter by size. BOS and template tokens
    are left out, since they would decide the comparison.

    Args:
        explanation: The explanation that the results belong to.
        results: Two or more results.
        rows: Indices of target rows.
        level: Level at which methods that can be added up are compared.
        k: Size of the top list; by default the larger of 5 and a tenth of the units, at most half of them.
    """
    scored = [result for result in results if result.scores is not None]
    readings = [read(explanation, result, rows, level) for result in scored]
    pairs = []
    for (i, first), (j, second) in combinations(enumerate(readings), 2):
        if first.units != second.units:  # bring the one that can be added up to the units of the other
            first = read(explanation, scored[i], rows, units=second.units)
            if first.units != second.units:
                first = readings[i]
                second = read(explanation, scored[j], rows, units=first.units)
        pairs.append(_compare(first, second, k))
    return tuple(pairs)


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float | None:
    """Rank correlation with averaged ties; None if either side is constant or shorter than two."""
    ranks = [_ranks(np.asarray(side, np.float64)) for side in (a, b)]
    centered = [rank - rank.mean() for rank in ranks if rank.size > 1]
    if len(centered) < 2:
        return None
    scale = float(np.sqrt((centered[0] ** 2).sum() * (centered[1] ** 2).sum()))
    return float(np.clip((centered[0] * centered[1]).sum() / scale, -1, 1)) if scale > 0 else None


def top_overlap(a: npt.ArrayLike, b: npt.ArrayLike, k: int) -> float:
    """Part of the ``k`` highest entries that both sides name, in [0, 1]. Ties at the border share its places."""

    def membership(side: npt.ArrayLike) -> npt.NDArray[np.float64]:
        values = np.asarray(side, np.float64)
        border = np.sort(values)[-k]
        above, tied = values > border, values == border
        share: npt.NDArray[np.float64] = above + tied * ((k - above.sum()) / tied.sum())
        return share

    return float(np.minimum(membership(a), membership(b)).sum() / k)


def _compare(first: Reading, second: Reading, k: int | None) -> Agreement:
    names = first.traits.name, second.traits.name
    if first.units != second.units:
        return Agreement(*names, None, None, 0, 0, "", "The two were measured on different units.")
    both = first.scaled & second.scaled
    signed = first.traits.signed and second.traits.signed
    a, b = (r.values[both] if signed else np.abs(r.values[both]) for r in (first, second))
    count = int(both.sum())
    size = min(k or max(5, count // 10), count // 2)
    basis = f"Compared on {count} units, {'with their signs' if signed else 'by size'}; BOS and template left out."
    if size < 1:
        return Agreement(*names, None, None, 0, count, basis, "There are too few units to compare.")
    for reading, side in ((first, a), (second, b)):
        if np.ptp(side) == 0:
            reason = f"{reading.traits.label} gives every unit the same score, so there is no order to compare."
            return Agreement(*names, None, None, size, count, basis, reason)
    return Agreement(*names, spearman(a, b), top_overlap(a, b, size), size, count, basis)


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks
