"""Sentences that say nothing to the point: the hay around a needle.

Made from templates and word lists of this project, shuffled by seed. No sentence speaks of secrets, gates or words to
remember, none holds a word of ``SECRETS``, and lengths range from three words to over twenty, so that any number of
tokens can be filled.
"""

from __future__ import annotations

import itertools
import random
import string

SECRETS = (
    "apple", "banana", "orange", "cherry", "lemon", "tiger", "eagle", "rabbit", "whale", "silver", "purple", "crystal",
    "diamond", "rocket", "planet", "guitar", "piano", "castle", "pyramid", "volcano", "desert", "island", "jungle",
    "mirror", "hammer", "wizard", "dragon", "knight", "cotton", "pepper", "honey", "butter", "coffee", "chocolate",
    "laser", "robot", "camera", "helmet", "anchor", "compass", "turtle", "spider", "galaxy", "thunder", "marble",
    "tomato", "potato", "cookie", "basket", "bullet", "ocean", "arrow", "tunnel", "copper", "sugar", "monkey",
)  # fmt: skip
"""Words that most vocabularies hold whole; answers are drawn from them."""

_LISTS: dict[str, tuple[str, ...]] = {
    "who": (
        "the baker", "the postman", "a retired teacher", "the young doctor", "the carpenter", "her neighbor",
        "the night nurse", "a tired clerk", "the librarian", "his cousin", "the tailor", "an old fisherman",
        "the bus driver", "the mayor", "a visiting student", "the gardener", "the plumber", "my uncle",
    ),
    "name": (
        "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis",
        "Maria", "Nora", "Oscar", "Paula", "Rosa", "Simon", "Teresa", "Walter",
    ),
    "place": (
        "the market", "the old mill", "the town hall", "the railway station", "the north bridge", "the school yard",
        "the small park", "the harbor wall", "the post office", "the corner shop", "the riverside path",
        "the village square", "the swimming pool", "the bus stop", "the upper meadow", "the museum",
    ),
    "when": (
        "on Monday", "on Tuesday", "last winter", "in early spring", "after lunch", "before dawn", "every Friday",
        "in the evening", "two days later", "at noon", "during the holidays", "around midnight", "in late August",
        "most mornings",
    ),
    "thing": (
        "umbrella", "bicycle", "notebook", "blanket", "suitcase", "kettle", "newspaper", "chair", "jacket", "radio",
        "map", "clock", "wooden box", "lamp", "paint brush", "garden hose", "pair of boots", "coil of rope",
    ),
    "quality": (
        "heavy", "new", "dusty", "expensive", "broken", "blue", "rather small", "surprisingly light", "quite old",
        "almost empty", "badly scratched", "well made", "damp", "clean",
    ),
    "weather": (
        "the rain had stopped", "the wind was strong", "it was unusually warm", "fog covered the hills",
        "snow lay on the roofs", "the sky was clear", "the heat had passed", "clouds came in from the west",
    ),
    "work": (
        "repaired the fence", "counted the empty bottles", "swept the stairs", "sorted the letters", "cleaned a window",
        "read the timetable twice", "wrote a long list", "moved the chairs", "watered the plants", "painted the door",
        "measured the floor", "waited for the ferry", "fed the hens", "mended a shirt",
    ),
    "topic": (
        "the price of bread", "a football match", "the new road", "an election", "the harvest", "a wedding",
        "the repair of the roof", "train delays", "the summer fair", "a lost dog", "school lunches", "the water bill",
    ),
    "number": ("three", "four", "six", "seven", "nine", "eleven", "twelve", "fifteen", "twenty", "forty"),
}  # fmt: skip

_TEMPLATES = (
    "It rained {when}.",
    "{name} slept late {when}.",
    "The {thing} was {quality}.",
    "{name} went to {place}.",
    "{name} {work} {when}.",
    "{name} and {name2} {work}.",
    "Nobody was at {place} {when}.",
    "{who} {work}, and {weather}.",
    "{when}, {who} {work} near {place}.",
    "{name} left a {quality} {thing} at {place}.",
    "There were {number} people at {place} {when}.",
    "{name} and {who} talked about {topic} for {number} minutes.",
    "Because {weather}, {name} stayed at home and {work}.",
    "The {thing} that {who} had bought {when} turned out to be {quality}.",
    "{who} asked {name} about {topic}, but {name} only shrugged and {work}.",
    "At {place} a {quality} {thing} stood beside {number} chairs, and {weather}.",
    "{when} {name} walked from {place} to {place2}, carrying a {thing} and a {thing2}.",
    "When {weather}, {who} usually {work}, while {name} preferred to read about {topic}.",
    "It took {number} days until {who} found the {thing} which {name} had forgotten at {place}.",
    "{name} had never liked {place}, yet {when} {who} saw {name2} there with a {quality} {thing}, speaking of {topic}.",
)


def sentences(rng: random.Random, count: int) -> list[str]:
    """Return different sentences in random order.

    Args:
        rng: Decides everything.
        count: How many; the templates make many thousands.
    """
    found: dict[str, None] = {}  # a set that keeps its order
    for template in itertools.cycle(_TEMPLATES):  # the shortest templates run out of new sentences, the others go on
        if len(found) == count:
            break
        found[_filled(template, rng)] = None
    out = list(found)
    rng.shuffle(out)
    return out


def _filled(template: str, rng: random.Random) -> str:
    """Fill a template's slots; a slot that ends in 2 gets another word than its twin."""
    words: dict[str, str] = {}
    for _, slot, _, _ in string.Formatter().parse(template):
        if slot and slot not in words:
            taken = words.get(slot.rstrip("2"))
            words[slot] = rng.choice([word for word in _LISTS[slot.rstrip("2")] if word != taken])
    text = template.format(**words)
    return text[0].upper() + text[1:]
