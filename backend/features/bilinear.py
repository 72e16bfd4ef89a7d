"""Bilinear interpolation of the feature grid.

Idea: a weighted mean of the four cells around each pixel; no value leaves the range of the grid.
Cost: four multiply-adds per output value.
Source: textbook interpolation with pixel centers; equal to torch's mode "bilinear". Own implementation.
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
    """Bilinear interpolation has no settings."""


@register(
    "bilinear",
    label="Bilinear",
    kind="upsampler",
    family="interpolation",
    signed=True,
    additive=False,
    params=Params,
    cost=lambda _params, _work: Passes(),
    summary="How far does plain smoothing get?",
    reading="Blends of the four nearest vectors; the image plays no part.",
    default=True,
)
def run(scene: Scene, params: Params, tick: Tick) -> Operator:
    """Prepare the operator; the picture is not used."""
    from backend.features.interpolation import SeparableOperator, linear_taps

    device = scene.features.device
    rows = linear_taps(scene.size[0], scene.grid[0], device)
    return SeparableOperator(rows, linear_taps(scene.size[1], scene.grid[1], device), scene)
