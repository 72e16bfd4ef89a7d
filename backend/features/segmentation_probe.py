"""Second benchmark: a linear probe on generated scenes, scored per upsampler by mIoU and boundary F-score.

Training draws pixels and takes their upsampled vectors; testing applies the classifier on the grid and upsamples class
scores. Knows scenes, encoders and upsamplers; draws nothing, writes no file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.errors import NotApplicable
from backend.features.encoders import Encoder, as_picture, encode
from backend.features.evaluation import CONTESTANTS, Contestant
from backend.features.generated_scenes import CLASSES, scene
from backend.features.operator import Operator
from backend.features.probe import Probe, fit_probe
from backend.registry import get_method, make_params
from backend.types import Scalar, Tick, no_tick

NEAR = 8  # pixels from a border that count as near it
SLACK = 2  # pixels that a border may be off in the boundary F-score


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many scenes, and how many pixels are drawn from each for training."""

    train: int = 160
    test: int = 40
    pixels: int = 2048
    side: int = 448


def borders(labels: Tensor) -> Tensor:
    """Return the pixels (H, W) whose right or lower neighbor has another label."""
    edge = torch.zeros_like(labels, dtype=torch.bool)
    edge[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    edge[:-1] |= labels[:-1] != labels[1:]
    return edge


def widened(mask: Tensor, distance: int) -> Tensor:
    """Return the pixels (H, W) within a square of so many pixels around the mask."""
    width = 2 * distance + 1
    return F.max_pool2d(mask[None, None].float(), width, 1, distance)[0, 0] > 0


def boundary_f(seen: Tensor, truth: Tensor, slack: int = SLACK) -> float:
    """Return the F-score of the borders of two label maps (H, W); 1 if both have none."""
    ours, wanted = borders(seen), borders(truth)
    if not bool(ours.any()) and not bool(wanted.any()):
        return 1.0
    precision = float((ours & widened(wanted, slack)).sum()) / max(1, int(ours.sum()))
    recall = float((wanted & widened(ours, slack)).sum()) / max(1, int(wanted.sum()))
    return 2 * precision * recall / max(precision + recall, 1e-12)


def confusion(seen: Tensor, truth: Tensor, classes: int = len(CLASSES)) -> Tensor:
    """Return counts (classes, classes), rows true, columns seen."""
    return torch.bincount(truth.flatten() * classes + seen.flatten(), minlength=classes**2).view(classes, classes)


def mean_iou(counts: Tensor) -> float:
    """Return the mean over the classes that occur of intersection over union."""
    both = counts.diagonal().double()
    either = counts.sum(0) + counts.sum(1) - both
    present = counts.sum(1) > 0
    return float((both[present] / either[present]).mean())


def flat_blocks(truth: Tensor, block: int = 16) -> Tensor:
    """Return the majority class of each block, painted flat: what a perfect block classifier reaches."""
    hot = F.one_hot(truth, len(CLASSES)).permute(2, 0, 1)[None].float()
    most = F.avg_pool2d(hot, block).argmax(1)
    return most[0].repeat_interleave(block, 0).repeat_interleave(block, 1)


def _drawn(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw pixels, half of them near a border; flat indices."""
    near = widened(borders(labels), NEAR).flatten().nonzero()[:, 0]
    close = near[torch.randint(len(near), (count // 2,), generator=generator)] if len(near) else near
    anywhere = torch.randint(labels.numel(), (count - len(close),), generator=generator)
    return torch.cat((close, anywhere))


def _prepared(contestant: Contestant, encoder: Encoder, picture: npt.NDArray[np.uint8]) -> tuple[Operator, Tensor]:
    seen = encode(encoder, as_picture(picture), picture.shape[0])
    method = get_method(contestant.method, "upsampler")
    operator: Operator = method.run(seen.scene(), make_params(method, dict(contestant.params)), no_tick)
    return operator, seen.features


def _vectors(operator: Operator, features: Tensor, pixels: Tensor) -> Tensor:
    """Return upsampled vectors (N, C) of some pixels, row chunk by row chunk."""
    width, out = operator.size[1], features.new_empty(len(pixels), features.shape[1])
    for start, stop in operator.chunks(features.shape[1], rows=64):
        here = (pixels >= start * width) & (pixels < stop * width)
        out[here] = operator.rows(features, start, stop)[0].flatten(0, 1)[pixels[here] - start * width]
    return out


@torch.no_grad()
def probe_rows(
    encoder: Encoder,
    contestants: Sequence[Contestant] = CONTESTANTS,
    seeds: Sequence[int] = (0, 1, 2),
    sizes: Sizes = Sizes(),
    tick: Tick = no_tick,
) -> list[dict[str, Scalar]]:
    """Train and score a probe per upsampler and seed.

    Returns:
        Rows with protocol "segmentation_probe", encoder, method, seed, miou, miou_near (within ``NEAR`` pixels of
        borders), boundary_f, accuracy, seconds per test scene; and the row "flat blocks", an upper bound without
        upsampling.
    """
    rows: list[dict[str, Scalar]] = []
    for seed in seeds:
        for number, contestant in enumerate(contestants):
            try:
                probe = _trained(contestant, encoder, seed, sizes)
            except NotApplicable:
                continue
            rows.append(_scored(contestant, encoder, probe, seed, sizes))
            tick(seed * len(contestants) + number + 1, len(seeds) * len(contestants))
        rows.append(_scored(None, encoder, None, seed, sizes))
    return rows


def _trained(contestant: Contestant, encoder: Encoder, seed: int, sizes: Sizes) -> Probe:
    vectors, labels = [], []
    for index in range(sizes.train):
        picture, truth = scene("train", seed, index, sizes.side)
        target = torch.from_numpy(truth).long()
        pixels = _drawn(target, sizes.pixels, torch.Generator().manual_seed(seed * 10_000 + index))
        vectors.append(_vectors(*_prepared(contestant, encoder, picture), pixels))
        labels.append(target.flatten()[pixels])
    return fit_probe(torch.cat(vectors), torch.cat(labels), len(CLASSES))


def _scored(
    contestant: Contestant | None, encoder: Encoder, probe: Probe | None, seed: int, sizes: Sizes
) -> dict[str, Scalar]:
    total = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64)
    near, f_scores, seconds = total.clone(), [], 0.0
    for index in range(sizes.test):
        picture, labels = scene("test", seed, index, sizes.side)
        truth = torch.from_numpy(labels).long()
        start = time.perf_counter()
        if contestant is None or probe is None:
            seen = flat_blocks(truth)
        else:
            seen = probe.scores(*_prepared(contestant, encoder, picture))[0].argmax(0)
        seconds += time.perf_counter() - start
        close = widened(borders(truth), NEAR)
        total += confusion(seen, truth)
        near += confusion(seen[close], truth[close])
        f_scores.append(boundary_f(seen, truth))
    return {
        "protocol": "segmentation_probe",
        "encoder": encoder.info.tag,
        "method": contestant.name if contestant else "flat blocks",
        "seed": seed,
        "miou": mean_iou(total),
        "miou_near": mean_iou(near),
        "boundary_f": float(np.mean(f_scores)),
        "accuracy": float(total.diagonal().sum() / total.sum()),
        "seconds": seconds / sizes.test,
    }
