"""Which variants of a text to run in one pass, when each differs from the text only from some position on.

Plain arithmetic: a pass over a group repeats the part behind the group's earliest change, for every member. Large
groups use the hardware well but repeat more; the grouping with the least total work is found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group(starts: Sequence[int], length: int, *, at_once: int, overhead: int) -> list[tuple[int, int]]:
    """Cut sorted variants into groups.

    Args:
        starts: First position that each variant must run, ascending.
        length: Length of the text; a variant runs ``length - start`` positions.
        at_once: Positions that a pass may hold; a single variant may exceed it.
        overhead: What a pass costs before it does anything, in positions.

    Returns:
        Half-open index ranges into ``starts``, in order, that need the fewest positions in total.
    """
    count = len(starts)
    best = np.full(count + 1, np.inf)
    cut = np.zeros(count + 1, np.int64)
    best[0] = 0.0
    for begin in range(count):
        rest = length - starts[begin]
        most = max(1, at_once // max(rest, 1))
        ends = np.arange(begin + 1, min(count, begin + most) + 1)
        total = best[begin] + overhead + (ends - begin) * rest
        better = total < best[ends]
        best[ends[better]] = total[better]
        cut[ends[better]] = begin
    groups = []
    end = count
    while end:
        groups.append((int(cut[end]), end))
        end = int(cut[end])
    return groups[::-1]
