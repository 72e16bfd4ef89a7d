"""Input x gradient: how far each token pushes the target's score, to first order.

Idea: s_i is the inner product of e_i, the embedding of token i, with its gradient dS/de_i.
Cost: one forward pass, one backward pass per target token.
Sign: positive pushes the score up. Unit: that of S (nats for a log-probability).
Check: the sum of the scores is shown beside S; nothing makes them agree. Layers that normalize their input ignore the
length of e_i, which hides part of a token's effect from this method.
Source: Shrikumar et al. 2016 (arXiv:1605.01713). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.question import Question


@dataclass(frozen=True)
class Params:
    """Input x gradient has no settings."""


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    return Passes(forward=work.strands, backward=work.targets + work.strands - 1)


@register(
    "input_x_gradient",
    label="Input × gradient",
    family="gradient",
    signed=True,
    additive=True,
    params=Params,
    cost=cost,
    summary="Which tokens push the target up or down, to first order?",
    reading="Positive: to first order, this token raises the target's score; negative: it lowers it "
    "(in the unit of the score: nats for a log-probability).",
    default=True,
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Multiply each source's embedding with its gradient and add up.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Nothing.
        tick: Progress and cancellation, once per row.

    Returns:
        Scores ``(row, source)``.

    Raises:
        NotApplicable: If the model has no backward pass or its gradients are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.gradients import activation_bytes, row_gradients, row_passes, source_embeddings

    count = len(question.targets)
    tick(0, count)
    activation_bytes(model)  # refuses models without a backward pass
    embeddings = source_embeddings(question)
    rows, reached = [], []
    for done, row in enumerate(row_gradients(question), start=1):
        rows.append((embeddings * row.gradients[0]).sum(dim=-1).cpu().numpy())
        reached.append(float(row.values[0]))
        tick(done, count)
    values = np.stack(rows)
    checks.require_finite(values)
    found = [
        checks.same_as_plain(question, reached, "hooked_equals_plain", "Reading gradients at the embeddings"),
        checks.sum_beside_value(question, values),
        *checks.saturation(question),
        *checks.no_signal(question, values),
        checks.first_token_share(question, values),
    ]
    return Scores(values, row_passes(question), checks=tuple(found))
