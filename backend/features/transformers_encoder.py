"""Vision models of the transformers library: DINOv2, DINOv3, ViT, CLIP and SigLIP by block, backbones by stage.

Knows where each family keeps its tokens and how many stand before the patches; knows no hub. Safetensors only, no
code from a model's folder, and our own resizing instead of the processor's crop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPVisionModel,
    SiglipVisionModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING

from backend.errors import BadRequest, ModelUnavailable, NotApplicable
from backend.features.encoders import Encoder, EncoderInfo, Triple
from backend.models.weights import content_hash, find_weights

_TOKENS = {"dinov2", "dinov2_with_registers", "dinov3_vit", "vit", "clip", "clip_vision_model", "siglip"}
_TOKENS |= {"siglip_vision_model"}
_ANY_SIZE = {"dinov2", "dinov2_with_registers", "dinov3_vit"}  # the others want a flag to change their size
_NO_CLASS = {"siglip", "siglip_vision_model"}
_LEVELS = {"convnext", "convnextv2", "resnet", "swin", "swinv2", "dinov3_convnext", "focalnet", "hgnet_v2", "pvt_v2"}
_IMAGENET: tuple[Triple, Triple] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TransformersEncoder(Encoder):
    """A transformers vision model, read at one layer."""

    def __init__(
        self,
        encoder_id: str,
        model: Any,
        kind: str,
        layer: str = "",
        *,
        normalization: tuple[Triple, Triple] = _IMAGENET,
        revision: str = "random",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap a model.

        Args:
            encoder_id: As requested.
            model: Vision model or backbone.
            kind: ``model_type`` of its configuration.
            layer: "last" or "block3" for transformers, "s16" for stages; empty for the default.
            normalization: Mean and standard deviation per color.
            revision: Content hash of the weights.
            device: Where it goes.
            dtype: Of the weights.
        """
        self.device, self._dtype, self._kind = torch.device(device), dtype, kind
        self._model = model.to(device=self.device, dtype=dtype).eval().requires_grad_(False)
        config = model.config
        self._is_tokens = kind in _TOKENS
        trained = 0
        if self._is_tokens:
            size, patch = (_side(value) for value in (config.image_size, config.patch_size))
            depth, width = int(config.num_hidden_layers), int(config.hidden_size)
            layers = [*(f"block{i}" for i in range(depth - 1)), "last"]
            stride = multiple = patch
            trained = size // patch
            default = "last"
        else:
            stages = list(model.out_features)
            widths, multiple = list(model.channels), 32
            # A stage's stride is measured, not believed from the name.
            with torch.no_grad():
                probe = torch.zeros(1, 3, 64, 64, device=self.device, dtype=dtype)
                strides = [64 // level.shape[2] for level in model(probe).feature_maps]
            by_name = {f"s{s}": i for i, s in enumerate(strides) if s in (8, 16, 32)}
            if not by_name:
                raise BadRequest(
                    f"{encoder_id} has no stage of stride 8, 16 or 32: {', '.join(stages)}.", "Choose another."
                )
            layers, default = list(by_name), "s16" if "s16" in by_name else list(by_name)[-1]
        layer = layer or default
        if layer not in layers:
            raise BadRequest(f"The encoder has no layer {layer!r}.", f"Its layers: {', '.join(layers)}.")
        self._index = layers.index(layer)
        if not self._is_tokens:
            self._index = by_name[layer]
            stride, width = strides[self._index], int(widths[self._index])
        self._prefix = int(getattr(config, "num_register_tokens", 0) or 0) + (kind not in _NO_CLASS)
        self._last = layer == "last"
        self.info = EncoderInfo(
            id=encoder_id,
            tag=f"{encoder_id}/{layer}",
            architecture=type(model).__name__,
            layer=layer,
            layers=tuple(layers),
            channels=width,
            stride=stride,
            multiple=multiple,
            mean=normalization[0],
            std=normalization[1],
            prefix_tokens=self._prefix if self._is_tokens else 0,
            trained_grid=trained,
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
    ) -> TransformersEncoder:
        """Load a model's folder.

        Raises:
            NotApplicable: If the model needs code of its own, or its family is not known here.
            ModelUnavailable: If its weights are missing or damaged.
        """
        kind = str(config.get("model_type", ""))
        if "auto_map" in config and kind not in _TOKENS | _LEVELS:
            raise NotApplicable(
                f"{encoder_id} runs program code of its own, which is never executed here.",
                "Look for the same model in timm or transformers.",
            )
        if kind not in _TOKENS | _LEVELS:
            raise NotApplicable(
                f"Vision models of type {kind or 'unknown'} cannot be read here.",
                "DINOv2, DINOv3, ViT, CLIP, SigLIP, ConvNeXt, ResNet and Swin can; so can any timm model.",
            )
        files = find_weights(folder).files
        options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        try:
            if kind in _LEVELS:
                read = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
                read.out_indices = list(range(1, len(read.stage_names)))
                options["config"] = read
                backbone: Any = MODEL_FOR_BACKBONE_MAPPING[type(read)]
                model = backbone.from_pretrained(str(folder), **options)
            else:
                model = _class(kind).from_pretrained(str(folder), **options)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise ModelUnavailable(
                f"{encoder_id} cannot be loaded: {str(error).splitlines()[0][:200]}", "Check the model's files."
            ) from None
        return cls(
            encoder_id,
            model,
            kind,
            layer,
            normalization=_normalization(folder),
            revision=content_hash(files),
            device=device,
            dtype=dtype,
        )

    def features(self, image: Tensor) -> Tensor:
        """Return (B, C, h, w) float32; see the base class."""
        image = image.to(self._dtype)
        if not self._is_tokens:
            return cast(Tensor, self._model(image).feature_maps[self._index].float())
        flags = {} if self._kind in _ANY_SIZE else {"interpolate_pos_encoding": True}
        out = self._model(image, output_hidden_states=not self._last, **flags)
        tokens = out.last_hidden_state if self._last else out.hidden_states[self._index + 1]
        rows, columns = image.shape[2] // self.info.stride, image.shape[3] // self.info.stride
        if tokens.shape[1] - rows * columns != self._prefix:
            raise ModelUnavailable(
                f"{self.info.id} gave {tokens.shape[1]} tokens for {rows} × {columns} patches + {self._prefix}.",
                "This encoder cannot be used here.",
            )
        patches = tokens[:, self._prefix :].transpose(1, 2)
        return cast(Tensor, patches.reshape(image.shape[0], -1, rows, columns).float())


def _class(kind: str) -> Any:
    return {
        "clip": CLIPVisionModel,
        "clip_vision_model": CLIPVisionModel,
        "siglip": SiglipVisionModel,
        "siglip_vision_model": SiglipVisionModel,
    }.get(kind, AutoModel)


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _normalization(folder: Path) -> tuple[Triple, Triple]:
    """Read mean and standard deviation of the image processor; ImageNet's where it has none."""
    try:
        stored = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        mean, std = (tuple(float(v) for v in stored[key]) for key in ("image_mean", "image_std"))
    except (OSError, ValueError, KeyError, TypeError):
        return _IMAGENET
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        return _IMAGENET
    return mean, std
