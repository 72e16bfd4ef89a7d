"""Integrated gradients over the input embeddings.

Idea: s_i adds up <e_i - b_i, dS/de_i> along the straight path from a baseline b to the input e.
Cost: ``steps`` forward passes, and ``steps`` backward passes per target token, in small batches.
Sign: positive pushes the score up. Unit: that of S.
Check: the scores of a row sum to S(e) - S(b); the gap, relative to that difference, is ``completeness_residual``.
Transformers with normalization layers change S so abruptly along the path that the gap seldom closes; agreement at a
single step count can be luck, so it counts as confirmed only if it holds at a second one (``refine``). Scores are
never rescaled to close the gap. BOS and template tokens keep their embedding in the baseline and score 0.
Source: Sundararajan et al. 2017 (arXiv:1703.01365). Own implementation, midpoint rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question


@dataclass(frozen=True)
class Params:
    """Settings of integrated gradients."""

    steps: int = field(default=64, metadata={"min": 8, "max": 512, "step": 8, "help": "Points on the path."})
    baseline: str = field(
        default="mean",
        metadata={
            "choices": ("mean", "zero", "eos", "pad", "space"),
            "help": "Where the path starts: the mean embedding of the vocabulary, zero, or a special or blank token.",
        },
    )
    refine: bool = field(
        default=False,
        metadata={"help": "Double the points until the scores add up at two counts in a row, up to the limit below."},
    )
    max_steps: int = field(
        default=512, metadata={"min": 16, "max": 2048, "step": 16, "help": "Most points on the path when refining."}
    )


def step_counts(params: Params) -> tuple[int, ...]:
    """Step counts that a run may go through, ascending; more than one only when refining."""
    counts = [params.steps]
    while params.refine and counts[-1] * 2 <= params.max_steps:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes at most."""
    points = sum(step_counts(params))
    return Passes(forward=points * work.strands + work.strands, backward=points * (work.targets + work.strands - 1))


@register(
    "integrated_gradients",
    label="Integrated gradients",
    family="gradient",
    signed=True,
    additive=True,
    params=Params,
    cost=cost,
    summary="How much of the target's score does each token account for, on the way from a blank input to this one?",
    reading="Positive: on the way from the baseline to the prompt, this token raised the target's score; negative: it "
    "lowered it (in the unit of the score). Trust it only where the scores add up, see the residual.",
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Integrate each row's gradient along the path.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Steps and baseline.
        tick: Progress and cancellation, once per batch of path points.

    Returns:
        Scores ``(row, source)``.

    Raises:
        NotApplicable: If the model has no backward pass, its gradients are not numbers, or the baseline's token does
            not exist.
    """
    import numpy as np
    import torch

    from backend.saliency import checks
    from backend.saliency.embeddings import baseline_vector
    from backend.saliency.gradients import row_passes, row_values, source_embeddings

    counts = step_counts(params)
    tick(0, sum(counts))
    start = source_embeddings(question).clone()
    moved = ~torch.from_numpy(question.is_frame).to(start.device)
    start[moved] = baseline_vector(model, params.baseline).to(start.device)
    wanted = question.plain.values - row_values(question, lambda plain: start[None, : len(plain)])[0]  # S(e) - S(b)
    tick(0, sum(counts))
    history: list[npt.NDArray[np.float64]] = []  # residual per row at each step count
    spent = 0
    for steps in counts:
        values = _integrate(question, start, steps, partial(_advance, tick, spent, sum(counts)))
        spent += steps
        checks.require_finite(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            history.append(np.abs(values.sum(axis=1) - wanted) / np.abs(wanted))
        if len(history) > 1 and (np.maximum(history[-1], history[-2]) <= checks.GREEN).all():
            break
    tick(sum(counts), sum(counts))
    found = [
        *(
            checks.completeness(question, row, values[row], wanted[row], [h[row] for h in history], steps)
            for row in range(len(values))
        ),
        *checks.saturation(question),
        *checks.no_signal(question, values),
    ]
    once = row_passes(question, spent)
    passes = Passes(once.forward + len(question.strands), once.backward)
    return Scores(values.astype(np.float32), passes, checks=tuple(found))


def _advance(tick: Tick, before: int, total: int, done: int) -> None:
    tick(before + done, total)


def _integrate(
    question: Question, start: torch.Tensor, steps: int, progress: Callable[[int], None]
) -> npt.NDArray[np.float64]:
    """Apply the midpoint rule with this many points; return scores ``(row, source)``."""
    import numpy as np
    import torch

    from backend.saliency.gradients import in_batches, inputs_at_once, row_gradients, source_embeddings

    way = source_embeddings(question) - start
    at = (torch.arange(steps, device=start.device) + 0.5) / steps
    total = np.zeros((len(question.targets), question.source_count))

    def points(begin: int, end: int) -> None:
        share = at[begin:end, None, None]
        part = np.zeros_like(total)
        path = row_gradients(question, lambda plain: start[: len(plain)] + share * way[: len(plain)])
        for index, row in enumerate(path):
            part[index] = (way * row.gradients).sum(dim=-1).sum(dim=0).cpu().numpy()
        total[:] += part  # only now: a batch that ran out of memory is repeated
        progress(end)

    in_batches(steps, inputs_at_once(question, steps), points)
    return total / steps
