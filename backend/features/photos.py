"""The held-out photographs: shipped with scikit-image and scikit-learn, never trained on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from backend.errors import NotApplicable

HELD_OUT: dict[str, str] = {
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "rocket": "skimage/data/rocket.jpg",
    "motorcycle_left": "skimage/data/motorcycle_left.png",
    "hubble_deep_field": "skimage/data/hubble_deep_field.jpg",
    "china": "sklearn/datasets/images/china.jpg",
    "flower": "sklearn/datasets/images/flower.jpg",
}
TEXTURES: dict[str, str] = {name: f"skimage/data/{name}.png" for name in ("brick", "grass", "gravel")}


def photo_path(name: str) -> Path:
    """Return the file of a held-out photograph or texture.

    Raises:
        NotApplicable: If its package is not installed.
    """
    package, _, rest = (HELD_OUT | TEXTURES)[name].partition("/")
    spec = find_spec(package)
    path = Path(spec.origin).parent / rest if spec and spec.origin else Path(rest)
    if not path.is_file():
        raise NotApplicable(
            f"The held-out photograph {name} is not installed.", "pip install scikit-image scikit-learn"
        )
    return path


def read_photo(name: str) -> Tensor:
    """Return a photograph as RGB in [0, 1], (1, 3, H, W)."""
    with Image.open(photo_path(name)) as image:
        pixels = np.asarray(image.convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255


def square(photo: Tensor, side: int = 448) -> Tensor:
    """Cut the largest centered square and resize it (bicubic), (1, 3, side, side)."""
    height, width = photo.shape[2:]
    edge = min(height, width)
    top, left = (height - edge) // 2, (width - edge) // 2
    cut = photo[:, :, top : top + edge, left : left + edge]
    return F.interpolate(cut, size=(side, side), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def held_out(side: int = 448) -> dict[str, Tensor]:
    """Return all held-out photographs as squares."""
    return {name: square(read_photo(name), side) for name in HELD_OUT}
