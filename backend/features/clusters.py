"""Segments: k-means on grid vectors, every pixel given to the nearest center.

The nearest center is the largest of y · c - |c|² / 2, which is affine in y: so k channels are upsampled, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.errors import BadRequest
from backend.features.operator import Operator
from backend.features.views import affine_view
from backend.types import Tick, no_tick

_ROUNDS = 100
_STARTS = 4


def kmeans(features: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return ``count`` centers (k, C) of the grid vectors of (B, C, h, w), the best of several seeded starts.

    Centers are sorted by size of their segment, largest first, so that colors are stable.

    Raises:
        BadRequest: If there are fewer different cells than centers, or fewer than one center is wanted.
    """
    vectors = features.movedim(1, 3).flatten(0, 2).double()
    if not 1 <= count <= vectors.shape[0]:
        raise BadRequest(f"{count} segments cannot be made of {vectors.shape[0]} cells.", "Choose fewer segments.")
    best, best_cost = vectors[:count], float("inf")
    for start in range(_STARTS):
        centers = _spread_out(vectors, count, seed + start)
        for _ in range(_ROUNDS):
            owner = torch.cdist(vectors, centers).argmin(1)
            sums = torch.zeros_like(centers).index_add_(0, owner, vectors)
            sizes = torch.bincount(owner, minlength=count)
            moved = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centers)
            if torch.equal(moved, centers):
                break
            centers = moved
        distance, owner = torch.cdist(vectors, centers).min(1)
        cost = float(distance.square().sum())
        if cost < best_cost:
            order = torch.bincount(owner, minlength=count).argsort(descending=True, stable=True)
            best, best_cost = centers[order], cost
    return best.float()


def _spread_out(vectors: Tensor, count: int, seed: int) -> Tensor:
    """Choose starting centers far from each other (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(vectors), (1,), generator=generator))]
    nearest = (vectors - vectors[chosen[0]]).square().sum(1)
    for _ in range(count - 1):
        weight = nearest.cpu() if float(nearest.sum()) > 0 else torch.ones(len(vectors))
        chosen.append(int(torch.multinomial(weight.double(), 1, generator=generator)))
        nearest = torch.minimum(nearest, (vectors - vectors[chosen[-1]]).square().sum(1))
    return vectors[chosen]


def segments(
    operator: Operator, features: Tensor, centers: Tensor, *, budget: int | None = None, tick: Tick = no_tick
) -> Tensor:
    """Return the number of the nearest center at every pixel, int64 (B, H, W)."""
    scores = affine_view(operator, features, centers, -centers.square().sum(1) / 2, budget=budget, tick=tick)
    return scores.argmax(1)
