"""The ablation bank: random parts of the prompt hidden, run once, read by every method that samples subsets.

Each mask says which units stay. What stays always: BOS, template tokens, and the answer so far, so that masks speak
of the prompt alone. Read for each mask and target: the log-odds of the target (against all other tokens, or against
the foil), and whether it is the token that greedy decoding would choose. Where there are no more masks than asked
for, each is taken once and nothing is left to chance; equal masks are run once.

A bank is found again by everything that decides it: model, ids, targets, foil, units, operator, rule, number, seed.
Knows masks and outcomes; knows nothing of what methods make of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from backend import registry
from backend.errors import NotApplicable
from backend.saliency.ablation import Ablator
from backend.saliency.embeddings import baseline_vector
from backend.saliency.question import Question
from backend.saliency.variants import Operator
from backend.types import Check, FloatArray
from backend.types import cache_key as hash_of

BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]

Rule = Literal["half", "size", "single"]

_FIXED_ROLES = ("bos", "template", "answer")
_FORMAT = 1  # raise it when the stored form changes


@dataclass(frozen=True, slots=True)
class Plan:
    """Which masks to run.

    Attributes:
        rule: "half": each unit stays with probability 1/2, independently. "size": exactly ``size`` units stay.
            "single": one unit goes at a time.
        operator: How units are removed; a replaced token becomes the mean embedding.
        masks: Number of masks to draw; "single" needs none.
        size: Units that stay, for "size".
    """

    rule: Rule
    operator: Operator
    masks: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Outcomes of masked runs.

    Attributes:
        units: Indices of the question's units that masks speak of, int ``(unit,)``.
        keep: bool ``(mask, unit)``; True where the unit stays.
        log_odds: float64 ``(mask, row)``.
        top: bool ``(mask, row)``; whether the target is the most likely token.
        plain: float64 ``(row,)``; log-odds with everything in place.
        noise: float64 ``(row,)``; by how much rounding moves the log-odds.
        exact: Whether every possible mask was run once.
        lost: Masks without an outcome, since they left nothing to predict a target from; they are left out.
        checks: Assertions about the set-up.
        forward: Passes that this reading took; 0 if the runs existed already.
    """

    units: npt.NDArray[np.int64]
    keep: BoolArray
    log_odds: Array
    top: BoolArray
    plain: Array
    noise: Array
    exact: bool
    lost: int
    checks: tuple[Check, ...]
    forward: float = 0.0

    @property
    def notes(self) -> list[Check]:
        """What a reader of any method's scores must know about the runs."""
        found = list(self.checks)
        runs = f"{len(self.keep)} masked runs"
        if not self.forward:
            found.append(Check("shared_runs", None, "info", f"The {runs} existed already and were read again."))
        if self.lost:
            text = f"{self.lost} masks left nothing to predict a target from; the other {len(self.keep)} count."
            found.append(Check("lost_masks", float(self.lost), "warn", text))
        return found


def removable(question: Question) -> list[int]:
    """Return the indices of the units that masks may remove.

    Raises:
        NotApplicable: If there are none.
    """
    found = [u for u, (begin, _) in enumerate(question.spans) if question.roles[begin] not in _FIXED_ROLES]
    if not found:
        raise NotApplicable(
            "Only BOS, template and answer tokens stand before the target, and random masks leave these in place.",
            "Enter a prompt, or choose occlusion with BOS and template tokens.",
        )
    return found


def draw(question: Question, plan: Plan, progress: Callable[[float], None]) -> Bank:
    """Run the masks of a plan, or read them where they were run before.

    Args:
        question: Rows, sources, units, and the runs that exist.
        plan: Which masks.
        progress: Called with the part that is done, 0 to 1, at least once per pass; may raise to stop.

    Raises:
        NotApplicable: If no unit can be removed, or the operator does not work with this model.
    """
    units = removable(question)
    key = _key(question, units, plan)
    kept = question.runs.get(key)
    found = None if kept is None else _decode(kept)
    if found is None:
        found = _run(question, units, plan, progress)
        question.runs.put(key, _encode(found))
    progress(1.0)
    return found


def spread_out(question: Question, units: npt.ArrayLike, scores: Array) -> tuple[FloatArray, BoolArray]:
    """Put scores of the units that masks speak of among all units.

    Args:
        question: Rows and units.
        units: Indices of the units that masks speak of, int ``(column,)``.
        scores: float64 ``(row, column)``; NaN for units that were never drawn.

    Returns:
        float32 ``(row, unit)`` and bool ``(unit,)``. Units without a score are not measured: NaN, but 0 for targets
        that cannot see them.
    """
    begins = np.array([begin for begin, _ in question.spans])
    seen = begins < np.array(question.targets)[:, None]
    values = np.where(seen, np.float32(np.nan), np.float32(0.0))
    known = np.isfinite(scores).all(axis=0)
    columns = np.asarray(units, np.int64)[known]
    values[:, columns] = scores[:, known]
    measured = np.zeros(len(begins), bool)
    measured[columns] = True
    return values, measured


def draw_masks(count: int, plan: Plan, seed: int) -> tuple[BoolArray, bool]:
    """Return keep-masks, bool ``(mask, unit)``, and whether they are all that there are.

    Args:
        count: Number of units.
        plan: Rule, number and size.
        seed: Seed of the draw.
    """
    rng = np.random.default_rng(seed)
    if plan.rule == "single":
        return ~np.eye(count, dtype=bool), False
    if plan.rule == "size":
        if comb(count, plan.size) <= plan.masks:
            chosen = np.array(list(combinations(range(count), plan.size)), np.int64)
            return (chosen[:, :, None] == np.arange(count)).any(axis=1), True
        order = rng.random((plan.masks, count)).argsort(axis=1).argsort(axis=1)
        return order < plan.size, False
    if 2**count <= plan.masks:
        return ((np.arange(2**count)[:, None] >> np.arange(count)) & 1).astype(bool), True
    return rng.random((plan.masks, count)) < 0.5, False


def _run(question: Question, units: list[int], plan: Plan, progress: Callable[[float], None]) -> Bank:
    keep, exact = draw_masks(len(units), plan, question.seed)
    distinct, which = np.unique(keep, axis=0, return_inverse=True)
    removed = np.zeros((len(distinct) + 1, question.source_count), bool)  # the last one removes nothing
    for column, unit in enumerate(units):
        removed[:-1, slice(*question.spans[unit])] = ~distinct[:, column, None]
    part = 0.0

    def advance(done: int) -> None:
        nonlocal part
        part = done / len(removed)
        progress(part)

    advance(0)
    fill = baseline_vector(question.model, "mean") if plan.operator == "replace" else None
    ablator = Ablator(question, plan.operator, fill, log_odds=True, before_pass=lambda: progress(part))
    odds, top = ablator.outcomes(removed, advance)
    plain, odds, top = odds[-1], odds[which.reshape(-1)], top[which.reshape(-1)]
    whole = np.isfinite(odds).all(axis=1)
    if not whole.any():
        raise NotApplicable(
            "With any of the units removed, nothing is left to predict the target from.",
            "Choose the operator hide, or finer units.",
        )
    return Bank(
        units=np.array(units, np.int64),
        keep=keep[whole],
        log_odds=odds[whole],
        top=top[whole],
        plain=plain,
        noise=ablator.noise,
        exact=exact and bool(whole.all()),
        lost=int((~whole).sum()),
        checks=ablator.checks,
        forward=ablator.forward,
    )


def _key(question: Question, units: list[int], plan: Plan) -> str:
    info = question.model.info
    return hash_of(
        "ablation bank",
        [_FORMAT, registry.METHODS_VERSION],
        [info.id, info.revision, info.dtype, info.attention, info.device.split(":")[0]],
        [question.ids, question.targets, question.strands],
        [[question.spans[unit] for unit in units], plan, question.seed],
    )


def _encode(bank: Bank) -> bytes:
    document = {
        "units": bank.units.tolist(),
        "keep": ["".join("01"[bit] for bit in row) for row in bank.keep.tolist()],
        "log_odds": bank.log_odds.tolist(),
        "top": bank.top.tolist(),
        "plain": bank.plain.tolist(),
        "noise": bank.noise.tolist(),
        "exact": bank.exact,
        "lost": bank.lost,
        "checks": [[check.name, check.value, check.verdict, check.text] for check in bank.checks],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _decode(data: bytes) -> Bank | None:
    """Read stored runs; None if the bytes are not such a document."""
    try:
        document: dict[str, Any] = json.loads(data)
        bank = Bank(
            units=np.array(document["units"], np.int64),
            keep=np.array([[bit == "1" for bit in row] for row in document["keep"]], bool),
            log_odds=np.array(document["log_odds"], np.float64),
            top=np.array(document["top"], bool),
            plain=np.array(document["plain"], np.float64),
            noise=np.array(document["noise"], np.float64),
            exact=bool(document["exact"]),
            lost=int(document["lost"]),
            checks=tuple(Check(*entry) for entry in document["checks"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return bank if bank.keep.shape == (len(bank.log_odds), len(bank.units)) else None
