"""The sanity block of a run: is the model the same afterwards, do scores repeat, does the map see a broken model?

* ``plain_logits_unchanged``: logits before and after a method are equal bit by bit.
* ``unmeasured_share``: part of the sources without a score. Scores that are not numbers never get this far.
* ``seed_spread``: rank correlation between runs with different seeds, for methods that sample.
* ``randomized_weights``: rank correlation with the map of a copy of the model whose last blocks hold random weights.
  A map that stays the same does not depend on what those blocks learned.

The copy has modules of its own and shares the untouched weights with the leased model; nothing is ever written to
those, and the leased model is not changed.
Source of the last check: Adebayo et al. 2018 (arXiv:1810.03292). Own implementation.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.models.passage import encode_text
from backend.registry import Method, get_method, make_params
from backend.saliency.agreement import spearman
from backend.saliency.passes import logits_at
from backend.saliency.question import Question, ask
from backend.types import Check, Passage, SaliencyRequest, Scores, Tick

SAME = 0.9
"""Rank correlation with the broken model's map from which a map counts as hardly changed."""

STEADY = 0.8
"""Rank correlation between seeds below which a map counts as unsteady."""

_SEEDS = 3


@dataclass(frozen=True, slots=True)
class MethodSanity:
    """The checks of one method.

    Attributes:
        method: Registry name.
        checks: One per question of this module; only a refusal's sentence where the method cannot serve the model.
        refusal: Why there are no checks; empty if there are.
    """

    method: str
    checks: tuple[Check, ...]
    refusal: str = ""


def sanity(
    model: LanguageModel,
    passage: Passage,
    request: SaliencyRequest,
    tick: Tick,
    *,
    seeds: int = _SEEDS,
    blocks: int = 1,
) -> tuple[MethodSanity, ...]:
    """Check every method of a request. Each runs two to ``seeds + 1`` times.

    Args:
        model: The model; unchanged afterwards.
        passage: Prompt and answer.
        request: Target, foil, level, seed, methods.
        tick: Progress and cancellation, within one pass.
        seeds: Runs that are compared for methods that sample; at least 2.
        blocks: Blocks, from the last down, that lose what they learned.

    Raises:
        BadRequest: If target, foil, method or parameters make no sense.
        NotApplicable: If the model cannot be copied, see ``randomized``.
        Cancelled: If ``tick`` raised it.
    """
    foil = encode_text(model, request.foil) if request.foil else ()
    broken = ask(randomized(model, blocks=blocks, seed=request.seed), passage, request, foil)
    asked = [replace(request, seed=request.seed + number) for number in range(max(2, seeds))]
    total = 1000 * len(request.methods)
    found = []
    for number, spec in enumerate(request.methods):
        method = get_method(spec.name)
        params = make_params(method, dict(spec.params))
        run = _Run(method, params, tick, 1000 * number, total, len(asked) + 1)
        try:
            checks = _checks(run, [ask(model, passage, r, foil) for r in asked], broken, blocks)
        except NotApplicable as refusal:
            found.append(MethodSanity(method.name, (), str(refusal)))
        else:
            found.append(MethodSanity(method.name, tuple(checks)))
    tick(total, total)
    return tuple(found)


def randomized(model: LanguageModel, *, blocks: int = 1, seed: int = 0) -> LanguageModel:
    """Return a copy whose last blocks hold random weights, drawn with mean and spread of the real ones.

    Vectors (norm weights, biases) are shuffled instead, whatever their convention. All other weights are shared.

    Args:
        model: Stays as it is.
        blocks: How many blocks, from the last down; capped at all of them.
        seed: Of the random weights.

    Raises:
        NotApplicable: If the blocks cannot be found, weights are quantized, or the model is spread over devices.
    """
    module = model.module
    if getattr(module, "hf_device_map", None):
        raise NotApplicable("The model is spread over several devices and cannot be copied.", "Use one device.")
    name, layers = _blocks(module)
    chosen = range(max(0, len(layers) - blocks), len(layers))
    learned = {id(p) for index in chosen for p in layers[index].parameters()}
    if not learned or any(not p.is_floating_point() for index in chosen for p in layers[index].parameters()):
        raise NotApplicable("The weights are quantized, so no random ones can take their place.", "Use float weights.")
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in learned}
    twin = copy.deepcopy(module, dict(shared))  # what the memo holds already is not copied
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index in chosen:
            for weight in twin.get_submodule(f"{name}.{index}").parameters():
                weight.copy_(_forgotten(weight, generator))
    mark = f"{model.info.revision}-randomized-{len(chosen)}-{seed}"  # nothing that is kept for the real model fits
    return replace(model, module=twin, info=replace(model.info, revision=mark))


def _blocks(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of transformer blocks: the first one as long as the configuration says."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None else None
    depth = getattr(text, "num_hidden_layers", None)
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == depth:
            return name, part
    raise NotApplicable("The blocks of this model were not found, so none can be given random weights.")


def _forgotten(weight: Tensor, generator: torch.Generator) -> Tensor:
    wide = weight.detach().float().cpu()
    if wide.dim() < 2:
        return wide.flatten()[torch.randperm(wide.numel(), generator=generator)].reshape(wide.shape).to(weight)
    noise = torch.randn(wide.shape, generator=generator)
    return (wide.mean() + wide.std() * noise).to(weight)


@dataclass(frozen=True, slots=True)
class _Run:
    """One method, its parameters, and its stretch of the overall progress."""

    method: Method
    params: object
    tick: Tick
    before: int
    total: int
    runs: int

    def __call__(self, question: Question, number: int) -> Scores:
        """Run the method for the ``number``-th time."""
        start, width = self.before + 1000 * number // self.runs, 1000 // self.runs

        def tick(done: int, total: int) -> None:
            self.tick(start + width * min(done, total) // max(total, 1), self.total)

        scores: Scores = self.method.run(question.model, question, self.params, tick)
        return scores


def _checks(run: _Run, asked: Sequence[Question], broken: Question, blocks: int) -> list[Check]:
    """Run a method on the same question with several seeds, and on the broken model."""
    first = asked[0]
    before = _logits(first)
    real = run(first, 0)
    found = [_unchanged(before, _logits(first)), _unmeasured(real)]
    runs = [real, run(asked[1], 1)]
    sampled = not np.array_equal(real.values, runs[1].values, equal_nan=True)
    if sampled:
        runs += [run(question, number) for number, question in enumerate(asked[2:], 2)]
    found.append(_spread(first, runs, sampled))
    try:
        found.append(_randomized(run.method, first, real, run(broken, len(asked)), blocks))
    except NotApplicable as refusal:
        found.append(Check("randomized_weights", None, "info", f"Not for the broken model: {refusal}"))
    return found


@torch.no_grad()
def _logits(question: Question) -> list[Tensor]:
    device = question.model.device
    return [logits_at(question.model, torch.tensor([s.ids], device=device), s.positions) for s in question.strands]


def _unchanged(before: Sequence[Tensor], after: Sequence[Tensor]) -> Check:
    gap = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    text = "The model's logits are the same before and after, bit by bit."
    if not same:
        text = f"The method left the model changed: its logits differ by up to {gap:.2g} afterwards."
    return Check("plain_logits_unchanged", gap, "ok" if same else "fail", text)


def _unmeasured(scores: Scores) -> Check:
    share = float((~_measured(scores)).mean())
    text = "Every source has a score, and every score is a number."
    if share:
        text = f"{share:.0%} of the sources were left out on purpose; every other score is a number."
    return Check("unmeasured_share", share, "info" if share else "ok", text)


def _measured(scores: Scores) -> npt.NDArray[np.bool_]:
    return np.ones(scores.values.shape[1], bool) if scores.measured is None else scores.measured


def _spread(question: Question, runs: Sequence[Scores], sampled: bool) -> Check:
    if not sampled:
        return Check("seed_spread", 1.0, "ok", "Another seed gives the same scores, bit by bit: nothing is sampled.")
    pairs = [_correlation(question, a, b) for a, b in combinations(runs, 2)]
    known = [value for value in pairs if value is not None]
    if not known:
        return Check("seed_spread", None, "warn", f"Scores of {len(runs)} seeds differ, and no ranks can be compared.")
    mean = float(np.mean(known))
    text = f"Rankings of {len(runs)} seeds agree to {mean:.2f} (mean rank correlation, lowest {min(known):.2f})"
    if mean < STEADY:
        return Check("seed_spread", mean, "warn", f"{text}: take more samples before you trust the order.")
    return Check("seed_spread", mean, "ok", f"{text}.")


def _randomized(method: Method, question: Question, real: Scores, other: Scores, blocks: int) -> Check:
    name = "randomized_weights"
    where = "the last block" if blocks == 1 else f"the last {blocks} blocks"
    same = real.values.shape == other.values.shape and np.array_equal(real.values, other.values, equal_nan=True)
    if same and method.family == "baseline":
        return Check(name, 1.0, "info", "A baseline does not look at the model, so breaking the model changes nothing.")
    if same:
        return Check(name, 1.0, "fail", f"The map is the same, bit by bit, with random weights in {where}.")
    value = _correlation(question, real, other)
    if value is None:
        return Check(name, None, "info", f"The map changes with random weights in {where}; no ranks compare.")
    text = f"With random weights in {where}, the ranking agrees to {value:.2f} with the real one"
    if value > SAME:
        return Check(name, value, "warn", f"{text}: it hardly depends on what was learned there.")
    return Check(name, value, "ok", f"{text}.")


def _correlation(question: Question, first: Scores, second: Scores) -> float | None:
    """Rank correlation over sources that set the color scale and have scores on both sides; rows are added."""
    if first.values.shape != second.values.shape or first.units != second.units:
        return None
    starts = [start for start, _ in first.units] if first.units else list(range(question.source_count))
    counted: npt.NDArray[np.bool_] = ~question.is_frame[starts]
    counted = counted & _measured(first) & _measured(second)
    a, b = (np.asarray(s.values, np.float64).sum(axis=0)[counted] for s in (first, second))
    return spearman(a, b)
