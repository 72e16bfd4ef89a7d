"""How much of a map lies on what the answer needs: mass, lift, recall, rank. Plain arithmetic; knows no model.

All numbers are taken over the counted tokens: system text, distractor, needle and query. BOS and template tokens are
outside, since attention sinks there would decide everything; their shares of the whole map are reported beside it.
Shares are of absolute scores, or of positive scores (what speaks for the target); methods without a sign have one
version only, both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from backend.saliency.reading import combine_rows
from backend.types import TokenAttribution

Part = Literal["absolute", "positive"]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenSets:
    """Positions of a needle prompt's tokens, exact and without overlap but for the last two.

    Attributes:
        bos: The BOS token; where the text has none, the first token, which takes its place as attention sink.
        template: Control tokens and role markers of a chat.
        system: What the model is told to do.
        distractor: Sentences that say nothing to the point.
        needle: The sentence that holds the answer.
        query: The question.
        answer_word: Inside the needle: the answer itself.
        entity: Inside the needle: the made-up name.
        lead: Answer tokens before the secret; neither counted nor outside.
    """

    bos: tuple[int, ...]
    template: tuple[int, ...]
    system: tuple[int, ...]
    distractor: tuple[int, ...]
    needle: tuple[int, ...]
    query: tuple[int, ...]
    answer_word: tuple[int, ...]
    entity: tuple[int, ...]
    lead: tuple[int, ...] = ()

    @property
    def causal(self) -> tuple[int, ...]:
        """What the answer needs: system, needle, query."""
        return tuple(sorted((*self.system, *self.needle, *self.query)))

    @property
    def counted(self) -> tuple[int, ...]:
        """All tokens that shares are taken over."""
        return tuple(sorted((*self.causal, *self.distractor)))


@dataclass(frozen=True, slots=True)
class NeedleMetrics:
    """What a map says of a planted needle.

    Attributes:
        mass: Share of system, needle and query, in [0, 1]; None if there is nothing to share out.
        lift: Mass relative to that of a uniform map, which has exactly 1.
        needle_mass: Share of the needle alone.
        needle_lift: The same relative to a uniform map.
        recall_at_k: Part of the k highest tokens that belong to the needle, k being the needle's length.
        auprc: Average precision of the ranking for the needle's tokens.
        secret_rank: Rank of the answer word's best token; 1 is perfect.
        bos_share: Share of BOS in the whole map, BOS and template included; None if the method left it out.
        template_share: The same for the template; 0 where there is none.
        chance: Recall that a random order reaches on average.
        unmeasured: Counted tokens without a score; they have no share and rank last.
    """

    mass: float | None
    lift: float | None
    needle_mass: float | None
    needle_lift: float | None
    recall_at_k: float
    auprc: float
    secret_rank: int
    bos_share: float | None
    template_share: float | None
    chance: float
    unmeasured: int


def token_scores(result: TokenAttribution, count: int) -> Array:
    """Return one score per token, rows put together; NaN where nothing was measured.

    A unit of several tokens shares its score out evenly among them, so that mass stays what it was.

    Args:
        result: A result with scores.
        count: Number of source tokens.

    Raises:
        BadRequest: If the result has no scores.
    """
    rows = range(0 if result.scores is None else len(result.scores))
    values = combine_rows(result, rows)[0].astype(np.float64)
    if result.measured is not None:
        values[~result.measured] = np.nan
    if result.units is None:
        return values
    out = np.full(count, np.nan)
    for (begin, end), value in zip(result.units, values, strict=True):
        out[begin:end] = value / (end - begin)
    return out


def measure(scores: Array, sets: TokenSets, *, part: Part = "absolute", seed: int = 0) -> NeedleMetrics:
    """Measure a map.

    Args:
        scores: float64 ``(token,)``; NaN where not measured.
        sets: Where system, needle, query and the rest lie.
        part: Which scores make shares and order: absolute, or positive ones.
        seed: Of the random order among equal scores.
    """
    counted = np.array(sets.counted)
    is_needle, is_causal, is_secret = (
        np.isin(counted, chosen) for chosen in (sets.needle, sets.causal, sets.answer_word)
    )
    n, k = len(counted), len(sets.needle)
    weight = _weight(scores, part)
    total = float(np.nansum(weight[counted]))
    mass = needle_mass = None
    if total > 0:
        mass = float(np.nansum(weight[counted][is_causal])) / total
        needle_mass = float(np.nansum(weight[counted][is_needle])) / total
    order = _ranking(scores[counted] if part == "positive" else weight[counted], seed)
    hits = is_needle[order]
    places = np.flatnonzero(hits) + 1
    everything = np.array(sorted((*sets.counted, *sets.bos, *sets.template)))
    whole = float(np.nansum(weight[everything]))
    return NeedleMetrics(
        mass=mass,
        lift=None if mass is None else mass / (len(sets.causal) / n),
        needle_mass=needle_mass,
        needle_lift=None if needle_mass is None else needle_mass / (k / n),
        recall_at_k=float(hits[:k].sum() / k),
        auprc=float((np.arange(1, k + 1) / places).mean()),
        secret_rank=int(np.flatnonzero(is_secret[order])[0]) + 1,
        bos_share=_share(weight, sets.bos, whole),
        template_share=_share(weight, sets.template, whole) if sets.template else 0.0,
        chance=k / n,
        unmeasured=int(np.isnan(scores[counted]).sum()),
    )


def _weight(scores: Array, part: Part) -> Array:
    """Make scores into weights of at least 0, the largest being 1: equal scores then add up without rounding."""
    weight = np.abs(scores) if part == "absolute" else np.maximum(scores, 0.0)
    top = float(np.nanmax(weight, initial=0.0))
    return weight / top if top > 0 else weight


def _share(weight: Array, chosen: tuple[int, ...], whole: float) -> float | None:
    found = weight[list(chosen)]
    if whole <= 0 or not chosen or np.isnan(found).all():
        return None
    return float(np.nansum(found)) / whole


def _ranking(values: Array, seed: int) -> npt.NDArray[np.intp]:
    """Return the order from the highest to the lowest, equal values at random, unmeasured ones last."""
    shuffled = np.random.default_rng(seed).permutation(len(values))
    order: npt.NDArray[np.intp] = shuffled[np.argsort(-values[shuffled], kind="stable")]  # NaN sorts last
    return order
