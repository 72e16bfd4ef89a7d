"""Joint bilateral upsampling: a pixel mixes nearby cells, mostly those whose average color is like its own.

Idea: weight(p, q) = exp(-distance² / 2σ_s²) · exp(-color difference² / 2σ_r²) over (2R + 1)² cells, normalized.
Cost: (2R + 1)² multiply-adds per output value; the weights are computed once per picture.
Note: where all weights vanish, the pixel is interpolated linearly.
Source: Kopf et al. 2007 (Joint Bilateral Upsampling). Own implementation.
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
    """Settings of joint bilateral upsampling."""

    radius: int = field(
        default=2, metadata={"min": 1, "max": 4, "step": 1, "help": "Cells on every side that a pixel may read."}
    )
    sigma_space: float = field(
        default=1.0, metadata={"min": 0.1, "max": 5.0, "step": 0.1, "help": "Reach in the grid, in cells."}
    )
    sigma_range: float = field(
        default=0.2, metadata={"min": 0.01, "max": 2.0, "step": 0.01, "help": "Reach in color, RGB in [0, 1]."}
    )


@register(
    "joint_bilateral",
    label="Joint bilateral",
    kind="upsampler",
    family="filter",
    signed=True,
    additive=False,
    params=Params,
    cost=lambda _params, _work: Passes(),
    summary="What if vectors follow pixels of a similar color?",
    reading="Blends of nearby vectors; outlines come from the colors of the image.",
)
def run(scene: Scene, params: Params, tick: Tick) -> Operator:
    """Prepare the operator from the picture."""
    from backend.features.checks import check_pair
    from backend.features.filters import JointBilateralOperator

    check_pair(scene.picture, scene.features)
    return JointBilateralOperator(scene, params.radius, params.sigma_space, params.sigma_range)
