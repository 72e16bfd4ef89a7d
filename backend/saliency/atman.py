"""Attention manipulation (AtMan): how much less likely the target becomes when attention to a unit is turned down.

Idea: in every layer, head and query row the attention scores are shifted so that the lowest allowed one is 0, then
the scores of the unit's tokens are multiplied by a small factor. Tokens whose input embedding is similar are turned
down too, the more the more similar they are, so that a copy cannot stand in. s_u = S(text) - S(unit turned down).
Cost: one forward pass per unit, about half of that where the beginning of the text is computed once for all units;
three quarters where similar tokens further left go along.
Sign: positive supports the target: turning it down lowers the score. Unit: that of S.
Check: with all factors at 1 the model answers as always; effects below twice the rounding are noise; which tokens
were turned down along with a unit.
Failure modes: two mentions of the same word cannot be told apart while similar tokens go along. Even a factor of 0
does not remove a token: its score becomes that of the row's least attended token. Turning BOS down can change
everything, so BOS and template tokens are left out unless asked for (they may still go along as similar ones).
Source: Deiseroth et al. 2023 (arXiv:2301.08110). Own implementation from the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question

    Floats = npt.NDArray[np.float32]

_NAMED = 4  # units whose companions are named in the check


@dataclass(frozen=True)
class Params:
    """Settings of attention manipulation."""

    factor: float = field(
        default=0.1,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "step": 0.05,
            "help": "What the unit's shifted attention scores are multiplied by: 1 changes nothing, 0 makes them the "
            "lowest of their row.",
        },
    )
    similar: bool = field(default=True, metadata={"help": "Turn similar tokens down along with the unit."})
    threshold: float = field(
        default=0.6,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "step": 0.05,
            "help": "Cosine of the input embeddings from which a token is similar.",
        },
    )
    include_template: bool = field(
        default=False, metadata={"help": "Turn BOS and template tokens down too; that often breaks the model."}
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: half a pass per unit, more with similar tokens, and some for the checks."""
    return Passes(forward=work.strands * ((0.75 if params.similar else 0.55) * work.units + 4))


@register(
    "atman",
    label="AtMan",
    family="ablation",
    signed=True,
    additive=False,
    params=Params,
    cost=cost,
    summary="How much less likely does the target become when attention to this token is turned down?",
    reading="Positive: with less attention to this unit, and to tokens like it, the target's score falls by so much, "
    "so it supports the target; negative: it works against it (in the unit of the score).",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Turn each unit down and score the same targets.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and units.
        params: How far, and whether similar tokens go along.
        tick: Progress and cancellation, once per pass.

    Returns:
        Scores ``(row, unit)``. Units that were left out on purpose are NaN and not measured.

    Raises:
        NotApplicable: If the model's attention cannot be exchanged, or scores are not numbers.
    """
    import numpy as np

    from backend.saliency import ablation_checks
    from backend.saliency.suppression import Suppressor

    units = question.spans
    frame = question.is_frame
    chosen = [u for u, (begin, _) in enumerate(units) if params.include_template or not frame[begin]]
    if not chosen:
        raise NotApplicable(
            "Only BOS and template tokens stand before the target, and they are not turned down by default.",
            "Switch on BOS and template tokens.",
        )
    total, done = len(chosen) + 1, 0

    def progress(now: int) -> None:
        nonlocal done
        done = now
        tick(done, total)

    progress(0)
    suppressor = Suppressor(question, before_pass=lambda: tick(done, total))
    spans = [units[unit] for unit in chosen]
    without = suppressor.values(lambda strand: unit_factors(model, strand.ids, spans, params), progress)
    values = np.full((len(question.targets), len(units)), np.nan)
    effects = question.plain.values[:, None] - without.T
    # a unit that a target cannot see may have taken earlier tokens along: that is not the unit's doing
    begins = np.array([begin for begin, _ in spans])
    values[:, chosen] = np.where(begins[None] < np.array(question.targets)[:, None], effects, 0.0)
    measured = np.isfinite(values).all(axis=0)
    found = [
        suppressor.neutral_check(),
        *ablation_checks.noise(suppressor, values),
        *_companions(question, values, params),
    ]
    progress(total)
    return Scores(values.astype(np.float32), Passes(forward=suppressor.forward), question.units, measured, tuple(found))


def unit_factors(model: LanguageModel, ids: tuple[int, ...], spans: list[tuple[int, int]], params: Params) -> Floats:
    """Say how far every token is turned down for each unit.

    A token of the unit gets the factor f; another one whose largest cosine c with a token of the unit reaches the
    threshold gets f + (1 - f)(1 - c); all others 1.

    Args:
        model: The model.
        ids: The sequence.
        spans: Half-open spans of the units.
        params: Factor, threshold, whether similar tokens go along.

    Returns:
        float32 ``(unit, len(ids))``, in [factor, 1].
    """
    import numpy as np
    import torch

    from backend.saliency.embeddings import embed

    factors = np.ones((len(spans), len(ids)), np.float32)
    if params.similar:
        vectors = torch.nn.functional.normalize(embed(model, ids).float(), dim=-1)
        cosines = (vectors @ vectors.T).clamp(max=1.0).cpu().numpy()
    for unit, (begin, end) in enumerate(spans):
        if params.similar:
            closest = cosines[begin:end].max(axis=0)
            lowered = params.factor + (1 - params.factor) * (1 - closest)
            factors[unit] = np.where(closest >= params.threshold, lowered, 1.0)
        factors[unit, begin:end] = params.factor
    return factors


def _companions(question: Question, values: npt.NDArray[np.float64], params: Params) -> list[Check]:
    """Say which tokens were turned down along with the strongest units."""
    import numpy as np

    if not params.similar:
        return []
    spans = list(question.spans)
    lowered: npt.NDArray[np.bool_] = np.less(unit_factors(question.model, question.ids, spans, params), 1)
    for unit, (begin, end) in enumerate(spans):
        lowered[unit, begin:end] = False
    lowered[np.isnan(values).all(axis=0)] = False
    took = np.array([bool(row.any()) for row in lowered])
    count = int(took.sum())
    if not count:
        return [Check("co_suppressed", 0.0, "info", "No unit has similar tokens that were turned down with it.")]
    strength = np.nan_to_num(np.abs(values)).sum(axis=0)
    named = [unit for unit in np.argsort(-strength, kind="stable") if took[unit]][:_NAMED]
    examples = "; ".join(
        f"{_name(question, *spans[unit])} with token {', '.join(str(i + 1) for i in np.flatnonzero(lowered[unit])[:8])}"
        + ("…" if lowered[unit].sum() > 8 else "")
        for unit in named
    )
    text = (
        f"{count} units had similar tokens (cosine of the embeddings from {params.threshold:g}) turned down with them, "
        f"so their scores are shared ones. The strongest: {examples}."
    )
    return [Check("co_suppressed", float(count), "info", text)]


def _name(question: Question, begin: int, end: int) -> str:
    """Name a unit by its text and its place."""
    place = f"token {begin + 1}" if end - begin == 1 else f"tokens {begin + 1} to {end}"
    text = str(question.model.tokenizer.decode(list(question.ids[begin:end]))).strip()
    return f"“{text}” ({place})" if text else place
