"""Measured quality of upsamplers on held-out photographs: three protocols, rows and their means.

``recomputed``: features of the shrunken photo against features of the photo. ``pooled``: features averaged down
against themselves. ``dense_channels``: hand-made maps with exact full-resolution truth, no encoder. They answer
different questions and are never mixed. Knows operators and encoders; draws nothing, writes no file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.errors import NotApplicable
from backend.features.blocks import pool
from backend.features.encoders import Encoder
from backend.features.scene import IMAGENET_MEAN, IMAGENET_STD, Scene, normalized
from backend.registry import get_method, make_params
from backend.types import Scalar, Tick, no_tick

PROTOCOLS = ("recomputed", "pooled", "dense_channels")
MEAN_VECTOR, PICK_BEST = "mean vector", "pick best"
DENSE_GRIDS = (14, 16, 28)
_DENSE_SIDE = 224
_BOX = 9
_CHANNELS = 48


@dataclass(frozen=True, slots=True)
class Contestant:
    """An upsampler with its settings, under the name that rows carry."""

    name: str
    method: str
    params: tuple[tuple[str, Scalar], ...] = ()


CONTESTANTS: tuple[Contestant, ...] = tuple(
    Contestant(name, name) for name in ("nearest", "bilinear", "bicubic", "joint_bilateral", "guided", "jafar", "anyup")
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        protocol: One of ``PROTOCOLS``.
        image: Name of the photograph.
        encoder: Encoder with stride, e.g. "efficientnet_lite0_s16"; for dense channels the grid, e.g. "grid16".
        method: Name of the upsampler.
        factor: How many times larger the output's sides are than the input's.
        cosine: Mean over positions of the cosine to the truth.
        centred_cosine: The same after subtracting the truth's mean vector from both.
        relative_mse: Σ(y - t)² / Σ(t - mean of t)².
        seconds: Wall time of the upsampler.
    """

    protocol: str
    image: str
    encoder: str
    method: str
    factor: float
    cosine: float
    centred_cosine: float
    relative_mse: float
    seconds: float


def scores(result: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """Return cosine, centered cosine and relative MSE of (1, C, H, W) against a truth of that shape."""
    middle = truth.mean((2, 3), keepdim=True)
    cosine = F.cosine_similarity(result, truth, dim=1).mean()
    centered = F.cosine_similarity(result - middle, truth - middle, dim=1).mean()
    error = (result - truth).square().sum() / (truth - middle).square().sum()
    return float(cosine), float(centered), float(error)


def pick_best(low: Tensor, truth: Tensor) -> Tensor:
    """Return, for each position, the low-resolution vector nearest to the truth: the reach of hard selection."""
    vectors = low[0].flatten(1).T
    chosen = torch.cdist(truth[0].flatten(1).T, vectors).argmin(1)
    return vectors[chosen].T.reshape(truth.shape)


def upsampled(contestant: Contestant, scene: Scene) -> tuple[Tensor, float]:
    """Return a contestant's result and its seconds."""
    method = get_method(contestant.method, "upsampler")
    start = time.perf_counter()
    operator = method.run(scene, make_params(method, dict(contestant.params)), no_tick)
    result = operator.apply(scene.features)
    return result, time.perf_counter() - start


def measure(
    scene: Scene, truth: Tensor, contestants: Iterable[Contestant], label: tuple[str, str, str, float]
) -> list[Row]:
    """Return the rows of one setting, with the mean vector and the best pick beside the contestants.

    Args:
        scene: Picture, input features, size of the truth.
        truth: (1, C, H, W).
        contestants: The upsamplers; one that cannot serve this encoder is left out.
        label: Protocol, image, encoder, factor.
    """
    protocol, image, encoder, factor = label
    results: list[tuple[str, Tensor, float]] = []
    for contestant in contestants:
        try:
            results.append((contestant.name, *upsampled(contestant, scene)))
        except NotApplicable:
            continue
    results.append((MEAN_VECTOR, truth.mean((2, 3), keepdim=True).expand_as(truth), 0.0))
    results.append((PICK_BEST, pick_best(scene.features, truth), 0.0))
    return [
        Row(protocol, image, encoder, name, factor, *scores(result, truth), seconds)
        for name, result, seconds in results
    ]


def shrunk(photo: Tensor, side: int) -> Tensor:
    """Return the photo at another size (bilinear, antialiased)."""
    return F.interpolate(photo, size=(side, side), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)


@torch.no_grad()
def encoder_rows(
    encoder: Encoder,
    photos: Mapping[str, Tensor],
    contestants: Sequence[Contestant] = CONTESTANTS,
    factors: Sequence[int] = (2, 4),
    label: str = "",
    guidance: int | None = None,
    tick: Tick = no_tick,
) -> list[Row]:
    """Measure the protocols ``recomputed`` and ``pooled``.

    Args:
        encoder: Any encoder; the truth is what it sees in the whole photo.
        photos: Squares (1, 3, N, N), N a multiple of the encoder's at every factor.
        contestants: The upsamplers.
        factors: How much smaller the input is; one that leaves a photo or grid too small is left out.
        label: Name of the encoder in the rows; its tag by default.
        guidance: Side of the guidance image; the photo's own by default.
        tick: Called after every photo.
    """
    info, rows = encoder.info, []
    name = label or info.tag
    for number, (title, photo) in enumerate(photos.items(), 1):
        truth = encoder.features(normalized(photo, info.mean, info.std))
        guide = photo if guidance is None else shrunk(photo, guidance)
        grid = (truth.shape[2], truth.shape[3])
        for factor in factors:
            side = photo.shape[2] // factor
            inputs: list[tuple[str, Tensor]] = []
            if side % info.multiple == 0 and side // info.stride >= 2:
                low = encoder.features(normalized(shrunk(photo, side), info.mean, info.std))
                inputs.append(("recomputed", low))
            if grid[0] % factor == 0 and grid[0] // factor >= 2:
                inputs.append(("pooled", F.avg_pool2d(truth, factor)))
            for protocol, low in inputs:
                scene = Scene(guide, low, grid, info.mean, info.std, info.tag)
                rows += measure(scene, truth, contestants, (protocol, title, name, float(factor)))
        tick(number, len(photos))
    return rows


def dense_truth(image: Tensor, seed: int = 1, channels: int = _CHANNELS, box: int = _BOX) -> Tensor:
    """Return hand-made maps with exact pixels: tanh of a random mixture of colors, blurs and edge energies.

    Args:
        image: ImageNet-normalized, (1, 3, H, W).
        seed: Of the mixture.
        channels: Number of maps.
        box: Odd side of the averaging window.

    Returns:
        (1, channels, H, W).
    """
    inside = F.avg_pool2d(image, box, 1, box // 2, count_include_pad=False)
    across = F.pad(image[..., 1:] - image[..., :-1], (0, 1)).abs()
    down = F.pad(image[..., 1:, :] - image[..., :-1, :], (0, 0, 0, 1)).abs()
    energies = [F.avg_pool2d(edges, box, 1, box // 2, count_include_pad=True) for edges in (across, down)]
    stack = torch.cat((image, inside, *energies), dim=1)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, 12, generator=generator) / 2
    shift = torch.randn(channels, generator=generator) * 0.3
    return torch.tanh(torch.einsum("kc,bchw->bkhw", weight, stack) + shift[None, :, None, None])


@torch.no_grad()
def dense_rows(
    photos: Mapping[str, Tensor],
    contestants: Sequence[Contestant] = CONTESTANTS,
    grids: Sequence[int] = DENSE_GRIDS,
    side: int = _DENSE_SIDE,
    tick: Tick = no_tick,
) -> list[Row]:
    """Measure the protocol ``dense_channels``; JAFAR takes no part, since these maps have no encoder."""
    rows: list[Row] = []
    for number, (title, photo) in enumerate(photos.items(), 1):
        picture = shrunk(photo, side)
        truth = dense_truth(normalized(picture, IMAGENET_MEAN, IMAGENET_STD))
        for grid in grids:
            scene = Scene(picture, pool(truth, (grid, grid)), (side, side))
            rows += measure(scene, truth, contestants, ("dense_channels", title, f"grid{grid}", side / grid))
        tick(number, len(photos))
    return rows


def summary(rows: Iterable[Row]) -> list[dict[str, Scalar]]:
    """Return the means over photographs per protocol, encoder, method and factor, in order of appearance."""
    groups: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.protocol, row.encoder, row.method, row.factor), []).append(row)
    return [
        {
            "protocol": protocol,
            "encoder": encoder,
            "method": method,
            "factor": factor,
            "images": len(group),
            "cosine": fmean(r.cosine for r in group),
            "centred_cosine": fmean(r.centred_cosine for r in group),
            "relative_mse": fmean(r.relative_mse for r in group),
            "seconds": fmean(r.seconds for r in group),
        }
        for (protocol, encoder, method, factor), group in groups.items()
    ]


def as_table(rows: Sequence[Row]) -> dict[str, list[dict[str, Scalar]]]:
    """Return rows and summary as plain values, ready for a JSON file."""
    return {"rows": [asdict(row) for row in rows], "summary": summary(rows)}
