"""Uniform baseline: every source gets the same share.

Idea: the zero line. A method whose map looks like this one has found nothing.
Cost: none; the model is not run.
Sign: none. Unit: share of 1.
Check: each row sums to 1 over the sources that its target can see.
Source: specification of this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.question import Question


@dataclass(frozen=True)
class Params:
    """The uniform baseline has no settings."""


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: none."""
    return Passes()


@register(
    "uniform",
    label="Uniform",
    family="baseline",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="The zero line: what a map looks like that has found nothing.",
    reading="Every token gets the same share of 1; a method that scores like this has found nothing.",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Give each source that a row can see the same share of 1.

    Args:
        model: Not run.
        question: Rows and sources.
        params: Nothing.
        tick: Progress and cancellation.

    Returns:
        Scores ``(row, source)``; BOS and template tokens are counted.
    """
    tick(0, 1)
    values = np.zeros((len(question.targets), question.source_count), np.float32)
    for row, end in enumerate(question.targets):
        values[row, :end] = 1.0 / end
    tick(1, 1)
    return Scores(values, Passes())
