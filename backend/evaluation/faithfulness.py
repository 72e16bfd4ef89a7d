"""Fixed-budget faithfulness: what happens to the target when the units that a method ranks highest are hidden.

Idea: v(A) = p(target) when only the units A can be seen. Hiding the top k % should lower it ("deletion"), and showing
only the top k % should keep it ("insertion"). All methods get the same budgets, so none gains by large scores, and the
same random orders and the ascending order stand beside them: the gap to random is the result, not the raw area.
Cost: up to 24 forward passes per method and 60 for the random orders, about half of that where the beginning of the
text is computed once.
Units are those of the explanation's level; BOS, template, query and the answer so far always stay. Tokens are hidden
the way occlusion hides them, which favors occlusion (``FAVORS``).
Source: DeYoung et al. 2020 (arXiv:1911.03429) for comprehensiveness and sufficiency; Petsiuk et al. 2018
(arXiv:1806.07421) for deletion and insertion. Own implementation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from backend.errors import NotApplicable
from backend.saliency.reading import read
from backend.saliency.units import Units, make_units
from backend.types import Explanation, MethodSpec, SaliencyRequest, Tick, TokenAttribution

if TYPE_CHECKING:
    from backend.models.language import LanguageModel

BUDGETS = (1, 2, 5, 10, 20, 50)
"""Percent of the units that are hidden, or alone left."""

FAVORS = "Tokens are hidden the way occlusion hides them, so these numbers favor occlusion."

_PERMUTATIONS = 5
_STAY = ("bos", "template", "query", "answer", "pad")
_TINY = 1e-9  # p of a target below which ratios mean little

Order = Literal["descending", "ascending"]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Deletion and insertion along one order of units.

    Attributes:
        deletion: float64 ``(1 + budget,)``; log p(target) with the first k % hidden; k = 0 first.
        insertion: The same with only the first k % visible.
    """

    deletion: Array
    insertion: Array


@dataclass(frozen=True, slots=True, eq=False)
class MethodFaithfulness:
    """What hiding by one method's order does. Probabilities in [0, 1], areas relative to p(target) of the whole text.

    Attributes:
        method: Registry name.
        descending: From the highest unit down; None if the method has no scores on these units.
        ascending: From the lowest unit up.
        deletion_auc: Mean height of p(all without top k %) / p(all) over the budgets; low is better.
        insertion_auc: Mean height of p(top k % alone) / p(all); high is better.
        deletion_gap: How far ``deletion_auc`` lies below the mean of the random orders.
        insertion_gap: How far ``insertion_auc`` lies above it.
        comprehensiveness: Mean over budgets of p(all) - p(all without top k %); high is better.
        sufficiency: Mean over budgets of p(all) - p(top k % alone); low is better.
        log_prob_drop: Per budget, log p(all) - log p(all without top k %), in nats; high is better.
        reason: Why there are no numbers; empty if there are.
    """

    method: str
    descending: Curves | None = None
    ascending: Curves | None = None
    deletion_auc: float = float("nan")
    insertion_auc: float = float("nan")
    deletion_gap: float = float("nan")
    insertion_gap: float = float("nan")
    comprehensiveness: float = float("nan")
    sufficiency: float = float("nan")
    log_prob_drop: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Faithfulness:
    """All methods of an explanation on the same budgets.

    Attributes:
        budgets: Percent, ascending.
        counts: Units hidden at each budget.
        units: Number of units that can be hidden.
        log_prob: log p(target) of the whole text.
        random: One pair of curves per random order.
        methods: One entry per method of the explanation, in its order.
        passes: Forward passes, in full-length sequences.
        seconds: Wall time.
        notes: What the reader must know.
    """

    budgets: tuple[int, ...]
    counts: tuple[int, ...]
    units: int
    log_prob: float
    random: tuple[Curves, ...]
    methods: tuple[MethodFaithfulness, ...]
    passes: float
    seconds: float
    notes: tuple[str, ...] = (FAVORS,)

    def ratios(self, log_probs: Array) -> Array:
        """Return a curve as p / p(all), for drawing."""
        ratio: Array = np.exp(log_probs - self.log_prob)
        return ratio

    def random_band(self, kind: Literal["deletion", "insertion"]) -> tuple[Array, Array, Array]:
        """Return mean, lowest and highest ratio of the random orders, each ``(1 + budget,)``."""
        all_orders = np.stack([self.ratios(getattr(curves, kind)) for curves in self.random])
        return all_orders.mean(axis=0), all_orders.min(axis=0), all_orders.max(axis=0)


def faithfulness(
    model: LanguageModel,
    explanation: Explanation,
    tick: Tick,
    *,
    budgets: Sequence[int] = BUDGETS,
    permutations: int = _PERMUTATIONS,
    seed: int = 0,
) -> Faithfulness:
    """Measure all methods of an explanation at once.

    Args:
        model: The model that the explanation is of; unchanged afterwards.
        explanation: Passage, targets and scores. A foil is left out: v is the probability of the target itself.
        tick: Progress and cancellation, once per pass.
        budgets: Percent of units, ascending, each above 0 and at most 100.
        permutations: Random orders.
        seed: Of the random orders, and of the order among equal scores.

    Raises:
        NotApplicable: If tokens cannot be hidden in this model, or fewer than two units can be.
        BadRequest: If the explanation does not belong to the model.
        Cancelled: If ``tick`` raised it; takes effect within one pass.
    """
    from backend.saliency.ablation import Ablator
    from backend.saliency.question import ask

    began = time.perf_counter()
    units = make_units(explanation.sources, explanation.level)
    free = [u for u, (start, _) in enumerate(units) if explanation.sources[start].role not in _STAY]
    if len(free) < 2:
        raise NotApplicable("Fewer than two units can be hidden.", "Use a longer prompt or smaller units.")
    counts = tuple(max(1, round(len(free) * budget / 100)) for budget in budgets)
    rng = np.random.default_rng(seed)
    shuffles = [rng.permutation(len(free)) for _ in range(permutations)]
    rankings = [_ranking(explanation, result, units, free, seed) for result in explanation.results]
    plan = _Plan(len(free), counts)
    for shuffle in shuffles:
        plan.add(shuffle)
    for ranking in rankings:
        if not isinstance(ranking, str):
            plan.add(ranking)
            plan.add(ranking[::-1])
    sets = plan.hidden()  # (variant, free unit)
    tick(0, len(sets))
    done = 0

    def progress(now: int) -> None:
        nonlocal done
        done = now
        tick(done, len(sets))

    question = ask(model, explanation.passage, _request(explanation))
    ablator = Ablator(question, "hide", before_pass=lambda: tick(done, len(sets)))
    removed = np.zeros((len(sets), question.source_count), bool)
    for column, unit in enumerate(free):
        removed[:, slice(*units[unit])] = sets[:, column, None]
    values = ablator.without(removed, progress).sum(axis=1)
    tick(len(sets), len(sets))
    plain = float(question.plain.values.sum())
    random = tuple(plan.curves(shuffle, values, plain) for shuffle in shuffles)
    x = np.array([0.0, *(count / len(free) for count in counts)])
    base = _areas(random, x, plain)
    methods = []
    for result, ranking in zip(explanation.results, rankings, strict=True):
        if isinstance(ranking, str):
            methods.append(MethodFaithfulness(result.method, reason=ranking))
            continue
        down, up = (plan.curves(order, values, plain) for order in (ranking, ranking[::-1]))
        methods.append(_measured(result.method, down, up, base, x, plain))
    notes: tuple[str, ...] = (FAVORS,)
    if np.exp(plain) < _TINY:
        notes = (FAVORS, f"The target's probability is only {np.exp(plain):.1e}, so ratios to it mean little.")
    return Faithfulness(
        budgets=tuple(budgets),
        counts=counts,
        units=len(free),
        log_prob=plain,
        random=random,
        methods=tuple(methods),
        passes=ablator.forward + len(question.strands),
        seconds=time.perf_counter() - began,
        notes=notes,
    )


class _Plan:
    """Which sets of units must be hidden, each once, and where its result will stand."""

    def __init__(self, units: int, counts: tuple[int, ...]) -> None:
        self._units, self._counts = units, counts
        self._index: dict[bytes, int] = {}
        self._sets: list[npt.NDArray[np.bool_]] = []
        self._put(np.ones(units, bool))  # nothing visible: where insertion starts

    def add(self, order: npt.NDArray[np.intp]) -> None:
        """Plan the sets along an order of all units."""
        for first in self._firsts(order):
            self._put(first)
            self._put(~first)

    def hidden(self) -> npt.NDArray[np.bool_]:
        """Return all planned sets, bool ``(variant, unit)``, True where hidden."""
        return np.stack(self._sets)

    def curves(self, order: npt.NDArray[np.intp], values: Array, plain: float) -> Curves:
        """Collect an order's results, ``values`` being log p per variant."""
        firsts = self._firsts(order)
        deletion = [plain, *(values[self._index[first.tobytes()]] for first in firsts)]
        insertion = [values[0], *(values[self._index[(~first).tobytes()]] for first in firsts)]
        return Curves(np.array(deletion), np.array(insertion))

    def _firsts(self, order: npt.NDArray[np.intp]) -> list[npt.NDArray[np.bool_]]:
        out = []
        for count in self._counts:
            first = np.zeros(self._units, bool)
            first[order[:count]] = True
            out.append(first)
        return out

    def _put(self, hidden: npt.NDArray[np.bool_]) -> None:
        key = hidden.tobytes()
        if key not in self._index:
            self._index[key] = len(self._sets)
            self._sets.append(hidden)


def _request(explanation: Explanation) -> SaliencyRequest:
    """Ask for the same target again: its log-probability, without a foil."""
    from backend.types import ModelRef

    start = explanation.targets[0].position - explanation.passage.prompt_length
    return SaliencyRequest(
        model=ModelRef(explanation.model.id),
        prompt=explanation.prompt,
        answer_ids=tuple(token.id for token in explanation.passage.answer_tokens),
        target=(start, start + len(explanation.targets)),
        methods=tuple(MethodSpec.of(result.method) for result in explanation.results),
        level=explanation.level,
    )


def _ranking(
    explanation: Explanation, result: TokenAttribution, units: Units, free: list[int], seed: int
) -> npt.NDArray[np.intp] | str:
    """Order the free units from the highest score down, or say why a method has no order on them.

    Equal scores are ordered at random, units without a score come last.
    """
    if result.scores is None:
        return result.refusal
    reading = read(explanation, result, range(len(result.scores)), units=units)
    if reading.units != units:
        return "It was measured on other units than the explanation's level."
    values = reading.values[free].astype(np.float64)
    shuffled = np.random.default_rng(seed).permutation(len(free))
    order: npt.NDArray[np.intp] = shuffled[np.argsort(-values[shuffled], kind="stable")]
    return order


def _area(log_probs: Array, x: Array, plain: float) -> float:
    """Return the mean height of p / p(all) over the hidden part ``x``, by trapezoids."""
    return float(np.trapezoid(np.exp(log_probs - plain), x) / (x[-1] - x[0]))


def _areas(orders: Sequence[Curves], x: Array, plain: float) -> Mapping[str, float]:
    return {
        kind: float(np.mean([_area(getattr(curves, kind), x, plain) for curves in orders]))
        for kind in ("deletion", "insertion")
    }


def _measured(
    method: str, down: Curves, up: Curves, base: Mapping[str, float], x: Array, plain: float
) -> MethodFaithfulness:
    deletion, insertion = _area(down.deletion, x, plain), _area(down.insertion, x, plain)
    whole = np.exp(plain)
    return MethodFaithfulness(
        method=method,
        descending=down,
        ascending=up,
        deletion_auc=deletion,
        insertion_auc=insertion,
        deletion_gap=base["deletion"] - deletion,
        insertion_gap=insertion - base["insertion"],
        comprehensiveness=float((whole - np.exp(down.deletion[1:])).mean()),
        sufficiency=float((whole - np.exp(down.insertion[1:])).mean()),
        log_prob_drop=tuple(float(plain - value) for value in down.deletion[1:]),
    )
