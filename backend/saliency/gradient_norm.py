"""Gradient norm: how fast the target's score changes when a token's embedding moves.

Idea: s_i is the length of dS/de_i, the gradient with respect to the embedding of token i.
Cost: one forward pass, one backward pass per target token.
Sign: none. Unit: change of S per unit of embedding length.
Check: saturation (p near 1 leaves no gradient); agreement with the shortest embeddings, which layers that normalize
their input magnify; share of the first token.
Source: Simonyan et al. 2013 (arXiv:1312.6034), Li et al. 2016 (arXiv:1506.01066). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    from backend.models.language import LanguageModel
    from backend.saliency.question import Question


@dataclass(frozen=True)
class Params:
    """Settings of the gradient norm."""

    p: int = field(
        default=2,
        metadata={"choices": (1, 2), "help": "Which norm measures a gradient: 2 is its length, 1 the sum of sizes."},
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    return Passes(forward=work.strands, backward=work.targets + work.strands - 1)


@register(
    "gradient_norm",
    label="Gradient norm",
    family="gradient",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="How sensitive is the target to a small change of each token?",
    reading="Darker: a small move of this token's embedding changes the target's score more, up or down "
    "(change of the score per unit of embedding length).",
    default=True,
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Take the norm of each source's gradient.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Which norm.
        tick: Progress and cancellation, once per row.

    Returns:
        Scores ``(row, source)``, not negative.

    Raises:
        NotApplicable: If the model has no backward pass or its gradients are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.gradients import activation_bytes, row_gradients, row_passes, source_embeddings

    count = len(question.targets)
    tick(0, count)
    activation_bytes(model)  # refuses models without a backward pass
    rows, reached = [], []
    for done, row in enumerate(row_gradients(question), start=1):
        rows.append(row.gradients[0].norm(p=params.p, dim=-1).cpu().numpy())
        reached.append(float(row.values[0]))
        tick(done, count)
    values = np.stack(rows)
    checks.require_finite(values)
    norms = source_embeddings(question).norm(dim=-1).cpu().numpy()
    found = [
        checks.same_as_plain(question, reached, "hooked_equals_plain", "Reading gradients at the embeddings"),
        *checks.saturation(question),
        *checks.no_signal(question, values * norms),
        *checks.short_embeddings(question, values, norms),
        checks.first_token_share(question, values),
    ]
    return Scores(values, row_passes(question), checks=tuple(found))
