"""AT2, attribution with attention: attention weights of all heads, weighed by what was learned about this model.

Idea: which heads predict what happens when tokens are hidden is learned once per model, from random ablations
(``at2_training``). Then the score of token i is the sum over layers and heads of a learned weight times the attention
from the position that predicts the target to token i.
Cost: one forward pass, for any number of targets.
Sign: positive: attention that, on the training texts, went with support for the answer; negative: with the opposite.
Unit: none; the learned weights' absolute values sum to 1.
Check: correlation with real ablations on texts kept aside, beside equal and random weights.
Failure modes: useless for a model that it was not fitted to, so it refuses others; what it learned on documents with
questions may not hold for other texts; blind to the target, like everything that reads attention alone.
Source: AT2 (arXiv:2504.13752). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.at2_weights import Record
    from backend.saliency.question import Question

_BETTER = 0.05  # how much the learned weights should gain over equal ones


@dataclass(frozen=True)
class Params:
    """AT2 has no settings; its weights are chosen by the model."""


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    return Passes(forward=1)


@register(
    "at2",
    label="AT2",
    family="attention",
    signed=True,
    additive=True,
    params=Params,
    cost=cost,
    summary="To which tokens do the heads attend that, as was learned for this model, carry the evidence?",
    reading="Positive: heads that carry evidence look at this token when the target is predicted; negative: heads "
    "whose attention goes with a less likely answer do (attention, weighed by learned weights; no unit).",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Weigh each head's attention from the predicting positions.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: None.
        tick: Progress and cancellation.

    Returns:
        Scores ``(row, source)``.

    Raises:
        NotApplicable: If no weights were learned for this model, or it shows no attention weights.
    """
    import numpy as np
    import torch

    from backend.saliency import at2_weights, checks
    from backend.saliency.attention_rows import attention_rows, same_logits

    tick(0, 1)
    fitted = at2_weights.find(model)
    places = [target - 1 for target in question.targets]
    rows, logits = attention_rows(model, question.strands[0].ids, places)
    theta = torch.tensor(fitted.theta, dtype=torch.float64)
    if theta.shape != rows.shape[:2]:
        raise NotApplicable(
            f"The weights of AT2 are for {theta.shape[0]} layers of {theta.shape[1]} heads; this model has "
            f"{rows.shape[0]} of {rows.shape[1]}.",
            "Train them again: python -m scripts.train_at2",
        )
    values = torch.einsum("lh,lhti->ti", theta, rows.double()).numpy()
    checks.require_finite(values)
    tick(1, 1)
    found = [
        same_logits(question, logits),
        _held_out(fitted.record),
        Check(
            "not_target_specific",
            None,
            "info",
            "AT2 reads attention alone: any other target at this place would get the same scores"
            + (", and the foil plays no part." if question.has_foil else "."),
        ),
        checks.first_token_share(question, values),
    ]
    return Scores(values.astype(np.float32), Passes(forward=1), checks=tuple(found))


def _held_out(record: Record) -> Check:
    """Say how well the weights predict real ablations."""
    text = (
        f"On {record.held_out} texts kept aside the learned weights predict random ablations with correlation "
        f"{record.correlation:.2f}; equal weights reach {record.equal_weights:.2f}, random ones "
        f"{record.random_weights:.2f}. They were learned on {record.prompts} texts."
    )
    if record.by_kind:
        text += " By kind: " + ", ".join(f"{kind} {value:.2f}" for kind, value in record.by_kind.items()) + "."
    useful = record.correlation >= record.equal_weights + _BETTER
    if not useful:
        text += " They are hardly better than plain mean attention."
    return Check("held_out_correlation", record.correlation, "ok" if useful else "warn", text)
