"""Leave-one-out occlusion: how much less likely the target becomes when a unit is removed.

Idea: s_u = S(text) - S(text without unit u), for the same target ids.
Cost: one forward pass per unit, about half of that where the beginning of the text is computed once for all units.
Sign: positive supports the target: removing it lowers the score. Unit: that of S.
Check: with nothing removed the model answers as always; effects below twice the rounding are noise; evidence that
stands in the text twice hides itself, since each copy alone can go, so the strongest units are removed together too.
Source: Zeiler and Fergus 2013 (arXiv:1311.2901), Li et al. 2016 (arXiv:1612.08220). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.question import Question
    from backend.saliency.variants import Operator


@dataclass(frozen=True)
class Params:
    """Settings of occlusion."""

    operator: str = field(
        default="hide",
        metadata={
            "choices": ("hide", "delete", "replace"),
            "help": "hide: later tokens cannot look at the unit; delete: take it out and move the rest up; "
            "replace: exchange its embedding for a neutral one.",
        },
    )
    fill: str = field(
        default="mean",
        metadata={
            "choices": ("mean", "zero", "eos", "pad", "space"),
            "help": "What a replaced unit becomes: the mean embedding, zero, or a special or blank token.",
        },
    )
    include_template: bool = field(
        default=False, metadata={"help": "Remove BOS and template tokens too; that often breaks the model."}
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: half a pass per unit, and some for the checks."""
    return Passes(forward=work.strands * (0.55 * work.units + 4))


@register(
    "occlusion",
    label="Occlusion",
    family="ablation",
    signed=True,
    additive=False,
    params=Params,
    cost=cost,
    summary="How much less likely does the target become without this token, word or sentence?",
    reading="Positive: without this unit the target's score falls by so much, so the unit supports it; negative: the "
    "unit works against it (in the unit of the score: nats for a log-probability).",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Remove each unit in turn and score the same targets.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and units.
        params: How units are removed.
        tick: Progress and cancellation, once per group of variants.

    Returns:
        Scores ``(row, unit)``. Units that were left out on purpose, or that leave nothing to predict a target from,
        are NaN and not measured.

    Raises:
        NotApplicable: If the operator does not work with this model, or scores are not numbers.
    """
    import numpy as np

    from backend.saliency import ablation_checks
    from backend.saliency.ablation import Ablator
    from backend.saliency.embeddings import baseline_vector

    units = question.spans
    frame = question.is_frame
    chosen = [u for u, (begin, _) in enumerate(units) if params.include_template or not frame[begin]]
    if not chosen:
        raise NotApplicable(
            "Only BOS and template tokens stand before the target, and they are not removed by default.",
            "Switch on the removal of BOS and template tokens.",
        )
    total, done = len(chosen) + 1, 0

    def progress(now: int) -> None:
        nonlocal done
        done = now
        tick(done, total)

    progress(0)
    operator = cast("Operator", params.operator)
    fill = baseline_vector(model, params.fill) if operator == "replace" else None
    ablator = Ablator(question, operator, fill, before_pass=lambda: tick(done, total))
    removed = np.zeros((len(chosen), question.source_count), bool)
    for variant, unit in enumerate(chosen):
        removed[variant, slice(*units[unit])] = True
    without = ablator.without(removed, progress)
    values = np.full((len(question.targets), len(units)), np.nan)
    values[:, chosen] = question.plain.values[:, None] - without.T
    # where a unit is all that a target could be predicted from, nothing can be measured
    measured = np.isfinite(values).all(axis=0)
    values[:, ~measured] = np.nan
    found = [
        *ablator.checks,
        *ablation_checks.noise(ablator, values),
        *ablation_checks.redundancy(ablator, values, units),
        *ablation_checks.predicting_units(question, [units[u] for u in chosen], operator),
    ]
    progress(total)
    return Scores(values.astype(np.float32), Passes(forward=ablator.forward), question.units, measured, tuple(found))
