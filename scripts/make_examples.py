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
    continuation: str | None = None
    max_new_tokens: int = 12


RECIPES = (
    Recipe(
        "where-is-the-phone",
        "Two facts, one question",
        "Two objects in two places. Which of the sentences does the model use for its answer?",
        Prompt("Maria left her keys in the kitchen and her phone in the garden. Maria's phone is in the"),
        " garden",
        max_new_tokens=4,
    ),
    Recipe(
        "paris-rather-than-london",
        "Why this and not that?",
        "A contrastive explanation: what makes the model say “Paris” rather than “London”?",
        Prompt("I took the train from London through the tunnel. The capital of France is"),
        " Paris",
        foil=" London",
        max_new_tokens=2,
    ),
    Recipe(
        "chat-needle",
        "A fact hidden in chatter",
        "A chat with a made-up password in the middle of other talk, read sentence by sentence. The template's own "
        "tokens are hatched and outside the color scale.",
        Prompt(
            turns=(
                Turn(
                    "user",
                    "The weather was fine all week. We walked along the river every evening. The password of the "
                    "library is Lantern. My sister baked two loaves of bread. The bus was late again on Friday. "
                    "What is the password of the library?",
                ),
            )
        ),
        "Lantern",
        level="sentence",
        max_new_tokens=24,
    ),
    Recipe(
        "other-scripts",
        "Other scripts",
        "Chinese, Arabic and an emoji family: pieces of a character are put together again, right-to-left text "
        "runs right to left.",
        Prompt("你好 means hello, مرحبا means hello, and 👩‍👩‍👧 is a family. In Spanish, hello is"),
        "",
        methods=("gradient_norm", "input_x_gradient"),
        continuation=" hola",
    ),
)


def make(engine: Engine, recipe: Recipe) -> bytes:
    """Compute one example and return its export."""
    asked = AnswerRequest(
        ModelRef(), recipe.prompt, Decoding(max_new_tokens=recipe.max_new_tokens), recipe.continuation
    )
    answer = engine.run(asked)
    texts = [token.text for token in answer.passage.answer_tokens]
    span = (0, len(texts))
    if recipe.target:
        start = next(i for i in range(len(texts)) if "".join(texts[i:]).startswith(recipe.target))
        stop = next(j for j in range(start + 1, len(texts) + 1) if "".join(texts[start:j]).startswith(recipe.target))
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
