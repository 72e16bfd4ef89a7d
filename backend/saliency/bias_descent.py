"""Learning one attention bias per token by gradient descent: the forms of the objective and how alpha becomes a bias.

Two forms:

* "anchored" (ours): the first token, where most models park attention, keeps the bias 0; every other one gets
  b = log sigmoid(alpha), so that its attention is multiplied by a gate between 0 and 1. Closing all gates sends
  attention to the first token and costs the answer, so gates that the answer needs stay open.
* "literal" (after the published text): b = alpha - mean(alpha), which moves freely. Adding a constant to all alphas
  changes nothing for the model; only the penalty sees it, and that common push is what sets tokens apart.

Both minimize -S + lambda * mean sigmoid(alpha) with Adam. Knows nothing of methods, readouts or drawings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.saliency.attention_bias import BiasedPasses

Form = Literal["anchored", "literal"]
FloatArray64 = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

START: dict[str, float] = {"anchored": 2.0, "literal": 0.0}
"""Alpha before the first step: gates nearly open (0.88), or no preference."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How alpha is learned.

    Attributes:
        form: See the module.
        steps: Updates.
        rate: Adam's learning rate.
        penalty: lambda.
        ramp: Whether lambda grows linearly from 0 to its value at the last step.
        noise: Standard deviation of normal noise on the start values.
        fixed: bool ``(source,)``; tokens whose bias stays 0 and whose alpha is not learned.
    """

    form: Form
    steps: int
    rate: float
    penalty: float
    ramp: bool
    noise: float
    fixed: BoolArray


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands.

    Attributes:
        step: Updates so far.
        alpha: float64 ``(source,)``; NaN where fixed.
        bias: float64 ``(source,)``; what is added to the attention scores.
        probability: Geometric mean of p over the target tokens, under this bias.
        pull: Largest size of dS/db; 0 where S does not depend on attention at all. None in the last state.
    """

    step: int
    alpha: FloatArray64
    bias: FloatArray64
    probability: float
    pull: float | None


def bias_of(alpha: Tensor, form: Form, fixed: Tensor) -> Tensor:
    """Return the bias ``(source,)`` that alpha ``(source,)`` stands for; 0 where fixed. Differentiable."""
    if form == "anchored":
        moved = torch.nn.functional.logsigmoid(alpha)
    else:
        moved = alpha - alpha[~fixed].mean()
    return torch.where(fixed, 0.0, moved)


def descend(passes: BiasedPasses, plan: Plan, seed: int) -> Iterator[State]:
    """Run the descent.

    Args:
        passes: The model, biased.
        plan: How.
        seed: Seed of the noise.

    Yields:
        The state before each update, and the last one: ``steps + 1`` states. Each but the last costs a forward and a
        backward pass per strand, the last a forward pass.
    """
    device = passes.device
    fixed = torch.from_numpy(plan.fixed).to(device)
    noise = torch.randn(len(plan.fixed), generator=torch.Generator().manual_seed(seed))
    alpha = (START[plan.form] + plan.noise * noise).to(device).requires_grad_()
    adam = torch.optim.Adam([alpha], lr=plan.rate)
    for step in range(plan.steps):
        bias = bias_of(alpha.detach(), plan.form, fixed)
        reached = passes.gradient(bias)
        assert reached.gradient is not None  # noqa: S101 - what ``gradient`` promises
        pull = torch.where(fixed, 0.0, reached.gradient)
        yield _state(step, alpha, bias, fixed, reached.log_probability, float(pull.abs().max()))
        weight = plan.penalty * (step + 1) / plan.steps if plan.ramp else plan.penalty
        with torch.enable_grad():
            # the likelihood enters by its slope at this bias, so that the model's graph is gone by now
            loss = weight * alpha[~fixed].sigmoid().mean() - (bias_of(alpha, plan.form, fixed) * pull).sum()
            (alpha.grad,) = torch.autograd.grad(loss, alpha)
        adam.step()
    bias = bias_of(alpha.detach(), plan.form, fixed)
    yield _state(plan.steps, alpha, bias, fixed, passes.value(bias).log_probability, None)


def _state(step: int, alpha: Tensor, bias: Tensor, fixed: Tensor, log_p: float, pull: float | None) -> State:
    learned = torch.where(fixed, torch.nan, alpha.detach()).double().cpu().numpy()
    return State(step, learned, bias.double().cpu().numpy(), float(np.exp(log_p)), pull)
