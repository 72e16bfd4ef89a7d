"""Less memory for a backward pass: layers keep their input only and run once more when their gradient is due.

Knows layers and sizes; knows nothing of what is differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from backend.models.language import LanguageModel
from backend.models.placement import free_bytes
from backend.saliency.gradients import activation_bytes

_MEMORY_SHARE = 0.5
"""Part of the free memory that one backward pass may fill before layers are run twice instead."""

_WORKING = 4
"""Matrices of query by key that the layer at work holds, beside the one of probabilities that every layer keeps."""


@contextmanager
def checkpointed(module: PreTrainedModel) -> Iterator[int]:
    """Let every layer of this one model run again in the backward pass instead of keeping what it computed.

    The library's own switch works in training mode only. Weights, results and gradients are the same with and without.

    Yields:
        Number of layers that do so; 0 where the model has none that the library knows to be repeatable.
    """
    before: list[tuple[nn.Module, object]] = []
    try:
        for layer in _layers(module):
            before.append((layer, vars(layer).get("forward")))
            again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            layer.forward = again
        yield len(before)
    finally:
        for layer, forward in before:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward  # type: ignore[assignment]


def backward_bytes(model: LanguageModel, length: int) -> float:
    """Estimate what a backward pass over a text keeps in memory, attention matrices included, in bytes.

    Raises:
        NotApplicable: If the model has no backward pass.
    """
    config = model.module.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    square = (layers + _WORKING) * heads * length**2 * torch.finfo(model.module.dtype).bits / 8
    return activation_bytes(model) * length + square


def is_short_of_memory(model: LanguageModel, length: int) -> bool:
    """Say whether a backward pass over a text of this length should rather run layers twice."""
    free = free_bytes(model.device)
    return free is not None and backward_bytes(model, length) > _MEMORY_SHARE * free


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost repeatable layers."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _layers(child)
