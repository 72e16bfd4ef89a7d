"""HETA: where the flow of attention meets curvature and loss of information.

Idea: s_i = M_i (beta C_i + (1 - beta) I_i). The gate M_i is the share of token i in the flow of attention and values to
the predicting position (``value_flow``). The curvature C_i is the size of the second derivative of S with respect to
the embedding of token i: the mean over random sign vectors v of |H_ii v|, summed over dimensions. The information I_i
is the KL divergence of the model's distribution with token i blanked out from the one with it.
Cost: per candidate token and probe one product with the Hessian (about two backward passes), or per probe one for all
candidates together; per candidate one forward pass. Candidates are the tokens with the largest gradients.
Sign: none. Unit: none; C and I have different units and the larger one decides, so both are stated.
Check: gate, curvature and information on their own; halves of the probes agree; the joint probe's deviation from exact
blocks, measured on a few tokens.
Failure modes: attention must be computed step by step, and the model be differentiable twice; gate and curvature are
blind to the direction of an effect.
Source: HETA (arXiv:2604.13258). Own implementation; values are read behind the input norm and shared by grouped
queries as the model does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question

PRODUCT = 2
"""Backward passes that one product with the Hessian counts as."""

PROBES = 3
"""Passes over four tokens that make sure of the second derivative."""

COMPARED = 3
"""Tokens whose exact blocks are computed to judge the joint probe."""


@dataclass(frozen=True)
class Params:
    """Settings of HETA."""

    candidates: int = field(
        default=32,
        metadata={
            "min": 1,
            "max": 512,
            "help": "Tokens to score: those with the largest gradients. Others stay blank.",
        },
    )
    curvature: str = field(
        default="exact",
        metadata={
            "choices": ("exact", "joint"),
            "help": "exact: each token's own block of second derivatives; joint: one probe for all tokens together, "
            "an approximation that is many times faster.",
        },
    )
    probes: int = field(default=4, metadata={"min": 1, "max": 32, "help": "Random directions per token."})
    beta: float = field(
        default=0.5, metadata={"min": 0.0, "max": 1.0, "step": 0.1, "help": "Weight of curvature against information."}
    )
    standardize: bool = field(
        default=False,
        metadata={"help": "Divide curvature and information by their sums first, so that neither decides by its unit."},
    )
    fill: str = field(
        default="zero",
        metadata={"choices": ("zero", "mean"), "help": "What a blanked-out token becomes: zero or the mean embedding."},
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes; exact where all visible tokens are candidates."""
    visible = [work.length - work.targets + 1 + row for row in range(work.targets)]
    exact = sum(min(params.candidates, count) for count in visible)
    joint = sum(1 + min(COMPARED, params.candidates, count) for count in visible)
    products = params.probes * (exact if params.curvature == "exact" else joint)
    both = (work.targets + work.strands - 1) / work.targets
    backward = both * (2 * work.targets + PRODUCT * products)
    return Passes(forward=work.strands + min(params.candidates, work.length), backward=backward)


@register(
    "heta",
    label="HETA",
    family="attention",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="Which tokens can reach the answer through attention, and matter there in curvature and information?",
    reading="Darker: attention and values flow from this token to the place of the answer, and the target's score "
    "bends, or the whole prediction moves, when it changes (no common unit; see the parts in the checks).",
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Compute gate, curvature and information for the candidates.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Candidates, probes, weights.
        tick: Progress and cancellation, once per pass and per product with the Hessian.

    Returns:
        Scores ``(row, source)``, not negative; sources that are no candidates are NaN and not measured.

    Raises:
        NotApplicable: If the model has no first or second derivative, shows no attention weights, or keeps its values
            in an unknown way.
    """
    import numpy as np
    import torch

    from backend.saliency import checks, heta_parts
    from backend.saliency.attention_rows import eager_attention, same_logits
    from backend.saliency.embeddings import baseline_vector
    from backend.saliency.gradients import activation_bytes, inputs_at_once, row_passes, source_embeddings
    from backend.saliency.second_order import divergences, require_second_derivative, rows_of_leaf
    from backend.saliency.value_flow import Flow, watched_flow

    rows, count = len(question.targets), min(params.candidates, question.source_count)
    exact = params.curvature == "exact"
    compared = 0 if exact else COMPARED
    steps = _Steps(tick, _step_count(question, params, count))
    activation_bytes(model)  # refuses models without a backward pass
    leaf = source_embeddings(question).clone().requires_grad_()
    flow = Flow([target - 1 for target in question.targets])
    with eager_attention(model), torch.enable_grad():
        require_second_derivative(model, steps.take)
        values, logits = rows_of_leaf(question, leaf, steps.take, watched_flow(model, flow))
        sensitivity = torch.zeros(question.source_count, device=leaf.device)
        for row in range(rows):
            steps.take()
            sensitivity += torch.autograd.grad(values[row], leaf, retain_graph=True)[0].norm(dim=-1)
        chosen = sorted(sensitivity.topk(count).indices.tolist())
        curvature = heta_parts.Curvature(leaf, chosen, params.probes, question.seed, compared, steps.take)
        for row, target in enumerate(question.targets):
            steps.take()
            (gradient,) = torch.autograd.grad(values[row], leaf, create_graph=True)
            curvature.add(gradient, sum(token < target for token in chosen))
            del gradient  # and with it a graph as large as the first
        del values
        fill = baseline_vector(model, params.fill)
        moved = divergences(question, logits, chosen, fill, steps.take, inputs_at_once(question, count))
    seen = np.array(chosen)[None] < np.array(question.targets)[:, None]  # (row, candidate)
    gate = flow.gate().numpy()[:, chosen]
    bent, told = curvature.mean(), moved.numpy() * seen
    scores = gate * _weighed(bent, told, params)
    checks.require_finite(scores)
    later = np.arange(question.source_count) >= np.array(question.targets)[:, None]
    out = np.where(later, 0.0, np.nan)
    out[:, chosen] = scores
    measured = np.zeros(question.source_count, bool)
    measured[chosen] = True
    steps.finish()
    found = [
        same_logits(question, logits),
        *heta_parts.parts(gate, bent, told, question.source_count),
        *curvature.checks(),
        *checks.saturation(question),
        checks.first_token_share(question, out),
    ]
    once = row_passes(question).backward
    spent = Passes(len(question.strands) + count, once * (2 + PRODUCT * curvature.products / rows))
    return Scores(out.astype(np.float32), spent, measured=measured, checks=tuple(found))


def _step_count(question: Question, params: Params, candidates: int) -> int:
    """Ticks that a run takes at most."""
    rows = len(question.targets)
    blocks = candidates if params.curvature == "exact" else 1 + min(COMPARED, candidates)
    return PROBES + len(question.strands) + rows * (2 + params.probes * blocks) + candidates


def _weighed(
    curvature: npt.NDArray[np.float64], information: npt.NDArray[np.float64], params: Params
) -> npt.NDArray[np.float64]:
    """Add curvature and information, ``(row, candidate)``, as they are or each divided by its sum."""
    import numpy as np

    if params.standardize:
        curvature, information = (
            part / np.maximum(part.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
            for part in (curvature, information)
        )
    return params.beta * curvature + (1 - params.beta) * information


class _Steps:
    """Counts what is done and tells it before each further step, so that a cancelled job stops there."""

    def __init__(self, tick: Tick, total: int) -> None:
        self._tick, self._total, self._done = tick, total, 0
        tick(0, total)

    def take(self, count: int = 1) -> None:
        """Tell, then count ``count`` steps."""
        self._tick(self._done, self._total)
        self._done += count

    def finish(self) -> None:
        """Tell that everything is done."""
        self._tick(self._total, self._total)
