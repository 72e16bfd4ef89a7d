"""Compute the examples gallery with the embedded model: ``python -m scripts.make_examples``.

Each entry is an ordinary export; ``index.json`` holds the titles. Run again after a change of methods or schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from backend.engine import Engine
from backend.io import bundle
from backend.io.examples import FOLDER
from backend.types import AnswerRequest, Decoding, Level, MethodSpec, ModelRef, Prompt, SaliencyRequest, Turn

METHODS = ("gradient_norm", "input_x_gradient", "occlusion")


@dataclass(frozen=True)
class Recipe:
    """One example: what to ask, what to explain. ``target`` is a text within the answer; empty for the whole."""

    name: str
    title: str
    about: str
    prompt: Prompt
    target: str
    methods: tuple[str, ...] = METHODS
    level: Level = "token"
    foil: str = ""
    max_new_tokens: int = 12


RECIPES = (
    Recipe(
        "where-is-the-phone",
        "Two facts, one question",
        "Two things in two places. Which words made the model say garden, and which spoke against it?",
        Prompt(
            "The key is in the kitchen. The phone is in the garden. Question: Where is the phone? "
            "Answer: The phone is in the"
        ),
        " garden",
        max_new_tokens=4,
    ),
    Recipe(
        "paris-rather-than-london",
        "Why this and not that?",
        "A contrastive explanation: what makes the model say Paris rather than London?",
        Prompt("I took the train from London through the tunnel. The capital of France is"),
        " Paris",
        foil=" London",
        max_new_tokens=2,
    ),
    Recipe(
        "code-word-in-a-chat",
        "A fact in a chat",
        "A code word among other notes, read sentence by sentence. The chat template's own tokens are hatched and "
        "do not set the color scale.",
        Prompt(
            turns=(
                Turn(
                    "user",
                    "Notes from Monday: the weather was fine. The meeting moved to Thursday. The code word is "
                    "Lantern. The printer is broken again. What is the code word?",
                ),
            )
        ),
        "Lantern",
        level="sentence",
        max_new_tokens=16,
    ),
    Recipe(
        "other-scripts",
        "Other scripts",
        "Chinese, Arabic and a family emoji: the pieces of a character are put together again, and right-to-left "
        "text runs from right to left.",
        Prompt(
            "In English one says hello, in Chinese 你好, in Arabic مرحبا, and 👩‍👩‍👧 is a family. "
            "In English, 你好 means"
        ),
        " hello",
        max_new_tokens=3,
    ),
)


def make(engine: Engine, recipe: Recipe) -> bytes:
    """Compute one example and return its export."""
    answer = engine.run(AnswerRequest(ModelRef(), recipe.prompt, Decoding(max_new_tokens=recipe.max_new_tokens)))
    texts = [token.text for token in answer.passage.answer_tokens]
    span = (0, len(texts))
    if recipe.target:
        start = max(i for i in range(len(texts)) if recipe.target in "".join(texts[i:]))
        stop = next(j for j in range(start + 1, len(texts) + 1) if recipe.target in "".join(texts[start:j]))
        span = (start, stop)
    request = SaliencyRequest(
        model=ModelRef(),
        prompt=recipe.prompt,
        answer_ids=answer.answer_ids,
        target=span,
        methods=tuple(MethodSpec(name) for name in recipe.methods),
        foil=recipe.foil,
        level=recipe.level,
        decoding=answer.decoding,
    )
    return bundle.encode(engine.run(request))


def main() -> None:
    """Write all examples and their index."""
    engine = Engine()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        target = Path(FOLDER / f"{recipe.name}.json")
        target.write_bytes(make(engine, recipe))
        print(f"wrote {target}")
    index = [{"name": r.name, "title": r.title, "about": r.about} for r in RECIPES]
    (FOLDER / "index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
    engine.close()


if __name__ == "__main__":
    main()
