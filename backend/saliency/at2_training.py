"""Learning AT2's weights for a model: random ablations of generated texts, then a fit of one number per head.

For each text the model answers; tokens are hidden at random; the log-odds of the answer are measured. A head's feature
of an ablation is the attention from the answer to what stayed minus that to what went. The weights are those whose
weighted sum of features correlates best with the measured log-odds, on average over texts. Each text's numbers are
kept in a file of their own, so that an interrupted run goes on where it stopped.
Source: AT2 (arXiv:2504.13752), its sampling, predictor and loss. Own implementation.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from backend.errors import BadRequest
from backend.models.generation import end_ids, generate_ids
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt
from backend.saliency.ablation import Ablator
from backend.saliency.at2_fitting import Example, Settings, choose_steps, correlation, fit
from backend.saliency.at2_texts import DESCRIPTION, KINDS, Text, make_text
from backend.saliency.at2_weights import Fitted, Identity, Record, identity_of
from backend.saliency.attention_rows import attention_rows
from backend.saliency.question import Question, ask
from backend.types import Decoding, Passage, SaliencyRequest, Tick

Array = npt.NDArray[np.float64]

_EVERY = 5  # of so many rounds through all kinds, the last is kept aside
_RANDOM_DRAWS = 20


def train(model: LanguageModel, settings: Settings, folder: Path, tick: Tick) -> Fitted:
    """Measure what is missing, fit, and judge on the texts kept aside.

    Args:
        model: The model; unchanged afterwards.
        settings: Of the run.
        folder: Where measured texts are kept; of this model and these settings alone.
        tick: Progress in texts, and cancellation within one pass; what was measured stays.

    Raises:
        BadRequest: If the folder belongs to another run.
        NotApplicable: If tokens cannot be hidden in this model, or it shows no attention weights.
    """
    return learn(collect(model, settings, folder, tick), identity_of(model), settings)


def learn(examples: Mapping[int, Example], identity: Identity, settings: Settings) -> Fitted:
    """Fit weights to measured texts, and judge them on the texts kept aside.

    Args:
        examples: By number of the text.
        identity: The model that they were measured on.
        settings: Of the run.

    Raises:
        BadRequest: If there are too few texts.
    """
    held = [example for number, example in examples.items() if _is_held(number)]
    learned = [example for number, example in examples.items() if not _is_held(number)]
    if not held or not learned:
        raise BadRequest("There are too few texts to learn from.", f"Use at least {_EVERY * len(KINDS)}.")
    steps = choose_steps(learned, settings)
    theta = fit(learned, settings, steps)
    generator = torch.Generator().manual_seed(settings.seed)
    random = [torch.randn(theta.shape, generator=generator, dtype=torch.float64) for _ in range(_RANDOM_DRAWS)]
    kinds = sorted({example.kind for example in held}, key=KINDS.index)
    record = Record(
        prompts=len(learned),
        held_out=len(held),
        masks=settings.masks,
        keep=settings.keep,
        steps=steps,
        correlation=round(correlation(held, theta), 3),
        equal_weights=round(correlation(held, torch.ones_like(theta)), 3),
        random_weights=round(float(np.mean([correlation(held, draw) for draw in random])), 3),
        by_kind={kind: round(correlation([e for e in held if e.kind == kind], theta), 3) for kind in kinds},
        data=DESCRIPTION,
        seed=settings.seed,
        versions={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        },
        created=datetime.now(UTC).date().isoformat(),
    )
    return Fitted(identity, tuple(tuple(row) for row in theta.tolist()), record)


def _is_held(number: int) -> bool:
    return number // len(KINDS) % _EVERY == _EVERY - 1


# ------------------------------------------------------------------------------------------------ measuring


def collect(model: LanguageModel, settings: Settings, folder: Path, tick: Tick) -> dict[int, Example]:
    """Return what was measured on each text by its number; measure what is not in the folder yet.

    A text whose answer does not change under ablation teaches nothing and is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, model, settings)
    found: dict[int, Example] = {}
    for number in range(settings.prompts):
        tick(number, settings.prompts)
        path = folder / f"text-{number:04d}.npz"
        text = make_text(number, settings.seed, model.info.has_chat_template, settings.sentences)
        if not path.is_file():
            example = measure(model, text, number, settings, lambda number=number: tick(number, settings.prompts))  # type: ignore[misc]
            fresh = path.with_suffix(".new")
            with fresh.open("wb") as stream:
                np.savez(stream, features=example.features, effects=example.effects)
            fresh.replace(path)
        with np.load(path, allow_pickle=False) as stored:
            example = Example(text.kind, stored["features"], stored["effects"])
        if np.isfinite(example.effects).all() and example.effects.std() > 0:
            found[number] = example
    tick(settings.prompts, settings.prompts)
    return found


def measure(
    model: LanguageModel, text: Text, number: int, settings: Settings, before_pass: Callable[[], None]
) -> Example:
    """Let the model answer a text, hide tokens at random, and measure the answer's log-odds.

    Args:
        model: The model.
        text: The text.
        number: Its number; decides the masks, and whether the question may be hidden.
        settings: Of the run.
        before_pass: Called before each pass; may raise.
    """
    passage = encode_prompt(model, text.prompt, room=settings.answer)
    decoding = Decoding(max_new_tokens=settings.answer)
    ids = generate_ids(model, passage.ids, decoding, lambda done, total: before_pass())
    while len(ids) > 1 and ids[-1] in end_ids(model):
        ids = ids[:-1]  # that it stops tells nothing of where the answer came from
    passage = append_answer(model, passage, ids)
    question = _ask(model, text, passage, ids)
    free = _free(passage, text, question, with_question=number % 2 == 0)
    return ablate(question, free, text.kind, number, settings, before_pass)


def ablate(
    question: Question,
    free: npt.NDArray[np.bool_],
    kind: str,
    number: int,
    settings: Settings,
    before_pass: Callable[[], None],
) -> Example:
    """Hide tokens at random, and measure the log-odds of all targets together.

    Args:
        question: The text and its targets.
        free: bool ``(source,)``; tokens that may be hidden.
        kind: Kind of text.
        number: Decides the masks, together with the seed.
        settings: Of the run.
        before_pass: Called before each pass; may raise.
    """
    generator = np.random.default_rng([settings.seed, number])
    removed = (generator.random((settings.masks, question.source_count)) >= settings.keep) & free
    values = Ablator(question, "hide", before_pass=before_pass).without(removed, lambda done: None).sum(axis=1)
    before_pass()
    places = [target - 1 for target in question.targets]
    rows, _ = attention_rows(question.model, question.strands[0].ids, places)
    kept = np.where(free, np.where(removed, -1.0, 1.0), 0.0)
    features = torch.einsum("lhi,mi->mlh", rows.mean(dim=2), torch.from_numpy(kept).float())
    return Example(kind, features.numpy(), log_odds(values))


def log_odds(log_probability: Array) -> Array:
    """Return log(p / (1 - p)) from log p, stable at both ends."""
    below = np.minimum(log_probability, -1e-9)
    odds: Array = below - np.log(-np.expm1(below))
    return odds


def _ask(model: LanguageModel, text: Text, passage: Passage, ids: tuple[int, ...]) -> Question:
    return ask(model, passage, SaliencyRequest(model.ref, text.prompt, ids, (0, len(ids)), ()))


def _free(passage: Passage, text: Text, question: Question, *, with_question: bool) -> npt.NDArray[np.bool_]:
    """Sources that may be hidden: what a person wrote, with or without the question."""
    end = len(passage.rendered) if with_question else passage.rendered.rindex(text.question)
    starts = np.cumsum([0, *(len(token.text) for token in passage.prompt_tokens)])[:-1]
    free = np.zeros(question.source_count, bool)
    for index, (token, start) in enumerate(zip(passage.prompt_tokens, starts, strict=True)):
        free[index] = token.role not in ("bos", "template", "pad") and start < end
    return free


def _claim(folder: Path, model: LanguageModel, settings: Settings) -> None:
    """Write down whose folder this is, or refuse it if it is somebody else's."""
    mine = {**asdict(settings), **asdict(identity_of(model))}
    for name in ("prompts", "steps", "rate"):  # texts stay what they are when there are more, or another fit
        del mine[name]
    path = folder / "run.json"
    if not path.is_file():
        path.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")
    elif json.loads(path.read_text(encoding="utf-8")) != mine:
        raise BadRequest(
            f"{folder} holds texts of another model or of other settings.", "Choose another folder, or delete it."
        )
