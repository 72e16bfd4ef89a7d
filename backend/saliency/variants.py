"""What is left of a text when some tokens are removed, and where its targets are read then. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from backend.saliency.question import Strand

Operator = Literal["hide", "delete", "replace"]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

PLAIN, GONE = -1, -2
"""Instead of a read: the term is as in the untouched text; nothing is left that could predict the term."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A strand with some tokens removed.

    Attributes:
        index: Its row in the result.
        order: Indices of the strand's tokens that are left, ascending.
        changed: bool, shape of ``order``; tokens that are hidden or replaced.
        start: First index into ``order`` that must be run; what comes before is as in the strand.
        reads: Index into ``order`` that predicts each term, or ``PLAIN`` or ``GONE``.
    """

    index: int
    order: IntArray
    changed: BoolArray
    start: int
    reads: IntArray

    @property
    def stop(self) -> int:
        """End of what must be run."""
        return int(self.reads.max()) + 1


def make_variant(index: int, strand: Strand, removed: BoolArray, operator: Operator) -> Variant:
    """Describe a strand without the removed ones of its first tokens.

    Hidden tokens change only what comes after them, so a hidden token still predicts the token right after it. A
    replaced token changes itself too. Behind a deleted one all tokens move up, and a term whose predicting token was
    deleted is read from the last token left before it.

    Args:
        index: Row in the result.
        strand: The strand.
        removed: bool, at most as long as the strand.
        operator: How tokens are removed.
    """
    length = len(strand.ids)
    gone = np.zeros(length, bool)
    gone[: len(removed)] = removed
    reads = np.array(strand.reads, np.int64)
    order = np.arange(length)
    if not gone.any():
        return Variant(index, order, gone, length, np.full(len(reads), PLAIN))
    first = int(gone.argmax())
    if operator != "delete":
        start = first + (operator == "hide")
        return Variant(index, order, gone, start, np.where(reads >= start, reads, PLAIN))
    left = np.maximum.accumulate(np.where(gone, -1, order))  # last token that is left at or before each position
    seen = left[reads]
    moved = np.where((seen < first) & (seen == reads), PLAIN, np.where(seen < 0, GONE, seen))
    run = moved >= 0
    start = min(first, int(moved[run].min(initial=length)))
    moved = np.where(run, (np.cumsum(~gone) - 1)[np.maximum(moved, 0)], moved)
    return Variant(index, order[~gone], np.zeros(int((~gone).sum()), bool), start, moved)
