"""A loaded causal language model, as methods receive it. Knows nothing of loading, caching or methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from backend.types import ModelInfo, ModelRef


@dataclass(eq=False)
class LanguageModel:
    """A causal language model with its tokenizer: eval mode, parameters frozen, on its device.

    Attributes:
        ref: What was asked for.
        info: What was loaded.
        module: The transformers model. Whoever changes it (hooks, attention kernel) restores it in ``finally``.
        tokenizer: Its fast tokenizer.
        nbytes: Memory that the weights take.
        notes: What a reader of any result must know about the loaded weights; usually empty.
    """

    ref: ModelRef
    info: ModelInfo
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the input embedding lives; inputs are created there."""
        weight = next(self.embedding.parameters())
        return weight.device

    @property
    def embedding(self) -> nn.Module:
        """The input-embedding module; its output is what the first layer receives."""
        module = self.module.get_input_embeddings()
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(self.module).__name__} has no input embedding module")
        return module

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the input embedding; ids must lie below. May differ from the tokenizer's size."""
        weight = next(self.embedding.parameters())
        return int(weight.shape[0])
