"""Where training examples come from: the embedded encoder for JAFAR; many kinds of features for AnyUp.

An example is a guidance picture, features of a small picture, and features of the large one to be matched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.features.encoders import Encoder, load_encoder
from backend.features.evaluation import dense_truth
from backend.features.scene import IMAGENET_MEAN, IMAGENET_STD, normalized

Triple = tuple[float, float, float]
_INPUTS = (112, 128, 160, 192, 224)


@dataclass(frozen=True)
class Example:
    """One batch.

    Attributes:
        guide: (B, 3, G, G) in [0, 1].
        low: (B, C, h, w) input features.
        target: (B, C, H, W) features to match.
        size: Size that is asked of the upsampler.
        window: Part of the result that the target covers; None for all.
        mean: Normalization of the guidance.
        std: Normalization of the guidance.
    """

    guide: Tensor
    low: Tensor
    target: Tensor
    size: tuple[int, int]
    window: tuple[slice, slice] | None
    mean: Triple
    std: Triple


class Source(ABC):
    """Makes examples from large pictures."""

    @abstractmethod
    def example(self, pictures: Tensor, names: list[int], step: int, generator: torch.Generator) -> Example:
        """Return an example; the same for the same pictures, step and generator.

        Args:
            pictures: (B, 3, 448, 448) in [0, 1].
            names: A number for each picture, under which its features may be kept.
            step: Training step.
            generator: Of everything random.
        """


def resized(picture: Tensor, side: int, antialias: bool = True) -> Tensor:
    """Return pictures at another size (bilinear)."""
    out = F.interpolate(picture, size=(side, side), mode="bilinear", antialias=antialias, align_corners=False)
    return out.clamp(0, 1)


class JafarSource(Source):
    """Features of one encoder: of the picture, and of the picture shrunk by a factor drawn anew for each batch."""

    def __init__(self, encoder: Encoder, pooled: float) -> None:
        self.encoder, self.pooled = encoder, pooled
        self._kept: dict[tuple[int, int], Tensor] = {}  # features by picture and side, float16: each is read once
        self.inputs = [side for side in _INPUTS if side % encoder.info.multiple == 0]

    @torch.no_grad()
    def example(self, pictures: Tensor, names: list[int], step: int, generator: torch.Generator) -> Example:
        """See the base class."""
        info = self.encoder.info
        target = self._read(pictures, names, pictures.shape[2])
        size = (target.shape[2], target.shape[3])
        if float(torch.rand((), generator=generator)) < self.pooled:
            low = F.avg_pool2d(target, 2)
        else:
            drawn = int(torch.randint(len(self.inputs), (), generator=generator))
            low = self._read(pictures, names, self.inputs[drawn])
        guide = resized(pictures, 224 if step % 4 == 3 else 112)  # sizes are mixed: it must not depend on one
        return Example(guide, low, target, size, None, info.mean, info.std)

    def _read(self, pictures: Tensor, names: list[int], side: int) -> Tensor:
        """Return features of the pictures at a size; some sizes are shrunk with and some without antialiasing."""
        info = self.encoder.info
        missing = [i for i, name in enumerate(names) if (name, side) not in self._kept]
        if missing:
            some = pictures[missing]
            if side != pictures.shape[2]:
                some = resized(some, side, antialias=side in _INPUTS[::2])
            for i, one in zip(missing, self.encoder.features(normalized(some, info.mean, info.std)), strict=True):
                self._kept[names[i], side] = one.half()
        return torch.stack([self._kept[name, side] for name in names]).float()


class AnyUpSource(Source):
    """Features of many kinds, so that no encoder, width or order of channels can be learned by heart."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.real = [load_encoder(layer=layer, device=device) for layer in ("s16", "s32", "s8")]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            vit = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True)
            net = timm.create_model("test_resnet", features_only=True, out_indices=(3,))
            stem = nn.Sequential(nn.Conv2d(3, 96, 28, 16, 6), nn.GELU(), nn.Conv2d(96, 128, 1))
        self.random = [part.to(device).eval().requires_grad_(False) for part in (vit, net, stem)]

    @torch.no_grad()
    def example(self, pictures: Tensor, names: list[int], step: int, generator: torch.Generator) -> Example:
        """See the base class; the target is a window of 224 pixels at a corner on a multiple of 32."""
        corner = [32 * int(torch.randint(8, (), generator=generator)) for _ in range(2)]
        part = pictures[:, :, corner[0] : corner[0] + 224, corner[1] : corner[1] + 224]
        small = resized(pictures, 224)
        kind = float(torch.rand((), generator=generator))
        if kind < 0.1:
            return self._dense(small, generator)
        if kind < 0.3:
            low, target, stride = self._random(small, part, generator)
        else:
            low, target, stride = self._real(small, part, generator)
            if kind < 0.55:
                low, target = self._projected(low, target, generator)
        if float(torch.rand((), generator=generator)) < 0.5:
            low, target = self._shuffled(low, target, generator)
        cells = 448 // stride
        size = (cells, cells)
        top, left = (round(c / stride) for c in corner)
        window = (slice(top, top + target.shape[2]), slice(left, left + target.shape[3]))
        guide = small if step % 4 == 3 else resized(pictures, 112)
        return Example(guide, low, target, size, window, IMAGENET_MEAN, IMAGENET_STD)

    def _real(self, small: Tensor, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        encoder = self.real[int(torch.randint(len(self.real), (), generator=generator))]
        info = encoder.info
        low, target = (encoder.features(normalized(p, info.mean, info.std)) for p in (small, part))
        return low, target, info.stride

    def _random(self, small: Tensor, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        which = int(torch.randint(3, (), generator=generator))
        model = self.random[which]

        def read(picture: Tensor) -> Tensor:
            image = normalized(picture, IMAGENET_MEAN, IMAGENET_STD)
            if which == 0:
                tokens: Tensor = model.forward_features(image)[:, 1:]
                side = round(tokens.shape[1] ** 0.5)
                return tokens.transpose(1, 2).reshape(len(image), -1, side, side)
            if which == 1:
                return model(image)[0]
            return model(image)

        low, target = read(small), read(part)
        return low, target, 224 // low.shape[2]

    def _projected(self, low: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width = (16, 32, 64, 128, 256, 384)[int(torch.randint(6, (), generator=generator))]
        square = torch.randn(max(width, low.shape[1]), max(width, low.shape[1]), generator=generator)
        rotation = torch.linalg.qr(square)[0][:width, : low.shape[1]].to(low)
        mapped = [torch.einsum("kc,bchw->bkhw", rotation, x) for x in (low, target)]
        return mapped[0], mapped[1]

    def _shuffled(self, low: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        order = torch.randperm(low.shape[1], generator=generator).to(low.device)
        scale = torch.exp(0.5 * torch.randn(low.shape[1], generator=generator)).to(low)[:, None, None]
        return low[:, order] * scale, target[:, order] * scale

    def _dense(self, small: Tensor, generator: torch.Generator) -> Example:
        """Hand-made maps with exact pixels; other mixtures and windows than the benchmark's."""
        seed = 1000 + int(torch.randint(1 << 30, (), generator=generator))
        box = (3, 5, 7, 13)[int(torch.randint(4, (), generator=generator))]
        cells = (14, 16, 28)[int(torch.randint(3, (), generator=generator))]
        image = normalized(small, IMAGENET_MEAN, IMAGENET_STD)
        truth = dense_truth(image, seed, channels=48, box=box)
        low = F.adaptive_avg_pool2d(truth, cells)
        target = F.adaptive_avg_pool2d(truth, 112)
        return Example(small, low, target, (112, 112), None, IMAGENET_MEAN, IMAGENET_STD)
