"""Upsampling by position alone: a few grid cells per output position and axis, the same for every image.

Knows the geometry of grids; knows no image. Output position p of N falls on grid coordinate (p + 0.5) · L / N - 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.features.operator import Operator
from backend.features.scene import Scene


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Cells and weights of every output position along one axis: index int64 (N, T), weight float32 (N, T)."""

    index: Tensor
    weight: Tensor

    def part(self, start: int, stop: int) -> Taps:
        """Return the taps of some positions."""
        return Taps(self.index[start:stop], self.weight[start:stop])

    def apply(self, values: Tensor, axis: int) -> Tensor:
        """Mix values along an axis of length L; it becomes N long."""
        shape = [1] * values.ndim
        shape[axis] = -1
        weight = self.weight.to(values.dtype)
        if self.index.shape[1] == 1:
            return values.index_select(axis, self.index[:, 0])
        mixed = values.index_select(axis, self.index[:, 0]) * weight[:, 0].view(shape)
        for tap in range(1, self.index.shape[1]):
            mixed.addcmul_(values.index_select(axis, self.index[:, tap]), weight[:, tap].view(shape))
        return mixed


def coordinates(length: int, cells: int) -> Tensor:
    """Return the grid coordinates (N) of output positions, float64 on the CPU; an integer is a cell's center."""
    return (torch.arange(length, dtype=torch.float64) + 0.5) * cells / length - 0.5


def nearest_taps(length: int, cells: int, device: torch.device) -> Taps:
    """Return the cell that holds each position."""
    index = ((2 * torch.arange(length) + 1) * cells // (2 * length))[:, None]
    return Taps(index.to(device), torch.ones(length, 1, device=device))


def linear_taps(length: int, cells: int, device: torch.device) -> Taps:
    """Return the two cells around each position, clamped to the grid."""
    place = coordinates(length, cells)
    low = place.floor()
    share = (place - low).float()
    index = torch.stack((low, low + 1), dim=1).long().clamp(0, cells - 1)
    return Taps(index.to(device), torch.stack((1 - share, share), dim=1).to(device))


def cubic_taps(length: int, cells: int, device: torch.device, a: float = -0.75) -> Taps:
    """Return the four cells around each position, clamped to the grid, with the cubic kernel's weights."""
    place = coordinates(length, cells)
    cell = place.floor()[:, None] + torch.arange(-1, 3)
    x = (place[:, None] - cell).abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weight = torch.where(x <= 1, near, far)
    return Taps(cell.long().clamp(0, cells - 1).to(device), weight.float().to(device))


class SeparableOperator(Operator):
    """Rows and columns mixed one after the other."""

    def __init__(self, rows: Taps, columns: Taps, scene: Scene) -> None:
        self.grid, self.size, self.batch = scene.grid, scene.size, scene.features.shape[0]
        self.device = scene.features.device
        self._rows, self._columns = rows, columns

    def row_bytes(self, channels: int) -> int:
        """Return the working memory of one output row, in bytes."""
        return 12 * self.batch * self.size[1] * channels

    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return output rows (B, stop - start, W, K); see the base class."""
        exact = values.float() if values.dtype.itemsize < 4 else values
        last = exact.permute(0, 2, 3, 1)
        return self._columns.apply(self._rows.part(start, stop).apply(last, 1), 2)
