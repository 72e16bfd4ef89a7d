"""Cut a prompt that is too long, at a place that the person chose. Never called on its own accord."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from backend.errors import BadRequest, PromptTooLong
from backend.models.characters import cluster_edges
from backend.models.language import LanguageModel
from backend.models.passage import encode_prompt
from backend.settings import Settings, get_settings
from backend.types import Prompt

Keep = Literal["start", "end", "ends"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A shortened prompt.

    Attributes:
        prompt: The prompt that fits.
        dropped: The characters that were taken out.
        position: Where they stood, counted in characters of the text (or of the turn) as it was.
        tokens: Number of tokens of the shortened prompt.
    """

    prompt: Prompt
    dropped: str
    position: int
    tokens: int


def cut_prompt(
    model: LanguageModel,
    prompt: Prompt,
    keep: Keep = "start",
    *,
    at: int | None = None,
    limits: Settings | None = None,
    room: int = 1,
) -> Cut:
    """Take characters out of a prompt until it fits, and say which.

    Of a chat, the longest turn is cut. No user-perceived character is cut in two.

    Args:
        model: Its tokenizer counts.
        prompt: The prompt that is too long.
        keep: "start" drops the end, "end" drops the start, "ends" drops a piece in between.
        at: For "ends": the character in the middle of the gap; None for the middle of the text.
        limits: As for ``encode_prompt``.
        room: As for ``encode_prompt``.

    Raises:
        BadRequest: If the place is outside the text, or nothing would be left.
    """
    limits = limits or get_settings()
    turn = max(range(len(prompt.turns)), key=lambda i: len(prompt.turns[i].content), default=-1)
    text = prompt.turns[turn].content if prompt.is_chat else prompt.text
    edges = cluster_edges(text)
    middle = len(text) // 2 if at is None else at
    if not 0 <= middle <= len(text):
        raise BadRequest(f"The place {middle} is outside the text, which has {len(text):,} characters.")

    def shortened(count: int) -> tuple[int, int]:
        """Return the gap that leaves ``count`` user-perceived characters."""
        total = len(edges) - 1
        gap = total - count
        first = {"start": count, "end": 0}.get(keep, -1)
        if first < 0:
            center = sum(edge <= middle for edge in edges) - 1
            first = min(max(center - gap // 2, 0), count)
        return edges[first], edges[first + gap]

    def length(count: int) -> int | None:
        start, stop = shortened(count)
        try:
            passage = encode_prompt(model, _without(prompt, turn, start, stop), limits, room=room)
        except PromptTooLong:
            return None
        return passage.prompt_length

    low, high = 0, len(edges) - 1  # `low` characters are too few to ask about, or fit; more than `high` do not exist
    while low < high:
        count = (low + high + 1) // 2
        start, stop = shortened(count)
        rest = text[:start] + text[stop:]
        fits = not rest.strip() or length(count) is not None
        low, high = (count, high) if fits else (low, count - 1)
    start, stop = shortened(low)
    if not (text[:start] + text[stop:]).strip():
        raise BadRequest("Nothing of this text would be left.", "Shorten another part of the prompt.")
    tokens = length(low)
    if tokens is None:
        raise BadRequest("Nothing of this text would be left.", "Shorten another part of the prompt.")
    return Cut(_without(prompt, turn, start, stop), text[start:stop], start, tokens)


def _without(prompt: Prompt, turn: int, start: int, stop: int) -> Prompt:
    if not prompt.is_chat:
        return replace(prompt, text=prompt.text[:start] + prompt.text[stop:])
    content = prompt.turns[turn].content
    turns = list(prompt.turns)
    turns[turn] = replace(turns[turn], content=content[:start] + content[stop:])
    return replace(prompt, turns=tuple(turns))
