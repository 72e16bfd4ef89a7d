"""The examples gallery: explanations computed once, kept as JSON exports in ``assets/examples``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import orjson

from backend.errors import BadRequest
from backend.io.bundle import decode
from backend.types import Explanation

FOLDER = Path(__file__).resolve().parent.parent.parent / "assets" / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """One entry of the gallery.

    Attributes:
        name: Name of its file, without ".json"; appears in links.
        title: A few words.
        about: What there is to see, one or two sentences.
    """

    name: str
    title: str
    about: str


@lru_cache(maxsize=1)
def list_examples() -> tuple[Example, ...]:
    """Return the gallery's entries, in display order."""
    entries = orjson.loads((FOLDER / "index.json").read_bytes())
    return tuple(Example(entry["name"], entry["title"], entry["about"]) for entry in entries)


@lru_cache(maxsize=16)
def load_example(name: str) -> Explanation:
    """Return an example; needs no model.

    Raises:
        BadRequest: If there is no example of this name.
    """
    if name not in {example.name for example in list_examples()}:
        known = ", ".join(example.name for example in list_examples())
        raise BadRequest("There is no example of this name.", f"Known examples: {known}.")
    explanation = decode((FOLDER / f"{name}.json").read_bytes())
    if not isinstance(explanation, Explanation):
        raise BadRequest(f"The example {name} holds no explanation.")
    return explanation
