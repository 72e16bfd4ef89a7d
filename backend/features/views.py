"""What is shown of features at full resolution, without building all channels where that can be avoided.

Affine views (components, class scores, dot products) are computed on the grid and upsampled in few channels, exactly.
Views that are not affine (norms, differences) are reduced chunk by chunk. Knows operators; knows neither encoders nor
colors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.features.blocks import pool_axis
from backend.features.operator import Operator
from backend.types import Tick, no_tick


def affine(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a per-cell affine map on the grid.

    Args:
        features: (B, C, h, w).
        weight: (K, C).
        bias: (K); None for zero.

    Returns:
        (B, K, h, w). Upsampled, it equals the same map of the upsampled features, since weights sum to 1.
    """
    mapped = torch.einsum("kc,bchw->bkhw", weight.to(features.dtype), features)
    return mapped if bias is None else mapped + bias.to(features.dtype)[None, :, None, None]


def affine_view(
    operator: Operator,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    budget: int | None = None,
    tick: Tick = no_tick,
) -> Tensor:
    """Return weight · y + bias at every pixel, (B, K, H, W), where y are the upsampled features."""
    return operator.apply(affine(features, weight, bias), budget=budget, tick=tick)


def reduced(
    operator: Operator,
    features: Tensor,
    reduce: Callable[[Tensor], Tensor],
    *,
    budget: int | None = None,
    tick: Tick = no_tick,
) -> Tensor:
    """Return a reduction of the upsampled features that never exist as a whole.

    Args:
        operator: Prepared upsampler.
        features: (B, C, h, w).
        reduce: Maps (B, rows, W, C) to (B, rows, W, K).
        budget: Bytes of working memory.
        tick: Called after every chunk.

    Returns:
        (B, K, H, W).
    """
    operator.check(features)
    parts = []
    for start, stop in operator.chunks(features.shape[1], budget):
        parts.append(reduce(operator.rows(features, start, stop)))
        tick(stop, operator.size[0])
    return torch.cat(parts, dim=1).movedim(3, 1)


def norms(operator: Operator, features: Tensor, *, budget: int | None = None, tick: Tick = no_tick) -> Tensor:
    """Return the lengths of the upsampled vectors, (B, 1, H, W)."""
    return reduced(operator, features, lambda y: y.norm(dim=3, keepdim=True), budget=budget, tick=tick)


def difference(
    one: Operator, other: Operator, features: Tensor, *, budget: int | None = None, tick: Tick = no_tick
) -> Tensor:
    """Return the distance between two upsamplers' vectors, relative to the mean length on the grid, (B, 1, H, W)."""
    scale: Tensor = features.norm(dim=1).mean().clamp(min=1e-12)
    row = 0

    def reduce(y: Tensor) -> Tensor:
        nonlocal row
        start, row = row, row + y.shape[1]
        gap = y - other.rows(features, start, row)
        length: Tensor = torch.linalg.vector_norm(gap, dim=3, keepdim=True)
        return length / scale

    return reduced(one, features, reduce, budget=budget, tick=tick)


@dataclass(frozen=True, slots=True, eq=False)
class RoundTrip:
    """What is left of a feature map that was upsampled and averaged back to its grid.

    Attributes:
        relative_mse: Σ(back - f)² / Σ(f - mean over positions)²; 0 if nothing was lost. NaN for a constant map.
        error: (B, h, w) lengths of the differences, relative to the mean length.
    """

    relative_mse: float
    error: Tensor


def round_trip(operator: Operator, features: Tensor, *, budget: int | None = None, tick: Tick = no_tick) -> RoundTrip:
    """Average the upsampled features back to the grid and compare. All but 10 MB or so is reduced chunk by chunk."""
    (height, _), (rows, columns) = operator.size, operator.grid
    by_column = reduced(operator, features, lambda y: pool_axis(y, 2, columns), budget=budget, tick=tick)
    back = pool_axis(by_column, 2, rows) if by_column.shape[2] == height else by_column
    gap = back - features
    spread = (features - features.mean((2, 3), keepdim=True)).square().sum()
    relative = float(gap.square().sum() / spread) if float(spread) > 0 else float("nan")
    scale = features.norm(dim=1).mean().clamp(min=1e-12)
    return RoundTrip(relative, gap.norm(dim=1) / scale)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Which grid cells an output pixel reads.

    Attributes:
        weights: (h, w), sum 1.
        total: The sum, for the reader to see.
        entropy: In bits; 0 for one cell, log2(h · w) for all alike.
        largest: The largest weight.
    """

    weights: Tensor
    total: float
    entropy: float
    largest: float


def reading(operator: Operator, row: int, column: int, image: int = 0) -> Reading:
    """Return what an output pixel reads.

    Raises:
        BadRequest: If the pixel lies outside the output.
    """
    weights = operator.reads(row, column, image)
    shares = weights.clamp(min=0)
    shares = shares / shares.sum().clamp(min=1e-12)
    entropy = float(torch.special.entr(shares).sum() / torch.log(torch.tensor(2.0)))
    return Reading(weights, float(weights.sum()), entropy, float(weights.max()))
