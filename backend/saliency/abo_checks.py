"""Checks of attention bias optimization: the set-up, what was learned, whether it is stable.

Knows histories of a descent and shares; knows nothing of how a bias is added.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backend.saliency.agreement import spearman, top_overlap
from backend.saliency.attention_bias import BiasedPasses, memory_check, neutral_check
from backend.saliency.bias_descent import Plan, State
from backend.saliency.question import Question
from backend.types import Check

if TYPE_CHECKING:
    from backend.saliency.abo import Params

Array = npt.NDArray[np.float64]

_NEAR_UNIFORM = 0.1
"""Total variation distance from uniform below which nothing was learned; 1 would be all on one token."""

_SPREAD = 0.5  # difference of biases below which a literal run has not moved
_SATURATED = 0.95  # target probability from which the penalty alone decides, in the literal form
_KEPT = 0.5  # part of its probability that the target should keep
_UNLIKELY = 0.1  # probability below which a target is not what the model would say
_OPEN = 0.01  # a gate below this lets nothing through
_STABLE = 0.7  # rank correlation of two states of one run, or of two runs
_TOP = 10  # tokens whose place is compared


def setup_checks(question: Question, passes: BiasedPasses, params: Params, plan: Plan) -> list[Check]:
    """Say which form ran and on which tokens."""
    found = [neutral_check(passes)]
    if params.form == "anchored":
        first = "BOS, the first token," if question.roles[0] == "bos" else "The first token"
        text = (
            "This is the sink-anchored form, a variant of ours and not the published method. "
            f"{first} is the anchor: its gate is fixed at 1, so it is not scored and its 0 says nothing."
        )
    else:
        text = "This is the literal form: our reading of the published text, which leaves the objective open."
    found.append(Check("form", None, "info", text))
    frozen = int((plan.fixed & question.is_frame)[1 if params.form == "anchored" else 0 :].sum())
    if frozen:
        text = f"The attention to {frozen} BOS and template tokens was left as it is; their 0 says nothing."
        found.append(Check("frozen_frame", float(frozen), "info", text))
    count = len(question.targets)
    if count > 1:
        text = (
            f"One bias per token was learned for all {count} targets together. Each row shows the same biases, as "
            "shares of what its target sees: the rows do not tell the targets apart."
        )
        found.append(Check("shared_targets", float(count), "info", text))
    return found + memory_check(passes)


def descent_checks(
    question: Question, params: Params, histories: list[list[State]], values: Array, halves: list[Array], runs: Array
) -> list[Check]:
    """Judge what was learned.

    Args:
        question: Rows and sources.
        params: Settings.
        histories: States of each run.
        values: Mean shares ``(row, source)``.
        halves: Shares half-way, one array per run.
        runs: Shares at the end ``(run, row, source)``.
    """
    return [
        _likelihood(question, params, histories),
        *_learned(question, params, histories, values),
        *_half_way(question, histories, halves, runs),
        *_seeds(question, histories, runs),
        _frame_share(question, values),
    ]


def _likelihood(question: Question, params: Params, histories: list[list[State]]) -> Check:
    plain = float(np.exp(np.log(np.maximum(question.plain.probabilities, 1e-300)).mean()))
    path = np.array([[state.probability for state in history] for history in histories]).mean(axis=0)
    end = float(path[-1])
    what = "The target's probability" if len(question.targets) == 1 else "The targets' probability (geometric mean)"
    text = f"{what} was {plain:.3g} in the untouched model, {path[0]:.3g} at the start and {end:.3g} at the end"
    if plain < _UNLIKELY and end > 5 * plain:
        text += (
            "; the biases steer the model to a target that it did not prefer: read the shares as what could make it "
            "likely, not as what the model used."
        )
        return Check("likelihood", end, "warn", text)
    high = float((path > _SATURATED).mean())
    if params.form == "literal" and high > 1 / 3:
        text += f"; it lay above {_SATURATED} for {high:.0%} of the steps, where the penalty alone decides."
        return Check("likelihood", end, "warn", text)
    if params.form == "anchored" and end < _KEPT * plain:
        text += "; the gates closed further than the answer bears: try a smaller penalty."
        return Check("likelihood", end, "warn", text)
    return Check("likelihood", end, "ok", f"{text}.")


def _learned(question: Question, params: Params, histories: list[list[State]], values: Array) -> list[Check]:
    found = []
    last = [history[-1] for history in histories]
    if all(history[0].pull == 0 for history in histories):
        text = "The target does not depend on any attention that may move, so there is nothing to rank."
        found.append(Check("no_signal", 0.0, "fail", text))
    part = ~np.isnan(last[0].alpha)
    distance = _from_uniform(question, values, part)
    spread = float(np.mean([np.ptp(state.bias[part]) for state in last]))
    if distance < _NEAR_UNIFORM or (params.form == "literal" and spread < _SPREAD):
        text = f"Nothing was learned: the shares are {distance:.2f} of 1 from uniform, the biases {spread:.2g} apart."
        if params.form == "anchored":
            text += " So it goes where the first token draws no attention that the others could lose to it."
        found.append(Check("nothing_learned", distance, "warn", text))
    else:
        text = f"The shares differ from uniform by {distance:.2f} of 1; the biases lie {spread:.3g} apart."
        found.append(Check("nothing_learned", distance, "ok", text))
    if params.form == "anchored":
        gates = np.exp(np.mean([state.bias[part] for state in last], axis=0))
        top = float(gates.max())
        text = (
            f"Gates run from {gates.min():.2g} to {top:.2g}; {int((gates > 0.5).sum())} of {len(gates)} are more than "
            "half open."
        )
        if top < _OPEN:
            text += (
                " All are closed, so their order is what is left of a collapse: try fewer steps or a smaller penalty."
            )
        found.append(Check("gates", top, "warn" if top < _OPEN else "info", text))
    return found


def _from_uniform(question: Question, values: Array, part: npt.NDArray[np.bool_]) -> float:
    """Total variation distance of the last row, which sees most, from equal shares."""
    seen = part & (np.arange(len(part)) < question.targets[-1])
    return float(0.5 * np.abs(values[-1][seen] - 1 / max(1, seen.sum())).sum())


def _half_way(question: Question, histories: list[list[State]], halves: list[Array], runs: Array) -> list[Check]:
    part = ~np.isnan(histories[0][-1].alpha) & (np.arange(runs.shape[-1]) < question.targets[-1])
    if int(part.sum()) < 3 or len(histories[0]) < 3:
        return []
    pairs = [(half[-1][part], end[-1][part]) for half, end in zip(halves, runs, strict=True)]
    correlations = [value for value in (spearman(*pair) for pair in pairs) if value is not None]
    if not correlations:
        return []
    value = float(np.mean(correlations))
    k = min(_TOP, int(part.sum()) // 2)
    common = float(np.mean([top_overlap(*pair, k) for pair in pairs]))
    text = (
        f"The ranking agrees with that of half the steps to {value:.2f} (rank correlation); {common:.0%} of the top "
        f"{k} are the same."
    )
    if value < _STABLE and common < _STABLE:
        return [Check("half_way_agreement", value, "warn", f"{text} It has not settled: take more steps.")]
    return [Check("half_way_agreement", value, "ok", text)]


def _seeds(question: Question, histories: list[list[State]], runs: Array) -> list[Check]:
    part = ~np.isnan(histories[0][-1].alpha) & (np.arange(runs.shape[-1]) < question.targets[-1])
    if len(runs) < 2 or int(part.sum()) < 3:
        return []
    found = [spearman(a[-1][part], b[-1][part]) for a, b in combinations(runs, 2)]
    known = [value for value in found if value is not None]
    if not known:
        return []
    value = min(known)
    text = f"{len(runs)} runs with noisy starts were averaged; their rankings agree to {value:.2f} or better."
    return [Check("seed_agreement", value, "ok" if value >= _STABLE else "warn", text)]


def _frame_share(question: Question, values: Array) -> Check:
    total = float(values.sum())
    share = float(values[:, question.is_frame].sum() / total) if total > 0 else 0.0
    return Check("frame_share", share, "info", f"{share:.0%} of all shares lie on BOS and template tokens.")
