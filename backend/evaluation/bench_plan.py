"""Which needles each method gets: settings, lengths, depths, seeds, and how many, so that the whole fits the time.

Every method starts on the richest grid. What a method needs at a length is estimated from passes that were timed on
this machine; the cheapest pairs of method and length take what they need, and the rest is shared out among the dearer
ones, which step down to poorer grids until they fit. Knows numbers and names; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.types import Level, Scalar

QUICK_LENGTHS = (128,)
FULL_LENGTHS = (128, 256, 512, 1024)
QUICK_MINUTES, FULL_MINUTES = 9.0, 350.0

_WORDS_ABOVE = 256  # tokens beyond which ablation removes words instead of tokens
_MUST = 512  # up to this length every method takes part, also if the poorest grid does not fit


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters that a method gets in the benchmark, where they differ from its defaults.

    Attributes:
        quick: With ``--quick``.
        full: In the full run.
    """

    quick: Mapping[str, Scalar] = field(default_factory=dict)
    full: Mapping[str, Scalar] = field(default_factory=dict)


SETTINGS: Mapping[str, Setting] = {
    "integrated_gradients": Setting(quick={"steps": 16}, full={"steps": 32}),
    "smooth_grad": Setting(quick={"samples": 8}),
    "heta": Setting(quick={"curvature": "joint", "candidates": 16, "probes": 2}, full={"curvature": "joint"}),
    "ensemble_shap": Setting(quick={"masks": 100}),
    "token_shap": Setting(quick={"masks": 32}),
}
"""Reduced settings of expensive methods; every row of the table repeats its own. Methods that are not listed run with
their defaults."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Depths in percent, seeds, and needles per depth and seed."""

    depths: tuple[int, ...]
    seeds: tuple[int, ...]
    needles: int

    @property
    def size(self) -> int:
        """Needles altogether."""
        return len(self.depths) * len(self.seeds) * self.needles


_DEPTHS, _FEWER, _MIDDLE = (10, 30, 50, 70, 90), (10, 50, 90), (50,)
_SEEDS = (0, 1, 2)
QUICK_GRIDS = (Grid(_FEWER, (0,), 2), Grid(_FEWER, (0,), 1), Grid(_MIDDLE, (0,), 1))
FULL_GRIDS = (
    Grid(_DEPTHS, _SEEDS, 3),
    Grid(_DEPTHS, _SEEDS, 2),
    Grid(_DEPTHS, _SEEDS, 1),
    Grid(_FEWER, _SEEDS, 1),
    Grid(_MIDDLE, _SEEDS, 1),
)
"""Grids from rich to poor."""


def level_at(length: int) -> Level:
    """Return the unit that ablation methods remove in prompts of this length."""
    return "word" if length > _WORDS_ABOVE else "token"


def setting_of(method: str, quick: bool) -> Mapping[str, Scalar]:
    """Return a method's parameters in the benchmark, where they differ from its defaults."""
    setting = SETTINGS.get(method, Setting())
    return setting.quick if quick else setting.full


def choose_grids(
    seconds: Mapping[tuple[str, int], float], budget: float, grids: Sequence[Grid]
) -> dict[tuple[str, int], Grid]:
    """Give each pair of method and length the richest grid that fits.

    Args:
        seconds: Expected seconds of one needle, per method and length.
        budget: Seconds for everything.
        grids: From rich to poor.

    Returns:
        The grid of each pair. Pairs beyond 512 tokens whose poorest grid does not fit are left out.
    """
    out: dict[tuple[str, int], Grid] = {}
    pairs = sorted(seconds, key=lambda pair: (seconds[pair], pair))
    # the poorest grids that must be are set aside, so that cheaper pairs do not take their time
    reserve = {pair: seconds[pair] * grids[-1].size for pair in pairs if pair[1] <= _MUST}
    left = budget - sum(reserve.values())
    for number, pair in enumerate(pairs):
        share = max(left, 0.0) / (len(pairs) - number) + reserve.get(pair, 0.0)
        fitting = [grid for grid in grids if seconds[pair] * grid.size <= share]
        if not fitting and pair not in reserve:
            continue
        out[pair] = fitting[0] if fitting else grids[-1]
        left -= seconds[pair] * out[pair].size - reserve.get(pair, 0.0)
    return out
