"""What a run will cost: two passes are measured once per model, the rest is extrapolated from counts of passes.

Knows sizes and the registry's cost formulas; knows nothing of scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.registry import Method, Workload, get_method, make_params
from backend.saliency.gradients import TOKENS_AT_ONCE, activation_bytes, forward_from_leaf
from backend.saliency.passes import logits_at
from backend.saliency.planning import workload
from backend.types import Estimate, Passage, SaliencyRequest, Tick, no_tick

LENGTHS = (64, 128)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast a model is on this machine.

    Attributes:
        lengths: The two measured lengths, in tokens.
        forward: Seconds of a forward pass at each.
        backward: Seconds of a backward pass at each; equal to ``forward`` where the model has none.
        attention: Cost of attention relative to everything else, per token of length.
        saved: Memory that a pass keeps for its backward pass, in bytes per token; 0 where there is none.
        working: Memory that a forward pass needs at once, in bytes per token.
        logits: Bytes of the logits at one position.
        at_once: Tokens that batched methods put into one pass.
        device: "cpu", "cuda", "mps".
    """

    lengths: tuple[int, int]
    forward: tuple[float, float]
    backward: tuple[float, float]
    attention: float
    saved: float
    working: float
    logits: int
    at_once: int
    device: str

    def seconds(self, pair: tuple[float, float], length: int, batch: float) -> float:
        """Extrapolate the time of one sequence in a pass over ``batch`` sequences of ``length`` tokens."""
        slope = max((pair[1] - pair[0]) / (self.lengths[1] - self.lengths[0]), 0.0)
        start = max(pair[0] - slope * self.lengths[0], 0.0)
        if slope == 0.0:  # the hardware is not busy at these lengths; charge what was measured per token
            slope, start = pair[1] / self.lengths[1] / 8, pair[1]
        return start / batch + slope * length * (1 + self.attention * length)


def calibrate(model: LanguageModel, tick: Tick = no_tick) -> Calibration:
    """Time a forward pass and a forward with a backward pass at two lengths. Takes a few passes.

    Args:
        model: The model; unchanged afterwards.
        tick: Progress and cancellation, once per pass.
    """
    context = model.info.context_length or LENGTHS[1]
    lengths = LENGTHS if context >= LENGTHS[1] else (max(1, context // 2), max(2, context))
    tick(0, 5)
    try:
        saved = activation_bytes(model)
    except NotApplicable:
        saved = 0.0
    _timed(model, lambda: _forward(model, lengths[0]))  # the first pass of a process pays for set-up
    tick(1, 5)
    forward, both = [], []
    for number, length in enumerate(lengths):
        forward.append(_timed(model, lambda length=length: _forward(model, length)))  # type: ignore[misc]
        tick(2 + 2 * number, 5)
        if saved:
            both.append(_timed(model, lambda length=length: _both(model, length)))  # type: ignore[misc]
        tick(3 + 2 * number, 5)
    backward = [max(b - f, 0.0) for f, b in zip(forward, both, strict=True)] if saved else forward
    config = model.module.config.get_text_config()
    width = int(getattr(config, "hidden_size", 0))
    layers = int(getattr(config, "num_hidden_layers", 0))
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    weights = max(model.info.parameters, 1)
    size = model.module.dtype.itemsize
    return Calibration(
        lengths=(lengths[0], lengths[1]),
        forward=(forward[0], forward[1]),
        backward=(backward[0], backward[1]),
        attention=2 * width * layers / weights,
        saved=saved,
        working=float(size * (6 * width + 3 * inner) + size * 2 * layers * width),
        logits=4 * int(getattr(config, "vocab_size", model.vocabulary_rows)),
        at_once=TOKENS_AT_ONCE.get(model.device.type, 512),
        device=model.device.type,
    )


def estimate(passage: Passage, request: SaliencyRequest, calibration: Calibration) -> Estimate:
    """Say what a request will cost, before it runs.

    Args:
        passage: Prompt and answer.
        request: Target, methods and their parameters.
        calibration: Of the model in question.

    Raises:
        BadRequest: If a method or parameter does not exist.
    """
    work = workload(passage, request)
    per_method: dict[str, float] = {}
    peak = 0
    for spec in request.methods:
        method = get_method(spec.name)
        seconds, memory = _one(method, make_params(method, dict(spec.params)), work, calibration)
        per_method[spec.name] = per_method.get(spec.name, 0.0) + seconds
        peak = max(peak, memory)
    first, second = calibration.lengths
    basis = (
        f"From passes timed here on {first} and {second} tokens ({calibration.forward[1]:.2g} s forward at {second}), "
        f"for {work.length} tokens."
    )
    return Estimate(sum(per_method.values()), peak, basis, per_method)


def _one(method: Method, params: object, work: Workload, calibration: Calibration) -> tuple[float, int]:
    """Return seconds and bytes of one method."""
    passes = method.cost(params, work)
    sequences = passes.forward / work.strands
    batch = max(1.0, min(sequences, calibration.at_once / work.length))
    seconds = passes.forward * calibration.seconds(calibration.forward, work.length, batch)
    seconds += passes.backward * calibration.seconds(calibration.backward, work.length, batch)
    if not passes.forward:
        return 0.0, 0
    per_token = calibration.saved if method.needs_gradient else calibration.working
    memory = batch * (work.length * per_token * work.strands + work.targets * calibration.logits * 3)
    return seconds, int(memory)


def _forward(model: LanguageModel, length: int) -> None:
    with torch.no_grad():
        logits_at(model, _ids(model, length), [length - 1])


def _both(model: LanguageModel, length: int) -> None:
    with torch.enable_grad():
        leaf, logits = forward_from_leaf(model, _ids(model, length)[0].tolist(), [length - 1])
        torch.autograd.grad(logits[0, 0, 0], leaf)


def _ids(model: LanguageModel, length: int) -> torch.Tensor:
    return (torch.arange(length, device=model.device) % model.vocabulary_rows)[None]


def _timed(model: LanguageModel, work: Callable[[], None]) -> float:
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(model.device)
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began
