"""Units: tokens, words and sentences as spans over a passage's tokens.

Knows characters and roles; knows nothing of models, scores or drawing. A unit is a half-open span of tokens. Units
cover every token in order, never cross the border between two roles, and a special token is always a unit of its
own. Tokens cannot be cut: a token that reaches into the next word counts for the word in which it begins.
"""

# ruff: noqa: RUF001 - punctuation of many scripts is the subject here
from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from backend.errors import BadRequest
from backend.types import Level, Token

Units = tuple[tuple[int, int], ...]

# Scripts that are written without spaces: Thai, Lao, Myanmar, Khmer, Han, Kana.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff]"
)
_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")

# These end a sentence wherever they stand: ideographic, fullwidth, Arabic, Urdu, Devanagari, Armenian, Ethiopic,
# Myanmar, Khmer.
_HARD_STOPS = "。｡！？؟۔।॥։።፧။។"
# These end one only before whitespace or the end: "3.14" and "a.b" go on.
_SOFT_STOPS = ".!?…"
_CLOSERS = "\"')\\]}”’»›」』】）］｝〉》〕"
_STOP_RUN = re.compile(f"[{_HARD_STOPS}{_SOFT_STOPS}]+[{_CLOSERS}]*")

_RULES: dict[Level, str] = {
    "token": "One unit per token; pieces of the same character are one unit.",
    "word": (
        "A word is what stands between whitespace, with the space before it; a line break is a unit of its own. Han, "
        "Kana, Thai, Lao, Khmer and Myanmar are written without spaces: there, each character counts as a word."
    ),
    "sentence": (
        "A sentence ends at . ! ? … 。 ！ ？ ؟ । and the like before whitespace, or at a line break. Abbreviations "
        "such as “e.g.” end one too."
    ),
}


def level_rule(level: Level) -> str:
    """Return the sentence that tells a reader how units of this level are cut."""
    return _RULES[level]


def make_units(tokens: Sequence[Token], level: Level) -> Units:
    """Cut tokens into units of the given level.

    * "token": display groups. Pieces that share a user-perceived character are one unit.
    * "word": maximal runs between whitespace; blanks before a word belong to it, line breaks are units of their own.
      In scripts without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar) each character is a word, with the
      punctuation that follows it; where one token holds several such characters, that token is the unit.
    * "sentence": up to a stop, closing quotes and brackets, and the whitespace after them; or up to a line break.
      No list of abbreviations is kept.

    Args:
        tokens: Tokens in reading order.
        level: The level.

    Returns:
        Half-open token spans that cover ``tokens`` in order.

    Raises:
        BadRequest: If there is no such level.
    """
    if level not in _RULES:
        raise BadRequest(f"There is no level {level!r}.", f"Choose one of {', '.join(_RULES)}.")
    units: list[tuple[int, int]] = []
    for start, stop in _role_runs(tokens):
        if level == "token":
            units += _groups(tokens, start, stop)
        else:
            units += _labelled(tokens, start, stop, _word_labels if level == "word" else _sentence_labels)
    return tuple(units)


def unit_text(tokens: Sequence[Token], unit: tuple[int, int]) -> str:
    """Return the characters of a unit."""
    return "".join(token.text for token in tokens[unit[0] : unit[1]])


def _role_runs(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """Yield maximal spans of ordinary tokens of one role; each special token is a span of its own."""

    def run_key(index: int) -> tuple[str, int]:
        token = tokens[index]
        return token.role, index if token.special else -1

    for _, members in groupby(range(len(tokens)), key=run_key):
        span = list(members)
        yield span[0], span[-1] + 1


def _groups(tokens: Sequence[Token], start: int, stop: int) -> Iterator[tuple[int, int]]:
    for _, members in groupby(range(start, stop), key=lambda index: tokens[index].group):
        span = list(members)
        yield span[0], span[-1] + 1


def _labelled(
    tokens: Sequence[Token], start: int, stop: int, label_characters: Callable[[str], list[int]]
) -> Iterator[tuple[int, int]]:
    """Join display groups whose first visible character carries the same label."""
    labels = label_characters(unit_text(tokens, (start, stop)))
    at = 0
    current = labels[0] if labels else 0
    begin = start
    for first, last in _groups(tokens, start, stop):
        text = unit_text(tokens, (first, last))
        if text:
            visible = next((i for i, char in enumerate(text) if not char.isspace()), len(text) - 1)
            label = labels[at + visible]
            at += len(text)
            if label != current and first > begin:
                yield begin, first
                begin = first
            current = label
    yield begin, stop


def _word_labels(text: str) -> list[int]:
    """Number each character's word, ascending."""
    labels: list[int] = []
    label = 0
    before = ""  # kind of the previous character
    body = ""  # kind of the last letter-like character in the current word; empty if it has none yet
    for char in text:
        kind = _kind(char)
        if kind == "blank":
            new = before != "blank"
        elif kind == "break":
            new = before not in ("break", "blank")
        elif before == "break":
            new = True
        elif kind == "single":
            new = bool(body)
        else:
            new = kind in ("word", "open") and body == "single"
        if new and before:
            label += 1
            body = ""
        if kind in ("word", "single"):
            body = kind
        labels.append(label)
        before = kind
    return labels


def _kind(char: str) -> str:
    """Sort a character: "blank", "break", "glue" (never starts a word), "open" (bracket), "single" or "word"."""
    if char in _BREAKS:
        return "break"
    if char.isspace():
        return "blank"
    category = unicodedata.category(char)
    if category[0] == "M" or category == "Cf":
        return "glue"
    if _UNSPACED.match(char):
        return "single"
    if category in ("Ps", "Pi"):
        return "open"
    return "glue" if category[0] == "P" else "word"


def _sentence_labels(text: str) -> list[int]:
    """Number each character's sentence, ascending. One pass: long runs of stops stay linear."""
    ends = set()
    for match in _STOP_RUN.finditer(text):
        hard = any(char in _HARD_STOPS for char in match.group())
        if hard or match.end() == len(text) or text[match.end()].isspace():
            ends.add(match.end())
    labels: list[int] = []
    label = 0
    ended = False  # a stop or line break was seen; the next visible character starts a sentence
    seen = False  # the current sentence has a visible character
    for index, char in enumerate(text):
        ended = ended or (seen and index in ends)
        if char.isspace():
            ended = ended or (seen and char in _BREAKS)
        else:
            if ended:
                label += 1
            ended, seen = False, True
        labels.append(label)
    return labels
