"""What every upsampler starts from: a picture, its features, and the wanted size. Pure data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A picture with the features that an encoder made of it. Both show the same region.

    Attributes:
        picture: RGB in [0, 1], (B, 3, H_g, W_g); guidance of all upsamplers that use one.
        features: (B, C, h, w), finite; always the encoder's own, never a projection or a selection of channels.
        size: Output (H, W).
        mean: The encoder's normalization, per color.
        std: The encoder's normalization, per color.
        encoder: Tag of the encoder with layer and normalization, to which JAFAR weights are bound; empty if unknown.
        keep_bytes: Memory that an operator may use to answer later calls faster.
    """

    picture: Tensor
    features: Tensor
    size: tuple[int, int]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    encoder: str = ""
    keep_bytes: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Grid size (h, w)."""
        return self.features.shape[2], self.features.shape[3]


def normalized(picture: Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]) -> Tensor:
    """Return (picture - mean) / std per color, (B, 3, H, W)."""
    center = picture.new_tensor(mean).view(3, 1, 1)
    spread = picture.new_tensor(std).view(3, 1, 1)
    return (picture - center) / spread
