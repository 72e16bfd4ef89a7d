"""Guided filter: around each cell, the features as an affine function of color, applied to the picture.

Idea: fit f ≈ aᵀ color + b in a window of cells, smooth and enlarge a and b, evaluate them at every pixel.
Cost: about 16 multiply-adds per output value.
Check: constant features come back exactly; features that are affine in color come back nearly exactly as ε → 0.
Source: He et al. 2010 (Guided Image Filtering). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.features.scene import Scene
from backend.registry import register
from backend.types import Passes, Tick

if TYPE_CHECKING:
    from backend.features.operator import Operator


@dataclass(frozen=True)
class Params:
    """Settings of the guided filter."""

    radius: int = field(
        default=1, metadata={"min": 1, "max": 8, "step": 1, "help": "Cells on every side of the fitting window."}
    )
    epsilon: float = field(
        default=1e-2,
        metadata={"min": 1e-6, "max": 1.0, "help": "Ridge of the fit: larger means smoother, with less of the image."},
    )


@register(
    "guided",
    label="Guided filter",
    kind="upsampler",
    family="filter",
    signed=True,
    additive=False,
    params=Params,
    cost=lambda _params, _work: Passes(),
    summary="What if features were locally a linear function of color?",
    reading="Outlines come from the colors of the image; values can overshoot the range of the grid.",
)
def run(scene: Scene, params: Params, tick: Tick) -> Operator:
    """Prepare the operator from the picture."""
    from backend.features.checks import check_pair
    from backend.features.filters import GuidedOperator

    check_pair(scene.picture, scene.features)
    return GuidedOperator(scene, params.radius, params.epsilon)
