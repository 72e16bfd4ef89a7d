"""Parts that JAFAR and AnyUp share: residual encoders, position code, query and key projections, area pooling.

Plain differentiable modules whose names are those of the official state dicts; the memory-saving evaluation of the
same parts is in ``pointwise``. Knows neither images nor attention.

Source: JAFAR (arXiv 2506.11136) and AnyUp (arXiv 2510.12764). Own implementation.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8  # of every group norm
NORM_EPS = 1e-5
RMS_EPS = 1.1920929e-07  # fixed in the official models
UNIT_EPS = 1e-12


class Conv(nn.Conv2d):
    """Convolution without bias in the input's dtype: a model in half precision still works in float32 on the grid."""

    def __init__(self, in_dim: int, dim: int, kernel: int = 1, reflect: bool = False) -> None:
        super().__init__(
            in_dim, dim, kernel, padding=kernel // 2, padding_mode="reflect" if reflect else "zeros", bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, in_dim, H, W)."""
        return cast(Tensor, self._conv_forward(x, self.weight.to(x.dtype), None))


class GroupNorm(nn.GroupNorm):
    """Group norm of both models, in the input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__(GROUPS, dim, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, dim, H, W)."""
        return F.group_norm(x, GROUPS, self.weight.to(x.dtype), self.bias.to(x.dtype), NORM_EPS)


class ResidualParts(NamedTuple):
    """The learned parts of x + conv2(SiLU(norm2(conv1(SiLU(norm1(x)))))), whatever their names in the file."""

    norm1: nn.GroupNorm
    conv1: nn.Conv2d
    norm2: nn.GroupNorm
    conv2: nn.Conv2d
    shortcut: nn.Conv2d | None = None


class Residual(nn.Module):
    """Residual part with JAFAR's parameter names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(dim)
        self.conv1 = Conv(dim, dim)
        self.norm2 = GroupNorm(dim)
        self.conv2 = Conv(dim, dim)

    def parts(self) -> ResidualParts:
        """Return the parts by role."""
        return ResidualParts(self.norm1, self.conv1, self.norm2, self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D, H, W) to the same shape."""
        return cast(Tensor, x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x)))))))


class NumberedResidual(nn.Module):
    """Residual part with AnyUp's parameter names; the input may have another width."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            GroupNorm(in_dim),
            nn.SiLU(),
            Conv(in_dim, dim),
            GroupNorm(dim),
            nn.SiLU(),
            Conv(dim, dim),
        )
        self.shortcut: nn.Module = Conv(in_dim, dim) if in_dim != dim else nn.Identity()

    def parts(self) -> ResidualParts:
        """Return the parts by role."""
        block = self.block
        shortcut = self.shortcut if isinstance(self.shortcut, nn.Conv2d) else None
        return ResidualParts(
            cast(nn.GroupNorm, block[0]),
            cast(nn.Conv2d, block[2]),
            cast(nn.GroupNorm, block[3]),
            cast(nn.Conv2d, block[5]),
            shortcut,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_dim, H, W) to (B, D, H, W)."""
        return cast(Tensor, self.shortcut(x) + self.block(x))


def encoder(in_dim: int, dim: int, kernel: int, part: type[Residual] | type[NumberedResidual]) -> nn.Sequential:
    """Build a convolution in_dim to dim (reflect padding, no bias) followed by two residual parts."""
    first = Conv(in_dim, dim, kernel, reflect=True)
    rest = [NumberedResidual(dim, dim) if part is NumberedResidual else Residual(dim) for _ in range(2)]
    return nn.Sequential(first, *rest)


class Rope(nn.Module):
    """The models' position code: every channel turned by its own learned angle, linear in row and column.

    The two partners of a pair use different angles, so this is no rotation; the released weights need it so.
    """

    def __init__(self, dim: int, theta: float = 100.0) -> None:
        super().__init__()
        exponents = torch.arange(dim // 4, dtype=torch.float32) / max(dim // 4 - 1, 1)
        waves = 2 * math.pi * theta**-exponents
        freqs = torch.zeros(2, dim)
        freqs[0, : dim // 2] = waves.repeat(2)
        freqs[1, dim // 2 :] = waves.repeat(2)
        self.freqs = nn.Parameter(freqs)

    def angles(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the row part (H, D) and the column part (W, D) of the angles, in radians, never in half precision."""
        freqs = self.freqs if self.freqs.dtype == torch.float64 else self.freqs.float()

        def axis(length: int) -> Tensor:
            steps = torch.arange(length, device=freqs.device, dtype=freqs.dtype)
            return steps[:, None] / max(length - 1, 1)  # both ends included

        return axis(height) * freqs[0], axis(width) * freqs[1]

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, D, H, W)."""
        rows, columns = self.angles(x.shape[2], x.shape[3])
        angle = (rows[:, None] + columns[None]).permute(2, 0, 1)  # D, H, W
        first, second = x.to(angle.dtype).chunk(2, dim=1)
        turned = torch.cat((-second, first), dim=1)
        return (x * angle.cos() + turned * angle.sin()).to(x.dtype)


class RmsNorm(nn.Module):
    """Division by the root mean square over the last axis, times a learned weight, in float32 at least."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., D)."""
        exact = x if x.dtype == torch.float64 else x.float()
        return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + RMS_EPS) * self.weight


class Projection(nn.Module):
    """Query and key projections, stored as torch's multi-head attention stores them.

    The value and output parts are in the official files but cannot change the result: they are declared, so that
    strict loading works, and never used.
    """

    def __init__(self, dim: int, value_dim: int) -> None:
        super().__init__()
        self.packed = value_dim == dim
        if self.packed:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(dim, dim))
            self.k_proj_weight = nn.Parameter(torch.empty(dim, dim))
            self.v_proj_weight = nn.Parameter(torch.empty(dim, value_dim))
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.out_proj.bias)
        self.dim = dim

    def query(self) -> tuple[Tensor, Tensor]:
        """Return weight (D, D) and bias (D) of the queries."""
        weight = self.in_proj_weight[: self.dim] if self.packed else self.q_proj_weight
        return weight, self.in_proj_bias[: self.dim]

    def key(self) -> tuple[Tensor, Tensor]:
        """Return weight (D, D) and bias (D) of the keys."""
        weight = self.in_proj_weight[self.dim : 2 * self.dim] if self.packed else self.k_proj_weight
        return weight, self.in_proj_bias[self.dim : 2 * self.dim]


class CrossAttention(nn.Module):
    """Norms and projections of queries and keys, never in half precision: attention weights are sensitive to them."""

    def __init__(self, dim: int, value_dim: int, value_norm: bool) -> None:
        super().__init__()
        self.norm_q = RmsNorm(dim)
        self.norm_k = RmsNorm(dim)
        if value_norm:  # in the file, without effect
            self.norm_v = RmsNorm(value_dim)
        self.attention = Projection(dim, value_dim)

    def queries(self, x: Tensor) -> Tensor:
        """Map (..., D) to projected queries."""
        return _project(self.norm_q(x), *self.attention.query())

    def keys(self, x: Tensor) -> Tensor:
        """Map (..., D) to projected keys."""
        return _project(self.norm_k(x), *self.attention.key())


def _project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


class CrossDecode(nn.Module):
    """The 3×3 query convolution (zero padding) and the attention that follows it."""

    def __init__(self, dim: int, value_dim: int, value_norm: bool) -> None:
        super().__init__()
        self.conv2d = Conv(dim, dim, 3)
        self.cross_attn = CrossAttention(dim, value_dim, value_norm)


def unit(features: Tensor) -> Tensor:
    """Divide (B, C, h, w) by its length along the channels, in float32 at least."""
    exact = features if features.dtype == torch.float64 else features.float()
    return F.normalize(exact, dim=1, eps=UNIT_EPS)


def cut_axis(x: Tensor, axis: int, parts: int) -> Tensor:
    """Split one axis into (parts, length / parts)."""
    return x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])


def pool_axis(x: Tensor, axis: int, cells: int, start: int = 0, stop: int | None = None) -> Tensor:
    """Adaptive average pooling along one axis, on every kind of device; optionally only cells ``start`` to ``stop``.

    Cell i of n is the mean of positions floor(i·N/n) to ceil((i+1)·N/n) - 1. With more cells than positions they
    repeat or overlap.
    """
    length = x.shape[axis]
    stop = cells if stop is None else stop
    if length == cells:
        return x.narrow(axis, start, stop - start)
    if length % cells == 0:
        step = length // cells
        return cut_axis(x.narrow(axis, start * step, (stop - start) * step), axis, stop - start).mean(axis + 1)
    index = torch.arange(start, stop, device=x.device)
    low, high = index * length // cells, -(-(index + 1) * length // cells)
    span = int((high - low).max())
    reach = low[:, None] + torch.arange(span, device=x.device)  # cells, span
    weight = (reach < high[:, None]).to(x.dtype) / (high - low)[:, None]
    picked = cut_axis(x.index_select(axis, reach.clamp(max=length - 1).flatten()), axis, stop - start)
    shape = [1] * picked.ndim
    shape[axis : axis + 2] = [stop - start, span]
    pooled: Tensor = (picked * weight.view(shape)).sum(axis + 1)
    return pooled


def pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Adaptive average pooling of (B, D, H, W) to ``size``."""
    return pool_axis(pool_axis(x, 3, size[1]), 2, size[0])
