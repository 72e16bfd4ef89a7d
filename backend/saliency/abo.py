"""Attention bias optimization (ABO): which attention does the answer need?

Idea: one number per token is added to the attention that the token receives in every layer and head; the numbers are
learned so that the target stays likely while a penalty closes everything else. What stays open is what the answer
needs. The default form is a variant of ours ("anchored"), the published text reads as "literal"; see
``bias_descent`` for both, and for what is learned.
Cost: one forward and one backward pass per step and run, two more forward passes; several targets share one descent.
Sign: none. Unit: share of 1 over the tokens that the target sees.
Check: with every bias at 0 the model answers as always; the readout differs from uniform; it agrees with its own
half-way state; runs with noisy starts agree; what became of the target's probability.
Failure modes: it answers "which attention keeps the target likely", so tokens the model did not use can rise; compare
the top with occlusion. The anchored form needs a first token that draws attention, as it does in most models; elsewhere
gates close without effect and nothing is learned. The literal form saturates: once the target is likely, the penalty
alone decides.
Source: "The Fragile Truth of Saliency", NeurIPS 2025, known in words only; objective, scale and readout are our
reconstruction, the anchored form is ours. Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from backend.errors import NotApplicable
from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.bias_descent import Form, Plan
    from backend.saliency.question import Question
    from backend.types import Objective


@dataclass(frozen=True)
class Params:
    """Settings of attention bias optimization; the defaults are those of the anchored form."""

    form: str = field(
        default="anchored",
        metadata={
            "choices": ("anchored", "literal"),
            "help": "anchored: the first token keeps all its attention, every other gets a gate between 0 and 1 (our "
            "variant); literal: biases move freely around their mean, as the published text reads (try a learning "
            "rate of 0.3, 30 steps and a penalty of 1).",
        },
    )
    steps: int = field(default=16, metadata={"min": 1, "max": 200, "step": 1, "help": "Updates of the biases."})
    learning_rate: float = field(
        default=1.0, metadata={"min": 0.01, "max": 3.0, "step": 0.01, "help": "Step size of the optimizer (Adam)."}
    )
    penalty: float = field(
        default=10.0,
        metadata={"min": 0.0, "max": 100.0, "step": 0.1, "help": "How strongly open tokens are penalized (lambda)."},
    )
    ramp: bool = field(default=False, metadata={"help": "Let the penalty grow from 0 to its value over the run."})
    likelihood: str = field(
        default="question",
        metadata={
            "choices": ("question", "log_prob", "prob"),
            "help": "What is kept high: the score that was asked for (with the foil's subtracted, if there is one), "
            "or the log-probability or probability in its place.",
        },
    )
    readout: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "gate", "softmax", "centered", "min_shift"),
            "help": "How alpha becomes a score: gate: sigmoid(alpha); softmax: exp(alpha); centered: sigmoid of alpha "
            "minus its mean; min_shift: alpha minus its minimum. auto: gate for anchored, softmax for literal.",
        },
    )
    freeze_frame: bool = field(
        default=False, metadata={"help": "Leave the attention to BOS and template tokens as it is; they score 0."}
    )
    noise: float = field(
        default=0.0,
        metadata={"min": 0.0, "max": 2.0, "step": 0.1, "help": "Standard deviation of noise on the start values."},
    )
    runs: int = field(
        default=1,
        metadata={"min": 1, "max": 5, "step": 1, "help": "Runs to average, each with its own noise."},
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes, however many targets there are."""
    steps = params.runs * params.steps
    return Passes(forward=work.strands * (1 + steps + params.runs), backward=work.strands * steps)


@register(
    "abo",
    label="ABO, sink-anchored (our variant)",
    family="attention",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="Which tokens must the model be able to attend to, for the target to stay likely?",
    reading="Darker: the target needs attention to this token; the optimization closed the others (share of 1). It "
    "says what the answer could rest on, not whether it speaks for or against it.",
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Learn one bias per source and read it out.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: Form, descent and readout.
        tick: Progress and cancellation, once per pass.

    Returns:
        Scores ``(row, source)``: the same biases in every row, as shares of the sources that the row sees.

    Raises:
        NotApplicable: If the model has no backward pass, takes no attention bias, or no source is free to move.
    """
    import numpy as np

    from backend.saliency.abo_checks import descent_checks, setup_checks
    from backend.saliency.attention_bias import BiasedPasses
    from backend.saliency.bias_descent import descend

    plan = make_plan(question, params)
    total, done = int(cost(params, Workload(0, 0, 0, len(question.strands))).forward) + 1, 0

    def before_pass() -> None:
        nonlocal done
        tick(min(done, total - 1), total)
        done += 1

    tick(0, total)
    if plan.fixed.all():
        return _nothing_to_learn(question, params, tick, total)
    objective = question.objective if params.likelihood == "question" else cast("Objective", params.likelihood)
    passes = BiasedPasses(question, objective, before_pass)
    histories = [list(descend(passes, plan, question.seed + number)) for number in range(params.runs)]
    runs = np.stack([read_out(question, history[-1].alpha, params) for history in histories])
    halves = [read_out(question, history[params.steps // 2].alpha, params) for history in histories]
    values = runs.mean(axis=0)
    found = [
        *setup_checks(question, passes, params, plan),
        *descent_checks(question, params, histories, values, halves, runs),
    ]
    tick(total, total)
    return Scores(values.astype(np.float32), passes.passes, checks=tuple(found))


def make_plan(question: Question, params: Params) -> Plan:
    """Say how alpha is learned, and which sources take part.

    Raises:
        NotApplicable: If BOS and template tokens stay as they are and there are no others.
    """
    import numpy as np

    from backend.saliency.bias_descent import Plan

    fixed = question.is_frame if params.freeze_frame else np.zeros(question.source_count, bool)
    if fixed.all():
        raise NotApplicable(
            "Only BOS and template tokens stand before the target, and their attention is to stay as it is.",
            "Switch freeze frame off.",
        )
    if params.form == "anchored":
        fixed[0] = True
    form = cast("Form", params.form)
    return Plan(form, params.steps, params.learning_rate, params.penalty, params.ramp, params.noise, fixed)


def read_out(question: Question, alpha: npt.NDArray[np.float64], params: Params) -> npt.NDArray[np.float64]:
    """Turn alpha into shares.

    Args:
        question: Rows and sources.
        alpha: float64 ``(source,)``; NaN for sources that do not take part.
        params: The readout.

    Returns:
        float64 ``(row, source)``; each row sums to 1 over what it sees, or is 0 where nothing it sees takes part.
    """
    import numpy as np

    part = ~np.isnan(alpha)
    a = np.where(part, alpha, 0.0)
    readout = params.readout
    if readout == "auto":
        readout = "gate" if params.form == "anchored" else "softmax"
    if readout == "gate":
        size = _sigmoid(a)
    elif readout == "softmax":
        size = np.exp(a - a[part].max())
    elif readout == "centered":
        size = _sigmoid(a - a[part].mean())
    else:
        size = a - a[part].min()
    size = np.where(part, size, 0.0)
    seen = np.arange(len(alpha))[None] < np.array(question.targets)[:, None]
    rows = np.where(seen, size, 0.0)
    sums = rows.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.divide(rows, sums, out=np.zeros_like(rows), where=sums > 0)
    return shares


def _sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    import numpy as np

    small = np.exp(-np.abs(x))
    out: npt.NDArray[np.float64] = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return out


def _nothing_to_learn(question: Question, params: Params, tick: Tick, total: int) -> Scores:
    """Answer where the anchor is all there is."""
    import numpy as np

    tick(total, total)
    text = "The first token is the anchor and nothing else stands before the target, so there is nothing to learn."
    zeros = np.zeros((len(question.targets), question.source_count), np.float32)
    return Scores(zeros, Passes(), checks=(Check("nothing_learned", None, "fail", text),))
