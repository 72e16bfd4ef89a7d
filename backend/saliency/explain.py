"""A whole saliency request: every method in turn, with progress, refusals, cached scores and provenance.

Knows the registry and results; knows nothing of how any method works. A method that cannot serve the model says why
and the others go on; a cancelled job and a device without memory end the whole request.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from backend import registry
from backend.errors import NotApplicable, OutOfMemory
from backend.models.generation import token_statistics
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_text
from backend.models.placement import free_bytes, is_out_of_memory
from backend.registry import Method, Workload, get_method, make_params, params_dict
from backend.saliency.calibration import Calibration, calibrate, estimate
from backend.saliency.checks import CERTAIN
from backend.saliency.question import Question, ask
from backend.saliency.runs import Runs, Shelf
from backend.types import Explanation, Passage, SaliencyRequest, Scores, TargetToken, Tick, Token, TokenAttribution
from backend.types import cache_key as hash_of

__all__ = ["Calibration", "calibrate", "estimate", "explain", "method_key", "versions"]

_STEPS = 1000  # resolution of the overall progress

Recall = Callable[[str], TokenAttribution | None]
Remember = Callable[[str, TokenAttribution], None]


def explain(
    model: LanguageModel,
    passage: Passage,
    request: SaliencyRequest,
    tick: Tick,
    *,
    recall: Recall | None = None,
    remember: Remember | None = None,
    shelf: Shelf | None = None,
) -> Explanation:
    """Run all methods of a request.

    Args:
        model: The model; unchanged afterwards.
        passage: Prompt and answer of the request, as tokens.
        request: Target, foil, methods.
        tick: Progress over all methods together, and cancellation.
        recall: Returns a method's stored scores by key, or None.
        remember: Stores a method's scores under a key; not called for refusals.
        shelf: Keeps random ablations for later requests; within this one they are shared anyway.

    Raises:
        BadRequest: If target, foil, method or parameters make no sense.
        OutOfMemory: If memory ran out even for the smallest batch; says what was free.
        Cancelled: If ``tick`` raised it; takes effect within one pass.
    """
    if request.answer_ids != tuple(token.id for token in passage.answer_tokens):
        raise ValueError("the passage does not hold the request's answer")
    planned = [
        (method, make_params(method, dict(spec.params)))
        for spec in request.methods
        for method in [get_method(spec.name)]
    ]
    foil = encode_text(model, request.foil) if request.foil else ()
    question = replace(ask(model, passage, request, foil), runs=Runs(shelf))
    keys = [method_key(question, request, method, params, foil) for method, params in planned]
    stored = [recall(key) if recall else None for key in keys]
    weights = [
        0.0 if found else _weight(method, params, question)
        for (method, params), found in zip(planned, stored, strict=True)
    ]
    tick(0, _STEPS)
    targets = token_statistics(model, passage.ids[: question.targets[-1] + 1], passage.prompt_length)
    targets = targets[request.target[0] :]
    results = []
    for index, ((method, params), found) in enumerate(zip(planned, stored, strict=True)):
        if found is not None:
            results.append(replace(found, from_cache=True))
            continue
        result = _run(model, question, method, params, _part(tick, weights, index))
        if remember and not result.refusal:
            remember(keys[index], result)
        results.append(result)
    tick(_STEPS, _STEPS)
    return Explanation(
        model=model.info,
        prompt=request.prompt,
        decoding=request.decoding,
        passage=passage,
        targets=targets,
        foil=_foil_tokens(model, passage, request, foil),
        objective=request.objective,
        level=request.level,
        seed=request.seed,
        results=tuple(results),
        versions=versions(),
        notes=(*model.notes, *passage.notes, *_notes(targets, question)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def method_key(question: Question, request: SaliencyRequest, method: Method, params: Any, foil: tuple[int, ...]) -> str:
    """Return the key under which a method's scores are stored: a hash of everything that decides them."""
    info = question.model.info
    return hash_of(
        "token attribution",
        registry.METHODS_VERSION,
        [info.id, info.revision, info.dtype, info.attention, info.device.split(":")[0]],
        [question.ids, question.roles, question.targets, request.answer_ids[: request.target[1]], foil],
        [request.objective, request.seed, question.units if method.family == "ablation" else None],
        [method.name, params_dict(params)],
    )


def _run(model: LanguageModel, question: Question, method: Method, params: Any, tick: Tick) -> TokenAttribution:
    """Run one method; measure time and memory; turn a refusal into a result without scores."""
    base = TokenAttribution(method.name, params_dict(params), method.signed, None)
    cuda = model.device.type == "cuda"
    try:
        question.plain  # noqa: B018 - shared by all methods, so no method's time
        if cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
            before = torch.cuda.memory_allocated(model.device)
        began = time.perf_counter()
        scores: Scores = method.run(model, question, params, tick)
        if cuda:
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(model.device) - before if cuda else None
    except NotApplicable as refusal:
        return replace(base, refusal=str(refusal))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return replace(
            base,
            signed=method.signed if scores.signed is None else scores.signed,
            scores=scores.values,
            units=scores.units,
            measured=scores.measured,
            seconds=seconds,
            passes=scores.passes,
            peak_bytes=peak,
            checks=scores.checks,
        )
    # here the handler is left, and with it the traceback that held the failed pass's tensors
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    free = free_bytes(model.device)
    amount = "" if free is None else f" ({free / 1e9:.1f} GB are free)"
    raise OutOfMemory(
        f"Memory ran out during {method.label}, even with a batch of one{amount}.",
        "Use a shorter prompt, coarser units, a smaller model, or close other programs.",
    )


def _weight(method: Method, params: Any, question: Question) -> float:
    """Expected share of the work, in forward passes."""
    work = Workload(len(question.targets), question.source_count, len(question.spans), len(question.strands))
    passes = method.cost(params, work)
    return passes.forward + 2 * passes.backward + 0.1


def _part(tick: Tick, weights: list[float], index: int) -> Tick:
    """Map one method's progress to its stretch of the whole; never backwards."""
    total = sum(weights)
    before, width = sum(weights[:index]) / total, weights[index] / total
    reached = 0

    def part(done: int, of: int) -> None:
        nonlocal reached
        reached = max(reached, int(_STEPS * (before + width * min(1.0, done / max(of, 1)))))
        tick(reached, _STEPS)

    return part


def _foil_tokens(
    model: LanguageModel, passage: Passage, request: SaliencyRequest, foil: tuple[int, ...]
) -> tuple[Token, ...]:
    """Read the foil's characters where it would stand: after the prompt and the answer before the target."""
    if not foil:
        return ()
    prompt = replace(passage, tokens=passage.prompt_tokens)
    before = request.answer_ids[: request.target[0]]
    return append_answer(model, prompt, (*before, *foil)).answer_tokens[len(before) :]


def _notes(targets: tuple[TargetToken, ...], question: Question) -> list[str]:
    """Say what a reader must know of the targets, whatever the method."""
    notes = []
    unlikely = [target for target in targets if target.rank > 1]
    if unlikely and len(targets) == 1:
        notes.append(
            f"The model would rather have said {unlikely[0].runner_up_text!r}: the target has rank "
            f"{unlikely[0].rank:,} with probability {unlikely[0].probability:.2g}."
        )
    elif unlikely:
        notes.append(f"{len(unlikely)} of {len(targets)} targets are not what the model finds most likely there.")
    if not question.has_foil and question.objective != "logit":
        sure = sum(target.probability > CERTAIN for target in targets)
        if sure:
            which = "The target is" if len(targets) == 1 else f"{sure} of {len(targets)} targets are"
            notes.append(f"{which} nearly certain (p above {CERTAIN}), where gradients vanish; a foil asks more.")
    return notes


def versions() -> dict[str, str]:
    """Return the versions of what computes: package name to version."""
    found = {"python": platform.python_version()}
    for package in ("attriscope", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
