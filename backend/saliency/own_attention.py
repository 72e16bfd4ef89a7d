"""An attention function of our own that turns the attention to single tokens down, for one model at a time.

The library looks attention functions up by name. Ours is registered under its own name, which changes nothing for
anybody, and one model instance is switched to that name for one pass. What the function shall turn down is kept per
module of that instance, so that two models in two threads cannot disturb each other.
Knows attention scores; knows nothing of questions, units or methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from backend.errors import NotApplicable
from backend.saliency.masks import FORBIDDEN

NAME = "attriscope_suppressed"
"""The name under which the library finds the function."""


@dataclass(eq=False)
class _Switch:
    """What one instance's attention layers shall do: ``factors`` is float ``(batch, key)``; ``calls`` counts layers."""

    factors: Tensor
    calls: int = 0


_SWITCHES: weakref.WeakKeyDictionary[nn.Module, _Switch] = weakref.WeakKeyDictionary()


def suppressed(scores: Tensor, allowed: Tensor, factors: Tensor) -> Tensor:
    """Scale attention scores down and return probabilities.

    Scores are first shifted so that the lowest allowed one of a row is 0: without the shift, a factor below 1 would
    raise a negative score. A factor of 0 makes a token's score that of the row's least attended token, not minus
    infinity.

    Args:
        scores: float32 ``(..., query, key)``, before the softmax.
        allowed: bool, broadcast to ``scores``; every row has an allowed key.
        factors: float32, broadcast to ``scores``; 1 changes nothing.

    Returns:
        float32, shape of ``scores``; rows sum to 1.
    """
    lowest = torch.where(allowed, scores, torch.inf).amin(dim=-1, keepdim=True)
    # in place from here on: these matrices are the largest of a pass
    return (scores - lowest).mul_(factors).masked_fill_(~allowed, -torch.inf).softmax(dim=-1)


@contextmanager
def suppressing(module: PreTrainedModel, factors: Tensor) -> Iterator[None]:
    """Let this one model's attention be scaled by ``factors`` ``(batch, key)`` within the block.

    Raises:
        NotApplicable: If the model's attention cannot be exchanged, or a pass did not go through it.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    config = module.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    before = {"": config._attn_implementation, **{name: part._attn_implementation for name, part in parts.items()}}
    switch = _Switch(factors)
    try:
        for part in module.modules():
            _SWITCHES[part] = switch
        module.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise NotApplicable(*_REFUSED)
        yield
    finally:
        module.set_attn_implementation(before)
        for part in module.modules():
            _SWITCHES.pop(part, None)
    if switch.calls == 0:
        raise NotApplicable(*_REFUSED)


_REFUSED = (
    "This model's attention cannot be exchanged for one that turns single tokens down.",
    "Use occlusion, which removes tokens instead.",
)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as the library's plain implementation does, with suppression.

    Args:
        module: The attention layer.
        query: ``(batch, head, query, width)``.
        key: ``(batch, key head, key, width)``.
        value: ``(batch, key head, key, width)``.
        attention_mask: Additive or boolean, ``(batch or 1, 1, query, key)``.
        scaling: Factor of the scores.
        dropout: Not used; models are in eval mode.
        softcap: Bound of the scores, for models that have one.
        **more: What other models pass; whatever of it would change the result shows in the comparison with the
            untouched model.
    """
    if attention_mask is None:
        raise TypeError("this attention needs an explicit mask")
    switch = _SWITCHES[module]
    switch.calls += 1
    batch, heads, rows, width = query.shape
    pairs = key.shape[1]  # heads that share keys and values stand next to each other
    scale = width**-0.5 if scaling is None else scaling
    grouped = query.float().mul(scale).reshape(batch, pairs, -1, width)
    scores = (grouped @ key.float().transpose(-1, -2)).view(batch, heads, rows, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask > FORBIDDEN / 2
    factors = switch.factors.to(scores.device)[:, None, None]
    weights = suppressed(scores, allowed, factors)
    out = (weights.view(batch, pairs, -1, weights.shape[-1]) @ value.float()).view(batch, heads, rows, -1)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None
