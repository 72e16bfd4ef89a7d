"""Prompts and answers as tokens with roles and characters. Knows text and tokenizers; runs no model.

A chat is rendered to text once, the text is tokenized once, and from then on ids are the truth: nothing is decoded
and encoded again. Roles:

* ``bos``: the control token at the very start, written by the tokenizer or by the template.
* ``template``: everything in a rendered chat that is no message.
* ``system``, ``user``: messages; a plain prompt is ``user`` throughout.
* ``document``: earlier assistant turns of a chat. They are prompt content, and a segment of their own keeps their
  share apart from the person's words and from the answer that is being explained.
* ``answer``: the answer's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from backend.errors import BadRequest, ModelUnavailable, PromptTooLong
from backend.models.characters import decode_pieces, display_groups, encode, lay_out, special_ids, token_text
from backend.models.chat import Rendering, render_chat
from backend.models.language import LanguageModel
from backend.settings import Settings, get_settings
from backend.types import Passage, Prompt, Role, Token

_SURROGATE = re.compile("[\ud800-\udfff]")
_ANCHORS = ("\n", "a")  # texts that a continuation may follow
_CONTEXT = 4  # prompt tokens that the decoder sees before an answer, so that it keeps the answer's leading space


def encode_prompt(model: LanguageModel, prompt: Prompt, limits: Settings | None = None, *, room: int = 1) -> Passage:
    """Turn a prompt into tokens with roles, ready for an answer.

    Args:
        model: Its tokenizer and template are used.
        prompt: A plain text, or chat turns for the model's template.
        limits: Bounds on characters and tokens; None for the process-wide settings.
        room: Tokens that must still fit into the model's context after the prompt.

    Raises:
        BadRequest: If the prompt is empty or holds characters that cannot be tokenized faithfully.
        PromptTooLong: If a limit is exceeded; nothing is ever cut silently (see ``cutting.cut_prompt``).
        NotApplicable: If there are turns and the model has no chat template.
        ModelUnavailable: If the tokenizer makes ids for which the model has no embedding.
    """
    limits = limits or get_settings()
    check_prompt(prompt, limits.max_prompt_chars)
    if prompt.is_chat:
        rendering = render_chat(model.tokenizer, prompt.turns)
    else:
        rendering = Rendering(prompt.text, ((0, len(prompt.text), "user"),))
    raw = _tokenize(model, rendering.text, template=prompt.is_chat)
    check_ids(model, raw.ids)
    _check_length(model, len(raw.ids), limits.max_prompt_tokens, room)
    return _assemble(model, rendering, raw, template=prompt.is_chat)


def append_answer(model: LanguageModel, passage: Passage, answer_ids: Sequence[int]) -> Passage:
    """Append an answer's ids to a prompt. The ids are decoded one after the other and never encoded again.

    End-of-turn tokens are tokens of the answer like others, marked special.

    Raises:
        BadRequest: If there are no ids or an id is outside the vocabulary.
        PromptTooLong: If prompt and answer exceed the model's context.
    """
    ids = [int(i) for i in answer_ids]
    if not ids:
        raise BadRequest("The answer is empty.", "Let the model answer, or give a continuation.")
    rows = model.vocabulary_rows
    for i in ids:
        if not 0 <= i < rows:
            raise BadRequest(f"The answer holds the id {i}, but the model has only {rows} tokens.")
    _check_length(model, passage.prompt_length, passage.prompt_length, len(ids))
    special = special_ids(model.tokenizer)
    alone = [i in special for i in ids]
    context = [token.id for token in passage.prompt_tokens[-_CONTEXT:]]
    pieces = decode_pieces(model.tokenizer, context, ids)
    groups = display_groups(pieces, alone, first=passage.prompt_tokens[-1].group + 1)
    answer = tuple(
        Token(i, text, "answer", group, single)
        for i, text, group, single in zip(ids, pieces.texts, groups, alone, strict=True)
    )
    return replace(passage, tokens=passage.prompt_tokens + answer)


def encode_text(model: LanguageModel, text: str) -> tuple[int, ...]:
    """Tokenize a continuation or foil: exactly these characters, appended to something, without control tokens.

    Raises:
        BadRequest: If the text is empty or holds characters that cannot be tokenized faithfully.
        ModelUnavailable: If the tokenizer makes ids for which the model has no embedding.
    """
    if not text:
        raise BadRequest("The text is empty.", "Type at least one character.")
    _check_characters(text, "The text")
    ids = _ids_of_exactly(model, text)
    if not ids:
        raise BadRequest("The tokenizer makes no token of this text.", "Use other characters.")
    check_ids(model, ids)
    return tuple(ids)


def _ids_of_exactly(model: LanguageModel, text: str) -> list[int]:
    """Find ids that decode to the text, behind other text. Some tokenizers write a space before all they are given."""
    tokenizer = model.tokenizer
    plain = list(encode(tokenizer, text, control_tokens=False).ids)
    before = encode(tokenizer, _ANCHORS[-1], control_tokens=False).ids

    def attempts() -> Iterator[list[int]]:
        yield plain
        for anchor in _ANCHORS:
            longer = encode(tokenizer, anchor + text, control_tokens=False)
            yield [i for i, (start, _) in zip(longer.ids, longer.offsets, strict=True) if start >= len(anchor)]

    exact = (ids for ids in attempts() if ids and decode_pieces(tokenizer, before, ids).text == text)
    return next(exact, plain)


def check_prompt(prompt: Prompt, max_chars: int) -> None:
    """Refuse prompts that are empty, too long to be tokenized, or hold characters that would silently change.

    Raises:
        BadRequest: With a sentence that names the place.
        PromptTooLong: If there are more than ``max_chars`` characters.
    """
    parts = [(f"Turn {i}", turn.content) for i, turn in enumerate(prompt.turns, 1)] or [("The prompt", prompt.text)]
    length = sum(len(text) for _, text in parts)
    if length > max_chars:
        raise PromptTooLong(
            f"The prompt has {length:,} characters; at most {max_chars:,} are allowed.",
            "Shorten it, or raise ATTRISCOPE_MAX_PROMPT_CHARS.",
            limit=max_chars,
        )
    for i, (name, text) in enumerate(parts):
        may_be_empty = prompt.is_chat and prompt.turns[i].role == "system"  # switches a default system message off
        if not text and not may_be_empty:
            raise BadRequest(f"{name} is empty.", "Type at least one word.")
        if text and not text.strip():
            raise BadRequest(f"{name} holds nothing but white space.", "Type at least one word.")
        _check_characters(text, name)


def _check_characters(text: str, name: str) -> None:
    zero = text.find("\0")
    if zero >= 0:
        raise BadRequest(f"{name} holds a NUL character at position {zero + 1}.", "Remove it.")
    lone = _SURROGATE.search(text)
    if lone:
        raise BadRequest(
            f"{name} holds half a character (U+{ord(lone.group()):04X}) at position {lone.start() + 1}.",
            "Remove it or type the character again.",
        )


def check_ids(model: LanguageModel, ids: Sequence[int]) -> None:
    """Refuse ids beyond the embedding; on CUDA they would end the process.

    Raises:
        ModelUnavailable: If an id has no row.
    """
    rows, highest = model.vocabulary_rows, max(ids, default=0)
    if highest >= rows:
        raise ModelUnavailable(
            f"The tokenizer makes the id {highest}, but the model has only {rows} tokens.",
            "Tokenizer and weights do not belong together: download or copy the model again.",
        )


def _check_length(model: LanguageModel, length: int, most: int, room: int) -> None:
    context = model.info.context_length
    if length > most:
        raise PromptTooLong(
            f"The prompt has {length:,} tokens; at most {most:,} are allowed.",
            "Shorten it, have it cut at a place that you choose, or raise ATTRISCOPE_MAX_PROMPT_TOKENS.",
            tokens=length,
            limit=most,
        )
    if context is not None and length + room > context:
        raise PromptTooLong(
            f"The prompt has {length:,} tokens and the answer needs {room:,}; this model reads at most {context:,}.",
            "Shorten the prompt or the answer, or have the prompt cut at a place that you choose.",
            tokens=length,
            limit=max(context - room, 0),
        )


@dataclass(frozen=True, slots=True)
class _Raw:
    """Tokens as the tokenizer gives them: ids, offsets, and which it inserted without characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    inserted: list[bool]


def _tokenize(model: LanguageModel, text: str, *, template: bool) -> _Raw:
    """Tokenize, with at most one BOS at the start."""
    bos = model.tokenizer.bos_token_id
    raw = _encode(model, text, add_special=not template)
    if bos is not None and raw.ids[:2] == [bos, bos]:
        if raw.inserted[0]:  # the person typed it as well
            raw = _encode(model, text, add_special=False)
        if raw.ids[:2] == [bos, bos]:
            name = token_text(model.tokenizer, int(cast(int, bos)))
            raise BadRequest(
                f"The prompt starts with {name} twice.", "Remove one of them: it would shift every position."
            )
    if not raw.ids:
        raise BadRequest("The tokenizer makes no token of this prompt.", "Use other characters.")
    return raw


def _encode(model: LanguageModel, text: str, *, add_special: bool) -> _Raw:
    encoding = encode(model.tokenizer, text, control_tokens=add_special)
    return _Raw(list(encoding.ids), list(encoding.offsets), [s is None for s in encoding.sequence_ids])


def _assemble(model: LanguageModel, rendering: Rendering, raw: _Raw, *, template: bool) -> Passage:
    special = special_ids(model.tokenizer)
    own = [k for k, inserted in enumerate(raw.inserted) if not inserted]  # tokens with characters in the text
    pieces = lay_out(rendering.text, [raw.offsets[k] for k in own])
    alone = [raw.ids[k] in special for k in own]
    borders = [edge for start, stop, _ in rendering.spans for edge in (start, stop)]
    groups = display_groups(pieces, alone, borders)
    placed = dict(zip(own, zip(pieces.texts, pieces.spans, groups, strict=True), strict=True))

    tokens: list[Token] = []
    shift = 0  # units taken by inserted tokens so far
    last = -1
    for k, i in enumerate(raw.ids):
        is_special = i in special
        if k in placed:
            text, span, group = placed[k]
            role = _role(rendering, span)
            if is_special and not rendering.located:
                role = "template"
            last = group + shift
        else:
            text, role = token_text(model.tokenizer, i), "template"
            shift += 1
            last += 1
        if k == 0 and i == model.tokenizer.bos_token_id:
            role = "bos"
        tokens.append(Token(i, text, role, last, is_special))
    notes = rendering.notes
    if any(token.special and token.role in {"system", "user", "document"} for token in tokens):
        notes = (*notes, "The prompt spells control tokens of this model; the model reads them as such, not as text.")
    if not template and rendering.text.endswith(" "):
        notes = (*notes, "The prompt ends with a space; most models expect the space at the start of the next word.")
    return Passage(tuple(tokens), len(tokens), rendering.text, notes)


def _role(rendering: Rendering, span: tuple[int, int]) -> Role:
    """Return the role of the first character of a token that belongs to a message, else template."""
    for start, stop, role in rendering.spans:
        if span[0] < stop and start < span[1]:
            return role
    return "template"
