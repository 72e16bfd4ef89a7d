"""One pass through a causal language model: ids in, logits at chosen positions out.

Knows transformers' calling conventions; knows nothing of targets, methods or gradients. Whether a graph is recorded
is the caller's choice (``torch.no_grad`` or ``torch.enable_grad``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from backend.models.language import LanguageModel

Mask = Tensor | Mapping[str, Tensor]

UNFIT = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
"""What models raise when they do not take a mask, a cache or an attention function of ours. Whoever catches these lets
memory that ran out pass on, and refuses or takes another way."""

_HEAD_ROWS = 16384  # vocabulary rows that are held in float32 at once


def logits_at(
    model: LanguageModel,
    ids: Tensor,
    positions: Sequence[int],
    *,
    position_ids: Tensor | None = None,
    mask: Mask | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """Run the model and return its logits at the given positions only.

    The vocabulary head is the largest matrix of small models, and logits of a long prompt can take gigabytes; so the
    head runs at the wanted positions only, where the model lets us choose.

    Args:
        model: The model.
        ids: int64, shape ``(batch, length)``; with a cache, the ids that follow the cached ones.
        positions: Ascending indices in ``range(length)``.
        position_ids: int64, shape ``(1 or batch, length)``; None for 0, 1, 2, ...
        mask: Additive mask ``(batch, 1, length, cached + length)``, or one per layer type; None for the model's own.
        cache: Keys and values of what comes before; None for nothing.

    Returns:
        float32, shape ``(batch, len(positions), vocabulary)``.
    """
    takes = inspect.signature(model.module.forward).parameters
    wanted = torch.tensor(positions, dtype=torch.int64)  # on the CPU, since the head may live on any device
    given: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in takes:
        given["use_cache"] = cache is not None
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = wanted
    if position_ids is not None and "position_ids" in takes:
        given["position_ids"] = position_ids
    if mask is not None:
        given["attention_mask"] = mask
    if cache is not None:
        given["cache" if "cache" in takes else "past_key_values"] = cache
    with _precise_head(model.module):
        logits: Tensor = model.module(**given).logits
    if "logits_to_keep" not in takes:
        logits = logits[:, wanted]
    return logits.float()


@contextmanager
def _precise_head(module: PreTrainedModel) -> Iterator[None]:
    """Compute the vocabulary head in float32 for models that are held in a shorter format.

    In bfloat16 logits near 20 are 0.125 apart, more than what most tokens contribute.
    """
    head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.weight.dtype not in (torch.bfloat16, torch.float16):
        yield
        return

    weight, bias = head.weight, head.bias

    def in_float32(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        logits: Tensor = _Head.apply(args[0], weight)
        return logits if bias is None else logits + bias.float()

    handle = head.register_forward_hook(in_float32)
    try:
        yield
    finally:
        handle.remove()


class _Head(torch.autograd.Function):
    """``hidden @ weight.T`` in float32 without holding a float32 copy of the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = hidden.dtype
        wide = hidden.float()
        return torch.cat([wide @ rows.float().T for rows in torch.split(weight, _HEAD_ROWS)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        parts = zip(torch.split(grads[0], _HEAD_ROWS, dim=-1), torch.split(weight, _HEAD_ROWS), strict=True)
        total = sum((grad @ rows.float() for grad, rows in parts), start=torch.zeros((), device=grads[0].device))
        return total.to(ctx.dtype), None
