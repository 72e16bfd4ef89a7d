"""Checks of ablation methods: rounding, redundant evidence, the token that predicts.

Knows effects and how to measure one more; knows nothing of how a method chose what to remove.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from backend.saliency.ablation import Ablator
from backend.saliency.question import Question
from backend.types import Check

TOGETHER = 5
"""Units with the strongest single effects that are removed together, to find redundant evidence."""


class HasNoise(Protocol):
    """Whatever measured effects and knows its own rounding, float64 ``(row,)``."""

    noise: npt.NDArray[np.float64]


def noise(ablator: HasNoise, values: npt.NDArray[np.float64]) -> list[Check]:
    """Say which effects are rounding: S itself moves that much when other texts share its pass."""
    floor = float(ablator.noise.max())
    sizes = np.abs(values[~np.isnan(values)])
    if not sizes.size:
        return [Check("no_signal", None, "fail", "No unit can be removed: nothing would be left to predict from.")]
    below = int((sizes < 2 * floor).sum())
    text = f"S moves by up to {floor:.1e} through rounding alone; {below} of {sizes.size} scores lie below twice that."
    found = [Check("noise_floor", floor, "warn" if 2 * below > sizes.size else "ok", text)]
    if not (sizes > 2 * floor).any():
        found.append(
            Check("no_signal", float(sizes.max()), "fail", "There is no signal: all scores lie within rounding.")
        )
    return found


def redundancy(ablator: Ablator, values: npt.NDArray[np.float64], units: tuple[tuple[int, int], ...]) -> list[Check]:
    """Remove the strongest units together: more than twice the sum of their effects means that each covers for others.

    Args:
        ablator: What measured the effects.
        values: float64 ``(row, unit)``; effects of single units, NaN where not measured.
        units: Half-open spans of sources.
    """
    question = ablator.question
    effects = values.sum(axis=0)  # NaN where not measured
    size = min(TOGETHER, int(np.isfinite(effects).sum()) // 3)
    if size < 2:
        return []
    strongest = np.argsort(-np.nan_to_num(effects, nan=-np.inf), kind="stable")[:size]
    removed = np.zeros((1, question.source_count), bool)
    for unit in strongest:
        removed[0, slice(*units[unit])] = True
    joint = float((question.plain.values - ablator.without(removed, lambda done: None)[0]).sum())
    alone = float(effects[strongest].sum())
    if not np.isfinite(joint):
        return []
    text = f"The {size} strongest units score {alone:.3g} one by one and {joint:.3g} when removed together"
    if joint > 2 * max(alone, 0.0) and joint > 2 * float(ablator.noise.sum()):
        return [
            Check(
                "redundancy",
                joint,
                "warn",
                f"{text}: redundant evidence. Each covers for the others, so single scores are too low; "
                "try sentences instead of tokens.",
            )
        ]
    return [Check("redundancy", joint, "ok", f"{text}.")]


def predicting_units(question: Question, removed: list[tuple[int, int]], operator: str) -> list[Check]:
    """Tell what removing the very token that predicts a target means: nothing, or a prediction from further left."""
    predicting = {target - 1 for target in question.targets}
    if operator == "replace" or not any(begin <= p < end for begin, end in removed for p in predicting):
        return []
    text = (
        "The token right before a target predicts it and cannot be hidden from itself: where only that token is "
        "removed, its score for that target is 0 and says nothing. The operators delete and replace measure it."
        if operator == "hide"
        else "Where the token right before a target is deleted, the target is predicted from the token before it."
    )
    return [Check("predicting_token", None, "info", text)]
