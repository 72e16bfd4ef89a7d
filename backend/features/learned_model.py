"""What JAFAR and AnyUp share: the way from image and features to queries, keys and the mixture.

Two routes with equal results. With gradients: plain modules under their official names. Without: maps evaluated in
strips (``pointwise``) and an operator that can be used again (``learned_operator``). The subclasses say how keys
come about, whether pooled queries are normalized, and how wide the window is.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.features.attention import TILE, Bounds, dense_mix, tile_weights, untile, window_bounds
from backend.features.blocks import GROUPS, NORM_EPS, CrossDecode, Rope, pool, pool_axis
from backend.features.checks import check_chunk, check_pair, check_size
from backend.features.learned_operator import AttentionOperator, Guidance
from backend.features.pointwise import Strips, patches, strip_rows, turn
from backend.types import Tick, no_tick

_PASSES = 16  # over the guidance image: five for each encoder, one for the position code


class LearnedUpsampler(nn.Module):
    """An upsampler whose weights come from attention between image pixels and grid cells."""

    image_encoder: nn.Sequential
    query_encoder: nn.Sequential
    key_encoder: nn.Sequential
    cross_decode: CrossDecode
    rope: Rope
    input_dim: int
    kernel_size: int
    num_heads: int
    window_ratio: float = 0.0
    query_norm: bool = False

    @abstractmethod
    def check_features(self, features: Tensor) -> None:
        """Refuse a feature map (B, C, h, w) that these weights cannot serve."""

    @abstractmethod
    def combine(self, keys: Tensor, features: Tensor) -> Tensor:
        """Combine image keys (B, D, h, w), averaged to the grid, with the feature map (B, C, h, w) to (B, D, h, w)."""

    @property
    def dim(self) -> int:
        """Inner width D."""
        return self.rope.freqs.shape[1]

    def forward(
        self,
        image: Tensor,
        features: Tensor,
        output_size: Sequence[int] | None = None,
        q_chunk_size: int | None = None,
    ) -> Tensor:
        """Upsample a feature map.

        Args:
            image: Guidance, (B, 3, H_g, W_g), normalized as the model asks; same region as the features.
            features: (B, C, h, w), finite.
            output_size: (height, width); None for the image's size.
            q_chunk_size: Most output pixels that attention works on at once; None to choose it. Never changes the
                result.

        Returns:
            (B, C, height, width), float32 (float64 for a float64 model).

        Raises:
            BadRequest: If shapes, sizes or numbers do not fit.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in (image, features, *self.parameters())):
            size = self._check(image, features, output_size, q_chunk_size)
            return self._differentiable(image, features, size, q_chunk_size)
        operator = self.prepare(image, features, output_size, chunk=q_chunk_size)
        exact = features.to(torch.promote_types(self.rope.freqs.dtype, torch.float32))
        return operator.apply(exact)

    def _check(
        self, image: Tensor, features: Tensor, output_size: Sequence[int] | None, chunk: int | None
    ) -> tuple[int, int]:
        check_pair(image, features, self.input_dim)
        self.check_features(features)
        check_chunk(chunk)
        return check_size(output_size, (image.shape[2], image.shape[3]))

    @torch.no_grad()
    def prepare(
        self,
        image: Tensor,
        features: Tensor,
        output_size: Sequence[int] | None = None,
        *,
        chunk: int | None = None,
        keep_bytes: int = 0,
        window_ratio: float | None = None,
        tick: Tick = no_tick,
    ) -> AttentionOperator:
        """Fix the weights for an image and its features; see ``forward`` for the arguments.

        Args:
            image: Guidance.
            features: The original features; never a projection of them.
            output_size: (height, width).
            chunk: Most output pixels at once.
            keep_bytes: Memory for weights that are kept for the operator's next call.
            window_ratio: Another window than the trained one.
            tick: Called after every strip of the guidance image.

        Raises:
            BadRequest: If shapes, sizes or numbers do not fit.
        """
        size = self._check(image, features, output_size, chunk)
        grid = (features.shape[2], features.shape[3])
        total = image.shape[0]
        maps = [
            self._maps(picture, grid, lambda done, steps, nth=nth: tick(nth * steps + done, total * steps))  # type: ignore[misc]
            for nth, picture in enumerate(image)
        ]
        pooled = torch.stack([keys for _, keys in maps]).permute(0, 3, 1, 2)
        keys = self._projected_keys(self.combine(pooled, features))
        return AttentionOperator(
            [Guidance(queries, key) for (queries, _), key in zip(maps, keys, strict=True)],
            self.cross_decode,
            self.num_heads,
            size,
            grid,
            self.window_ratio if window_ratio is None else window_ratio,
            self.query_norm,
            chunk,
            keep_bytes,
        )

    def _projected_keys(self, keys: Tensor) -> Tensor:
        """Map (B, D, h, w) to (B, h, w, D), with the attention's scale 1/√d. Like queries, never in half precision."""
        projected = self.cross_decode.cross_attn.keys(keys.permute(0, 2, 3, 1))
        return projected / math.sqrt(self.dim // self.num_heads)

    def _maps(self, image: Tensor, grid: tuple[int, int], tick: Tick) -> tuple[Tensor, Tensor]:
        """Return the query map (H_g, W_g, D) and the key map averaged to the grid (h, w, D) of one image."""
        height, width = image.shape[1:]
        like = self.rope.freqs
        strips = Strips(height * width, width * strip_rows(width, image.device), self.dim, like, tick, _PASSES)
        first, spare = strips.new_map(), strips.new_map()
        strips.encode(patches(image, self.kernel_size), self.image_encoder, first, spare)
        turn(first, self.rope, strips, (height, width))

        def source(start: int, stop: int) -> Tensor:
            return first[start:stop]

        key = strips.new_map()
        strips.encode(source, self.key_encoder, key, spare)
        view = key.view(height, width, self.dim)
        rows = [pool_axis(pool_axis(view, 0, grid[0], row, row + 1), 1, grid[1]) for row in range(grid[0])]
        del key, view
        strips.encode(source, self.query_encoder, first, spare)  # each strip is read before it is overwritten
        return first.view(height, width, self.dim), torch.cat(rows)

    def _differentiable(self, image: Tensor, features: Tensor, size: tuple[int, int], chunk: int | None) -> Tensor:
        coded = self.rope(self.image_encoder(image.to(self.rope.freqs.dtype)))
        queries = pool(self.query_encoder(coded), size)
        if self.query_norm:
            queries = F.group_norm(queries, GROUPS, eps=NORM_EPS)
        pooled = pool(self.key_encoder(coded), (features.shape[2], features.shape[3]))
        pooled = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        keys = self._projected_keys(self.combine(pooled, features))
        convolved = self.cross_decode.conv2d(queries).permute(0, 2, 3, 1)
        projected = self.cross_decode.cross_attn.queries(convolved)
        exact = features.to(torch.promote_types(self.rope.freqs.dtype, torch.float32)).permute(0, 2, 3, 1)
        mixed = [
            self._mix(q, k, v, chunk or size[0] * size[1])
            for q, k, v in zip(projected, keys.to(projected.dtype), exact, strict=True)
        ]
        return torch.stack(mixed).permute(0, 3, 1, 2)

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, chunk: int) -> Tensor:
        if self.window_ratio <= 0:
            return dense_mix(queries, keys, values, self.num_heads, chunk)
        height, width = queries.shape[:2]
        rows = window_bounds(height, keys.shape[0], self.window_ratio)
        columns = window_bounds(width, keys.shape[1], self.window_ratio)
        done = []
        for start in range(0, height, TILE):
            part = slice(start, min(start + TILE, height))
            bounds = Bounds(rows.low[part], rows.high[part])
            tiles = tile_weights(queries[part], keys, bounds, columns, self.num_heads)
            done.append(untile(tiles.mix(values), part.stop - start, width))
        return torch.cat(done)
