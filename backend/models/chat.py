"""Chat turns rendered by a model's own template, and where each message lies in the rendering.

Knows templates; knows neither tokens nor devices. The rendering is made once and never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from backend.errors import BadRequest, NotApplicable
from backend.types import Role, Turn

# Earlier answers in the history are prompt content, but neither the person's words nor the answer being explained:
# a segment of their own reports their share separately.
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "document"}

_TODAY = date(2024, 7, 26)  # templates that ask for the date get this one, so that the same turns give the same ids
_DATE_NOTE = (
    f"The chat template can mention today's date; {_TODAY.isoformat()} stands in for it, so that results repeat."
)
_LOST_NOTE = "A message could not be located in the rendered chat, so the whole prompt counts as one user segment."


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered chat.

    Attributes:
        text: What the template made of the turns.
        spans: ``(start, stop, role)`` of each message's characters, in order; the rest is template.
        notes: What the reader must know.
        located: False if a message was not found; then ``spans`` is one user segment over everything.
    """

    text: str
    spans: tuple[tuple[int, int, Role], ...]
    notes: tuple[str, ...] = ()
    located: bool = True


def render_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> Rendering:
    """Render turns with the model's template, ready for the model to answer.

    Raises:
        NotApplicable: If the model has no chat template.
        BadRequest: If a role is unknown, the last turn is not the person's, or the template refuses the turns.
    """
    if not tokenizer.chat_template:
        raise NotApplicable(
            "This model has no chat template: it was not trained for turns.", "Use the plain prompt instead."
        )
    for turn in turns:
        if turn.role not in _ROLES:
            raise BadRequest(f"There is no chat role named {turn.role!r}.", f"Use one of: {', '.join(_ROLES)}.")
    if turns[-1].role != "user":
        raise BadRequest("The last turn must be the user's: the model answers it.", "Add a user turn at the end.")

    text, dated = _render(tokenizer, turns)
    notes = (_DATE_NOTE,) if dated else ()
    spans = _locate_by_marks(tokenizer, turns, text) or _locate_by_search(turns, text)
    if spans is None:
        return Rendering(text, ((0, len(text), "user"),), (*notes, _LOST_NOTE), located=False)
    return Rendering(text, tuple(spans), notes)


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> tuple[str, bool]:
    """Return the rendering, and whether the template may ask for the date."""
    try:
        template = str(cast(Any, tokenizer).get_chat_template())
        dated = "strftime_now" in template
        text = cast(Any, tokenizer).apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in turns],
            chat_template=_date_macro() + template if dated else template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise BadRequest(
            f"The model's chat template refuses these turns: {error}",
            "Leave out the system turn, let user and assistant take turns, or use the plain prompt.",
        ) from error
    return str(text), dated


def _date_macro() -> str:
    """Return a template definition that hides the clock: templates get plain data only, so no function can be passed.

    The line break at its end is swallowed by the template engine's settings.
    """
    steps = "".join(f"|replace('%{c}','{_TODAY.strftime('%' + c)}')" for c in "aAbBdjmUwWyY")
    return f"{{% macro strftime_now(form) %}}{{{{ form{steps} }}}}{{% endmacro %}}\n"


def _locate_by_marks(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], text: str
) -> list[tuple[int, int, Role]] | None:
    """Render once more with a mark in place of each message: what lies between the marks is template.

    A search for the content alone would find the word "user" in the role marker.
    """
    marks = [f"\ue000{i}\ue001" if turn.content.strip() else "" for i, turn in enumerate(turns)]
    marked = [Turn(turn.role, mark or turn.content) for turn, mark in zip(turns, marks, strict=True)]
    try:
        rest, _ = _render(tokenizer, marked)
    except BadRequest:
        return None
    fixed: list[str] = []
    for mark in filter(None, marks):
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            return None
        fixed.append(before)
    fixed.append(rest)

    spans: list[tuple[int, int, Role]] = []
    at = 0
    filled = [turn for turn, mark in zip(turns, marks, strict=True) if mark]
    for turn, before, after in zip(filled, fixed, fixed[1:], strict=False):
        if not text.startswith(before, at):
            return None
        at += len(before)
        for content in dict.fromkeys(_trimmed(turn.content)):
            if text.startswith(content, at) and text.startswith(after, at + len(content)):
                spans.append((at, at + len(content), _ROLES[turn.role]))
                at += len(content)
                break
        else:
            return None
    return spans if at + len(fixed[-1]) == len(text) else None


def _locate_by_search(turns: Sequence[Turn], text: str) -> list[tuple[int, int, Role]] | None:
    """Find the messages in order; for templates whose fixed parts depend on the content."""
    spans: list[tuple[int, int, Role]] = []
    at = 0
    for turn in turns:
        content = turn.content.strip()
        if not content:
            continue
        start = text.find(content, at)
        if start < 0:
            return None
        at = start + len(content)
        spans.append((start, at, _ROLES[turn.role]))
    return spans


def _trimmed(content: str) -> tuple[str, ...]:
    """Return the forms in which templates write a message: as it is, or without spaces at its ends."""
    return content, content.rstrip(), content.lstrip(), content.strip()
