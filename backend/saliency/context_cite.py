"""ContextCite: a sparse linear model of what random parts of the prompt do to the target's odds.

Idea: keep each unit with probability 1/2, read the log-odds of the target, and explain them by "unit u was kept" with
a LASSO. The weights are the scores.
Cost: one forward pass per mask, less what equal masks and the beginning of the text share; none where another method
ran the same masks. The fit takes milliseconds.
Sign: positive supports the target. Unit: nats of log-odds, with the unit kept instead of removed. With a foil the odds
are those of the target against the foil. The objective of the request plays no part.
Rows: the log-odds of a span are not the sum of its tokens' log-odds, in which tokens that are certain anyway swing
most. So one model is fitted to the span, as published, and each row holds an equal part of its weights.
Check: R² and rank correlation on masks that were held out. Answers that hang on two facts together, or on either of
two, are not linear, and these numbers show it.
Failure modes: more units than masks can tell apart (refused above 4 per mask); weights below the penalty are 0.
Source: Cohen-Wang et al. 2024 (arXiv:2409.00729). Own implementation. The authors delete sources from the text; here
they are hidden by default, and deletion is an option.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.question import Question
    from backend.saliency.variants import Operator

UNITS_PER_MASK = 4
"""With more units per mask a fit would be a guess."""

_STEPS = 1000  # resolution of the progress


@dataclass(frozen=True)
class Params:
    """Settings of ContextCite."""

    masks: int = field(
        default=64,
        metadata={"min": 16, "max": 1024, "step": 16, "help": "Random parts of the prompt that the model is run on."},
    )
    penalty: float = field(
        default=0.01,
        metadata={
            "min": 0.001,
            "max": 1.0,
            "step": 0.001,
            "help": "Weight of sparsity: a larger penalty sets more scores to 0.",
        },
    )
    whole_span: bool = field(
        default=True,
        metadata={
            "help": "Explain the odds of all target tokens together, as published. Off: each target token by itself; "
            "tokens that are nearly certain then swing most."
        },
    )
    operator: str = field(
        default="hide",
        metadata={
            "choices": ("hide", "delete", "replace"),
            "help": "hide: later tokens cannot look at a removed unit; delete: take it out and move the rest up, as "
            "published; replace: exchange its embedding for the mean one.",
        },
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: one per mask, and some for the checks."""
    return Passes(forward=work.strands * (params.masks + 4))


@register(
    "context_cite",
    label="ContextCite",
    family="ablation",
    signed=True,
    additive=False,
    params=Params,
    cost=cost,
    summary="Which few words or sentences explain, as a sum, what random parts of the prompt do to the target?",
    reading="Positive: texts that keep this unit make the target likelier, by so many nats of log-odds; negative: "
    "less likely; 0: below the penalty. Trust it only where the fit predicts masks that it has not seen.",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Fit the log-odds of the target to what was kept.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and units.
        params: Masks, penalty and operator.
        tick: Progress and cancellation, once per pass.

    Returns:
        Scores ``(row, unit)``. BOS, template and answer tokens, and units that were always or never kept, are not
        measured.

    Raises:
        NotApplicable: If there are too many units for the masks, none can be removed, or the operator does not work
            with this model.
    """
    import numpy as np

    from backend.saliency import ablation_checks, bank, readouts

    units = bank.removable(question)
    if len(units) > UNITS_PER_MASK * params.masks:
        raise NotApplicable(
            f"{len(units)} units are too many for a linear model of {params.masks} masks.",
            f"Choose words or sentences as units, or at least {-(-len(units) // UNITS_PER_MASK)} masks.",
        )
    operator = cast("Operator", params.operator)
    plan = bank.Plan("half", operator, params.masks)
    runs = bank.draw(question, plan, lambda part: tick(int(part * _STEPS), _STEPS))
    rows = len(question.targets)
    together = params.whole_span and rows > 1
    odds = readouts.span_log_odds(runs.log_odds, question.has_foil)[:, None] if together else runs.log_odds
    size = rows if together else 1  # target tokens behind one fit
    weights = readouts.fit(runs.keep, odds, size, params.penalty)
    found = [
        *runs.notes,
        *readouts.quality(runs.keep, odds, size, params.penalty, exact=runs.exact, seed=question.seed),
        *ablation_checks.predicting_units(question, [question.spans[u] for u in units], operator),
    ]
    zero = float((weights == 0).sum() / max(1, np.isfinite(weights).sum()))
    found.append(Check("zero_weights", zero, "info", f"{zero:.0%} of the weights are exactly 0, below the penalty."))
    spread = float(np.ptp(odds, axis=0).max())
    if zero == 1 or spread <= 2 * float(runs.noise.sum()):
        text = f"There is no signal: over all masks, the log-odds move by {spread:.2g}."
        found.append(Check("no_signal", spread, "fail", text))
    if together:
        text = f"One fit explains all {rows} target tokens together; each row holds an equal part of its weights."
        found.append(Check("whole_span", None, "info", text))
    tick(_STEPS, _STEPS)
    values, measured = bank.spread_out(question, units, np.broadcast_to(weights / size, (rows, len(units))))
    return Scores(values, Passes(forward=runs.forward), question.units, measured, tuple(found))
