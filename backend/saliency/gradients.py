"""Gradients of every row with respect to the input embeddings of the sources.

The recipe: ids stay ids, a hook exchanges the embedding's output for a leaf, ``torch.autograd.grad`` differentiates
with respect to that leaf. Weights are not differentiated, no ``.grad`` is written, hooks are gone after each pass.
Knows nothing of what methods make of the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.models.placement import free_bytes, is_out_of_memory
from backend.saliency.embeddings import embed, replaced_embedding
from backend.saliency.passes import logits_at
from backend.saliency.question import Question
from backend.types import Passes

TOKENS_AT_ONCE = {"cpu": 1024, "mps": 2048, "cuda": 16384}
"""Tokens per pass beyond which a larger batch no longer pays; measured with the benchmark of costs."""

_MEMORY_SHARE = 0.25
"""Part of the free memory that one batch may fill."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, for a batch of inputs.

    Attributes:
        values: float32 ``(batch,)``; S.
        gradients: float32 ``(batch, source, width)``; its gradient; 0 for sources that the row cannot see.
        top: int64 ``(batch,)``; the token that the model finds most likely where it predicts the row's target.
    """

    values: Tensor
    gradients: Tensor
    top: Tensor


def source_embeddings(question: Question) -> Tensor:
    """Return the embeddings of the sources, float32 ``(source, width)``."""
    return embed(question.model, question.ids).float()


def row_gradients(question: Question, inputs: Callable[[Tensor], Tensor] | None = None) -> Iterator[Row]:
    """Differentiate every row: one forward pass per strand, then one backward pass per row and strand.

    Args:
        question: The rows and sources.
        inputs: Makes a batch of inputs ``(batch, shared, width)`` from the embeddings ``(shared, width)`` of a
            strand's sources; None for the embeddings as they are. Foil tokens keep their embedding.

    Yields:
        The rows in order. The graph lives until the last row is out, or the iterator is dropped.
    """
    model = question.model
    leaves: list[Tensor] = []
    parts: list[Tensor] = []  # per strand (batch, row)
    tops: list[Tensor] = []  # per strand (batch, position)
    with torch.enable_grad():
        for strand in question.strands:
            batch = None if inputs is None else _batch(question, strand.ids, strand.shared, inputs)
            leaf, logits = forward_from_leaf(model, strand.ids, strand.positions, batch)
            leaves.append(leaf)
            parts.append(question.rows(strand, question.terms(strand, logits)))
            tops.append(logits.argmax(-1))
        count = len(question.targets)
        for row in range(count):
            involved = [i for i, strand in enumerate(question.strands) if row in strand.rows]
            value = sum((parts[i][:, row] for i in involved[1:]), start=parts[involved[0]][:, row])
            grads = torch.autograd.grad(value.sum(), [leaves[i] for i in involved], retain_graph=row + 1 < count)
            total = grads[0].float()  # the first strand holds all sources
            for index, grad in zip(involved[1:], grads[1:], strict=True):
                shared = question.strands[index].shared
                total[:, :shared] += grad[:, :shared].float()
            total[:, question.targets[row] :] = 0
            first = question.strands[0]
            yield Row(value.detach(), total, tops[0][:, first.positions.index(first.reads[row])])


def row_values(question: Question, inputs: Callable[[Tensor], Tensor]) -> npt.NDArray[np.float64]:
    """Return S per input and row, float64 ``(batch, row)``, without gradients; ``inputs`` as in ``row_gradients``."""
    total = np.zeros(1)
    with torch.no_grad():
        for strand in question.strands:
            batch = _batch(question, strand.ids, strand.shared, inputs)
            _, logits = forward_from_leaf(question.model, strand.ids, strand.positions, batch)
            total = total + question.rows(strand, question.terms(strand, logits)).double().cpu().numpy()
    return total


def row_passes(question: Question, inputs: int = 1) -> Passes:
    """Passes that ``row_gradients`` takes for this many inputs."""
    backward = sum(len(set(strand.rows)) for strand in question.strands)
    return Passes(forward=len(question.strands) * inputs, backward=backward * inputs)


def forward_from_leaf(
    model: LanguageModel, ids: Sequence[int], positions: Sequence[int], inputs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the model with a leaf in place of the embedding's output. Call with gradients enabled.

    Args:
        model: The model.
        ids: The sequence.
        positions: Where logits are wanted.
        inputs: Embeddings ``(batch, length, width)`` to start from; None for those of the ids.

    Returns:
        The leaf ``(batch, length, width)`` and float32 logits ``(batch, position, vocabulary)``.
    """
    leaves: list[Tensor] = []

    def take(output: Tensor) -> Tensor:
        start = output if inputs is None else inputs.to(output.dtype)
        leaves.append(start.detach().requires_grad_())
        return leaves[-1]

    rows = 1 if inputs is None else len(inputs)
    with replaced_embedding(model, take):
        logits = logits_at(model, torch.tensor([list(ids)], device=model.device).expand(rows, -1), positions)
    return leaves[0], logits


def _batch(question: Question, ids: Sequence[int], shared: int, inputs: Callable[[Tensor], Tensor]) -> Tensor:
    plain = embed(question.model, ids).float()
    made = inputs(plain[:shared])
    return torch.cat([made, plain[shared:].expand(len(made), -1, -1)], dim=1)


# ------------------------------------------------------------------------------------------------ can it, at what cost

_PROBED: weakref.WeakKeyDictionary[nn.Module, float | str] = weakref.WeakKeyDictionary()


def activation_bytes(model: LanguageModel) -> float:
    """Memory per token that a pass keeps for its backward pass, in bytes; the first call runs four tokens.

    Raises:
        NotApplicable: If the model has no backward pass, as some quantized models, or one that returns no numbers.
    """
    if model.module not in _PROBED:
        _PROBED[model.module] = _probe(model)
    found = _PROBED[model.module]
    if isinstance(found, str):
        raise NotApplicable(found, "Use a method that needs no gradient, such as occlusion.")
    return found


def _probe(model: LanguageModel) -> float | str:
    ids = [i % model.vocabulary_rows for i in range(4)]
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            leaf, logits = forward_from_leaf(model, ids, [len(ids) - 1])
            (grad,) = torch.autograd.grad(logits.square().mean(), leaf)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"This model cannot be differentiated ({reason})."
    if not torch.isfinite(grad).all():
        return "The gradients of this model are not numbers, even for four tokens."
    if not grad.any():
        return "The gradients of this model are zero everywhere, even for four tokens."
    return sum(kept.values()) / len(ids)


def inputs_at_once(question: Question, wanted: int) -> int:
    """How many inputs to put into one pass: as many as pay, and as many as a quarter of the free memory holds."""
    model = question.model
    length = sum(len(strand.ids) for strand in question.strands)
    tokens = float(TOKENS_AT_ONCE.get(model.device.type, 512))
    free = free_bytes(model.device)
    if free is not None:
        tokens = min(tokens, _MEMORY_SHARE * free / activation_bytes(model))
    return max(1, min(wanted, int(tokens // length)))


def in_batches(total: int, size: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(start, stop)`` over ``range(total)``, with smaller batches after memory has run out.

    A batch that ran out of memory is repeated in halves; ``run`` must not have kept anything of it.
    """
    start = 0
    while start < total:
        stop = min(start + size, total)
        short = False
        try:
            run(start, stop)
        except (RuntimeError, MemoryError) as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            short = True
        if short:  # outside of the handler, which would keep the failed pass alive
            size = max(1, (stop - start) // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            start = stop
