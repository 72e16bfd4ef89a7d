"""Attention masks that hide or bias tokens: who may look at whom, in the form that each model family takes.

Models with sliding windows want one mask per layer type, others a single one that holds the window. The library's own
mask builder knows which; here its mask is made explicit, so that tokens can be hidden on top of it, or a number added
to their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from backend.models.language import LanguageModel
from backend.saliency.passes import Mask

FORBIDDEN = -1e4
"""Added to forbidden attention scores: zero weight after softmax, yet finite in every format. Infinity would turn a
row without any allowed key into NaN."""


def visible_keys(model: LanguageModel, length: int) -> Mask | None:
    """Return what the model's own attention allows for a text of this length.

    Args:
        model: The model.
        length: Number of tokens.

    Returns:
        bool ``(length, length)``, query by key, True where the key is visible; or one per layer type; None if the
        model has no such masks.
    """
    config = model.module.config
    dummy = torch.empty((1, length, 0), dtype=model.module.dtype, device=model.device)
    try:
        found = create_masks_for_generate(
            config=config,
            inputs_embeds=dummy,
            attention_mask=None,
            cache=None,
            # any function makes the library build the mask instead of leaving causality to the kernel
            and_mask_function=lambda batch, head, query, key: query >= 0,
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    parts = list(found.values()) if isinstance(found, Mapping) else [found]
    # kernels that take no explicit mask, and layers without attention, leave something else here
    return _each(found, _as_bool) if all(isinstance(part, Tensor) for part in parts) else None


def additive(
    visible: Mask, start: int, stop: int, hidden: Tensor | None, dtype: torch.dtype, bias: Tensor | None = None
) -> Mask:
    """Build the mask of queries ``start`` to ``stop`` over keys 0 to ``stop``.

    Args:
        visible: As from ``visible_keys``.
        start: First query.
        stop: End of queries and keys.
        hidden: bool ``(batch, length)``; keys that no later query may see. A token always sees itself.
        dtype: The model's dtype; biases are rounded to it.
        bias: float32 ``(at least stop,)``; one number per key, added to all attention that the key receives, in every
            layer, head and query row. Gradients flow back to it. None for zeros.

    Returns:
        Additive mask ``(batch or 1, 1, stop - start, stop)``, or one per layer type.
    """

    def build(allowed: Tensor) -> Tensor:
        rows = allowed[start:stop, :stop][None]
        if hidden is not None:
            own = torch.eye(stop, dtype=torch.bool, device=rows.device)[start:stop]
            rows = rows & (~hidden[:, None, :stop] | own)
        level = torch.zeros((), device=rows.device) if bias is None else bias[:stop].to(rows.device)
        return torch.where(rows, level.to(dtype), FORBIDDEN)[:, None]

    return _each(visible, build)


def _each(mask: Mask, change: Callable[[Tensor], Tensor]) -> Mask:
    if isinstance(mask, Tensor):
        return change(mask)
    return {name: change(one) for name, one in mask.items()}


def _as_bool(mask: Tensor) -> Tensor:
    """Read the library's mask, boolean or additive, of shape ``(1, 1, length, length)``."""
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
