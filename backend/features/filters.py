"""Operators of the two classical edge-aware filters. Their weights depend on the picture alone.

Knows pictures and grids; knows neither encoders nor learned weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.features.blocks import cut_axis, pool_axis
from backend.features.interpolation import SeparableOperator, coordinates, linear_taps
from backend.features.scene import Scene

_EMPTY = 1e-12  # a sum of weights below this counts as no weight at all


def resized(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (B, 3, H, W): an axis that shrinks is averaged by area, one that grows is interpolated linearly."""
    for axis, length in zip((2, 3), size, strict=True):
        if length < picture.shape[axis]:
            picture = pool_axis(picture, axis, length)
        elif length > picture.shape[axis]:
            picture = linear_taps(length, picture.shape[axis], picture.device).apply(picture, axis)
    return picture


class JointBilateralOperator(SeparableOperator):
    """Mixtures of the cells around a pixel, by distance in the grid and in color."""

    def __init__(self, scene: Scene, radius: int, sigma_space: float, sigma_range: float) -> None:
        """Prepare the weights: (2 · radius + 1)² numbers per output pixel."""
        device = scene.features.device
        linear = [linear_taps(n, cells, device) for n, cells in zip(scene.size, scene.grid, strict=True)]
        super().__init__(linear[0], linear[1], scene)
        picture = resized(scene.picture.float(), scene.size)
        small = pool_axis(pool_axis(picture, 3, self.grid[1]), 2, self.grid[0])
        places = [coordinates(n, cells).to(device) for n, cells in zip(scene.size, scene.grid, strict=True)]
        centers = [(place + 0.5).floor() for place in places]
        reach = range(-radius, radius + 1)
        self._cells: list[tuple[Tensor, Tensor]] = []
        weights = []
        for down in reach:
            for right in reach:
                cell = [center + step for center, step in zip(centers, (down, right), strict=True)]
                far = [(place - at).square().float() for place, at in zip(places, cell, strict=True)]
                index = [at.long().clamp(0, cells - 1) for at, cells in zip(cell, self.grid, strict=True)]
                color = small[:, :, index[0]][:, :, :, index[1]]
                unlike = (picture - color).square().sum(1)  # B, H, W
                space = (far[0][:, None] + far[1]) / (2 * sigma_space**2)
                weights.append(torch.exp(-space - unlike / (2 * sigma_range**2)))
                self._cells.append((index[0], index[1]))
        stacked = torch.stack(weights)  # offsets, B, H, W
        total = stacked.sum(0)
        self._lost = total < _EMPTY
        self._any_lost = bool(self._lost.any())
        self._weights = stacked / total.clamp(min=_EMPTY)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, in bytes."""
        return self._weights.numel() * 4

    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return output rows (B, stop - start, W, K); see the base class."""
        exact = (values.float() if values.dtype.itemsize < 4 else values).permute(0, 2, 3, 1)
        total = exact.new_zeros(self.batch, stop - start, self.size[1], values.shape[1])
        for (down, right), weight in zip(self._cells, self._weights, strict=True):
            picked = exact[:, down[start:stop]][:, :, right]
            total.addcmul_(picked, weight[:, start:stop, :, None].to(exact.dtype))
        if self._any_lost:
            lost = self._lost[:, start:stop, :, None]
            return torch.where(lost, super().rows(values, start, stop), total)
        return total


class GuidedOperator(SeparableOperator):
    """Locally affine functions of color: fitted on the grid, enlarged, applied to the picture."""

    def __init__(self, scene: Scene, radius: int, epsilon: float) -> None:
        """Prepare the inverse color covariances of all cells."""
        device = scene.features.device
        linear = [linear_taps(n, cells, device) for n, cells in zip(scene.size, scene.grid, strict=True)]
        super().__init__(linear[0], linear[1], scene)
        self._radius = radius
        exact = torch.promote_types(scene.features.dtype, torch.float32)
        self._picture = resized(scene.picture.to(exact), scene.size).permute(0, 2, 3, 1)
        small = pool_axis(pool_axis(self._picture, 2, self.grid[1]), 1, self.grid[0])  # B, h, w, 3
        # Covariances are differences of close numbers: in float64 they stay accurate for a small epsilon.
        self._small = small if small.device.type == "mps" else small.double()
        self._mean = self._boxed(self._small)
        outer = (self._small[..., :, None] * self._small[..., None, :]).flatten(3)
        second = cut_axis(self._boxed(outer), 3, 3)
        spread = second - self._mean[..., :, None] * self._mean[..., None, :]
        self._inverse = torch.linalg.inv(spread + epsilon * torch.eye(3, device=device, dtype=self._small.dtype))

    @property
    def nbytes(self) -> int:
        """Memory that the picture takes, in bytes."""
        return self._picture.numel() * self._picture.element_size()

    def row_bytes(self, channels: int) -> int:
        """Return the working memory of one output row, in bytes."""
        return 24 * self.batch * self.size[1] * channels

    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return output rows (B, stop - start, W, K); see the base class."""
        slopes, offset = self._fit(values)  # B, h, w, 3, K and B, h, w, K
        rows = self._rows.part(start, stop)
        total = self._columns.apply(rows.apply(offset, 1), 2)
        for color in range(3):
            slope = self._columns.apply(rows.apply(slopes[..., color, :], 1), 2)
            total.addcmul_(slope, self._picture[:, start:stop, :, color, None].to(slope.dtype))
        return total

    def _fit(self, values: Tensor) -> tuple[Tensor, Tensor]:
        exact = values if values.dtype.itemsize >= 4 else values.float()
        last = exact.permute(0, 2, 3, 1).to(self._small.dtype)
        mean = self._boxed(last)
        product = (self._small[..., :, None] * last[..., None, :]).flatten(3)
        shared = cut_axis(self._boxed(product), 3, 3) - self._mean[..., :, None] * mean[..., None, :]
        slopes = self._inverse @ shared
        offset = mean - (self._mean[..., None, :] @ slopes)[..., 0, :]
        smooth = cut_axis(self._boxed(slopes.flatten(3)), 3, 3)
        return smooth.to(exact.dtype), self._boxed(offset).to(exact.dtype)

    def _boxed(self, x: Tensor) -> Tensor:
        """Mean over a window of (2 · radius + 1)² cells of (B, h, w, K), over the cells inside the grid."""
        first = x.movedim(3, 1)
        width = 2 * self._radius + 1
        mean = F.avg_pool2d(first, width, stride=1, padding=self._radius, count_include_pad=False)
        return mean.movedim(1, 3)
