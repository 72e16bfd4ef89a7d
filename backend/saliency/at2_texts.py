"""Generated texts for learning AT2's weights: invented facts among other sentences, and something to answer.

All sentences are this project's own. Every text follows from its number and the seed alone. Knows no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from backend.types import Prompt, Turn

KINDS = ("question", "needle", "list", "chat", "continue")

DESCRIPTION = (
    "Generated English texts: invented people, places and objects among distracting sentences, written for this "
    "project. Kinds: a question about one fact, a code word among unrelated sentences, a list to repeat, a fact from "
    "an earlier turn of a chat, a sentence to continue. Answers are the model's own, decoded greedily. Tokens are "
    "hidden at random: in every second text all that a person wrote, in the others all but the question."
)

_PEOPLE = (
    "Anna", "Boris", "Clara", "Dario", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Leo", "Mira",
    "Nadia", "Oskar", "Petra", "Rafael", "Selma", "Tomas", "Vera",
)  # fmt: skip
_PLACES = (
    "kitchen", "garden", "library", "harbor", "attic", "station", "museum", "bakery", "school", "forest", "tower",
    "market", "church", "office", "cellar", "theater",
)  # fmt: skip
_THINGS = (
    "lamp", "violin", "map", "bicycle", "clock", "basket", "ladder", "camera", "drum", "letter", "umbrella", "hammer",
    "coin", "kite", "blanket", "compass",
)  # fmt: skip
_COLORS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange", "silver", "brown")
_JOBS = ("baker", "pilot", "nurse", "painter", "farmer", "lawyer", "tailor", "sailor", "teacher", "butcher")
_FOODS = ("apples", "bread", "rice", "cheese", "onions", "honey", "eggs", "tea", "pears", "salt", "beans", "butter")
_WORDS = (
    "walnut", "meteor", "velvet", "canyon", "pepper", "lantern", "orchid", "granite", "falcon", "ribbon", "saffron",
    "glacier", "thunder", "marble", "willow", "copper",
)  # fmt: skip
_OTHER = (
    "The rain stopped shortly before noon.",
    "A train to the coast leaves every two hours.",
    "Most of the windows face the narrow street.",
    "The old bridge was painted again last spring.",
    "Nobody remembers who planted the tall trees.",
    "On Sundays the square is full of pigeons.",
    "The meeting took longer than anyone expected.",
    "A thin layer of dust covered the upper shelf.",
    "The river is wide and slow at this point.",
    "Tickets can be bought at the second counter.",
    "In winter the path is closed after dark.",
    "The children built a dam out of flat stones.",
    "A small dog barked behind the wooden fence.",
    "The mayor promised new benches for the park.",
    "Two of the chairs had to be repaired.",
    "The soup was served with fresh herbs.",
    "An empty bus waited at the corner.",
    "The wind carried the smell of wet leaves.",
    "Some of the books were printed abroad.",
    "The concert began a quarter of an hour late.",
    "A long queue had formed in front of the door.",
    "The hills are covered with heather in autumn.",
    "Its roof is made of dark slate.",
    "The newspaper printed a photograph of the storm.",
    "They measured the depth of the well with a rope.",
    "The gate creaks whenever somebody opens it.",
    "A new road will connect the two villages.",
    "The lecture was about the history of salt.",
)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt to learn from.

    Attributes:
        kind: One of ``KINDS``.
        prompt: The prompt.
        question: The prompt's last part, which asks; hidden only in every second text.
    """

    kind: str
    prompt: Prompt
    question: str


def make_text(number: int, seed: int, chat: bool, sentences: int = 7) -> Text:
    """Make a text.

    Args:
        number: Which one; kinds take turns.
        seed: Of the whole collection.
        chat: Whether the model has a chat template; without one all is plain text.
        sentences: About how many sentences stand before the question.
    """
    random = Random(f"{seed}-{number}")  # noqa: S311 - texts, not secrets
    kind = KINDS[number % len(KINDS)]
    facts, question, start = _content(kind, random)
    others = random.sample(_OTHER, max(0, sentences - len(facts)))
    body = _shuffled(random, facts, others)
    if kind == "continue":
        return Text(kind, Prompt(" ".join([*body, start])), start)
    if not chat:
        end = f"Question: {question} Answer:"
        return Text(kind, Prompt(" ".join([*body, end])), end)
    if kind == "chat":
        turns = (
            Turn("user", " ".join(body)),
            Turn("assistant", "Thank you, I have noted that."),
            Turn("user", question),
        )
        return Text(kind, Prompt(turns=turns), question)
    return Text(kind, Prompt(turns=(Turn("user", " ".join([*body, question])),)), question)


def _content(kind: str, random: Random) -> tuple[list[str], str, str]:
    """Return facts, a question about one of them, and the start of a sentence that repeats it."""
    people, places, things = random.sample(_PEOPLE, 3), random.sample(_PLACES, 3), random.sample(_THINGS, 3)
    colors = random.sample(_COLORS, 3)
    one = random.randrange(3)
    if kind == "needle":
        word = random.choice(_WORDS)
        fact = random.choice(
            (
                f"The secret word of {people[0]} is {word}.",
                f"Remember that the password for the {places[0]} is {word}.",
                f"The code name of the {things[0]} is {word}.",
            )
        )
        asked = fact.removeprefix("Remember that ").removesuffix(f" is {word}.")
        return [fact], f"What is {asked[0].lower()}{asked[1:]}? Answer with one word.", ""
    if kind == "list":
        foods = random.sample(_FOODS, 3)
        day = random.choice(("Monday", "Tuesday", "Thursday", "Saturday"))
        fact = f"On {day} {people[0]} bought {foods[0]}, {foods[1]} and {foods[2]} at the {places[0]}."
        return [fact], f"What did {people[0]} buy on {day}?", ""
    if random.random() < 0.5:
        facts = [
            f"{who} left the {what} in the {where}." for who, what, where in zip(people, things, places, strict=True)
        ]
        question = random.choice((f"Where is the {things[one]}?", f"Where did {people[one]} leave the {things[one]}?"))
        return facts, question, f"So the {things[one]} is in the"
    jobs = random.sample(_JOBS, 3)
    facts = [
        f"{who}, who works as a {job}, owns a {color} {what}."
        for who, job, color, what in zip(people, jobs, colors, things, strict=True)
    ]
    question = random.choice((f"What color is the {things[one]}?", f"What is the job of {people[one]}?"))
    return facts, question, f"So the color of the {things[one]} is"


def _shuffled(random: Random, facts: list[str], others: list[str]) -> list[str]:
    body = [*facts, *others]
    random.shuffle(body)
    return body
