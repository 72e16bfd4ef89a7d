"""Attention rollout: where attention could have carried information from, through all layers.

Idea: A_l is the mean over heads of layer l's attention, half of which is replaced by the identity for the residual
stream: B_l = A_l / 2 + I / 2. The score of token i is entry (t, i) of the product B_L ... B_1, where t is the position
that predicts the target. Only this row is computed, from the last layer to the first.
Cost: one forward pass, for any number of targets; it keeps one map (length x length) per layer.
Sign: none. Unit: share; each row sums to 1.
Check: rows sum to 1; share of the first token, where many models park attention.
Failure modes: not specific to the target, since any other token at its position would get the same scores; blind to
values, to differences between heads, and to everything outside of attention.
Source: Abnar and Zuidema 2020 (arXiv:2005.00928). Own implementation, of this form only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question

_CLOSE = 1e-3  # how far a sum of float32 weights may be from 1


@dataclass(frozen=True)
class Params:
    """Attention rollout has no settings."""


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    return Passes(forward=1)


def rollout_rows(maps: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
    """Return rows of the product of all layers, float64 ``(position, source)``.

    Args:
        maps: Per layer, from the first: attention averaged over heads, ``(query, key)``.
        positions: The rows that are wanted.
    """
    import torch

    rows = torch.zeros(len(positions), len(maps[0]), dtype=torch.float64)
    rows[torch.arange(len(positions)), torch.tensor(positions)] = 1
    for weights in reversed(maps):
        rows = (rows @ weights.to(device="cpu", dtype=torch.float64) + rows) / 2
    return rows


@register(
    "attention_rollout",
    label="Attention rollout",
    family="attention",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="From which tokens could attention have carried information to the place of the answer?",
    reading="Darker: a larger share of the attention paths through all layers starts at this token (shares sum to 1). "
    "The scores know the place of the target, not the target: any other answer would get the same.",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Follow attention from each target's predicting position back to the tokens.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: None.
        tick: Progress and cancellation.

    Returns:
        Scores ``(row, source)``, not negative; rows sum to 1.

    Raises:
        NotApplicable: If the model shows no attention weights, or they are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.attention_rows import read_attention, same_logits

    tick(0, 1)
    strand = question.strands[0]
    maps, logits = read_attention(model, strand.ids, strand.positions, lambda weights: weights.mean(dim=0))
    values = rollout_rows(maps, [target - 1 for target in question.targets]).numpy()
    checks.require_finite(values)
    tick(1, 1)
    gap = float(np.abs(values.sum(axis=1) - 1).max())
    found = [
        same_logits(question, logits),
        Check(
            "sums_to_one",
            gap,
            "ok" if gap <= _CLOSE else "warn",
            f"The scores of each target sum to 1 (largest difference {gap:.1e})."
            if gap <= _CLOSE
            else f"The scores of a target miss 1 by {gap:.2g}: this model attends to something that is no token.",
        ),
        Check(
            "not_target_specific",
            None,
            "info",
            "Rollout follows attention alone: any other target at this place would get the same scores"
            + (", and the foil plays no part." if question.has_foil else "."),
        ),
        checks.first_token_share(question, values),
    ]
    return Scores(values.astype(np.float32), Passes(forward=1), checks=tuple(found))
