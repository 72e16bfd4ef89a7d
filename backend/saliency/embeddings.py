"""The input embeddings of a model: reading them, and replacing them during a pass. Knows nothing of targets.

Ids are passed to the model as always and a hook exchanges what the embedding returns. Models with per-layer inputs or
paths that depend on the vocabulary then work unchanged, which they do not when embeddings are passed instead of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from backend.errors import NotApplicable
from backend.models.language import LanguageModel

BASELINES = ("mean", "zero", "eos", "pad", "space")
"""What a token's embedding may be replaced by: the mean of the vocabulary, zero, or that of a special or neutral
token."""

_CHUNK = 8192  # vocabulary rows embedded at once


@contextmanager
def replaced_embedding(model: LanguageModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``change`` exchange the output ``(batch, length, width)`` of the embedding within the block.

    Raises:
        NotApplicable: If the model did not embed its input exactly once.
    """
    calls = 0

    def hook(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return change(output)

    handle = model.embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    if calls != 1:
        raise NotApplicable(
            f"This model embeds its input {calls} times per pass, so there is no one embedding to explain.",
            "Use a method that removes tokens instead.",
        )


@torch.no_grad()
def embed(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Return the embedding module's output, shape ``(len(ids), width)``, in the model's dtype.

    The output rather than the weight, because some models scale it.
    """
    out: Tensor = model.embedding(torch.tensor([list(ids)], device=model.device))
    return out[0].detach()


@torch.no_grad()
def baseline_vector(model: LanguageModel, name: str) -> Tensor:
    """Return the embedding that stands for "no token here", shape ``(width,)``, float32.

    Args:
        model: The model.
        name: One of ``BASELINES``.

    Raises:
        NotApplicable: If the model has no such token.
    """
    if name == "mean":
        rows = model.vocabulary_rows
        total = torch.zeros((), dtype=torch.float64)
        for begin in range(0, rows, _CHUNK):
            part = embed(model, range(begin, min(begin + _CHUNK, rows))).sum(0, dtype=torch.float32)
            total = total + part.cpu().double()
        return (total / rows).float().to(model.device)
    token = _token(model, name)
    return torch.zeros_like(embed(model, [0])[0]).float() if token is None else embed(model, [token])[0].float()


def _token(model: LanguageModel, name: str) -> int | None:
    """Return the id behind a baseline; None for zero."""
    if name == "zero":
        return None
    tokenizer = model.tokenizer
    if name == "space":
        ids = tokenizer.encode(" ", add_special_tokens=False)
        if len(ids) != 1:
            raise NotApplicable("A space is not one token in this model.", "Choose another baseline, such as mean.")
        return int(ids[0])
    token = tokenizer.eos_token_id if name == "eos" else tokenizer.pad_token_id
    if not isinstance(token, int):
        raise NotApplicable(f"This model has no {name.upper()} token.", "Choose another baseline, such as mean.")
    return token
