"""Losses of the two training recipes, and the perturbation of the guidance.

Both official training scripts clamp normalized images to [0, 1] and add noise in place; here pixels are clamped before
normalization, and the clean picture stays clean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.features.blocks import pool


def match_loss(result: Tensor, target: Tensor) -> Tensor:
    """Return 1 - cosine, plus the squared error after scaling both by the target's range over channels.

    Args:
        result: (B, C, H, W).
        target: (B, C, H, W).
    """
    result, target = result.float(), target.float()
    cosine = 1 - F.cosine_similarity(result, target, dim=1).mean()
    span = target.amax(1, keepdim=True) - target.amin(1, keepdim=True)
    span = span.clamp(min=1e-3 * float(span.mean())) + 1e-6  # flat targets would dominate everything
    return cosine + ((result - target) / span).square().mean()


def consistency_loss(noisy: Tensor, clean: Tensor) -> Tensor:
    """Return how far the result with a perturbed guidance is from the result without; the latter has no gradient."""
    return match_loss(noisy, clean.detach())


def input_loss(result: Tensor, low: Tensor) -> Tensor:
    """Return how far the result, averaged back to the grid, is from the input features."""
    return match_loss(pool(result, (low.shape[2], low.shape[3])), low)


def perturbed(picture: Tensor, generator: torch.Generator) -> Tensor:
    """Return pictures (B, 3, H, W) in [0, 1], blurred with probability 0.5, noisy with 0.3, gray with 0.1."""
    blur, noise, gray = (float(torch.rand((), generator=generator)) < p for p in (0.5, 0.3, 0.1))
    out = picture
    if blur:
        taps = torch.exp(-torch.arange(-2.0, 3.0).square() / 2).to(picture)
        kernel = torch.outer(taps, taps)
        weight = (kernel / kernel.sum()).expand(3, 1, 5, 5)
        out = F.conv2d(F.pad(out, (2,) * 4, mode="reflect"), weight, groups=3)
    if gray:
        out = out.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    if noise:
        out = out + 0.02 * torch.randn(out.shape, generator=generator).to(out)
    return out.clamp(0, 1)
