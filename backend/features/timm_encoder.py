"""Encoders of the timm library: vision transformers by block, convolutional and hierarchical networks by level.

Knows how timm's models are built and where their features and token counts are; knows no hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from backend.errors import BadRequest, ModelUnavailable
from backend.features.encoders import Encoder, EncoderInfo, Triple
from backend.models.weights import content_hash, find_weights

_STRIDES = (8, 16, 32)  # of levels that are offered; finer ones are hardly features
_DEFAULT_STRIDE = 16


class TimmEncoder(Encoder):
    """A timm model, read at one layer."""

    def __init__(
        self,
        encoder_id: str,
        name: str,
        layer: str = "",
        *,
        weights: Path | None = None,
        revision: str = "random",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Build.

        Args:
            encoder_id: As requested.
            name: timm's name of the network, with or without tag.
            layer: "last" or "block3" for transformers, "s16" for levels; empty for the default.
            weights: Safetensors file; None for random weights.
            revision: Content hash of the weights.
            device: Where it goes.
            dtype: Of the weights.
            config: timm's ``pretrained_cfg`` of the model, as its folder gives it.

        Raises:
            BadRequest: If the name or layer is unknown.
            ModelUnavailable: If the weights do not fit.
        """
        self.device = torch.device(device)
        self._dtype = dtype
        if not timm.is_model(name.split(".")[0]):
            raise BadRequest(f"timm has no model named {name!r}.", "See timm.list_models().")
        extra: dict[str, Any] = {} if config is None else {"pretrained_cfg_overlay": config}
        whole = _created(name, weights, {"num_classes": 0, **extra}, dynamic=True)
        self.is_transformer = hasattr(whole, "num_prefix_tokens") and hasattr(whole, "blocks")
        data: dict[str, Any] = resolve_model_data_config(whole)  # type: ignore[no-untyped-call]
        if self.is_transformer:
            self._prepare_transformer(whole, layer)
        else:
            whole = self._prepare_levels(name, weights, extra, layer)
        self._model = whole.to(device=self.device, dtype=dtype).eval().requires_grad_(False)
        source = encoder_id if encoder_id.startswith("timm/") else f"timm/{name}"
        self.info = EncoderInfo(
            id=encoder_id,
            tag=f"{source}/{self._layer}",
            architecture=name,
            layer=self._layer,
            layers=tuple(self._layers),
            channels=self._channels,
            stride=self._stride,
            multiple=self._multiple,
            mean=cast(Triple, tuple(data["mean"])),
            std=cast(Triple, tuple(data["std"])),
            prefix_tokens=int(getattr(whole, "num_prefix_tokens", 0)) if self.is_transformer else 0,
            trained_grid=int(data["input_size"][1]) // self._stride if self.is_transformer else 0,
            revision=revision,
        )

    @classmethod
    def from_folder(
        cls,
        encoder_id: str,
        folder: Path,
        config: dict[str, Any],
        layer: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> TimmEncoder:
        """Load a model's folder in timm's hub layout: ``config.json`` and ``model.safetensors``."""
        files = find_weights(folder).files
        if len(files) != 1:
            raise ModelUnavailable(f"{encoder_id} has its weights in several files.", "timm models have one file.")
        described = config.get("pretrained_cfg")
        known = {"mean", "std", "input_size", "fixed_input_size", "first_conv", "classifier", "num_classes"}
        overlay = {k: v for k, v in described.items() if k in known} if isinstance(described, dict) else {}
        name = str(config["architecture"])
        return cls(
            encoder_id,
            name,
            layer,
            weights=files[0],
            revision=content_hash(files),
            device=device,
            dtype=dtype,
            config=overlay,
        )

    def features(self, image: Tensor) -> Tensor:
        """Return (B, C, h, w) float32; see the base class."""
        image = image.to(self._dtype)
        if not self.is_transformer:
            level = self._model(image)[self._index]
            return cast(Tensor, (level.permute(0, 3, 1, 2) if self._channels_last else level).float())
        out = self._model.forward_intermediates(
            image,
            indices=[self._index],
            norm=self._layer == "last",
            output_fmt="NCHW",
            intermediates_only=True,
            return_prefix_tokens=True,
        )[0]
        return cast(Tensor, (out[0] if isinstance(out, tuple) else out).float())

    def _prepare_transformer(self, model: Any, layer: str) -> None:
        depth = len(model.blocks)
        self._layers = [*(f"block{i}" for i in range(depth - 1)), "last"]
        self._layer = _chosen(layer or "last", self._layers)
        self._index = self._layers.index(self._layer)
        patch = model.patch_embed.patch_size
        self._stride = self._multiple = int(patch[0] if isinstance(patch, (tuple, list)) else patch)
        self._channels = int(model.num_features if self._layer == "last" else model.embed_dim)

    def _prepare_levels(self, name: str, weights: Path | None, extra: dict[str, Any], layer: str) -> nn.Module:
        levels: Any = _created(name, weights, {"features_only": True, **extra})
        strides = [int(s) for s in levels.feature_info.reduction()]
        widths = [int(c) for c in levels.feature_info.channels()]
        by_name = {f"s{s}": i for i, s in enumerate(strides) if s in _STRIDES}  # the deepest of each stride
        if not by_name:
            raise BadRequest(f"{name} has no level of stride 8, 16 or 32.", "Choose another encoder.")
        default = f"s{_DEFAULT_STRIDE}" if f"s{_DEFAULT_STRIDE}" in by_name else list(by_name)[-1]
        self._layers = list(by_name)
        self._layer = _chosen(layer or default, self._layers)
        self._index = by_name[self._layer]
        self._stride, self._multiple, self._channels = strides[self._index], max(strides), widths[self._index]
        self._channels_last = str(getattr(levels, "output_fmt", "NCHW")).endswith("NHWC")
        return cast(nn.Module, levels)


def _created(name: str, weights: Path | None, arguments: dict[str, Any], dynamic: bool = False) -> Any:
    """Create a timm model; with any input size where its class can."""
    overlay = dict(arguments.pop("pretrained_cfg_overlay", {}))
    if weights is not None:
        overlay["file"] = str(weights)
    options = {**arguments, "pretrained": weights is not None, "pretrained_cfg_overlay": overlay}
    tries: list[dict[str, Any]] = [{"dynamic_img_size": True}] if dynamic else []
    tries += [{"strict_img_size": False}, {}]
    for number, more in enumerate(tries):
        try:
            return timm.create_model(name, **options, **more)
        except TypeError:  # this class does not know the keyword
            if number == len(tries) - 1:
                raise
        except (RuntimeError, KeyError, ValueError) as error:
            raise ModelUnavailable(
                f"{name} cannot be built from these files: {str(error).splitlines()[0][:200]}",
                "Check the model's files.",
            ) from None
    raise AssertionError("unreachable: the last try returns or raises")


def _chosen(layer: str, layers: list[str]) -> str:
    if layer not in layers:
        raise BadRequest(f"The encoder has no layer {layer!r}.", f"Its layers: {', '.join(layers)}.")
    return layer
