"""Checks at the public edge of the feature code: shapes, numbers, sizes. One sentence and a way out for each refusal.

Inner functions trust their callers; nothing here is called twice for the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.errors import BadRequest

MAX_SIDE = 8192  # pixels; a guard against typing errors, memory is checked where it is used


def check_shape(tensor: Tensor, name: str, axes: Sequence[str | int]) -> None:
    """Check the number of axes, and the length of those given as numbers.

    Raises:
        BadRequest: If the shape differs; names the argument, the wanted and the given shape.
    """
    wanted = ", ".join(map(str, axes))
    if tensor.ndim != len(axes):
        raise BadRequest(f"The {name} must have shape ({wanted}); it has {tuple(tensor.shape)}.")
    for length, axis in zip(tensor.shape, axes, strict=True):
        if length == 0 or (isinstance(axis, int) and length != axis):
            raise BadRequest(f"The {name} must have shape ({wanted}); it has {tuple(tensor.shape)}.")


def check_numbers(tensor: Tensor, name: str) -> None:
    """Check for a real floating-point type and finite values.

    Raises:
        BadRequest: If the tensor holds integers, complex numbers, NaN or infinity.
    """
    if not tensor.is_floating_point():
        raise BadRequest(f"The {name} must hold floating-point numbers, not {_short(tensor.dtype)}.", "Convert it.")
    if not bool(torch.isfinite(tensor).all()):
        raise BadRequest(f"The {name} holds NaN or infinite values.", "Replace them before upsampling.")


def check_size(size: Sequence[int] | None, default: tuple[int, int]) -> tuple[int, int]:
    """Return an output size as (height, width).

    Raises:
        BadRequest: If it is not two whole numbers between 1 and ``MAX_SIDE``.
    """
    if size is None:
        return default
    sides = [int(side) for side in size]
    whole = all(side == given for side, given in zip(sides, size, strict=True))
    if len(sides) != 2 or not whole or not all(1 <= side <= MAX_SIDE for side in sides):
        raise BadRequest(
            f"The output size must be (height, width), each from 1 to {MAX_SIDE}; it is {tuple(size)}.",
            "Give two whole numbers.",
        )
    return sides[0], sides[1]


def check_pair(image: Tensor, features: Tensor, channels: int = 3) -> None:
    """Check a guidance image against a feature map.

    Args:
        image: (B, channels, H, W).
        features: (B, C, h, w).
        channels: Wanted number of image channels.

    Raises:
        BadRequest: If shapes, batch sizes or devices do not fit, or values are not finite.
    """
    check_shape(image, "guidance image", ("B", channels, "H", "W"))
    check_shape(features, "feature map", ("B", "C", "h", "w"))
    if image.shape[0] != features.shape[0]:
        raise BadRequest(
            f"There are {image.shape[0]} guidance images but {features.shape[0]} feature maps.",
            "Give one image for each feature map.",
        )
    if image.device != features.device:
        raise BadRequest(
            f"The guidance image is on {image.device}, the feature map on {features.device}.",
            "Move both to one device.",
        )
    check_numbers(image, "guidance image")
    check_numbers(features, "feature map")


def check_chunk(chunk: int | None) -> None:
    """Check a number of queries per chunk.

    Raises:
        BadRequest: If it is below 1.
    """
    if chunk is not None and chunk < 1:
        raise BadRequest(f"A chunk must hold at least one query, not {chunk}.", "Leave it out to choose by memory.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
