"""JAFAR and AnyUp as registered upsamplers: which weights serve a scene, and the guidance each model wants.

Knows weight files by name; the models themselves are in ``jafar`` and ``anyup``. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.features.scene import IMAGENET_MEAN, IMAGENET_STD, Scene
from backend.registry import register
from backend.types import Passes, Tick

if TYPE_CHECKING:
    from backend.features.anyup import AnyUp
    from backend.features.operator import Operator

_READING = (
    "Values are mixtures of the encoder's grid vectors. Fine outlines are taken from the image: a hypothesis about "
    "where features change, not a measurement of the encoder."
)


@dataclass(frozen=True)
class JafarParams:
    """Settings of JAFAR."""

    weights: str = field(
        default="auto",
        metadata={"help": "auto: the weights made for this encoder; or a name from the table, or a path to a file."},
    )
    any_encoder: bool = field(
        default=False,
        metadata={"help": "Use weights of another encoder of the same width. The result means little."},
    )


@dataclass(frozen=True)
class AnyUpParams:
    """Settings of AnyUp."""

    weights: str = field(
        default="auto",
        metadata={"help": "auto: the weights that come with the app; or a name from the table, or a path to a file."},
    )
    window_ratio: float = field(
        default=0.0,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "step": 0.01,
            "help": "Half-width of the attention window as a fraction of the image; 0 keeps the trained one.",
        },
    )


@register(
    "jafar",
    label="JAFAR",
    kind="upsampler",
    family="learned",
    signed=True,
    additive=False,
    params=JafarParams,
    cost=lambda _params, _work: Passes(),
    summary="What does an upsampler trained for this very encoder give?",
    reading=_READING,
    default=True,
)
def jafar(scene: Scene, params: JafarParams, tick: Tick) -> Operator:
    """Prepare JAFAR with the weights bound to the scene's encoder.

    Raises:
        NotApplicable: If there are no weights for this encoder.
        BadFile: If the weights file is not what it should be.
    """
    from backend.features.scene import normalized
    from backend.features.weights import find_jafar

    loaded = find_jafar(params.weights, scene.encoder, scene.features.shape[1], params.any_encoder)
    model = loaded.on(scene.features.device)
    image = normalized(scene.picture, scene.mean, scene.std)
    operator = model.prepare(image, scene.features, scene.size, keep_bytes=scene.keep_bytes, tick=tick)
    operator.notes = loaded.notes
    return cast("Operator", operator)


@register(
    "anyup",
    label="AnyUp",
    kind="upsampler",
    family="learned",
    signed=True,
    additive=False,
    params=AnyUpParams,
    cost=lambda _params, _work: Passes(),
    summary="What does one upsampler for all encoders give?",
    reading=_READING,
    default=True,
)
def anyup(scene: Scene, params: AnyUpParams, tick: Tick) -> Operator:
    """Prepare AnyUp; the guidance carries the ImageNet normalization whatever the encoder.

    Raises:
        NotApplicable: If the app came without weights.
        BadFile: If the weights file is not what it should be.
    """
    from backend.features.scene import normalized
    from backend.features.weights import find_anyup

    loaded = find_anyup(params.weights)
    model = cast("AnyUp", loaded.on(scene.features.device))
    notes = loaded.notes
    ratio = params.window_ratio or model.window_ratio
    if ratio != model.window_ratio:
        notes += (f"The window is {ratio:g} of the image, not the trained {model.window_ratio:g}.",)
    image = normalized(scene.picture, IMAGENET_MEAN, IMAGENET_STD)
    operator = model.prepare(
        image, scene.features, scene.size, keep_bytes=scene.keep_bytes, window_ratio=ratio, tick=tick
    )
    operator.notes = notes
    return cast("Operator", operator)
