"""What a needle prompt tells, and the choice of sentences that fill it to a given size. Text and numbers only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from backend.types import Prompt, Turn

SYSTEM = "Read the text and answer with one word from it."
SYSTEM_MANY = "Read the text and answer with the exact words from it."
NEEDLE = "The secret word of the {entity} gate is {secret}."
QUERY = "What is the secret word of the {entity} gate? Your answer is:"
LEAD = "The secret word of the {entity} gate is"
"""How the answer begins, so that the next token is the secret: the end of a plain prompt, or the start of the model's
turn in a chat. Without it, small models end the text, or write a line break or a quotation mark first."""

_STARTS = (
    "Bre", "Dol", "Fen", "Gar", "Hul", "Jor", "Kal", "Lum", "Mor", "Nav", "Pel", "Quo", "Rin", "Tav", "Ven", "Zan",
)  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "aro", "eli", "ino", "ora")
_ENDS = ("bar", "dek", "fin", "gath", "lith", "mir", "nax", "pol", "rand", "sul", "thor", "vek", "wyn", "zim")


@dataclass(frozen=True, slots=True)
class Story:
    """What a prompt tells: the secret of a made-up place.

    Attributes:
        entity: The made-up name.
        secret: One or several words.
        chat: Whether it is told in turns.
    """

    entity: str
    secret: str
    chat: bool

    @property
    def system(self) -> str:
        """What the model is told to do."""
        return SYSTEM if " " not in self.secret else SYSTEM_MANY

    @property
    def needle(self) -> str:
        """The sentence that holds the secret."""
        return NEEDLE.format(entity=self.entity, secret=self.secret)

    @property
    def query(self) -> str:
        """The question; in a plain prompt with the start of the answer."""
        question = QUERY.format(entity=self.entity)
        return question if self.chat else f"{question} {LEAD.format(entity=self.entity)}"

    @property
    def lead(self) -> str:
        """How the model's turn of a chat begins; empty for a plain prompt."""
        return LEAD.format(entity=self.entity) if self.chat else ""

    def prompt(self, before: str, after: str) -> Prompt:
        """Put the parts together, one space between them."""
        body = " ".join(part for part in (before, self.needle, after, self.query) if part)
        if self.chat:
            return Prompt(turns=(Turn("system", self.system), Turn("user", body)))
        return Prompt(f"{self.system} {body}")


def made_up_name(rng: random.Random) -> str:
    """Return a name that stands for nothing."""
    return rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)


def frame_words(entity: str) -> str:
    """Return everything that any prompt says besides secret and distractor, in lower case."""
    return " ".join((SYSTEM, SYSTEM_MANY, NEEDLE, QUERY, LEAD, entity)).casefold()


def fill(sizes: Sequence[int], room: int, depth: int, rng: random.Random) -> tuple[list[int], list[int]] | None:
    """Choose sentences before and after the needle that take exactly ``room`` tokens together.

    Args:
        sizes: Tokens of each sentence.
        room: Tokens to fill.
        depth: Part of them before the needle, in percent; met as nearly as whole sentences allow.
        rng: Decides which sentences.

    Returns:
        Indices of sentences before and after, each used once; None if no such choice was found.
    """
    order = list(range(len(sizes)))
    rng.shuffle(order)
    wanted = round(room * depth / 100)
    for away in sorted(range(-wanted, room - wanted + 1), key=abs):
        before = _exactly(sizes, order, wanted + away)
        if before is None:
            continue
        used = set(before)
        after = _exactly(sizes, [i for i in order if i not in used], room - wanted - away)
        if after is not None:
            return before, after
    return None


def _exactly(sizes: Sequence[int], order: Sequence[int], room: int) -> list[int] | None:
    """Choose sentences of exactly ``room`` tokens: as the order has them, and the last one or two to fit."""
    chosen: list[int] = []
    tail = 2 * max(sizes, default=0)
    rest = iter(order)
    while room > tail:
        index = next(rest, None)
        if index is None:
            return None
        chosen.append(index)
        room -= sizes[index]
    if room == 0:
        return chosen
    first_of: dict[int, int] = {}
    for index in rest:
        if sizes[index] == room:
            return [*chosen, index]
        partner = first_of.get(room - sizes[index])
        if partner is not None:
            return [*chosen, partner, index]
        first_of.setdefault(sizes[index], index)
    return None
