"""Second derivatives of rows with respect to the sources' embeddings, one block per token.

The Hessian of S has one block (width x width) for each pair of tokens; here only the blocks on the diagonal matter,
and of those only products with vectors of signs. A product is one pass backward through the graph of a gradient.
Attention must be computed step by step meanwhile: the fast kernels have no second derivative on the CPU.
Knows rows and leaves; knows nothing of what a method makes of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.models.placement import is_out_of_memory
from backend.saliency.embeddings import embed, replaced_embedding
from backend.saliency.gradients import forward_from_leaf
from backend.saliency.passes import logits_at
from backend.saliency.question import Question

_PROBE_TOKENS = 4
_STEP = 3e-3  # of the embeddings' size; far enough to stand out of rounding
_OFF = 0.1  # deviation from small steps that the second derivative may show, by rounding and curvature of its own
_ROUNDING = 1e-4  # changes of a gradient that say nothing, relative to it


def rows_of_leaf(
    question: Question,
    leaf: Tensor,
    before_pass: Callable[[], None],
    around_first: AbstractContextManager[None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute all rows as functions of one leaf. Call with gradients enabled.

    Args:
        question: The rows.
        leaf: float32 ``(source, width)``; stands for the embeddings of the sources in every strand.
        before_pass: Called before each pass; may raise.
        around_first: Entered around the first strand's pass.

    Returns:
        S per row, ``(row,)``, and the first strand's logits ``(position, vocabulary)``.
    """
    total: Tensor | None = None
    first: Tensor | None = None
    for index, strand in enumerate(question.strands):
        before_pass()

        def place(output: Tensor, shared: int = strand.shared) -> Tensor:
            return torch.cat([leaf[:shared].to(output.dtype)[None], output[:, shared:]], dim=1)

        around = around_first if index == 0 and around_first else nullcontext()
        with around, replaced_embedding(question.model, place):
            ids = torch.tensor([strand.ids], device=question.model.device)
            logits = logits_at(question.model, ids, strand.positions)
        part = question.rows(strand, question.terms(strand, logits))[0]
        total = part if total is None else total + part
        first = logits[0] if first is None else first
    if total is None or first is None:
        raise ValueError("a question has at least one strand")
    return total, first


def signs(count: int, width: int, seed: int) -> Tensor:
    """Draw vectors of +1 and -1, float32 ``(count, width)``, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, width), generator=generator).float() * 2 - 1


def products(gradient: Tensor, leaf: Tensor, vector: Tensor) -> Tensor:
    """Return the Hessian times ``vector``, same shape as the leaf, ``(source, width)``.

    Args:
        gradient: Gradient of one row, computed with ``create_graph=True``.
        leaf: What it was differentiated by.
        vector: ``(source, width)``; zero for tokens whose columns of the Hessian are left out.
    """
    if not gradient.requires_grad:  # S is linear in the embeddings
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad((gradient * vector).sum(), leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found.detach()


def block_sizes(gradient: Tensor, leaf: Tensor, token: int, vectors: Tensor, before: Callable[[], None]) -> list[float]:
    """Return the size (sum of absolute values) of a token's own block times each vector.

    Args:
        gradient: Gradient of one row, with its graph.
        leaf: What it was differentiated by.
        token: Whose block.
        vectors: ``(probe, width)``.
        before: Called before each product; may raise.
    """
    found = []
    for vector in vectors:
        before()
        placed = torch.zeros_like(leaf)
        placed[token] = vector
        found.append(float(products(gradient, leaf, placed)[token].abs().sum()))
    return found


def joint_sizes(
    gradient: Tensor, leaf: Tensor, tokens: Sequence[int], vectors: Tensor, before: Callable[[], None]
) -> Tensor:
    """Like ``block_sizes`` for all tokens at once: one product per probe, blurred by blocks of pairs of tokens.

    Args:
        gradient: Gradient of one row, with its graph.
        leaf: What it was differentiated by.
        tokens: Whose blocks.
        vectors: ``(token, probe, width)``.
        before: Called before each product; may raise.

    Returns:
        float32 ``(token, probe)``.
    """
    found = []
    chosen = list(tokens)
    for probe in range(vectors.shape[1]):
        before()
        placed = torch.zeros_like(leaf)
        placed[chosen] = vectors[:, probe]
        found.append(products(gradient, leaf, placed)[chosen].abs().sum(dim=-1))
    return torch.stack(found, dim=1).cpu()


def require_second_derivative(model: LanguageModel, before_pass: Callable[[], None]) -> None:
    """Differentiate twice on four tokens, with the attention kernel as it is now, and compare with small steps.

    A layer that can be differentiated only once does not always raise: its part may silently be missing. Layers with
    kinks (ReLU) have no curvature of their own, while their gradients jump.

    Args:
        model: The model.
        before_pass: Called before each of three passes; may raise.

    Raises:
        NotApplicable: If the model has no second derivative, as most quantized ones, or it is not a number.
    """
    hint = "Use a method that differentiates once, such as gradient norm, or occlusion."
    ids = [i % model.vocabulary_rows for i in range(_PROBE_TOKENS)]
    start = embed(model, ids).float()
    way = signs(len(ids), start.shape[1], 0).to(start.device) * (_STEP * start.square().mean().sqrt())

    def gradient_at(inputs: Tensor, *, graph: bool) -> tuple[Tensor, Tensor]:
        before_pass()
        leaf, logits = forward_from_leaf(model, ids, [len(ids) - 1], inputs[None])
        (found,) = torch.autograd.grad(logits.log_softmax(-1)[0, 0, 0], leaf, create_graph=graph)
        return found, leaf

    try:
        with torch.enable_grad():
            bent = products(*gradient_at(start, graph=True), way)[0].float()
            ahead, _ = gradient_at(start + way, graph=False)
            behind, _ = gradient_at(start - way, graph=False)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotApplicable(f"This model cannot be differentiated twice ({reason}).", hint) from error
    if not torch.isfinite(bent).all():
        raise NotApplicable("The second derivatives of this model are not numbers, even for four tokens.", hint)
    stepped = (ahead - behind)[0].float() / 2
    floor = _ROUNDING * float(ahead.float().norm())
    off = float((bent - stepped).norm() / stepped.norm().clamp(min=max(floor, 1e-12)))
    if model.module.dtype == torch.float32 and off > _OFF:  # shorter formats round small steps away
        raise NotApplicable(
            "This model cannot be differentiated twice: some of its layers allow one derivative only, or have kinks "
            f"(second derivatives miss {off:.0%} of how gradients change).",
            hint,
        )


@torch.no_grad()
def divergences(
    question: Question,
    plain: Tensor,
    tokens: Sequence[int],
    fill: Tensor,
    before_pass: Callable[[int], None],
    at_once: int,
) -> Tensor:
    """Exchange one token's embedding at a time: how far does the distribution at each target move?

    Args:
        question: Rows and sources.
        plain: Logits without any change, by the kernel in use now, ``(position, vocabulary)``.
        tokens: The tokens, each exchanged alone.
        fill: Embedding ``(width,)`` that takes its place.
        before_pass: Called before each pass with the number of tokens in it; may raise.
        at_once: Tokens per pass.

    Returns:
        float64 ``(row, token)``: KL divergence of the plain distribution from the changed one, in nats.
    """
    strand, model = question.strands[0], question.model
    start_from = embed(model, strand.ids)
    ids = torch.tensor([strand.ids], device=model.device)
    wanted = plain.detach().double().log_softmax(-1)
    parts = []
    for start in range(0, len(tokens), at_once):
        some = list(tokens[start : start + at_once])
        before_pass(len(some))
        inputs = start_from.expand(len(some), -1, -1).clone()
        inputs[list(range(len(some))), some] = fill.to(inputs)
        with replaced_embedding(model, lambda output, inputs=inputs: inputs):  # type: ignore[misc]
            logits = logits_at(model, ids.expand(len(some), -1), strand.positions)
        for one in logits:  # one at a time: a vocabulary in float64 is large
            changed = one.double().log_softmax(-1)
            parts.append((wanted.exp() * (wanted - changed)).sum(-1).clamp(min=0).cpu())
    return torch.stack(parts, dim=1)
