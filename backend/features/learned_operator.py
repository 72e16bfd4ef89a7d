"""The operator of the two learned models: queries made on demand, weights kept where memory allows.

Knows prepared guidance maps, keys and attention; knows neither parameter files nor how the maps were made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.features.attention import (
    TILE,
    Bounds,
    TileWeights,
    dense_mix,
    logits_at_once,
    tile_weights,
    untile,
    window_bounds,
)
from backend.features.blocks import RMS_EPS, CrossDecode, pool_axis
from backend.features.operator import Operator
from backend.features.pointwise import Moments


@dataclass(slots=True, eq=False)
class Guidance:
    """One image's share of an operator.

    Attributes:
        queries: (H_g, W_g, D) output of the query encoder at guidance resolution.
        keys: (h, w, D) projected keys with the scale 1/√d.
        affine: Scale and shift (D) of the norm between pooling and convolution; None where the model has none.
        kept: First row of a strip to its weights or queries.
    """

    queries: Tensor
    keys: Tensor
    affine: tuple[Tensor, Tensor] | None = None
    kept: dict[int, list[TileWeights] | Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        total = sum(t.numel() * t.element_size() for t in (self.queries, self.keys))
        for item in self.kept.values():
            parts = [item] if isinstance(item, Tensor) else [tile.weights for tile in item]
            total += sum(t.numel() * t.element_size() for t in parts)
        return total


class AttentionOperator(Operator):
    """Weights of JAFAR (no window) or AnyUp (window) for a batch of images.

    Queries are made row by row from the guidance maps and, unless ``keep_bytes`` allows more, forgotten again. What
    is kept for later calls: the weights themselves with a window, the queries without one.
    """

    def __init__(
        self,
        guidance: list[Guidance],
        decode: CrossDecode,
        heads: int,
        size: tuple[int, int],
        grid: tuple[int, int],
        window_ratio: float = 0.0,
        query_norm: bool = False,
        chunk: int | None = None,
        keep_bytes: int = 0,
    ) -> None:
        """Prepare.

        Args:
            guidance: One entry per image.
            decode: The model's query convolution and projections.
            heads: Number of attention heads.
            size: Output size (H, W).
            grid: Grid size (h, w).
            window_ratio: See ``window_bounds``; 0 for no window.
            query_norm: Whether pooled queries pass a group norm over the whole output.
            chunk: Most queries that attention works on at once; None to choose by the cache.
            keep_bytes: Memory that weights kept for later calls may take.
        """
        self.grid, self.size, self.batch = grid, size, len(guidance)
        self.device = guidance[0].queries.device
        self.step = TILE
        self._guidance, self._heads, self._chunk = guidance, heads, chunk
        self._windowed = window_ratio > 0
        self._row_bounds = window_bounds(size[0], grid[0], window_ratio)
        self._column_bounds = window_bounds(size[1], grid[1], window_ratio)
        self._room = keep_bytes
        self._taps = [tap.T.contiguous() for tap in decode.conv2d.weight.detach().permute(2, 3, 0, 1).flatten(0, 1)]
        exact = guidance[0].queries.dtype
        weight, bias = (part.detach().to(exact) for part in decode.cross_attn.attention.query())
        self._query_weight = (weight * decode.cross_attn.norm_q.weight.detach().to(exact)).T.contiguous()
        self._query_bias = bias
        if query_norm:
            for item in guidance:
                item.affine = self._pooled_moments(item).affine(None)

    @property
    def nbytes(self) -> int:
        """Memory that guidance maps, keys and kept weights take, in bytes."""
        return sum(item.nbytes for item in self._guidance)

    def row_bytes(self, channels: int) -> int:
        """Return the working memory of one output row, in bytes."""
        width, dim = self.size[1], self._query_bias.shape[0]
        return 4 * width * (4 * dim + 2 * channels)

    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return output rows (B, stop - start, W, K); see the base class."""
        exact = values.float() if values.dtype.itemsize < 4 else values
        mixed = [
            self._windowed_rows(item, grid, start, stop)
            if self._windowed
            else self._dense_rows(item, grid, start, stop)
            for item, grid in zip(self._guidance, exact.permute(0, 2, 3, 1).contiguous(), strict=True)
        ]
        return mixed[0][None] if self.batch == 1 else torch.stack(mixed)

    def _dense_rows(self, item: Guidance, values: Tensor, start: int, stop: int) -> Tensor:
        cells = self.grid[0] * self.grid[1]
        chunk = max(1, logits_at_once(self.device) // (self._heads * cells))
        if self._chunk is not None:
            chunk = min(chunk, self._chunk)
        done = []
        for low, high in self._strips(start, stop):
            queries = item.kept.get(low)
            if not isinstance(queries, Tensor):
                queries = self._queries(item, low, high)
                self._keep(item, low, queries, queries.numel() * queries.element_size())
            part = queries[max(start - low, 0) : stop - low]
            done.append(dense_mix(part, item.keys, values, self._heads, chunk))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _windowed_rows(self, item: Guidance, values: Tensor, start: int, stop: int) -> Tensor:
        done = []
        for low, high in self._strips(start, stop):
            tiles = item.kept.get(low)
            if not isinstance(tiles, list):
                queries = self._queries(item, low, high)
                bounds = Bounds(self._row_bounds.low[low:high], self._row_bounds.high[low:high])
                tiles = [
                    tile_weights(queries, item.keys, bounds, self._column_bounds, self._heads, part)
                    for part in self._tile_groups(bounds, high - low)
                ]
                self._keep(item, low, tiles, sum(tile.nbytes for tile in tiles))
            mixed = torch.cat([tile.mix(values) for tile in tiles]) if len(tiles) > 1 else tiles[0].mix(values)
            done.append(untile(mixed, high - low, self.size[1])[max(start - low, 0) : stop - low])
        return done[0] if len(done) == 1 else torch.cat(done)

    def _strips(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the strips of whole tiles that cover some rows, so that kept weights serve any chunks."""
        first = start // TILE * TILE
        return [(low, min(low + TILE, self.size[0])) for low in range(first, stop, TILE)]

    def _tile_groups(self, bounds: Bounds, rows: int) -> list[slice]:
        """Cut a strip of tiles, so that the logits of a group stay within the limit."""
        tiles = -(-self.size[1] // TILE)
        span = int((self._column_bounds.high - self._column_bounds.low).max()) + 2
        per_tile = self._heads * rows * TILE * int(bounds.high[-1] - bounds.low[0]) * min(span, self.grid[1])
        most = max(1, logits_at_once(self.device) // per_tile)
        if self._chunk is not None:
            most = max(1, min(most, self._chunk // (rows * TILE)))
        return [slice(first, min(first + most, tiles)) for first in range(0, tiles, most)]

    def _keep(self, item: Guidance, key: int, what: list[TileWeights] | Tensor, nbytes: int) -> None:
        if nbytes > self._room:
            return
        item.kept[key] = what
        self._room -= nbytes
        if len(item.kept) == -(-self.size[0] // TILE):  # the guidance map is not needed any more
            item.queries = item.queries.new_empty(0)

    def _pooled(self, item: Guidance, start: int, stop: int) -> Tensor:
        """Return rows of the query map at output size, (stop - start, W, D)."""
        return pool_axis(pool_axis(item.queries, 0, self.size[0], start, stop), 1, self.size[1])

    def _pooled_moments(self, item: Guidance) -> Moments:
        moments = Moments()
        rows = max(1, 4096 // self.size[1])
        for start in range(0, self.size[0], rows):
            moments.add(self._pooled(item, start, min(start + rows, self.size[0])).flatten(0, 1))
        return moments

    def _queries(self, item: Guidance, start: int, stop: int) -> Tensor:
        """Return projected queries (stop - start, W, D) of some output rows."""
        height = self.size[0]
        top, bottom = max(start - 1, 0), min(stop + 1, height)
        slab = self._pooled(item, top, bottom)
        if item.affine is not None:
            slab = torch.addcmul(item.affine[1], slab, item.affine[0])
        # Rows of zeros above and below where the image ends, one column of zeros on either side.
        slab = F.pad(slab, (0, 0, 1, 1, int(start == 0), int(stop == height)))
        mixed = self._convolve(slab.to(self._taps[0].dtype)).to(slab.dtype)
        scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + RMS_EPS)
        projected = (mixed.flatten(0, 1) @ self._query_weight).view(mixed.shape)
        return torch.addcmul(self._query_bias, projected, scale)

    def _convolve(self, slab: Tensor) -> Tensor:
        """Return the 3×3 convolution of (rows + 2, W + 2, D), as nine products: (rows, W, D).

        In the flattened slab a neighbor is a constant offset away, so each tap is one product of plain matrices. It
        is as fast as the library's convolution on a CPU and keeps full float32 precision on a GPU.
        """
        rows, wide, dim = slab.shape[0] - 2, slab.shape[1], slab.shape[2]
        flat = F.pad(slab.flatten(0, 1), (0, 0, 0, 2))  # the last row's junk columns read two pixels further
        count = rows * wide
        total: Tensor = flat[:count] @ self._taps[0]
        for tap in range(1, 9):
            offset = tap // 3 * wide + tap % 3
            total.addmm_(flat[offset : offset + count], self._taps[tap])
        return total.view(rows, wide, dim)[:, : wide - 2]
