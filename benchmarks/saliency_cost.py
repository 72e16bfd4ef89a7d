"""What each saliency method costs beside the passes it needs, and beside other libraries.

``python -m benchmarks.saliency_cost [--quick] [--lengths 64 256] [--device cuda] [--json FILE]``

The references are written plainly here: one forward pass (F), and one forward pass with the backward pass to the
input embeddings (F+B), weights frozen, logits at the last position only, which is the least that any method can do.
Methods run through the public backend. Everything is timed in turns, and ratios are medians of the quotients of one
round, so that a machine that is busy for a while slows both sides. Memory is what a run adds at its peak: the
process's own high-water mark on Linux, torch's on CUDA. Captum, and Inseq where it is installed, compute the same
scores for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from backend.models.hub import ModelHub
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt
from backend.registry import get_method
from backend.saliency.question import Question, ask
from backend.settings import get_settings
from backend.types import ModelRef, Prompt, SaliencyRequest, no_tick
from benchmarks.measuring import Meter, Others, heading, interleaved, ratio

TEXT = (
    "The harbor town woke early that morning. Fishermen carried nets down to the boats, and the baker set out her "
    "first loaves while gulls argued over the roofs. Nobody had seen the old lighthouse keeper for a week, and people "
    "began to ask each other why the lamp still burned every night. Some said that his daughter had come back from the "
    "city to help him; others had heard a stranger's voice on the stairs. In the end the mayor sent two men across the "
    "bay with bread, lamp oil and a letter. They found the door open, a kettle on the stove, and a note on the table "
    "which said that the keeper had gone to look for the island that he had seen every evening since the spring, and "
    "that whoever read this should please feed the cat and keep the lamp burning until he came home with the proof. "
    "The men laughed, fed the cat, and wrote back that the lamp would be"
)
STEPS = 64
IG = "integrated_gradients"
CLOCK = 1.05  # times this close are the same


@dataclass
class Job:
    """Something to measure, and how many passes of which kind it may be compared with."""

    name: str
    call: Callable[[], Any]
    needs: str
    times: int
    bar: float | None


@dataclass
class Line:
    """One row of the table; times in seconds, one per round; memory in bytes."""

    length: int
    name: str
    times: list[float]
    needs: str  # the reference in words
    references: list[float] | None  # of the same rounds
    bar: float | None
    memory: int | None

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def ratio(self) -> float | None:
        return ratio(self.times, self.references) if self.references else None

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.bar is None:
            return ""
        return "PASS" if self.ratio <= self.bar else "MISS"


# ---------------------------------------------------------------------------------------------------- references


def forward(model: LanguageModel, ids: Tensor) -> None:
    """One plain forward pass."""
    with torch.no_grad():
        model.module(input_ids=ids, use_cache=False, logits_to_keep=1)


def forward_backward(model: LanguageModel, ids: Tensor, target: int) -> None:
    """One plain forward pass and its backward pass to the embeddings."""
    e = model.embedding(ids).detach().requires_grad_()
    logits = model.module(inputs_embeds=e, use_cache=False, logits_to_keep=1).logits
    torch.autograd.grad(logits[0, -1].float().log_softmax(-1)[target], e)


# ---------------------------------------------------------------------------------------------------- questions


def make_question(model: LanguageModel, length: int) -> tuple[Question, str]:
    """Ask why the model says what it says after exactly ``length`` tokens of text; return the text too."""
    text = TEXT
    while len(encode_prompt(model, Prompt(text)).tokens) < length:
        text += " " + TEXT
    tokens = encode_prompt(model, Prompt(text)).tokens[:length]
    text = "".join(token.text for token in tokens)
    passage = encode_prompt(model, Prompt(text))
    assert len(passage.tokens) == length, "the text was cut inside a word"
    ids = torch.tensor([passage.ids], device=model.device)
    with torch.no_grad():
        said = int(model.module(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].argmax())
    passage = append_answer(model, passage, (said,))
    question = ask(model, passage, SaliencyRequest(ModelRef(), Prompt(text), (said,), (0, 1), ()))
    _ = question.plain  # shared by all methods of a request, so part of none
    return question, text


def run(name: str, question: Question, **params: Any) -> Any:
    """Run a method the way the engine does."""
    method = get_method(name)
    return method.run(question.model, question, method.params(**params), no_tick)


# ---------------------------------------------------------------------------------------------------- the table


def measure(model: LanguageModel, length: int, *, quick: bool, others: bool) -> list[Line]:
    """Measure all methods, and other libraries, on a text of ``length`` tokens."""
    meter = Meter(model.device)
    question, text = make_question(model, length)
    ids = torch.tensor([question.ids], device=model.device)
    target = question.strands[0].tokens[0]
    steps = 16 if quick else STEPS
    references: dict[str, Callable[[], Any]] = {
        "F": lambda: forward(model, ids),
        "F+B": lambda: forward_backward(model, ids, target),
    }
    ig_bar = 0.6 if length <= 64 else 1.0
    jobs = [
        Job("gradient_norm", lambda: run("gradient_norm", question), "F+B", 1, 1.15),
        Job("input_x_gradient", lambda: run("input_x_gradient", question), "F+B", 1, 1.15),
        Job(IG, lambda: run(IG, question, steps=steps), "F+B", steps, ig_bar),
        Job("occlusion", lambda: run("occlusion", question), "F", length, 0.65),
        Job("occlusion (replace)", lambda: run("occlusion", question, operator="replace"), "F", length, 0.65),
    ]
    if others:
        from benchmarks.rivals import rivals  # Captum comes with the development set-up only

        ours = {job.name: job for job in jobs}
        for name, method, call in rivals(question, text, steps):
            jobs.append(Job(name, call, ours[method].needs, ours[method].times, None))
    short = [job for job in jobs if job.times == 1]
    long = [job for job in jobs if job.times > 1]
    once = interleaved(
        meter, references | {job.name: job.call for job in short}, 3 if quick else 24 if length <= 64 else 16
    )
    lines = [Line(length, name, once[name], "", None, None, meter.extra_bytes(call)) for name, call in
             references.items()]  # fmt: skip
    lines += [
        Line(
            length, job.name, once[job.name], f"1 x {job.needs}", once[job.needs], job.bar, meter.extra_bytes(job.call)
        )
        for job in short
    ]
    for line in lines:
        show(line)
    return lines + long_jobs(meter, length, long, references, rounds=1 if quick else 3 if length <= 64 else 1)


def long_jobs(
    meter: Meter, length: int, jobs: list[Job], references: dict[str, Callable[[], Any]], rounds: int
) -> list[Line]:
    """Take the long jobs in turns, each between two measurements of the references."""
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    needed: dict[str, list[float]] = {job.name: [] for job in jobs}
    memory: dict[str, int | None] = {}
    before = interleaved(meter, references, 5)
    for _ in range(rounds):
        for job in jobs:
            memory[job.name] = meter.extra_bytes(lambda job=job: seconds[job.name].append(meter.seconds(job.call)))
            after = interleaved(meter, references, 5)
            needed[job.name].append(job.times * statistics.median(before[job.needs] + after[job.needs]))
            before = after
    lines = [
        Line(
            length,
            job.name,
            seconds[job.name],
            f"{job.times} x {job.needs}",
            needed[job.name],
            job.bar,
            memory[job.name],
        )
        for job in jobs
    ]
    for line in lines:
        show(line)
    return lines


def compare(lines: list[Line]) -> list[str]:
    """Say of every method whether another library is faster, beyond what the clock can tell.

    Both are divided by the references of their own rounds first: long jobs run minutes apart, on a machine whose speed
    drifts.
    """
    out = []
    for line in lines:
        for rival in lines:
            who, _, what = rival.name.partition(" ")
            same = rival.length == line.length and what.partition(",")[0] == line.name and who in ("Captum", "Inseq")
            if same and line.ratio and rival.ratio:
                relative = line.ratio / rival.ratio
                verdict = "PASS" if relative <= CLOCK else "MISS"
                out.append(
                    f"{line.length:5d}  {line.name:22s} {line.seconds:8.3f} s   {rival.name:44s} {rival.seconds:8.3f} s"
                    f"   {relative:5.2f}   {verdict}"
                )
    return out


def show(line: Line) -> None:
    """Print one row."""
    ratio = "" if line.ratio is None else f"{line.ratio:6.2f}"
    bar = "" if line.bar is None else f"<= {line.bar:.2f}"
    memory = "" if line.memory is None else f"{line.memory / 2**20:7.0f} MB"
    print(f"{line.length:5d}  {line.name:44s} {line.seconds:9.3f} s  {line.needs:>10s} {ratio:>7s} {bar:>8s} "
          f"{line.verdict:5s} {memory:>10s}", flush=True)  # fmt: skip


def main() -> int:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 tokens, few steps and repeats, no other libraries")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths in tokens; default 64 256")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--no-others", action="store_true", help="leave Captum and Inseq out")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    lengths = given.lengths or ([64] if given.quick else [64, 256])
    with ModelHub(get_settings()).lease(ModelRef(device=given.device), no_tick) as model:
        top = heading(model)
        for name, value in top.items():
            print(f"{name:9s} {value}")
        print(
            f"\n{'n':>5s}  {'':44s} {'seconds':>11s}  {'needs':>10s} {'ratio':>7s} {'bar':>8s} {'':5s} {'memory':>10s}"
        )
        lines: list[Line] = []
        others = Others()
        for length in lengths:
            lines += measure(model, length, quick=given.quick, others=not (given.quick or given.no_others))
    compared = compare(lines)
    if compared:
        print("\nBeside other libraries, which compute the same scores; ours divided by theirs:")
        print("\n".join(compared))
    busy = others.share()
    if busy is not None:
        top["others"] = f"{busy:.0%} of the CPU time went to other programs meanwhile"
        print(f"\n{top['others']}{'; times are not to be trusted' if busy > 0.15 else ''}.")
    missed = [line for line in lines if line.verdict == "MISS"]
    slower = [text for text in compared if text.endswith("MISS")]
    print(f"\n{len(missed)} bars missed, {len(slower)} times another library was faster.")
    if given.json:
        rows = [
            asdict(line) | {"seconds": line.seconds, "ratio": line.ratio, "verdict": line.verdict} for line in lines
        ]
        given.json.write_text(json.dumps({"about": top, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
