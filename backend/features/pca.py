"""Principal components of feature vectors as colors: one basis, one sign rule and one range for all panels.

The basis is fitted on grid vectors, of one picture or several; components are upsampled as three channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.errors import BadRequest
from backend.features.views import affine

COMPONENTS = 9


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Principal components.

    Attributes:
        mean: (C).
        components: (K, C), orthonormal; the largest entry of each is positive.
        shares: (K) share of the variance.
        positions: (K) share of each component that row and column coordinates explain, in [0, 1].
    """

    mean: Tensor
    components: Tensor
    shares: Tensor
    positions: Tensor

    def project(self, features: Tensor) -> Tensor:
        """Return the components of (B, C, h, w) as (B, K, h, w); affine, so it may be upsampled afterwards."""
        return affine(features, self.components, -self.components @ self.mean)

    def useful(self, limit: float = 0.5) -> list[int]:
        """Return the components, in order, without those that mostly encode position."""
        return [index for index, share in enumerate(self.positions.tolist()) if share <= limit]


def fit_basis(maps: Sequence[Tensor], count: int = COMPONENTS, masks: Sequence[Tensor] | None = None) -> Basis:
    """Fit a joint basis.

    Args:
        maps: Feature maps (1, C, h, w) of one encoder; their grids may differ.
        count: Number of components; fewer if there are fewer cells or channels.
        masks: Bool (h, w) per map: the cells to fit on; None for all.

    Raises:
        BadRequest: If maps have different widths, or fewer than two cells are left.
    """
    if len({m.shape[1] for m in maps}) != 1:
        raise BadRequest("A joint basis needs features of one encoder.", "Encode all pictures with the same one.")
    cells = [m[0].flatten(1).T.double() for m in maps]  # cells, C
    kept = cells if masks is None else [c[mask.flatten()] for c, mask in zip(cells, masks, strict=True)]
    vectors = torch.cat(kept)
    if vectors.shape[0] < 2:
        raise BadRequest("Fewer than two cells are left to fit a basis on.", "Keep more of the picture.")
    mean = vectors.mean(0)
    _, singular, directions = torch.linalg.svd(vectors - mean, full_matrices=False)
    count = min(count, directions.shape[0])
    components = directions[:count]
    strongest = components.gather(1, components.abs().argmax(1, keepdim=True))
    components = components * torch.where(strongest < 0, -1.0, 1.0)
    power = singular.square()
    shares = power[:count] / power.sum().clamp(min=1e-300)
    positions = _position_share([(c - mean) @ components.T for c in cells], maps)
    return Basis(mean.float(), components.float(), shares.float(), positions.float())


def _position_share(scores: Sequence[Tensor], maps: Sequence[Tensor]) -> Tensor:
    """Return R² of each component on a constant, the row and the column coordinate."""
    places = []
    for m in maps:
        rows, columns = torch.meshgrid(
            *(torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1).double() for n in m.shape[2:]),
            indexing="ij",
        )
        places.append(torch.stack((torch.ones_like(rows), rows, columns), dim=2).flatten(0, 1).to(m.device))
    design, target = torch.cat(places), torch.cat(list(scores))
    fitted = design @ (torch.linalg.pinv(design) @ target)
    centered = target - target.mean(0)
    rest = (target - fitted).square().sum(0)
    total = centered.square().sum(0)
    return torch.where(total > 0, 1 - rest / total.clamp(min=1e-300), torch.zeros_like(total)).clamp(0, 1)


def foreground(basis: Basis, features: Tensor, keep_high: bool = True) -> Tensor:
    """Return the cells on one side of the first component's mean, bool (h, w); removes a uniform background."""
    first = basis.project(features)[0, 0]
    return first > 0 if keep_high else first <= 0


def color_range(maps: Sequence[Tensor], clip: float = 0.01) -> tuple[Tensor, Tensor]:
    """Return low and high (K) over all maps (1, K, H, W) together, without the outermost share at either end."""
    values = torch.cat([m.movedim(1, 0).flatten(1) for m in maps], dim=1)
    step = max(1, values.shape[1] // 1_000_000)  # quantiles of a million values are exact enough for colors
    sample = values[:, ::step].float()
    return sample.quantile(clip, dim=1), sample.quantile(1 - clip, dim=1)


def to_colors(components: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return (H, W, 3) 8-bit colors of three upsampled components (1, 3, H, W)."""
    span = (high - low).clamp(min=1e-12)[:, None, None]
    scaled = ((components[0] - low[:, None, None]) / span).clamp(0, 1)
    return (scaled * 255).round().to(torch.uint8).movedim(0, 2).cpu()
