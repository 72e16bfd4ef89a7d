"""JAFAR: queries from the image, keys from the image averaged to the grid and modulated by the features.

Idea: each output pixel is a mixture of the raw feature vectors; the attention between the pixel's query and the
cells' keys decides the shares. One set of weights per encoder; the guidance carries the encoder's own normalization.
Cost per output pixel: about 390,000 multiply-adds in the convolutions (D = 128), plus (D + C) · h · w.
Note: the norm of the queries runs over the whole output, so pixels depend slightly on the requested output size.
Source: Couairon et al. 2025 (arXiv 2506.11136, Apache-2.0). Own implementation.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from backend.errors import BadRequest
from backend.features.blocks import GROUPS, NORM_EPS, Conv, CrossDecode, Residual, Rope, encoder, unit
from backend.features.learned_model import LearnedUpsampler


class Modulation(nn.Module):
    """Scale and shift of the image keys by the feature code. There is no "1 +" in the scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = Conv(dim, dim)
        self.beta = Conv(dim, dim)

    def forward(self, keys: Tensor, code: Tensor) -> Tensor:
        """Combine keys and code, both (B, D, h, w)."""
        return cast(Tensor, self.gamma(code) * keys + self.beta(code))


class JAFAR(LearnedUpsampler):
    """The JAFAR upsampler; the state dict has the official names and shapes."""

    query_norm = True

    def __init__(
        self,
        input_dim: int = 3,
        qk_dim: int = 128,
        v_dim: int = 384,
        feature_dim: int | None = None,
        kernel_size: int = 1,
        num_heads: int = 4,
        **ignored: Any,
    ) -> None:
        """Build with random weights.

        Args:
            input_dim: Guidance channels.
            qk_dim: Inner width D; divisible by 8 and by ``num_heads``.
            v_dim: The encoder's number of channels.
            feature_dim: Accepted and unused, as in the official class.
            kernel_size: Odd width of the first image convolution.
            num_heads: Attention heads.
            ignored: Further keywords of official configuration files.

        Raises:
            ValueError: If the sizes do not fit together.
        """
        super().__init__()
        if qk_dim % 8 or qk_dim % num_heads or kernel_size % 2 == 0:
            raise ValueError("qk_dim must be divisible by 8 and by num_heads, kernel_size must be odd")
        self.input_dim, self.kernel_size, self.num_heads, self.v_dim = input_dim, kernel_size, num_heads, v_dim
        self.image_encoder = encoder(input_dim, qk_dim, kernel_size, Residual)
        self.key_encoder = encoder(qk_dim, qk_dim, 1, Residual)
        self.query_encoder = encoder(qk_dim, qk_dim, 1, Residual)
        self.key_features_encoder = encoder(v_dim, qk_dim, 1, Residual)
        self.sft_key = Modulation(qk_dim)
        self.cross_decode = CrossDecode(qk_dim, v_dim, value_norm=True)
        self.rope = Rope(qk_dim)

    def check_features(self, features: Tensor) -> None:
        """Refuse features of another width.

        Raises:
            BadRequest: If C is not ``v_dim``.
        """
        if features.shape[1] != self.v_dim:
            raise BadRequest(
                f"These JAFAR weights are for {self.v_dim} channels; the feature map has {features.shape[1]}.",
                "Choose the weights of this encoder, or AnyUp, which takes any number of channels.",
            )

    def combine(self, keys: Tensor, features: Tensor) -> Tensor:
        """Modulate normalized image keys (B, D, h, w) by the code of the unit-length features."""
        code = self.key_features_encoder(unit(features).to(keys.dtype))
        normalized = F.group_norm(keys, GROUPS, eps=NORM_EPS)
        return cast(Tensor, self.sft_key(normalized, code))
