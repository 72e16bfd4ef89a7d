"""Linear probes: a classifier per pixel, trained on vectors, applied on the grid and upsampled as class scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.features.operator import Operator
from backend.features.views import affine_view


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Class scores weight · y + bias; weight (K, C), bias (K)."""

    weight: Tensor
    bias: Tensor

    def scores(self, operator: Operator, features: Tensor) -> Tensor:
        """Return class scores (B, K, H, W) at full resolution; softmax and argmax come after."""
        return affine_view(operator, features, self.weight, self.bias)


def fit_probe(vectors: Tensor, labels: Tensor, classes: int, ridge: float = 1e-4, rounds: int = 100) -> Probe:
    """Fit a multinomial logistic regression by L-BFGS on standardized channels.

    Args:
        vectors: (N, C) float32.
        labels: int64 (N) in 0 … classes - 1.
        classes: Number of classes K.
        ridge: Weight of the squared parameters beside the mean loss.
        rounds: Most iterations.
    """
    mean, spread = vectors.mean(0), vectors.std(0).clamp(min=1e-6)
    scaled = (vectors - mean) / spread
    weight = torch.zeros(classes, vectors.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=rounds, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(scaled @ weight.T + bias, labels) + ridge * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    scaled_weight = weight.detach() / spread
    return Probe(scaled_weight, bias.detach() - scaled_weight @ mean)
