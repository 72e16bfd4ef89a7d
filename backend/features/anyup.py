"""AnyUp: attention from pixels to nearby grid cells, with keys that take features of any width from any encoder.

Idea: features enter the keys through filters that are shared by all channels, so one set of weights serves every
encoder; each pixel reads only the cells within a window around it. The guidance carries the ImageNet normalization,
whatever the encoder. Cost per output pixel: about 390,000 multiply-adds in the convolutions (D = 128), plus
(D + C) · 0.04 · h · w.
Note: the result depends on the order of the feature channels, see ``unify``.
Source: Wimmer et al. 2025 (arXiv 2510.12764, CC BY 4.0). Own implementation.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.errors import BadRequest
from backend.features.blocks import CrossDecode, NumberedResidual, Rope, encoder, unit
from backend.features.learned_model import LearnedUpsampler

_STRIP_BYTES = 1 << 23  # of filter responses worked on at once


class Unification(nn.Module):
    """The filters through which features of any number of channels enter; see ``unify``."""

    def __init__(self, filters: int, kernel: int, gaussian: bool) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.empty(filters, 1, kernel, kernel))
        nn.init.kaiming_uniform_(self.basis, a=math.sqrt(5))
        if gaussian:
            self.basis.data.copy_(gaussian_derivatives(filters, kernel))

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, M, h, w)."""
        device = features.device.type
        with torch.autocast(device, enabled=False):  # responses and softmax stay in float32
            return unify(unit(features), self.basis)


class AnyUp(LearnedUpsampler):
    """The AnyUp upsampler; the state dict has the official names and shapes."""

    def __init__(
        self,
        input_dim: int = 3,
        qk_dim: int = 128,
        kernel_size: int = 1,
        kernel_size_lfu: int = 5,
        window_ratio: float = 0.1,
        num_heads: int = 4,
        lfu_dim: int | None = None,
        init_gaussian_derivatives: bool = False,
        use_natten: bool = False,
        **ignored: Any,
    ) -> None:
        """Build with random weights.

        Args:
            input_dim: Guidance channels.
            qk_dim: Inner width D; divisible by 8 and by ``num_heads``.
            kernel_size: Odd width of the first image convolution.
            kernel_size_lfu: Odd width K of the unification filters.
            window_ratio: Half-width of the window as a fraction of the image; 0 or less for no window.
            num_heads: Attention heads.
            lfu_dim: Number M of unification filters, divisible by 8; None for D.
            init_gaussian_derivatives: Start the filters from Gaussian derivatives.
            use_natten: Accepted and unused: the windowed form here is exact.
            ignored: Further keywords of official configuration files.

        Raises:
            ValueError: If the sizes do not fit together.
        """
        super().__init__()
        filters = lfu_dim or qk_dim
        if qk_dim % 8 or filters % 8 or qk_dim % num_heads or kernel_size % 2 == 0 or kernel_size_lfu % 2 == 0:
            raise ValueError("qk_dim and lfu_dim must be divisible by 8, qk_dim by num_heads; kernels must be odd")
        self.input_dim, self.kernel_size, self.num_heads = input_dim, kernel_size, num_heads
        self.window_ratio = window_ratio
        self.image_encoder = encoder(input_dim, qk_dim, kernel_size, NumberedResidual)
        self.key_encoder = encoder(qk_dim, qk_dim, 1, NumberedResidual)
        self.query_encoder = encoder(qk_dim, qk_dim, 1, NumberedResidual)
        self.key_features_encoder = nn.Sequential(
            Unification(filters, kernel_size_lfu, init_gaussian_derivatives),
            NumberedResidual(filters, qk_dim),
            NumberedResidual(qk_dim, qk_dim),
        )
        self.aggregation = encoder(2 * qk_dim, qk_dim, 3, NumberedResidual)
        self.cross_decode = CrossDecode(qk_dim, qk_dim, value_norm=False)
        self.rope = Rope(qk_dim)

    def check_features(self, features: Tensor) -> None:
        """Refuse a grid with a single row or column.

        Raises:
            BadRequest: If the grid is smaller than 2 × 2.
        """
        if min(features.shape[2:]) < 2:
            raise BadRequest(
                f"AnyUp needs a grid of at least 2 × 2 cells; this one has {features.shape[2]} × {features.shape[3]}.",
                "Encode a larger image.",
            )

    def combine(self, keys: Tensor, features: Tensor) -> Tensor:
        """Aggregate image keys (B, D, h, w), first, with the unified features."""
        code = self.key_features_encoder[0](features).to(keys.dtype)
        for part in list(self.key_features_encoder)[1:]:
            code = part(code)
        return cast(Tensor, self.aggregation(torch.cat((keys, code), dim=1)))


def unify(features: Tensor, basis: Tensor) -> Tensor:
    """Turn features of any width into M maps.

    The responses r[channel, filter] are read back from memory as a table of M rows and C columns *without*
    transposing; softmax runs over its rows, the mean over its columns. The published formula transposes; the
    released weights were trained without. So the order of the channels matters.

    Args:
        features: Unit-length features (B, C, h, w).
        basis: Filters (M, 1, K, K), correlated with zeros outside the grid and divided by the cells inside it.

    Returns:
        (B, M, h, w); the M values of a position sum to 1.
    """
    (channels, height, width), filters = features.shape[1:], basis.shape[0]
    margin = basis.shape[2] // 2
    kernels = basis.to(features.dtype)
    inside = F.conv2d(features.new_ones(1, 1, height, width), torch.ones_like(kernels[:1]), padding=margin)[0, 0]
    padded = F.pad(features, (margin,) * 4)
    rows = max(1, _STRIP_BYTES // (4 * channels * filters * width))
    images = []
    for image in padded:
        strips = []
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            responses = F.conv2d(image[:, None, top : bottom + 2 * margin], kernels)  # C, M, rows, w
            responses = responses / inside[top:bottom]
            table = responses.reshape(filters, channels, bottom - top, width)
            strips.append(table.softmax(dim=0).mean(dim=1))
        images.append(torch.cat(strips, dim=1))
    return torch.stack(images)


def gaussian_derivatives(filters: int, kernel: int) -> Tensor:
    """Return (filters, 1, K, K) Gaussian derivatives of order 0 to 2 at several scales and angles, of unit length."""
    half = kernel // 2
    rows, columns = torch.meshgrid(*(torch.arange(-half, half + 1, dtype=torch.float32),) * 2, indexing="ij")
    bank = []
    for index in range(filters):
        order, angle = index % 3, math.pi * (index // 3 % 8) / 8
        sigma = 0.5 + 0.5 * (index // 24 % 4)
        along = rows * math.sin(angle) + columns * math.cos(angle)
        bump = torch.exp(-(rows.square() + columns.square()) / (2 * sigma**2))
        shape = (bump, -along * bump, (along.square() / sigma**2 - 1) * bump)[order]
        bank.append(shape / shape.norm())
    return torch.stack(bank)[:, None]
