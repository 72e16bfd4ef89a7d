"""The needle benchmark: the same planted needles for every registered method, row by row, resumable.

A row is one method at one length, depth and seed, averaged over the needles that its plan gives it. Only needles that
the model answers count; how many were tried is in the row. Which methods take part is read from the registry.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from backend import registry
from backend.errors import BadRequest, OutOfMemory
from backend.evaluation.bench_plan import (
    FULL_GRIDS,
    FULL_LENGTHS,
    FULL_MINUTES,
    QUICK_GRIDS,
    QUICK_LENGTHS,
    QUICK_MINUTES,
    Grid,
    choose_grids,
    level_at,
    setting_of,
)
from backend.evaluation.bench_table import Record, RowsFile, mean_row, require_same_run
from backend.evaluation.needle import Needle, NeedleSpec, ask_secret, plant
from backend.evaluation.needle_metrics import measure, token_scores
from backend.models.language import LanguageModel
from backend.registry import Method, get_method, list_methods, make_params, params_dict
from backend.saliency.calibration import calibrate, estimate
from backend.saliency.explain import explain, versions
from backend.types import MethodSpec, SaliencyRequest, Tick, TokenAttribution

_TRIES = 4  # needles tried for each one that is wanted
_OVERHEAD = 3  # forward passes around a method: does the model answer, statistics, the question itself
_ANSWER_ROOM = 16  # tokens of lead and answer behind a prompt

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        methods: Registry names; empty for all.
        lengths: Prompt lengths in tokens; empty for those of the run's kind.
        quick: Short run at reduced settings.
        chat: Prompts through the model's chat template.
        words: Words of the secret, one token each; all of them are the target.
        minutes: Time that the plan may take; None for that of the run's kind.
    """

    methods: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    quick: bool = False
    chat: bool = False
    words: int = 1
    minutes: float | None = None


def run_bench(
    model: LanguageModel, options: Options, file: RowsFile, tick: Tick, stage: Stage, expired: Callable[[], bool]
) -> bool:
    """Measure what the file does not hold yet, and append it row by row.

    Args:
        model: The model; unchanged afterwards.
        options: What to measure.
        file: Rows so far, and where new ones go.
        tick: Progress in needles, and cancellation within one pass.
        stage: Called with a few words when the kind of work changes.
        expired: Asked after each row whether to stop for now.

    Returns:
        Whether everything that was asked for is in the file.

    Raises:
        BadRequest: If a method is unknown, no length fits the model, or the file belongs to another run.
        Cancelled: If ``tick`` raised it.
    """
    methods = [get_method(name) for name in dict.fromkeys(options.methods)] or list(list_methods())
    lengths = _lengths(model, options)
    records = file.read()
    about = describe(model, options)
    known = next((record for record in records if record["kind"] == "about"), None)
    if known is None:
        file.append({"kind": "about", **about})
    else:
        require_same_run(known, about)
    stage("Planning")
    plan = _plan(model, options, methods, lengths, records, file)
    done = {_key(record) for record in records if record["kind"] == "row"}
    work = [
        (length, depth, seed, [m for m in methods if _takes_part(plan, m, length, depth, seed)])
        for length in lengths
        for depth in sorted({d for grid in plan.values() for d in grid.depths})
        for seed in sorted({s for grid in plan.values() for s in grid.seeds})
    ]
    total = sum(plan[m.name, length].needles for length, _, _, group in work for m in group)
    finished = 0

    def alive() -> None:
        tick(finished, total)

    for length, depth, seed, group in work:
        open_ones = [m for m in group if (m.name, length, depth, seed) not in done]
        finished += sum(plan[m.name, length].needles for m in group if m not in open_ones)
        alive()
        if not open_ones:
            continue
        stage(f"{length} tokens, depth {depth} %, seed {seed}: planting needles")
        most = max(plan[m.name, length].needles for m in open_ones)
        planted = _planted(model, options, (length, depth, seed), most, alive)
        for method in open_ones:
            stage(f"{length} tokens, depth {depth} %, seed {seed}: {method.name}")
            wanted = plan[method.name, length].needles
            row = _row(model, options, method, (length, depth, seed), planted, wanted, alive)
            file.append(row)
            finished += wanted
            alive()
            if expired():
                return finished == total
    return True


def describe(model: LanguageModel, options: Options) -> Record:
    """Say what is measured, on what, with which versions."""
    info = model.info
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": info.id,
        "revision": info.revision,
        "dtype": info.dtype,
        "device": info.device,
        "attention": info.attention,
        "quick": options.quick,
        "chat": options.chat,
        "words": options.words,
        "methods_version": registry.METHODS_VERSION,
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def metrics_of(result: TokenAttribution, needle: Needle, seed: int) -> dict[str, float | None]:
    """Return a row's numbers for one needle.

    Signed methods are read by their positive part, what speaks for the secret; by size beside it (``..._absolute``).

    Args:
        result: Scores for the needle's passage and target.
        needle: The needle.
        seed: Of the order among equal scores.
    """
    scores = token_scores(result, needle.passage.prompt_length + needle.target[1] - 1)
    absolute = measure(scores, needle.sets, seed=seed)
    main = measure(scores, needle.sets, part="positive", seed=seed) if result.signed else absolute
    names = (
        "mass",
        "lift",
        "needle_mass",
        "needle_lift",
        "recall_at_k",
        "auprc",
        "secret_rank",
        "chance",
        "unmeasured",
    )
    out: dict[str, Any] = {name: getattr(main, name) for name in names}
    out |= {f"{n}_absolute": getattr(absolute, n) for n in ("mass", "needle_mass", "recall_at_k", "secret_rank")}
    # where attention sinks draw scores, they draw them with either sign
    out |= {"bos_share": absolute.bos_share, "template_share": absolute.template_share}
    out |= {"seconds": result.seconds, "forward": result.passes.forward, "backward": result.passes.backward}
    return out


# ---------------------------------------------------------------------------------------------- inside

_Cell = tuple[int, int, int]  # length, depth, seed


@dataclass(frozen=True, slots=True)
class _Planted:
    """Needles that the model answers, and how many were tried up to each."""

    needles: tuple[Needle, ...]
    tried: tuple[int, ...]
    tried_in_all: int


def _lengths(model: LanguageModel, options: Options) -> list[int]:
    wanted = sorted(set(options.lengths)) or list(QUICK_LENGTHS if options.quick else FULL_LENGTHS)
    context = model.info.context_length
    fitting = [n for n in wanted if context is None or n + _ANSWER_ROOM <= context]
    if not fitting:
        raise BadRequest(f"The model reads at most {context} tokens, too few for these lengths.", "Name shorter ones.")
    return fitting


def _plan(
    model: LanguageModel,
    options: Options,
    methods: Sequence[Method],
    lengths: Sequence[int],
    records: Sequence[Record],
    file: RowsFile,
) -> dict[tuple[str, int], Grid]:
    """Return the grid of each pair of method and length; grids in the file stay, so that a run can go on."""
    plan = {
        (r["method"], r["length"]): Grid(tuple(r["depths"]), tuple(r["seeds"]), r["needles"])
        for r in records
        if r["kind"] == "plan"
    }
    spent = sum(r["expected_seconds"] for r in records if r["kind"] == "plan")
    missing = [(m, length) for length in lengths for m in methods if (m.name, length) not in plan]
    if not missing:
        return plan
    calibration = calibrate(model)
    seconds: dict[tuple[str, int], float] = {}
    for length in sorted({length for _, length in missing}):
        needle = plant(model, NeedleSpec(length, 50, 0, options.chat, options.words))
        for method in [m for m, at in missing if at == length]:
            cost = estimate(needle.passage, _request(model, needle, method, options, 0), calibration)
            around = _OVERHEAD * calibration.seconds(calibration.forward, length, 1.0)
            seconds[method.name, length] = cost.per_method[method.name] + around
    minutes = options.minutes or (QUICK_MINUTES if options.quick else FULL_MINUTES)
    chosen = choose_grids(seconds, 60 * minutes - spent, QUICK_GRIDS if options.quick else FULL_GRIDS)
    for (name, length), grid in chosen.items():
        file.append(
            {
                "kind": "plan",
                "method": name,
                "length": length,
                "depths": grid.depths,
                "seeds": grid.seeds,
                "needles": grid.needles,
                "expected_seconds": seconds[name, length] * grid.size,
            }
        )
    return plan | chosen


def _takes_part(plan: dict[tuple[str, int], Grid], method: Method, length: int, depth: int, seed: int) -> bool:
    grid = plan.get((method.name, length))
    return grid is not None and depth in grid.depths and seed in grid.seeds


def _key(row: Record) -> tuple[str, int, int, int]:
    return row["method"], row["length"], row["depth"], row["seed"]


def _planted(model: LanguageModel, options: Options, cell: _Cell, count: int, alive: Callable[[], None]) -> _Planted:
    """Plant needles until the model has answered as many as are wanted."""
    length, depth, seed = cell
    needles: list[Needle] = []
    tried: list[int] = []
    most = _TRIES * count
    for number in range(most):
        alive()
        needle = plant(model, NeedleSpec(length, depth, 1000 * seed + number, options.chat, options.words))
        if ask_secret(model, needle).passed:
            needles.append(needle)
            tried.append(number + 1)
            if len(needles) == count:
                return _Planted(tuple(needles), tuple(tried), number + 1)
    return _Planted(tuple(needles), tuple(tried), most)


def _request(model: LanguageModel, needle: Needle, method: Method, options: Options, seed: int) -> SaliencyRequest:
    return SaliencyRequest(
        model=model.ref,
        prompt=needle.prompt,
        answer_ids=needle.answer_ids,
        target=needle.target,
        methods=(MethodSpec.of(method.name, setting_of(method.name, options.quick)),),
        level=level_at(needle.spec.length),
        seed=seed,
    )


def _row(
    model: LanguageModel,
    options: Options,
    method: Method,
    cell: _Cell,
    planted: _Planted,
    wanted: int,
    alive: Callable[[], None],
) -> Record:
    """Measure one method on its needles of a cell."""
    length, depth, seed = cell
    used = planted.needles[:wanted]
    tried = planted.tried[wanted - 1] if len(planted.tried) >= wanted else planted.tried_in_all
    measured: list[dict[str, float | None]] = []
    signed = method.signed
    refusal = "" if used else f"The model answered none of {tried} needles."
    peaks: list[int] = []
    for needle in used:
        request = _request(model, needle, method, options, seed)
        try:
            result = explain(model, needle.passage, request, lambda done, total: alive()).results[0]
        except OutOfMemory as error:
            refusal = str(error)
            break
        if result.refusal:
            refusal = result.refusal
            break
        signed = result.signed
        measured.append(metrics_of(result, needle, seed))
        peaks += [] if result.peak_bytes is None else [result.peak_bytes]
    return {
        "kind": "row",
        "method": method.name,
        "length": length,
        "depth": depth,
        "seed": seed,
        "needles": len(measured),
        "tried": tried,
        "share": "positive" if signed else "absolute",
        "level": level_at(length),
        "params": params_dict(make_params(method, setting_of(method.name, options.quick))),
        **mean_row(measured),
        "peak_bytes": max(peaks, default=None),
        "refusal": refusal,
    }
