"""From token ids to the characters a person sees: pieces of one character together, no replacement characters.

Knows tokenizers and Unicode; knows neither roles nor models. Byte-level vocabularies cut a character such as an emoji
into several tokens, and no single one of them can be decoded.
"""

from __future__ import annotations

import json
import re as plain_re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import regex
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what decoders write for bytes that make no character
_BYTE_PIECE = plain_re.compile(r"<0x([0-9A-Fa-f]{2})>")
_GRAPHEME = regex.compile(r"\X")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Tokens laid onto a text.

    Attributes:
        text: The text.
        texts: Characters that each token adds; they concatenate to ``text``.
        spans: Half-open character range in ``text`` that each token touches. Pieces of one character share it.
    """

    text: str
    texts: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of control tokens such as BOS and end of turn."""
    added = cast(Any, tokenizer).added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, control_tokens: bool) -> Encoding:
    """Tokenize one text, never truncated; with the control tokens that the tokenizer puts around it, or without."""
    batch = tokenizer(text, add_special_tokens=control_tokens, truncation=False, padding=False, verbose=False)
    return cast(list[Encoding], batch.encodings)[0]


def lay_out(text: str, offsets: Sequence[tuple[int, int]]) -> Pieces:
    """Give every character of a text to one token, by the tokenizer's offsets.

    Characters between two tokens (offsets often leave out spaces) go to the token after them, trailing ones to the
    last. The first token that touches a character gets it.
    """
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    cursor = 0
    for start, stop in offsets:
        end = max(cursor, stop)
        texts.append(text[cursor:end])
        if start < stop or cursor < end:
            spans.append((min(start, cursor), end))
        else:  # a token without characters of its own, e.g. a leading space whose offsets were trimmed
            spans.append((cursor, min(cursor + 1, len(text))))
        cursor = end
    if texts and cursor < len(text):
        texts[-1] += text[cursor:]
        spans[-1] = (spans[-1][0], len(text))
    return Pieces(text, tuple(texts), tuple(spans))


def decode_pieces(tokenizer: PreTrainedTokenizerBase, context: Sequence[int], ids: Sequence[int]) -> Pieces:
    r"""Decode ids one after the other, as they were generated after ``context``, without encoding anything again.

    Bytes that make no character are written as escapes, e.g. ``\xe2``.
    """
    special = special_ids(tokenizer)
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    window = list(context)  # ids before the held ones, so that the decoder does not treat those as a text's start
    held: list[int] = []  # ids whose bytes do not make a whole character yet

    def settle(delta: str) -> None:
        nonlocal at, window
        added = _escaped(tokenizer, held) if _BROKEN in delta else _shared(delta, len(held))
        texts.extend(added.texts)
        spans.extend((at + start, at + stop) for start, stop in added.spans)
        at += len(added.text)
        window = held.copy()
        held.clear()

    for i in ids:
        if held and i in special:
            settle(_BROKEN)
        held.append(i)
        delta = _delta(tokenizer, window, held)
        if i in special or not delta.endswith(_BROKEN):
            settle(delta)
    if held:
        settle(_BROKEN)
    return Pieces("".join(texts), tuple(texts), tuple(spans))


def _delta(tokenizer: PreTrainedTokenizerBase, window: list[int], held: list[int]) -> str:
    backend = cast(Any, tokenizer).backend_tokenizer
    known = backend.decode(window, skip_special_tokens=False)
    both: str = backend.decode(window + held, skip_special_tokens=False)
    return both[len(known) :] if both.startswith(known) else backend.decode(held, skip_special_tokens=False)


def _shared(text: str, count: int) -> Pieces:
    """Lay several tokens onto one text that none of them makes alone."""
    return Pieces(text, (text, *[""] * (count - 1)), ((0, len(text)),) * count)


def _escaped(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Pieces:
    """Lay out tokens of which some bytes make no character; those bytes become escapes."""
    pieces = [_bytes_of(tokenizer, i) for i in ids]
    owner = [k for k, piece in enumerate(pieces) for _ in piece]  # token of each byte
    texts = [""] * len(ids)
    spans: list[tuple[int, int]] = [(-1, -1)] * len(ids)
    at = byte = 0
    for character in b"".join(pieces).decode("utf-8", "surrogateescape"):
        lone = "\udc80" <= character <= "\udcff"
        size = 1 if lone else len(character.encode())
        shown = f"\\x{ord(character) - 0xDC00:02x}" if lone else character.replace(_BROKEN, "\\ufffd")
        texts[owner[byte]] += shown
        for k in range(owner[byte], owner[byte + size - 1] + 1):
            spans[k] = (at if spans[k][0] < 0 else spans[k][0], at + len(shown))
        at += len(shown)
        byte += size
    return Pieces("".join(texts), tuple(texts), tuple((max(a, 0), max(b, 0)) for a, b in spans))


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    r"""Return one token alone as text; bytes that make no character as escapes, e.g. ``\xe2\x9c``."""
    if cast(Any, tokenizer).backend_tokenizer.id_to_token(token_id) is None:
        return f"<{token_id}>"  # a row of the embedding without a token
    return _escaped(tokenizer, [token_id]).text


def _bytes_of(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """Return the bytes that a token stands for, alone."""
    backend = cast(Any, tokenizer).backend_tokenizer
    piece = str(backend.id_to_token(token_id) or "")
    if token_id in special_ids(tokenizer):
        return piece.encode()
    kind = _decoder_kind(cast(Any, tokenizer))
    byte = _BYTE_PIECE.fullmatch(piece)
    if kind == "bytes":
        table = _byte_table()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    if byte:
        return bytes([int(byte.group(1), 16)])
    if kind == "metaspace":
        return piece.replace("▁", " ").encode()
    return str(backend.decode([token_id], skip_special_tokens=False)).encode()


def _decoder_kind(tokenizer: Any) -> str:
    decoder = tokenizer.backend_tokenizer.decoder
    state = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))
    if '"ByteLevel"' in state:
        return "bytes"
    return "metaspace" if "▁" in state or "\\u2581" in state else "other"


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in cast(Any, bytes_to_unicode)().items()}


def display_groups(pieces: Pieces, alone: Sequence[bool], borders: Sequence[int] = (), first: int = 0) -> list[int]:
    """Number the display units: tokens that share a user-perceived character (grapheme cluster) get the same number.

    Args:
        pieces: The tokens on their text.
        alone: True for tokens that always stand alone: control tokens.
        borders: Character positions that no unit may cross, e.g. where a message starts.
        first: Number of the first unit.

    Returns:
        One number per token, ascending without gaps.
    """
    cluster = _clusters(pieces.text, borders)
    groups: list[int] = []
    current, reach = first - 1, -1  # reach: the last cluster that the current unit touches
    closed = True
    for (start, stop), single in zip(pieces.spans, alone, strict=True):
        touches = cluster[start:stop]
        if closed or single or not touches or touches[0] > reach:
            current += 1
            reach = -1
        reach = max([reach, *touches])
        closed = single or not touches
        groups.append(current)
    return groups


def cluster_edges(text: str) -> list[int]:
    """Return where each user-perceived character starts, in order, and the length of the text at the end."""
    return [match.start() for match in _GRAPHEME.finditer(text)] + [len(text)]


def _clusters(text: str, borders: Sequence[int]) -> list[int]:
    """Return the number of the grapheme cluster of each character, counted over the whole text."""
    numbers: list[int] = []
    count = 0
    edges = sorted({0, len(text), *borders})
    for start, stop in pairwise(edges):
        for match in _GRAPHEME.finditer(text, start, stop):
            numbers.extend([count] * (match.end() - match.start()))
            count += 1
    return numbers
