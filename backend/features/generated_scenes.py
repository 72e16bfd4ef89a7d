"""Generated scenes with masks that are exact to the pixel: textured shapes on held-out photographs.

A scene is a function of its seed, index and split. A class is a texture family, not a shape and not a color: every
instance draws its own colors, scale, angle and phase. Three families are photographs of textures; training scenes take
their left halves, test scenes their right halves, and backgrounds come from different photographs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter

from backend.features.photos import read_photo

VERSION = 1
CLASSES = ("background", "stripes", "checks", "dots", "rings", "noise", "brick", "grass", "gravel")
BACKGROUNDS = {"train": ("astronaut", "rocket", "china", "motorcycle_left"), "test": ("coffee", "flower", "chelsea")}
_THIN = 12  # pixels
_CAMOUFLAGE = 0.2  # share of scenes whose shapes share their colors and differ in texture only

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.uint8]


def scene(split: str, seed: int, index: int, side: int = 448) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Return an image (side, side, 3) in 8 bits and its labels (side, side), numbers of ``CLASSES``.

    Args:
        split: "train" or "test".
        seed: Of the whole set.
        index: Of the scene.
        side: Pixels.
    """
    random = np.random.default_rng([VERSION, {"train": 0, "test": 1}[split], seed, index])
    image = _background(split, random, side)
    labels = np.zeros((side, side), np.uint8)
    shared = _two_colors(random) if random.random() < _CAMOUFLAGE else None
    count = int(random.integers(4, 10))
    for number in range(count):
        label = int(random.integers(1, len(CLASSES)))
        inside = _shape(random, side, thin=number < 2)
        dark, bright = shared or _two_colors(random)
        mix = _texture(CLASSES[label], split, random, side)[..., None]
        filled = dark * (1 - mix) + bright * mix
        image[inside] = filled[inside]
        labels[inside] = label
    blurred = Image.fromarray(image.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.5))
    noisy = np.asarray(blurred) + random.normal(0, 3, image.shape)
    return noisy.clip(0, 255).astype(np.uint8), labels


def _two_colors(random: np.random.Generator) -> tuple[Floats, Floats]:
    """Return two colors that differ clearly in brightness."""
    dark, bright = random.uniform(0, 140, 3), random.uniform(115, 255, 3)
    return dark, np.maximum(bright, dark.mean() + 60).clip(0, 255)


@lru_cache(maxsize=16)
def _photo(name: str) -> npt.NDArray[np.float32]:
    return (read_photo(name)[0].permute(1, 2, 0) * 255).numpy()


def _background(split: str, random: np.random.Generator, side: int) -> Floats:
    photo = _photo(str(random.choice(BACKGROUNDS[split])))
    edge = int(min(photo.shape[:2]) * random.uniform(0.5, 1.0))
    top, left = (int(random.integers(0, length - edge + 1)) for length in photo.shape[:2])
    cut = Image.fromarray(photo[top : top + edge, left : left + edge].astype(np.uint8))
    return np.asarray(cut.resize((side, side), Image.Resampling.BICUBIC)).astype(np.float64)


def _texture(name: str, split: str, random: np.random.Generator, side: int) -> Floats:
    """Return a share of the bright color in [0, 1] for every pixel."""
    scale, angle = 14 * random.uniform(0.5, 1.5), random.uniform(0, np.pi)
    rows, columns = np.mgrid[:side, :side] + random.uniform(0, 100, (2, 1, 1))
    u: Floats
    v: Floats
    share: Floats
    u, v = rows * np.cos(angle) + columns * np.sin(angle), columns * np.cos(angle) - rows * np.sin(angle)
    if name == "stripes":
        share = (u % scale < scale / 2).astype(float)
        return share
    if name == "checks":
        share = (u // scale + v // scale) % 2
        return share
    if name == "dots":
        share = (np.hypot(u % scale - scale / 2, v % scale - scale / 2) < 0.3 * scale).astype(float)
        return share
    if name == "rings":
        middle = random.uniform(-side / 2, side * 1.5, 2)
        share = 0.5 + 0.5 * np.sin(np.hypot(u - middle[0], 2 * (v - middle[1])) * 2 * np.pi / scale)
        return share
    if name == "noise":
        coarse = torch.from_numpy(random.uniform(0, 1, (1, 1, int(side / scale) + 2, int(side / scale) + 2)))
        smooth = F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False)
        return smooth[0, 0].numpy().clip(0, 1)
    gray = _photo(name).mean(2) / 255
    half = gray.shape[1] // 2
    part = gray[:, :half] if split == "train" else gray[:, half:]
    edge = int(min(part.shape) * random.uniform(0.5, 1.0))
    top, left = (int(random.integers(0, length - edge + 1)) for length in part.shape)
    cut = np.asarray(
        Image.fromarray((part[top : top + edge, left : left + edge] * 255).astype(np.uint8)).resize((side, side))
    )
    low, high = np.percentile(cut, (5, 95))
    share = ((cut - low) / max(float(high - low), 1.0)).clip(0, 1)
    return share


def _shape(random: np.random.Generator, side: int, thin: bool) -> npt.NDArray[np.bool_]:
    """Return a mask with hard edges: a bar or ring of at most ``_THIN`` pixels, or a polygon, star, ellipse or ring."""
    canvas = Image.new("1", (side, side))
    draw = ImageDraw.Draw(canvas)
    x, y = random.uniform(0.15, 0.85, 2) * side
    radius = random.uniform(0.08, 0.22) * side
    kind = random.choice(["bar", "ring"] if thin else ["ellipse", "polygon", "star", "bar", "ring"])
    width = int(random.integers(6, _THIN + 1)) if thin else int(random.integers(_THIN + 2, 31))
    if kind == "bar":
        points = [(x, y), *((x + dx, y + dy) for dx, dy in random.uniform(-0.5, 0.5, (2, 2)) * side)]
        draw.line([tuple(p) for p in points], fill=1, width=width, joint="curve")
    elif kind == "ring":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=1, width=width)
    elif kind == "ellipse":
        flat = radius * random.uniform(0.4, 1.0)
        draw.ellipse((x - radius, y - flat, x + radius, y + flat), fill=1)
    else:
        corners = int(random.integers(3, 10)) if kind == "polygon" else 2 * int(random.integers(4, 8))
        turns = (
            np.sort(random.uniform(0, 2 * np.pi, corners))
            if kind == "polygon"
            else np.arange(corners) * 2 * np.pi / corners
        )
        reach = radius * (np.where(np.arange(corners) % 2, 0.45, 1.0) if kind == "star" else np.ones(corners))
        draw.polygon([(x + r * np.cos(t), y + r * np.sin(t)) for r, t in zip(reach, turns, strict=True)], fill=1)
    return np.asarray(canvas)
