"""Mixing weights between output pixels and grid cells: dense, or restricted to a window around each pixel.

Knows queries, keys and windows; knows neither images nor where queries come from. Every function is differentiable
and exact: the windowed form touches the keys inside the windows only and equals the masked dense form up to rounding.

Weights are the average over the heads of each head's softmax. Maps are channels-last, without batch axis: queries
(rows, W, D), keys (h, w, D), values (h, w, K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 8  # output pixels per side that share one window of keys
CACHED_LOGITS = 1 << 21  # logits worked on at once on a CPU, so that they stay in its cache


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """First and last + 1 grid index that each output position may read, along one axis.

    Attributes:
        low: int64 (N,), never decreasing, on the CPU.
        high: int64 (N,), never decreasing, on the CPU.
    """

    low: Tensor
    high: Tensor


def window_bounds(length: int, cells: int, ratio: float) -> Bounds:
    """Return AnyUp's window along one axis. A ratio of 0 or less opens it fully.

    Float32 on the CPU and this order of operations are part of the trained model: float64 moves some bounds, and a
    GPU divides by multiplying with a rounded inverse.

    Args:
        length: Output positions N.
        cells: Grid cells L.
        ratio: Half-width of the window as a fraction of the axis.
    """
    if ratio <= 0:
        zeros = torch.zeros(length, dtype=torch.int64)
        return Bounds(zeros, zeros + cells)
    position = (torch.arange(length, dtype=torch.float32) + 0.5) / length
    low = torch.floor((position - ratio).clamp(0, 1) * cells)
    high = torch.ceil((position + ratio).clamp(0, 1) * cells)
    return Bounds(low.long(), high.long())


def logits_at_once(device: torch.device, limit_bytes: int | None = None) -> int:
    """Return how many logits to hold at once: what fits a CPU's cache, or 256 MB on a GPU, within a byte limit."""
    count = CACHED_LOGITS if device.type == "cpu" else 1 << 26
    return count if limit_bytes is None else max(1, min(count, limit_bytes // 12))


def dense_weights(queries: Tensor, keys: Tensor, heads: int) -> Tensor:
    """Return (n, N) weights of queries (n, D) over keys (N, D); keys carry the scale 1/√d already."""
    n, dim = queries.shape
    q = queries.view(n, heads, dim // heads).transpose(0, 1)
    k = keys.view(-1, heads, dim // heads).permute(1, 2, 0)
    return _softmax(torch.bmm(q, k)).mean(0)


def dense_mix(queries: Tensor, keys: Tensor, values: Tensor, heads: int, chunk: int) -> Tensor:
    """Mix values (h, w, K) for queries (rows, W, D), ``chunk`` queries at a time; returns (rows, W, K) float."""
    rows, width, dim = queries.shape
    flat, table = queries.reshape(-1, dim), values.flatten(0, 1)
    k = keys.flatten(0, 1)
    parts = [dense_weights(part, k, heads).to(table.dtype) @ table for part in torch.split(flat, chunk)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows, width, -1)


@dataclass(frozen=True, slots=True, eq=False)
class TileWeights:
    """Weights of a strip of tiles over their windows; what is left of queries and keys once they are fixed.

    Attributes:
        weights: (tiles, q, k) with q = rows · tile width and k = window rows · window columns.
        top: First grid row of the windows.
        bottom: Last grid row + 1.
        columns: int64 (tiles, window columns): grid columns; repeated ones carry weight 0.
        rows: Output rows of the strip.
    """

    weights: Tensor
    top: int
    bottom: int
    columns: Tensor
    rows: int

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, in bytes."""
        return self.weights.numel() * self.weights.element_size()

    def mix(self, values: Tensor) -> Tensor:
        """Mix values (h, w, K) to (tiles, q, K)."""
        window = values[self.top : self.bottom][:, self.columns]  # window rows, tiles, window columns, K
        table = window.transpose(0, 1).reshape(self.columns.shape[0], -1, values.shape[2])
        return torch.bmm(self.weights.to(table.dtype), table)


def tile_weights(
    queries: Tensor, keys: Tensor, rows: Bounds, columns: Bounds, heads: int, tiles: slice = slice(None)
) -> TileWeights:
    """Return the weights of some output rows, in tiles of all these rows by ``TILE`` columns.

    Args:
        queries: (rows, W, D).
        keys: (h, w, D) with the scale 1/√d applied.
        rows: Windows of these output rows.
        columns: Windows of all output columns.
        heads: Number of heads.
        tiles: Which tiles of the strip.
    """
    height, width, dim = queries.shape
    count = -(-width // TILE)
    device = queries.device
    position = torch.arange(count * TILE).clamp(max=width - 1).view(count, TILE)[tiles]  # the last tile repeats pixels
    low, high = columns.low[position], columns.high[position]  # tiles, TILE
    span = int((high[:, -1] - low[:, 0]).max())
    reach = low[:, :1] + torch.arange(span)  # tiles, span
    shut_columns = (reach[:, None] < low[:, :, None]) | (reach[:, None] >= high[:, :, None])  # tiles, TILE, span
    top, bottom = int(rows.low[0]), int(rows.high[-1])
    index = torch.arange(top, bottom)
    shut_rows = (index < rows.low[:, None]) | (index >= rows.high[:, None])  # rows, window rows
    reach = reach.clamp(max=keys.shape[1] - 1).to(device)
    shut = (shut_rows.to(device)[None, :, None, :, None] | shut_columns.to(device)[:, None, :, None, :]).flatten(3)

    tiled = queries[:, position.to(device)]  # rows, tiles, TILE, D
    amount = tiled.shape[1]
    q = tiled.view(height, amount, TILE, heads, -1).permute(1, 3, 0, 2, 4).reshape(amount * heads, height * TILE, -1)
    window = keys[top:bottom][:, reach]  # window rows, tiles, span, D
    k = window.view(bottom - top, amount, span, heads, -1).permute(1, 3, 4, 0, 2)
    k = k.reshape(amount * heads, dim // heads, -1)
    logits = torch.bmm(q, k).view(amount, heads, height * TILE, -1)
    logits = logits.masked_fill_(shut.flatten(1, 2)[:, None], -torch.inf)
    return TileWeights(_softmax(logits).mean(1), top, bottom, reach, height)


def untile(mixed: Tensor, rows: int, width: int) -> Tensor:
    """Arrange (tiles, rows · TILE, K) as (rows, W, K)."""
    tiles, _, channels = mixed.shape
    return mixed.view(tiles, rows, TILE, channels).transpose(0, 1).reshape(rows, tiles * TILE, channels)[:, :width]


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32 if logits.dtype.itemsize < 4 else None)
