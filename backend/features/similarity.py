"""Cosine similarity of every pixel to a vector: of a clicked point, a drawn box, or a point in another picture.

The dot product is affine in the features and upsampled as one channel; the lengths are not, so they are computed once
per picture. Where memory allows, the whole upsampled map is kept instead, so that each click is one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.errors import BadRequest
from backend.features.operator import Operator
from backend.features.views import affine, norms
from backend.types import Tick, no_tick

_TINY = 1e-12


class Similarity:
    """One picture, ready for clicks. Immutable after construction."""

    def __init__(
        self,
        operator: Operator,
        features: Tensor,
        *,
        keep_bytes: int = 0,
        budget: int | None = None,
        tick: Tick = no_tick,
    ) -> None:
        """Prepare.

        Args:
            operator: Prepared upsampler of one picture.
            features: (1, C, h, w).
            keep_bytes: Memory for the whole upsampled map; without it each click upsamples one channel.
            budget: Bytes of working memory.
            tick: Progress of the preparation.
        """
        self._operator, self._features = operator, features
        pixels = operator.size[0] * operator.size[1]
        self._map: Tensor | None = None
        if 4 * features.shape[1] * pixels <= keep_bytes:
            self._map = operator.apply(features, budget=budget, tick=tick)[0].flatten(1)  # C, pixels
            self._lengths = self._map.norm(dim=0).view(operator.size)
        else:
            self._lengths = norms(operator, features, budget=budget, tick=tick)[0, 0]

    def vector(self, row: int, column: int) -> Tensor:
        """Return the upsampled vector (C) of a pixel.

        Raises:
            BadRequest: If the pixel lies outside.
        """
        return torch.einsum("hw,chw->c", self._operator.reads(row, column), self._features[0])

    def box_vector(self, top: int, left: int, bottom: int, right: int) -> Tensor:
        """Return the mean upsampled vector (C) of a box of pixels, last row and column excluded.

        Raises:
            BadRequest: If the box is empty or lies outside.
        """
        height, width = self._operator.size
        if not (0 <= top < bottom <= height and 0 <= left < right <= width):
            raise BadRequest("The box is empty or lies outside the picture.", "Draw it again.")
        total = self._features.new_zeros(self._features.shape[1])
        for start in range(top, bottom, 16):
            stop = min(start + 16, bottom)
            total += self._operator.rows(self._features, start, stop)[0, :, left:right].sum((0, 1))
        return total / ((bottom - top) * (right - left))

    def to(self, vector: Tensor) -> Tensor:
        """Return the cosine between every pixel's vector and (C), (H, W) in [-1, 1]; 0 where a length is 0.

        Raises:
            BadRequest: If the vector has another width.
        """
        if vector.shape != self._features.shape[1:2]:
            raise BadRequest(
                f"The vector has {tuple(vector.shape)} numbers, the features have {self._features.shape[1]}.",
                "Compare pictures of one encoder.",
            )
        length = vector.norm()
        unit = vector / length.clamp(min=_TINY)
        if self._map is not None:
            product = (unit @ self._map).view(self._lengths.shape)
        else:
            product = self._operator.apply(affine(self._features, unit[None]))[0, 0]
        return torch.where(self._lengths > _TINY, product / self._lengths.clamp(min=_TINY), 0.0).clamp(-1, 1)
