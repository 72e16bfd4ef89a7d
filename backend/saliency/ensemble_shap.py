"""EnsembleSHAP: who is present when a vote of many partial prompts goes to the target.

Idea: run the model on subsets of exactly k units and let each vote. A unit's score is the target's share of the votes
(or its mean probability) among the subsets that hold the unit, minus the share among all subsets.
Cost: one forward pass per subset, less what equal subsets and the beginning of the text share.
Sign: positive where the target wins more often when the unit is there. Unit: difference of vote shares, -1 to 1.
Check: the scores of all units add up to 0 where every subset was run; the gap says how far the draw is from that.
Since a subset has only k places, a unit without any influence does not score exactly 0 but slightly below it: it takes
a place from those that have some.
Failure modes: it explains the vote of the masked prompts, not the plain model. A hard vote that always or never goes to
the target says nothing at this k, and cannot see units that never turn it; the soft form keeps the margin. With a foil,
a vote asks whether the target beats the foil. No certificate against attacks is claimed.
Source: EnsembleSHAP (arXiv:2603.30034). Own implementation; identities checked against all subsets. The soft form is
this project's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.bank import Bank
    from backend.saliency.question import Question
    from backend.saliency.variants import Operator

    Array = npt.NDArray[np.float64]

ENOUGH = 100
"""Subsets that should hold a unit, so that its vote share is known to a few hundredths."""

_STEPS = 1000  # resolution of the progress
_FLAT = 1e-6  # probabilities that differ by less do not differ


@dataclass(frozen=True)
class Params:
    """Settings of EnsembleSHAP."""

    masks: int = field(
        default=200,
        metadata={"min": 50, "max": 10_000, "step": 50, "help": "Subsets of the prompt that the model is run on."},
    )
    keep: float = field(
        default=0.5,
        metadata={"min": 0.05, "max": 0.95, "step": 0.05, "help": "Part of the units that every subset holds."},
    )
    vote: str = field(
        default="soft",
        metadata={
            "choices": ("soft", "hard"),
            "help": "soft: a subset votes with the target's probability; hard: with 1 if the model would choose the "
            "target, as published.",
        },
    )
    operator: str = field(
        default="hide",
        metadata={
            "choices": ("hide", "delete", "replace"),
            "help": "hide: later tokens cannot look at a unit that is not in the subset; delete: take it out and move "
            "the rest up; replace: exchange its embedding for the mean one.",
        },
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: one per subset, and some for the checks."""
    return Passes(forward=work.strands * (params.masks + 4))


@register(
    "ensemble_shap",
    label="EnsembleSHAP",
    family="ablation",
    signed=True,
    additive=False,
    params=Params,
    cost=cost,
    summary="Which words are there when partial prompts still lead to the target?",
    reading="Positive: among partial prompts that hold this unit, the target is so much likelier (difference of "
    "probabilities or votes) than among all partial prompts; negative: so much less likely.",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Compare the votes of subsets that hold a unit with all votes.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and units.
        params: Number and size of subsets, form of the vote.
        tick: Progress and cancellation, once per pass.

    Returns:
        Scores ``(row, unit)``. BOS, template and answer tokens, and units that no subset held, are not measured.

    Raises:
        NotApplicable: If no unit can be removed, or the operator does not work with this model.
    """
    import numpy as np

    from backend.saliency import ablation_checks, bank

    units = bank.removable(question)
    size = subset_size(len(units), params.keep)
    operator = cast("Operator", params.operator)
    plan = bank.Plan("size", operator, params.masks, size)
    runs = bank.draw(question, plan, lambda part: tick(int(part * _STEPS), _STEPS))
    votes = votes_of(runs, params.vote == "hard", question.has_foil)
    held = runs.keep.sum(axis=0)  # subsets that hold each unit
    with np.errstate(invalid="ignore"):
        shares = (runs.keep.T.astype(np.float64) @ votes / held[:, None]).T  # (row, unit); NaN where never drawn
    overall = votes.mean(axis=0)
    found = [
        *runs.notes,
        *_ensemble(runs, votes, size, params.vote),
        *_sampling(runs, votes, shares, held),
        *ablation_checks.predicting_units(question, [question.spans[u] for u in units], operator),
    ]
    tick(_STEPS, _STEPS)
    values, measured = bank.spread_out(question, units, shares - overall[:, None])
    return Scores(values, Passes(forward=runs.forward), question.units, measured, tuple(found))


def subset_size(units: int, keep: float) -> int:
    """Return how many of so many units a subset holds: at least one."""
    return max(1, round(keep * units))


def votes_of(runs: Bank, hard: bool, has_foil: bool) -> Array:
    """Return each subset's vote for each row's target, float64 ``(subset, row)`` in [0, 1].

    Args:
        runs: Outcomes of the subsets.
        hard: 1 where the target is the model's choice (or beats the foil), else 0; otherwise its probability (or its
            probability in the choice between the two).
        has_foil: Whether the log-odds are those against a foil.
    """
    import numpy as np

    if hard:
        return (runs.log_odds > 0 if has_foil else runs.top).astype(np.float64)
    return cast("Array", np.exp(-np.logaddexp(0.0, -runs.log_odds)))


def _ensemble(runs: Bank, votes: Array, size: int, form: str) -> list[Check]:
    """Say what was voted on, and whether the vote can tell anything."""
    import numpy as np

    overall = votes.mean(axis=0)
    kept = f"{size} of {len(runs.units)} units"
    name = "vote share" if form == "hard" else "mean probability"
    text = f"This explains partial prompts of {kept}, not the plain model: there the target's {name} is "
    text += f"{overall.mean():.2f}{' on average over the targets' if votes.shape[1] > 1 else ''}."
    found = [Check("masked_ensemble", float(overall.mean()), "info", text)]
    flat = np.ptp(votes, axis=0) <= _FLAT
    if flat.any():
        which = "" if len(flat) == 1 else f" for {int(flat.sum())} of {len(flat)} targets"
        if size == len(runs.units):
            advice = "every subset holds all units; name more units or keep fewer of them"
        elif form == "soft":
            advice = "the target's probability is the same in all of them"
        elif overall[flat].min() > 0:
            advice = "the target wins every vote; keep fewer units, or use soft votes"
        else:
            advice = "the target wins no vote; keep more units, or use soft votes"
        text = f"No information at subsets of {kept}{which}: {advice}."
        found.append(Check("no_signal", float(overall[flat].mean()), "fail", text))
    return found


def _sampling(runs: Bank, votes: Array, shares: Array, held: npt.NDArray[np.int64]) -> list[Check]:
    """Say how well the draw fixes the shares: how often a unit was held, error bars, the gap of the sum."""
    import numpy as np

    drawn = held > 0
    least = int(held.min())
    overall = votes.mean(axis=0)
    gap = float(np.abs((shares[:, drawn] - overall[:, None]).sum(axis=1)).max())
    total = f"The scores of a target add up to {gap:.2g} at most; over all subsets they add up to 0."
    if runs.exact:
        every = Check(
            "draws_per_unit", float(least), "ok", f"All {len(runs.keep)} subsets were run: nothing is chance."
        )
        return [every, Check("sum_gap", gap, "info", total)]
    found = []
    if not drawn.all():
        text = f"{int((~drawn).sum())} units were in no subset, so they have no score."
        found.append(Check("not_sampled", float((~drawn).sum()), "warn", text))
    text = f"Every unit was in {least} subsets or more."
    if least < ENOUGH:
        enough = -(-ENOUGH * len(runs.units) // max(1, int(runs.keep[0].sum())))
        text += f" That is few: about {enough} masks would give each one {ENOUGH}."
    found.append(Check("draws_per_unit", float(least), "ok" if least >= ENOUGH else "warn", text))
    # the spread of votes among the subsets that hold a unit; for hard votes sqrt(p (1 - p) / n)
    squares = (runs.keep.T.astype(np.float64) @ votes**2)[drawn] / held[drawn, None]
    errors = np.sqrt(np.maximum(squares - shares.T[drawn] ** 2, 0) / held[drawn, None]).T
    clear = int((np.abs(shares[:, drawn] - overall[:, None]) > 2 * errors).sum())
    text = (
        f"Each score is uncertain by up to ±{errors.max():.2g}; {clear} of {errors.size} exceed twice their own error."
    )
    found.append(Check("sampling_error", float(errors.max()), "info" if clear else "warn", text))
    found.append(Check("sum_gap", gap, "info", total))
    return found
