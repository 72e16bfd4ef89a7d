"""Bicubic interpolation of the feature grid.

Idea: a cubic kernel (a = -0.75) over 4 × 4 cells; sharper than bilinear, can overshoot the range of the grid.
Cost: eight multiply-adds per output value.
Source: textbook interpolation with pixel centers; equal to torch's mode "bicubic". Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.features.scene import Scene
from backend.registry import register
from backend.types import Passes, Tick

if TYPE_CHECKING:
    from backend.features.operator import Operator


@dataclass(frozen=True)
class Params:
    """Bicubic interpolation has no settings."""


@register(
    "bicubic",
    label="Bicubic",
    kind="upsampler",
    family="interpolation",
    signed=True,
    additive=False,
    params=Params,
    cost=lambda _params, _work: Passes(),
    summary="How far does sharper smoothing get?",
    reading="Blends of 16 vectors, some with negative weights; the image plays no part.",
    default=False,
)
def run(scene: Scene, params: Params, tick: Tick) -> Operator:
    """Prepare the operator; the picture is not used."""
    from backend.features.interpolation import SeparableOperator, cubic_taps

    device = scene.features.device
    rows = cubic_taps(scene.size[0], scene.grid[0], device)
    return SeparableOperator(rows, cubic_taps(scene.size[1], scene.grid[1], device), scene)
