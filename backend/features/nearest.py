"""Nearest neighbor: every output pixel takes the vector of the grid cell that holds it.

Idea: none; it shows the encoder's true grid.
Cost: one copy.
Source: textbook interpolation with pixel centers; equal to torch's mode "nearest-exact". Own implementation.
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
    """Nearest interpolation has no settings."""


@register(
    "nearest",
    label="Nearest",
    kind="upsampler",
    family="interpolation",
    signed=True,
    additive=False,
    params=Params,
    cost=lambda _params, _work: Passes(),
    summary="What does the encoder's grid itself look like?",
    reading="Each block is one vector of the encoder, unchanged.",
    default=False,
)
def run(scene: Scene, params: Params, tick: Tick) -> Operator:
    """Prepare the operator; the picture is not used."""
    from backend.features.interpolation import SeparableOperator, nearest_taps

    device = scene.features.device
    rows = nearest_taps(scene.size[0], scene.grid[0], device)
    return SeparableOperator(rows, nearest_taps(scene.size[1], scene.grid[1], device), scene)
