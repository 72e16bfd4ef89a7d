"""Passes with a number added to the attention that each source receives, and S with its gradient to these numbers.

The number is added before the softmax, in every layer, head and query row; the model and its kernels stay as they
are, since all of it travels in the attention mask. Foil tokens are fixed context: their number is 0.
Knows questions and masks; knows nothing of how a method chooses the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.errors import NotApplicable
from backend.models.placement import is_out_of_memory
from backend.saliency.checkpointing import checkpointed, is_short_of_memory
from backend.saliency.gradients import activation_bytes
from backend.saliency.masks import FORBIDDEN, additive, visible_keys
from backend.saliency.passes import UNFIT, Mask, logits_at
from backend.saliency.question import Plain, Question, Strand
from backend.types import Check, Objective, Passes

_PROBE = 8  # tokens of the text on which a model's other ways to read are looked for


@dataclass(frozen=True, slots=True)
class Reached:
    """What the model says under a bias.

    Attributes:
        value: S, summed over all rows.
        log_probability: Mean over the target tokens of log p.
        gradient: float32 ``(source,)``; of S with respect to the bias; None if it was not asked for.
    """

    value: float
    log_probability: float
    gradient: Tensor | None = None


class BiasedPasses:
    """Runs a question with attention biases.

    Attributes:
        gap: Largest difference of logits between a bias of 0 everywhere and the untouched model.
        repeats: Layers that run twice per step to save memory; 0 for none.
    """

    def __init__(self, question: Question, objective: Objective, before_pass: Callable[[], None]) -> None:
        """Prepare, and prove that a bias of 0 leaves the model as it is.

        Args:
            question: Rows and sources.
            objective: The quantity whose sum over rows is S.
            before_pass: Called before each pass through the model; may raise to stop.

        Raises:
            NotApplicable: If the model has no backward pass or does not take our masks.
        """
        self._model = question.model
        self._question = replace(question, objective=objective)
        self._chances = replace(question, objective="log_prob")
        self._before_pass = before_pass
        self._forward = self._backward = 0
        self.repeats = 0
        activation_bytes(self._model)  # refuses models without a backward pass
        self._visible = [self._require_mask(len(strand.ids)) for strand in question.strands]
        self.gap = self._neutral(question.plain)
        self._require_attention_only(question.strands[0], question.plain.tolerance)
        self._save = is_short_of_memory(self._model, max(len(strand.ids) for strand in question.strands))

    @property
    def device(self) -> torch.device:
        """Where biases are created."""
        return self._model.device

    @property
    def passes(self) -> Passes:
        """Passes so far, in full-length sequences; a layer that runs twice counts twice."""
        return Passes(self._forward, self._backward)

    def value(self, bias: Tensor) -> Reached:
        """Return S under a bias, float32 ``(source,)``."""
        with torch.no_grad():
            found = [self._strand(index, bias) for index in range(len(self._visible))]
        return Reached(sum(float(value) for value, _ in found), found[0][1])

    def gradient(self, bias: Tensor) -> Reached:
        """Return S under a bias, float32 ``(source,)``, and its gradient. Layers run twice where memory is short.

        Raises:
            NotApplicable: If the gradient does not reach the bias or is not finite.
        """
        if not self._save:
            try:
                return self._differentiate(bias)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._save = True  # outside of the handler, which would keep the failed pass alive
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return self._differentiate(bias)

    def _differentiate(self, bias: Tensor) -> Reached:
        saving: AbstractContextManager[int] = checkpointed(self._model.module) if self._save else nullcontext(0)
        total, value, log_probability = torch.zeros_like(bias), 0.0, 0.0
        with saving as self.repeats, torch.enable_grad():
            for index in range(len(self._visible)):  # one after the other, so that one graph is alive at a time
                leaf = bias.detach().requires_grad_()
                part, chance = self._strand(index, leaf)
                grad = torch.autograd.grad(part, leaf, allow_unused=True)[0] if part.requires_grad else None
                if grad is None:
                    raise NotApplicable(
                        "This model's attention takes no gradient through its mask.",
                        "Use a method that needs no gradient, such as occlusion.",
                    )
                if not torch.isfinite(grad).all():
                    raise NotApplicable(
                        "The gradients of the attention bias are not finite numbers.",
                        "Load the model in float32 or bfloat16; float16 overflows in many models.",
                    )
                self._backward += 1
                self._forward += int(self.repeats > 0)
                total += grad
                value += float(part.detach())
                log_probability = chance if index == 0 else log_probability
        return Reached(value, log_probability, total)

    def _strand(self, index: int, bias: Tensor) -> tuple[Tensor, float]:
        """Return a strand's part of S and, for the first one, the mean of log p over the targets."""
        strand = self._question.strands[index]
        own = torch.cat([bias[: strand.shared], bias.new_zeros(len(strand.ids) - strand.shared)])
        logits = self._pass(strand, additive(self._visible[index], 0, len(own), None, self._model.module.dtype, own))
        count = len(self._question.targets)
        chance = self._chances.terms(strand, logits.detach())[0, :count].mean() if index == 0 else 0.0
        return self._question.rows(strand, self._question.terms(strand, logits)).sum(), float(chance)

    def _pass(self, strand: Strand, mask: Mask) -> Tensor:
        self._before_pass()
        self._forward += 1
        ids = torch.tensor([strand.ids], device=self._model.device)
        return logits_at(self._model, ids, strand.positions, mask=mask)

    # ------------------------------------------------------------------------------------------ does it work here

    def _require_mask(self, length: int) -> Mask:
        visible = visible_keys(self._model, length)
        if visible is None:
            raise NotApplicable(*_REFUSED)
        return visible

    def _neutral(self, plain: Plain) -> float:
        gap = 0.0
        for index, strand in enumerate(self._question.strands):
            zero = torch.zeros(len(strand.ids), device=self._model.device)
            try:
                with torch.no_grad():
                    logits = self._pass(
                        strand, additive(self._visible[index], 0, len(zero), None, self._model.module.dtype, zero)
                    )[0]
            except UNFIT as error:
                if is_out_of_memory(error):
                    raise
                raise NotApplicable(*_REFUSED) from error
            gap = max(gap, float(torch.nan_to_num((logits - plain.logits[index]).abs(), nan=torch.inf).max()))
        if gap > plain.tolerance:
            raise NotApplicable(
                f"With our attention mask and no bias at all, this model's logits change by {gap:.2g}; scores would "
                "explain another model.",
                "Use occlusion with the operator replace or delete.",
            )
        return gap

    def _require_attention_only(self, strand: Strand, tolerance: float) -> None:
        """Exchange a token that nobody may attend to: if the last logits move, something else reads it.

        A bias would then cover only a part of what a token does.
        """
        stop = min(len(strand.ids), _PROBE)
        if stop < 3:
            return
        at = stop // 2
        visible = self._require_mask(stop)
        closed = torch.zeros(stop, device=self._model.device)
        closed[at] = FORBIDDEN
        ids = torch.tensor([strand.ids[:stop]] * 2, device=self._model.device)
        ids[1, at] = (ids[1, at] + 1) % self._model.vocabulary_rows
        self._before_pass()
        with torch.no_grad():
            mask = additive(visible, 0, len(closed), None, self._model.module.dtype, closed)
            logits = logits_at(self._model, ids, [stop - 1], mask=mask)
        if float((logits[0] - logits[1]).abs().max()) > tolerance:
            raise NotApplicable(
                "This model has layers that read tokens without attention, which no attention bias reaches.",
                "Use occlusion with the operator replace or delete, or a gradient method.",
            )


_REFUSED = (
    "This model takes no additive attention mask, so nothing can be added to its attention.",
    "Use occlusion with the operator replace or delete, or a gradient method.",
)


def neutral_check(passes: BiasedPasses) -> Check:
    """Say that the set-up without a bias is the model itself."""
    text = f"With every bias at 0 the set-up returns the model's own logits (largest difference {passes.gap:.1e})."
    return Check("neutral_bias", passes.gap, "ok", text)


def memory_check(passes: BiasedPasses) -> list[Check]:
    """Say that layers ran twice to save memory."""
    if not passes.repeats:
        return []
    text = (
        f"Memory would not have held a whole backward pass, so each of the {passes.repeats} layers ran twice per step; "
        "the scores are the same, the run takes about a third longer."
    )
    return [Check("checkpointed", float(passes.repeats), "info", text)]
