"""Keys and values of a text's beginning, computed once and read by many passes over different endings.

The library's cache grows with every pass; this one is read only, takes any batch size, and holds one layer of a batch
at a time instead of a copy per variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from backend.models.language import LanguageModel
from backend.saliency.passes import logits_at

KeysValues = tuple[Tensor, Tensor]
"""One layer: keys and values, each ``(1, heads, length, width)``."""


class _ReadOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer whose keys and values are put before those of a pass, and stay as they are."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix = (keys, values)
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        keys, values = (part.expand(len(key_states), -1, -1, -1) for part in self.prefix)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


@torch.no_grad()
def read_prefix(model: LanguageModel, ids: Sequence[int]) -> list[KeysValues] | None:
    """Run the text once and return every layer's keys and values; None if a layer does not keep all of them."""
    cache = DynamicCache()  # without the config, layers with a sliding window keep everything too
    logits_at(model, torch.tensor([list(ids)], device=model.device), [len(ids) - 1], cache=cache)
    layers: list[KeysValues] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4:
            return None
        if keys.shape[-2] != len(ids) or values.shape[-2] != len(ids):
            return None
        layers.append((keys, values))
    return layers or None


def prefix_cache(layers: Sequence[KeysValues], length: int) -> Cache | None:
    """Return a cache that holds the first ``length`` tokens of the text; None for none of them."""
    if length == 0:
        return None
    return Cache(layers=[_ReadOnlyLayer(keys[:, :, :length], values[:, :, :length]) for keys, values in layers])
