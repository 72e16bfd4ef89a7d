"""Which objective, scale and readout attention bias optimization should have: a sweep over planted needles.

``python -m benchmarks.abo_sweep --out FILE [--plan axes|full|tiny] [--lengths 128] [--depths 10 50 90] [--cases 1]``
``python -m benchmarks.abo_sweep --out FILE --summary``

The published text leaves the objective open. Every descent is run once and read out along the way: at several step
counts, at two stop rules, by every readout. One JSON line per reading goes to FILE and to the screen; a run that was
interrupted goes on where it stopped. "axes" varies one setting at a time around the middle of each form, "full" is
the whole grid of the specification (days on two cores), "tiny" shows that everything runs. ``--summary`` prints the
means per configuration, best first by recall of the needle's tokens and, where these are equal, its lift.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import transformers

from backend.errors import NotApplicable
from backend.models.hub import ModelHub
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.saliency.abo import Params, make_plan, read_out
from backend.saliency.attention_bias import BiasedPasses
from backend.saliency.bias_descent import State, descend
from backend.saliency.question import Question, ask
from backend.settings import get_settings
from backend.types import ModelRef, Objective, Passage, Prompt, SaliencyRequest, Turn, no_tick
from benchmarks.measuring import heading

STEPS = (4, 8, 10, 16, 20, 30, 40, 60, 80)  # where a descent is read out, as far as it goes
READOUTS = ("gate", "softmax", "centered", "min_shift")
ANCHORED = Params(steps=40)
LITERAL = Params(form="literal", learning_rate=0.3, penalty=1.0, steps=80)
NOISE = 0.5  # of the start values, where seeds are compared

SENTENCES = (
    "The river was wide and the boats moved slowly.",
    "In spring the farmers brought wool to the market.",
    "Children played near the old mill until it was dark.",
    "The baker sold warm bread before the sun came up.",
    "A long road leads from the hills down to the coast.",
    "Every winter the lake froze and people walked across it.",
    "The library kept its oldest books behind a glass door.",
    "Two brothers built a small house at the edge of the forest.",
    "The train stopped for an hour because of the snow.",
    "She painted the same window in every season of the year.",
    "Most visitors came to see the garden and its tall trees.",
    "The teacher told them how the stars were given their names.",
)
NAMES = ("Hagazin", "Dolvek", "Tavmir", "Kalthor", "Jorwyn", "Pelnax")
SYSTEM = "Read the text and answer with one word from it."
LEAD = "The secret word is"  # how the answer begins, so that the next token is the secret
SECRETS = ("silver", "pepper", "violet", "thunder", "cotton", "falcon")


@dataclass(frozen=True)
class Needle:
    """A prompt with a planted answer: the question about it, and which sources belong to what."""

    question: Question
    counted: tuple[int, ...]  # all but BOS, template, the first token and the lead
    system: tuple[int, ...]
    needle: tuple[int, ...]
    query: tuple[int, ...]
    secret: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------- prompts


def plant(model: LanguageModel, length: int, depth: int, case: int) -> Needle:
    """Make a prompt of at most ``length`` tokens and ask why the model says the secret, behind a lead."""
    name, secret = NAMES[case % len(NAMES)], SECRETS[case % len(SECRETS)]
    needle = f"The secret word of the {name} gate is {secret}."
    query = f"What is the secret word of the {name} gate?"
    rng = random.Random(case)  # noqa: S311 - not cryptography
    hay: list[str] = []
    prompt, passage = _written(model, needle, query, hay, depth)
    while True:
        hay.append(rng.choice(SENTENCES))
        longer = _written(model, needle, query, hay, depth)
        if len(longer[1].tokens) > length:
            break
        prompt, passage = longer
    answer = (*encode_text(model, LEAD), encode_text(model, f" {secret}")[0])
    text, spans, begin = passage.rendered, [], 0
    for token in passage.tokens:
        taken = len(token.text) if text.startswith(token.text, begin) else 0  # inserted tokens take no characters
        spans.append((begin, begin + taken))
        begin += taken

    def among(start: int, part: str) -> tuple[int, ...]:
        return tuple(i for i, (a, b) in enumerate(spans) if a < start + len(part) and b > start)

    start = text.index(needle)
    counted = tuple(i for i, token in enumerate(passage.tokens) if i and token.role not in ("bos", "template"))
    sets = [among(text.index(SYSTEM), SYSTEM), among(start, needle), among(text.rindex(query), query)]
    target = (len(answer) - 1, len(answer))
    passage = append_answer(model, passage, answer)
    question = ask(model, passage, SaliencyRequest(ModelRef(), prompt, answer, target, ()))
    wanted = [tuple(i for i in part if i in counted) for part in sets]
    return Needle(question, counted, *wanted, among(start + needle.index(secret), secret))


def _written(model: LanguageModel, needle: str, query: str, hay: list[str], depth: int) -> tuple[Prompt, Passage]:
    """Put the needle among the hay; as a chat where the model has a template for one."""
    at = round(depth / 100 * len(hay))
    body = " ".join([*hay[:at], needle, *hay[at:], query])
    if model.tokenizer.chat_template:
        prompt = Prompt(turns=(Turn("system", SYSTEM), Turn("user", body)))
    else:
        prompt = Prompt(f"{SYSTEM} {body} Answer:")
    return prompt, encode_prompt(model, prompt)


def measure(row: np.ndarray[Any, np.dtype[np.float64]], needle: Needle) -> dict[str, float]:
    """Metrics of the specification over the counted tokens."""
    counted, k = needle.counted, len(needle.needle)
    share = np.zeros(len(row))
    share[list(counted)] = row[list(counted)] / max(row[list(counted)].sum(), 1e-300)
    wanted = {*needle.system, *needle.needle, *needle.query}
    order = [i for i in np.argsort(-share, kind="stable") if i in counted]
    mass, own = float(share[list(wanted)].sum()), float(share[list(needle.needle)].sum())
    return {
        "mass": mass,
        "lift": mass / (len(wanted) / len(counted)),
        "needle_mass": own,
        "needle_lift": own / (k / len(counted)),
        "recall_at_k": len({*order[:k]} & {*needle.needle}) / k,
        "secret_rank": 1 + min(order.index(i) for i in needle.secret),
    }


# ---------------------------------------------------------------------------------------------------------- grid


def grid(plan: str, seeds: int) -> list[tuple[Params, int]]:
    """Settings and seed of every descent; the seed counts where there is noise."""
    if plan == "tiny":
        return [(replace(ANCHORED, steps=4), 0), (replace(LITERAL, steps=4, ramp=True, noise=NOISE), 1)]
    made: list[Params] = []
    for middle, rates, penalties in (
        (ANCHORED, (0.3, 0.5, 1.0, 2.0), (1.0, 3.0, 10.0, 30.0)),
        (LITERAL, (0.05, 0.1, 0.3), (0.3, 1.0, 3.0, 10.0)),
    ):
        if plan == "full":
            axes = product(rates, penalties, (False, True), ("log_prob", "prob"), (False, True))
            made += [
                replace(middle, learning_rate=r, penalty=p, ramp=ramp, likelihood=kind, freeze_frame=frozen)
                for r, p, ramp, kind, frozen in axes
            ]
            continue
        made.append(middle)
        made += [replace(middle, learning_rate=rate) for rate in rates]
        made += [replace(middle, penalty=penalty) for penalty in penalties]
        made += [
            replace(middle, ramp=True),
            replace(middle, ramp=True, penalty=10.0),
            replace(middle, likelihood="prob"),
        ]
        made.append(replace(middle, freeze_frame=True))
    unique = list(dict.fromkeys(made))
    noisy = unique if plan == "full" else [ANCHORED, LITERAL]
    return [(params, 0) for params in unique] + [
        (replace(params, noise=NOISE), seed) for params, seed in product(noisy, range(seeds))
    ]


def readings(question: Question, params: Params, history: list[State]) -> Iterator[tuple[str, State, str]]:
    """Every (stop rule, state, readout) at which one descent is read."""
    plain = float(question.plain.probabilities[0])
    stops = {f"{step} steps": step for step in STEPS if step < len(history)}
    stops |= {"P back at its plain value": _back(history, plain), "P back below 0.95": _back(history, 0.95)}
    for (stop, step), readout in product(stops.items(), READOUTS):
        yield stop, history[step], readout


def _back(history: list[State], level: float) -> int:
    """First step at which P, once above the level, is at or below it again; the last step if that never happens."""
    above = False
    for state in history:
        if above and state.probability <= level:
            return state.step
        above = above or state.probability > level
    return len(history) - 1


# ----------------------------------------------------------------------------------------------------------- run


def sweep(model: LanguageModel, given: argparse.Namespace) -> None:
    """Run what FILE does not hold yet."""
    done = {line["descent"] for line in read(given.out)}
    for length, depth, case in product(given.lengths, given.depths, range(given.cases)):
        needle: Needle | None = None
        for params, seed in grid(given.plan, given.seeds):
            descent = "/".join(map(str, (model.info.id, length, depth, case, seed, *asdict(params).values())))
            if descent in done:
                continue
            if needle is None:
                needle = plant(model, length, depth, case)
            where = {"descent": descent, "model": model.info.id, "length": length, "depth": depth, "case": case}
            lines = [where | line for line in one(needle, params, seed)]
            with given.out.open("a", encoding="utf-8") as stream:  # a whole descent at once, so that none is half read
                stream.writelines(json.dumps(line) + "\n" for line in lines)
            for line in lines:
                print(json.dumps(line), flush=True)


def one(needle: Needle, params: Params, seed: int) -> Iterator[dict[str, Any]]:
    """Run one descent and read it out; a model that refuses gives one line that says why."""
    question = needle.question
    plain = question.plain
    setting = asdict(params) | {"seed": seed, "plain_probability": float(plain.probabilities[0])}
    setting["answered"] = int(plain.logits[0][-1].argmax()) == question.strands[0].tokens[0]
    objective = cast("Objective", "log_prob" if params.likelihood == "question" else params.likelihood)
    try:
        passes = BiasedPasses(question, objective, lambda: None)
        began = time.perf_counter()
        history = list(descend(passes, make_plan(question, params), seed))
    except NotApplicable as refusal:
        yield setting | {"refusal": str(refusal)}
        return
    pace = (time.perf_counter() - began) / max(1, len(history) - 1)
    for stop, state, readout in readings(question, params, history):
        row = read_out(question, state.alpha, replace(params, readout=readout))[0]
        yield setting | {
            "stop": stop,
            "readout": readout,
            "step": state.step,
            "probability": state.probability,
            "seconds": pace * state.step,
            **measure(row, needle),
        }


def read(path: Path) -> list[dict[str, Any]]:
    """Lines that were written before."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Means per configuration over prompts and seeds that the model answers, best first."""
    axes = ("form", "learning_rate", "penalty", "ramp", "likelihood", "freeze_frame", "noise", "stop", "readout")
    names = ("recall_at_k", "needle_lift", "needle_mass", "mass", "secret_rank", "probability", "seconds")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("answered") and "stop" in line:
            groups.setdefault(tuple(line[axis] for axis in axes), []).append(line)
    means = {key: [statistics.fmean(line[name] for line in group) for name in names] for key, group in groups.items()}
    yield "  ".join(("prompts", *names, *axes))
    for key in sorted(means, key=lambda key: means[key][:2], reverse=True):
        yield "  ".join((str(len(groups[key])), *(f"{value:.3g}" for value in means[key]), *map(str, key)))


def main() -> int:
    """Sweep, or print what a sweep found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; read first, then added to")
    parser.add_argument("--plan", choices=("axes", "full", "tiny"), default="axes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128])
    parser.add_argument("--depths", type=int, nargs="+", default=[10, 50, 90])
    parser.add_argument("--cases", type=int, default=1, help="prompts per length and depth")
    parser.add_argument("--seeds", type=int, default=3, help="of noisy starts")
    parser.add_argument("--model", default="", help="default: the embedded model")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--summary", action="store_true", help="print means of FILE instead")
    given = parser.parse_args()
    if given.summary:
        print("\n".join(summary(read(given.out))))
        return 0
    transformers.utils.logging.set_verbosity_error()
    ref = ModelRef(given.model, device=given.device) if given.model else ModelRef(device=given.device)
    with ModelHub(get_settings()).lease(ref, no_tick) as model:
        for name, value in heading(model).items():
            print(f"{name:9s} {value}", file=sys.stderr)
        sweep(model, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
