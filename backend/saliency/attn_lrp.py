"""AttnLRP: layer-wise relevance propagation for transformers.

Idea: the target's logit is handed back through the network, layer by layer, and each layer shares what it receives
among its inputs by a rule that fits the layer. The rules can be written as gradients: R_i is the inner product of e_i,
the embedding of token i, with a gradient that treats scales of normalizations as constants, activations as lines
through the origin, and products as shared equally. The variant "cp" lets nothing flow through attention weights and
gates.
Cost: one forward pass, one backward pass per target token.
Sign: positive pushes the logit up. Unit: logits; the method starts from the logit whatever scalar was asked about.
Check: with the rules in place the model's answer is its own; the conservation residual, how far the scores are from
adding up to the logit: none for "cp" on a model without biases, information everywhere else, since softmax and biases
keep a share.
Fails where a layer has no rule, so models of other families are refused by name. The first token often takes a large
share. float16 overflows.
Patent and license: layer-wise relevance propagation is patented. The authors' package is free for personal and
scientific use and grants no patent license; whoever uses scores of this method otherwise must clear that first. For
that reason it is never among the preselected methods.
Source: Achtibat et al. 2024 (arXiv:2402.05602). Own implementation from the published rules; see ``lrp_rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.lrp_rules import Variant
    from backend.saliency.question import Question

LICENSE = (
    "Layer-wise relevance propagation is patented: free for personal and scientific use; clear the license before any "
    "other use."
)
"""What everyone who sees scores of this method must read."""


@dataclass(frozen=True)
class Params:
    """Settings of AttnLRP."""

    variant: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "attn_lrp", "cp"),
            "help": "attn_lrp: relevance flows through attention weights and gates too; cp: they count as constants, "
            "and scores add up to the logit where there are no biases; auto: cp for GPT-2, attn_lrp for all others.",
        },
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    return Passes(forward=work.strands, backward=work.targets + work.strands - 1)


@register(
    "attn_lrp",
    label="AttnLRP",
    family="gradient",
    signed=True,
    additive=True,
    params=Params,
    cost=cost,
    summary="How much of the target's logit goes back to each token, layer by layer? "
    "Patented; free for personal and scientific use.",
    reading="Positive: this share of the target's logit goes back to this token; negative: the token holds it down "
    "(in logits, whatever score was asked about). " + LICENSE,
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Propagate each row's logit back to the sources.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Which variant of the rules.
        tick: Progress and cancellation, once per row.

    Returns:
        Scores ``(row, source)``.

    Raises:
        NotApplicable: If a layer has no rule, the model has no backward pass, or scores are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.gradients import activation_bytes, row_gradients, row_passes, source_embeddings
    from backend.saliency.lrp_rules import family_of, relevance_rules

    count = len(question.targets)
    tick(0, count)
    family = family_of(model.module)
    activation_bytes(model)  # refuses models without a backward pass
    variant = cast("Variant", params.variant) if params.variant != "auto" else family.variant
    question = question.with_objective("logit")
    embeddings = source_embeddings(question)
    rows, reached = [], []
    with relevance_rules(model.module, variant) as hooks:
        for done, row in enumerate(row_gradients(question), start=1):
            rows.append((embeddings * row.gradients[0]).sum(dim=-1).cpu().numpy())
            reached.append(float(row.values[0]))
            tick(done, count)
    values = np.stack(rows)
    checks.require_finite(values)
    found = [
        checks.same_as_plain(question, reached, "hooked_equals_plain", f"Putting the rules in place ({hooks} layers)"),
        conservation(question, variant, values),
        *checks.no_signal(question, values),
        checks.first_token_share(question, values),
        Check("license", None, "info", LICENSE),
    ]
    return Scores(values, row_passes(question), checks=tuple(found))


def conservation(question: Question, variant: Variant, values: npt.NDArray[np.float32]) -> Check:
    """Compare the sum of each row's scores with the logit that was handed back.

    Args:
        question: The question, about the logit.
        variant: Which rules.
        values: Scores ``(row, source)``.

    Returns:
        The residual relative to the logit of the row where it is largest. A failure if the scores of a model without
        biases do not add up under "cp"; information in all other cases.
    """
    import numpy as np
    import torch

    from backend.saliency.lrp_rules import conserves

    wanted = question.plain.values
    total = values.sum(axis=1, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        residuals = np.nan_to_num((total - wanted) / np.abs(wanted), nan=0.0, posinf=np.inf, neginf=-np.inf)
    worst = int(np.abs(residuals).argmax())
    residual = float(residuals[worst]) if np.isfinite(residuals[worst]) else None
    what = "difference of logits" if question.has_foil else "logit"
    where = "" if len(total) == 1 else f"Target {worst + 1}, the worst of {len(total)}: "
    size = "" if residual is None else f" (residual {residual:.2g})"
    text = (
        f"{where}the scores of variant {variant} add up to {total[worst]:.3g}; the {what} is {wanted[worst]:.3g}{size}"
    )
    text = text[0].upper() + text[1:]
    name = "conservation_residual"
    if len(question.strands) > 1:
        return Check(name, residual, "info", f"{text}. The foil's own tokens keep a share that is not shown.")
    if not conserves(question.model.module, variant):
        keeps = "Softmax and gates" if variant == "attn_lrp" else "Biases and learned positions"
        return Check(name, residual, "info", f"{text}. {keeps} keep a share, so they need not agree.")
    rounding = max(1e-4, 8 * torch.finfo(question.model.module.dtype).eps)
    gaps = np.abs(total - wanted)
    if (gaps <= rounding * np.maximum(np.abs(values).sum(axis=1), np.abs(wanted))).all():
        return Check(name, residual, "ok", f"{text}: they agree to rounding, as they must.")
    return Check(name, residual, "fail", f"{text}: they must agree and do not. Do not trust these scores.")
