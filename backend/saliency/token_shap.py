"""TokenSHAP: how much better the answer stays with a unit than without it, over random parts of the prompt.

Idea: take all prompts with one unit left out and random parts of the prompt; s_u = mean value of those that hold u,
minus mean value of those that do not.
Value: "log_prob", the log-probability of the target by teacher forcing, is this project's and the default: cheap, and
about the target asked for. "generation" is the published form: let the model answer each part and compare with its
answer to the whole prompt, by TF-IDF cosine as in the paper (the authors' package offers a sentence encoder too).
Cost: log_prob: a pass per unit and per random part, shared with other methods; generation: an answer for each.
Sign: positive supports the target (the answer). Unit: nats of log-probability (with a foil: of the odds against it), or
cosine similarity.
Check: two halves of the parts rank the units alike; similarities that hardly differ (standard deviation below 0.02)
rank nothing.
Failure modes: leave-one-out prompts among random ones make this neither a Shapley nor a Banzhaf value. They also give
every unit the same bonus: almost whole prompts have high values and nearly all of them hold the unit, so a unit without
any influence scores far from 0. By default this bonus is taken out, by measuring each kind of part from its own mean.
The published scores (smallest shifted to 0, sum 1) hide it, and negative scores with it; they are an option. Similar
words may mean the opposite.
Source: TokenSHAP (arXiv:2407.10114). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question
    from backend.saliency.variants import Operator

    Array = npt.NDArray[np.float64]
    BoolArray = npt.NDArray[np.bool_]

MOST_ANSWERS = 200
"""Answers that a run generates at most."""

SAME = 0.02
"""Standard deviation of similarities below which nothing is ranked."""

_STEPS = 1000  # resolution of the progress
_TOKEN = 0.3  # what a generated token costs, in passes over a prompt of a hundred tokens


@dataclass(frozen=True)
class Params:
    """Settings of TokenSHAP."""

    value: str = field(
        default="log_prob",
        metadata={
            "choices": ("log_prob", "generation"),
            "help": "log_prob: how likely the target stays (fast). generation: how similar a newly generated answer is "
            "to the answer to the whole prompt, as published; needs an answer per part of the prompt.",
        },
    )
    masks: int = field(
        default=64,
        metadata={
            "min": 16,
            "max": 1024,
            "step": 16,
            "help": "Random parts of the prompt, beside those without one unit. Generation runs 200 in all at most.",
        },
    )
    max_new_tokens: int = field(
        default=64, metadata={"min": 1, "max": 256, "step": 1, "help": "Longest answer, for generation."}
    )
    form: str = field(
        default="centered",
        metadata={
            "choices": ("centered", "raw", "published"),
            "help": "centered: a unit without influence scores 0. raw: mean with the unit minus mean without it, in "
            "which all units share a bonus. published: raw, shifted so that the smallest is 0, divided by the sum.",
        },
    )
    operator: str = field(
        default="hide",
        metadata={
            "choices": ("hide", "delete", "replace"),
            "help": "For log_prob. hide: later tokens cannot look at a removed unit; delete: take it out and move the "
            "rest up; replace: exchange its embedding for the mean one. Generation always deletes.",
        },
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes at most."""
    if params.value == "generation":
        answers = 1 + min(MOST_ANSWERS, work.units + params.masks)
        return Passes(forward=answers * (1 + _TOKEN * params.max_new_tokens))
    return Passes(forward=work.strands * (0.55 * work.units + params.masks + 8))


@register(
    "token_shap",
    label="TokenSHAP",
    family="ablation",
    signed=True,
    additive=False,
    params=Params,
    cost=cost,
    summary="How much better does the answer survive in partial prompts that hold this word or sentence?",
    reading="Positive: in partial prompts with this unit the target is likelier than in those without it, by so many "
    "nats (or the generated answer is more similar to the full one); negative: less. Neither Shapley nor Banzhaf.",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Compare the values of partial prompts with and without each unit.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and units.
        params: Value, number of random parts, form of the scores.
        tick: Progress and cancellation, once per pass or generated token.

    Returns:
        Scores ``(row, unit)``. BOS, template and answer tokens, and units that every part or no part held, are not
        measured.

    Raises:
        NotApplicable: If no unit can be removed, the operator does not work with this model, or (generation) there
            are too many units, there is a foil, or the model has nothing to say.
    """
    import numpy as np

    from backend.saliency import bank, readouts

    units = bank.removable(question)
    rows = len(question.targets)

    def progress(part: float) -> None:
        tick(int(part * _STEPS), _STEPS)

    if params.value == "generation":
        parts = _generated(question, units, params, progress)
    else:
        parts = _likelihoods(question, params, progress)
    centered = parts.values if parts.exact else readouts.centered(parts.values, parts.single)
    scores = readouts.differences(parts.keep, centered if params.form == "centered" else parts.values)
    found = [*parts.checks]
    if not parts.exact:
        found += readouts.split_half(parts.keep, centered, question.seed)
        bonus = readouts.differences(parts.keep, parts.values - centered)
        found.append(_bonus(bonus, params.form))
    if params.form == "published":
        scores = shifted(scores)
    if len(scores) < rows:
        scores = np.repeat(scores / rows, rows, axis=0)
    tick(_STEPS, _STEPS)
    values, measured = bank.spread_out(question, units, scores)
    return Scores(values, Passes(forward=parts.forward), question.units, measured, tuple(found))


@dataclass(frozen=True, eq=False)
class _Parts:
    """Partial prompts, each once, and their values.

    Attributes:
        keep: bool ``(part, unit)``.
        single: bool ``(part,)``; whether just one unit is missing.
        values: float64 ``(part, row)``.
        exact: Whether there are no other parts.
        forward: What they cost.
        checks: About their values.
    """

    keep: BoolArray
    single: BoolArray
    values: Array
    exact: bool
    forward: float
    checks: list[Check]


def _likelihoods(question: Question, params: Params, progress: Callable[[float], None]) -> _Parts:
    """Value parts by the log-probability of the target."""
    import numpy as np

    from backend.saliency import ablation_checks, bank

    operator = cast("Operator", params.operator)
    single = bank.draw(question, bank.Plan("single", operator), lambda part: progress(part / 2))
    random = bank.draw(question, bank.Plan("half", operator, params.masks), lambda part: progress(0.5 + part / 2))
    keep, first = np.unique(np.concatenate([single.keep, random.keep]), axis=0, return_index=True)
    odds = np.concatenate([single.log_odds, random.log_odds])[first]
    values = odds if question.has_foil else -np.logaddexp(0.0, -odds)
    found = [
        *random.notes,
        *ablation_checks.predicting_units(question, [question.spans[u] for u in random.units], operator),
    ]
    # judged by the log-odds: log p of a target that is nearly certain moves little, but not by chance
    spread, floor = float(np.ptp(odds, axis=0).max()), float(random.noise.max())
    if spread <= 2 * floor:
        text = f"There is no signal: over all parts, the target's log-odds move by {spread:.2g}."
        found.append(Check("no_signal", spread, "fail", text))
    return _Parts(keep, _single(keep), values, random.exact, single.forward + random.forward, found)


def _generated(question: Question, units: list[int], params: Params, progress: Callable[[float], None]) -> _Parts:
    """Value parts by how similar the answer to them is to the answer to the whole prompt."""
    import numpy as np

    from backend.saliency import answers, bank

    if question.has_foil:
        raise NotApplicable("A foil has no part in answers that are generated.", "Choose the value log_prob.")
    if len(units) > MOST_ANSWERS:
        raise NotApplicable(
            f"{len(units)} units need {len(units)} answers or more; at most {MOST_ANSWERS} are generated.",
            "Choose words or sentences as units, or the value log_prob.",
        )
    plan = bank.Plan("half", "delete", min(params.masks, MOST_ANSWERS - len(units)))
    drawn, exact = bank.draw_masks(len(units), plan, question.seed)
    keep = np.unique(np.concatenate([~np.eye(len(units), dtype=bool), drawn]), axis=0)
    length = question.roles.index("answer") if "answer" in question.roles else question.source_count
    spans = [question.spans[unit] for unit in units]
    found, tokens = answers.similarities(
        question.model, question.ids[:length], spans, keep, params.max_new_tokens, progress
    )
    there = np.isfinite(found)
    if not there.any():
        raise NotApplicable("Without any of the units, nothing is left to answer.", "Choose finer units.")
    spread = float(found[there].std())
    text = "This is about an answer generated anew, compared by the words that it shares with the answer to the whole "
    text += "prompt (TF-IDF), not about the chosen target."
    if len(question.targets) > 1:
        text += " Each target holds an equal part of the scores."
    checks = [
        Check("generated_answer", None, "info", text),
        Check("similarity_spread", spread, "info", f"The similarities have a standard deviation of {spread:.3f}."),
    ]
    if spread < SAME:
        text = f"There is no signal: the answers hardly differ (standard deviation {spread:.3f}, below {SAME})."
        checks.append(Check("no_signal", spread, "fail", f"{text} Do not rank units by them."))
    forward = tokens / question.source_count
    keep = keep[there]
    return _Parts(keep, _single(keep), found[there, None], exact and bool(there.all()), forward, checks)


def _single(keep: BoolArray) -> BoolArray:
    missing: BoolArray = (~keep).sum(axis=1) == 1
    return missing


def _bonus(bonus: Array, form: str) -> Check:
    """Tell how far from 0 a unit without influence would score, as published."""
    import numpy as np

    size = float(np.nanmean(bonus)) if np.isfinite(bonus).any() else 0.0
    text = f"Prompts without one unit among random ones give every unit about {size:+.2g}, whatever it says"
    ways = {
        "centered": "; that is taken out of the scores.",
        "raw": ": read the order of the scores, not their sign.",
        "published": "; the shift of the smallest score to 0 hides it, and negative scores too.",
    }
    return Check("common_bonus", size, "warn" if form == "raw" else "info", text + ways[form])


def shifted(scores: Array) -> Array:
    """Return scores as published: minus the smallest of the row, divided by the sum; 0 where all are equal."""
    import numpy as np

    above = scores - np.nanmin(scores, axis=1, keepdims=True)
    total = np.nansum(above, axis=1, keepdims=True)
    return cast("Array", above / np.where(total > 0, total, 1.0))
