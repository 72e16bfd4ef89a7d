"""Attention weights of every layer, read during one pass. Knows the library's attention modules; knows no method.

The fast kernels return no weights, and say so with nothing but an empty tuple. So attention is computed step by step
("eager") for the length of the block, in this instance only, and each layer's weights are handed out and forgotten
layer by layer: never more than one layer's maps are held, unless the reader keeps them. The configuration's own kernel
is put back in any case. Grouped queries, sliding windows, soft caps and normalized queries are the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.saliency.passes import logits_at
from backend.saliency.question import Question
from backend.types import Check

Take = Callable[[nn.Module, Tensor], None]
"""Receives an attention module and its weights, float32 ``(head, query, key)``, layer by layer from the first."""

_HINT = "Use a gradient or an ablation method, such as occlusion."


@contextmanager
def eager_attention(model: LanguageModel) -> Iterator[None]:
    """Let this model compute attention step by step within the block; afterwards each part has its kernel back."""
    held = (getattr(part, "config", None) for part in model.module.modules())
    configs: dict[int, Any] = {id(config): config for config in held if isinstance(config, PreTrainedConfig)}
    # The attribute behind the property, as the library itself does it: the property would change nested ones too.
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@contextmanager
def watched_attention(model: LanguageModel, take: Take) -> Iterator[None]:
    """Hand the weights of every attention module to ``take`` during one pass over one sequence.

    Raises:
        NotApplicable: If a layer returns no attention weights, or there are layers without attention.
    """
    seen = 0

    def hook(part: nn.Module, args: Any, output: Any) -> None:
        nonlocal seen
        weights = _weights(output)
        if weights is None:
            raise NotApplicable(
                f"The layer {type(part).__name__} returns no attention weights, so there is nothing to follow.", _HINT
            )
        seen += 1
        take(part, weights[0].detach().float())

    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for part in attention_modules(model.module):
            stack.callback(part.register_forward_hook(hook).remove)
        yield
    layers = getattr(model.module.config.get_text_config(), "num_hidden_layers", None)
    if seen == 0:
        raise NotApplicable("This model shows no attention weights.", _HINT)
    if isinstance(layers, int) and seen != layers:
        raise NotApplicable(f"Only {seen} of {layers} layers of this model show attention weights.", _HINT)


def attention_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules that compute attention: those named so that hold no other such module."""

    def named(part: nn.Module) -> bool:
        return type(part).__name__.endswith("Attention")

    return [
        part
        for part in module.modules()
        if named(part) and not any(named(inner) for inner in part.modules() if inner is not part)
    ]


@torch.no_grad()
def read_attention(
    model: LanguageModel, ids: Sequence[int], positions: Sequence[int], reduce: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Run one pass and keep what ``reduce`` makes of each layer's weights ``(head, query, key)``.

    Args:
        model: The model.
        ids: The sequence.
        positions: Where logits are wanted too, ascending.
        reduce: What to keep of a layer; the rest is freed before the next layer.

    Returns:
        One tensor per layer, and float32 logits ``(position, vocabulary)``.

    Raises:
        NotApplicable: If the model shows no attention weights.
    """
    kept: list[Tensor] = []
    with watched_attention(model, lambda part, weights: kept.append(reduce(weights))):
        logits = logits_at(model, torch.tensor([list(ids)], device=model.device), positions)
    return kept, logits[0]


def attention_rows(model: LanguageModel, ids: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the attention weights of chosen queries, float32 ``(layer, head, position, key)``, and their logits.

    Raises:
        NotApplicable: If the model shows no attention weights, or layers have different numbers of heads.
    """
    chosen = list(positions)
    kept, logits = read_attention(model, ids, positions, lambda weights: weights[:, chosen].cpu())
    if len({rows.shape for rows in kept}) != 1:
        raise NotApplicable("The layers of this model have different numbers of heads.", _HINT)
    return torch.stack(kept), logits


def same_logits(question: Question, logits: Tensor) -> Check:
    """Compare logits of a watched pass, ``(position, vocabulary)``, with those of the untouched model."""
    plain = question.plain
    gap = float((logits.detach() - plain.logits[0]).abs().max())
    if gap <= plain.tolerance:
        text = f"With attention computed step by step the model answers as always (largest difference {gap:.1e})."
        return Check("hooked_equals_plain", gap, "ok", text)
    text = f"With attention computed step by step the logits differ by up to {gap:.2g} from the model's own kernel."
    return Check("hooked_equals_plain", gap, "warn", text)


def _weights(output: Any) -> Tensor | None:
    """Find the weights ``(batch, head, query, key)`` in what an attention module returned."""
    if not isinstance(output, tuple) or not isinstance(output[0], Tensor):
        return None
    length = output[0].shape[1]
    for part in output[1:]:
        if isinstance(part, Tensor) and part.ndim == 4 and part.shape[-2:] == (length, length):
            return part
    return None
