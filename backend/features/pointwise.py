"""The residual encoders of JAFAR and AnyUp, evaluated strip by strip without gradients.

Everything in these encoders acts on one pixel at a time, apart from the group norms, whose statistics need the whole
image. So each pass runs over strips of pixels that fit the processor's cache, writes one map and gathers the
statistics that the next pass needs. Equal to the plain modules up to rounding; two to three maps are alive instead
of six. Maps are (pixels, D), row-major, and never in half precision: with half-precision weights the products take
half-precision inputs, but what is summed up and normalized stays float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.features.blocks import GROUPS, NORM_EPS, Residual, ResidualParts, Rope
from backend.types import Tick, no_tick

Source = Callable[[int, int], Tensor]
"""``source(start, stop)`` returns the input rows of these pixels, (stop - start, channels)."""


def strip_rows(width: int, device: torch.device) -> int:
    """Return how many image rows make a strip: about 2,048 pixels on a CPU (1 MB), more on a GPU."""
    pixels = 2048 if device.type == "cpu" else 1 << 18
    return max(1, pixels // width)


class Moments:
    """Mean and spread per channel, gathered strip by strip in float64 (Chan's merge, so no cancellation)."""

    def __init__(self) -> None:
        self._count, self._dtype = 0, torch.float32
        self._mean: Tensor | float = 0.0
        self._spread: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """Take in (pixels, D)."""
        mean = x.mean(0)
        spread = (x - mean).square_().sum(0)
        wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
        count, total = x.shape[0], self._count + x.shape[0]
        delta = mean.to(wide) - self._mean
        self._mean = self._mean + delta * (count / total)
        self._spread = self._spread + spread.to(wide) + delta.square() * (count * self._count / total)
        self._count, self._dtype = total, x.dtype

    def affine(self, norm: nn.GroupNorm | None) -> tuple[Tensor, Tensor]:
        """Return scale (D) and shift (D) of the group norm over all pixels; None for a norm without parameters."""
        mean, spread = cast(Tensor, self._mean), cast(Tensor, self._spread)
        by_group = mean.view(GROUPS, -1)
        center = by_group.mean(1, keepdim=True)
        variance = spread.view(GROUPS, -1).mean(1, keepdim=True) / self._count
        variance = variance + (by_group - center).square().mean(1, keepdim=True)
        scale = torch.rsqrt(variance + NORM_EPS).expand_as(by_group).flatten()
        shift = -center.expand_as(by_group).flatten() * scale
        if norm is not None:
            weight, bias = norm.weight.to(scale.dtype), norm.bias.to(scale.dtype)
            scale, shift = scale * weight, shift * weight + bias
        return scale.to(self._dtype), shift.to(self._dtype)


class Strips:
    """Evaluates encoders over strips of a fixed number of pixels, with reusable scratch memory."""

    def __init__(self, pixels: int, strip: int, dim: int, like: Tensor, tick: Tick = no_tick, passes: int = 1) -> None:
        self.pixels, self.strip, self.dim = pixels, strip, dim
        self.device, self.dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        self._tick, self._done, self._passes = tick, 0, passes
        self._scratch = torch.empty(min(strip, pixels), dim, device=self.device, dtype=self.dtype)

    def new_map(self) -> Tensor:
        """Return an uninitialized (pixels, D) map."""
        return torch.empty(self.pixels, self.dim, device=self.device, dtype=self.dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of every strip; one pass over the image. Reports progress after each strip."""
        for start in range(0, self.pixels, self.strip):
            stop = min(start + self.strip, self.pixels)
            yield start, stop
            self._done += stop - start
            self._tick(self._done, self.pixels * self._passes)

    def first(self, source: Source, weight: Tensor, out: Tensor) -> Moments:
        """Write source @ weightᵀ into ``out``, which the source may read from."""
        moments = Moments()
        for start, stop in self.spans():
            out[start:stop] = source(start, stop).to(weight.dtype) @ weight.T
            moments.add(out[start:stop])
        return moments

    def residual(self, x: Tensor, moments: Moments, part: ResidualParts, z: Tensor) -> Moments:
        """Replace ``x`` by the residual part of it; ``z`` is a second map that is overwritten."""
        exact = part.conv1.weight.dtype == self.dtype
        scale, shift = moments.affine(part.norm1)
        inner, outer = Moments(), Moments()
        weight = _matrix(part.conv1)
        for start, stop in self.spans():
            bent = self._bent(x[start:stop], scale, shift)
            if exact:
                torch.mm(bent, weight.T, out=z[start:stop])
            else:
                z[start:stop] = bent.to(weight.dtype) @ weight.T
            inner.add(z[start:stop])
        scale, shift = inner.affine(part.norm2)
        weight = _matrix(part.conv2)
        for start, stop in self.spans():
            bent = self._bent(z[start:stop], scale, shift)
            if exact:
                x[start:stop].addmm_(bent, weight.T)
            else:
                x[start:stop] += bent.to(weight.dtype) @ weight.T
            outer.add(x[start:stop])
        return outer

    def encode(self, source: Source, encoder: nn.Sequential, out: Tensor, z: Tensor) -> None:
        """Evaluate a convolution and two residual parts into ``out``; ``z`` is overwritten.

        ``source`` gives the input of the convolution, see ``patches``; it may read ``out``.
        """
        moments = self.first(source, _matrix(cast(nn.Conv2d, encoder[0])), out)
        for part in list(encoder)[1:]:
            moments = self.residual(out, moments, cast(Residual, part).parts(), z)

    def _bent(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return SiLU(x · scale + shift) in the scratch memory."""
        scratch = self._scratch[: x.shape[0]]
        torch.addcmul(shift, x, scale, out=scratch)
        return F.silu(scratch, inplace=True)


def _matrix(conv: nn.Conv2d) -> Tensor:
    return conv.weight.detach().flatten(1)


def patches(image: Tensor, kernel: int) -> Source:
    """Return a source of the first convolution's inputs: each pixel with its neighbors, edges mirrored.

    Args:
        image: (channels, H, W).
        kernel: Odd width of the convolution.
    """
    width = image.shape[2]
    if kernel > 1:
        margin = kernel // 2
        image = F.pad(image[None], (margin,) * 4, mode="reflect")[0]

    def source(start: int, stop: int) -> Tensor:
        top, bottom = start // width, stop // width  # strips are whole rows
        slab = image[:, top : bottom + kernel - 1]
        if kernel > 1:
            return F.unfold(slab[None], kernel)[0].T
        return slab.flatten(1).T

    return source


def turn(x: Tensor, rope: Rope, strips: Strips, size: tuple[int, int]) -> None:
    """Apply the position code to a (pixels, D) map in place, from tables of H + W angles instead of H·W."""
    height, width = size
    rows, columns = rope.angles(height, width)
    row_cos, row_sin, col_cos, col_sin = rows.cos(), rows.sin(), columns.cos(), columns.sin()
    half = x.shape[1] // 2
    for start, stop in strips.spans():
        part = slice(start // width, stop // width)
        cos = row_cos[part, None] * col_cos - row_sin[part, None] * col_sin
        sin = row_sin[part, None] * col_cos + row_cos[part, None] * col_sin
        view = x[start:stop].view(-1, width, x.shape[1])
        turned = cos.mul_(view)
        turned[..., :half].addcmul_(sin[..., :half], view[..., half:], value=-1)
        turned[..., half:].addcmul_(sin[..., half:], view[..., :half])
        view.copy_(turned)
