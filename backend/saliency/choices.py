"""How the choice between target and foil stands at every point of a text, read from the left and from the right.

The choice of a row is D = tanh((z(y) - z(f)) / 2), the difference of a softmax over the two tokens alone.
Knows passes and batches; knows nothing of scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from backend.saliency.gradients import TOKENS_AT_ONCE, in_batches
from backend.saliency.passes import logits_at
from backend.saliency.question import Question
from backend.types import Tick

Array = npt.NDArray[np.float64]

_FEWEST = 6  # texts that may share a pass, however short they are
_PART = 5  # else a pass holds at most a fifth as many texts as the longest of them has tokens, so little is padding
_LOGITS_AT_ONCE = 2**28  # logits in one pass: a gigabyte in float32


class Choices:
    """The choice of each row along the text.

    Attributes:
        question: Rows and sources.
        pairs: Target and foil of each row, as ids.
        chosen: Per row, whether the foil is that of the request.
        whole: float64 ``(row,)``; D of the whole text, from the untouched model.
        forward: Passes so far, in full-length sequences.
    """

    def __init__(self, question: Question, *, left: bool, right: bool, tick: Tick) -> None:
        """Choose foils and plan passes.

        Args:
            question: Rows and sources.
            left: Whether the text will be read from the left.
            right: Whether it will be read from the right.
            tick: Progress and cancellation, once per pass.
        """
        self.question, self.tick = question, tick
        self.forward = 0.0
        # a prompt that begins with BOS keeps it in front of every shorter text
        self._head = list(question.ids[:1]) if question.roles[0] == "bos" and question.source_count > 1 else []
        strand, logits = question.strands[0], question.plain.logits[0]
        given = _single_foil(question)
        self.pairs, self.chosen, whole = [], [], []
        for row, target in enumerate(strand.tokens[: len(question.targets)]):
            here = logits[strand.positions.index(strand.reads[row])]
            others = here.clone()
            others[target] = -torch.inf
            # only the first target has the same past as the foil
            asked = row == 0 and given is not None and given != target
            self.pairs.append((target, given if asked and given is not None else int(others.argmax())))
            self.chosen.append(asked)
            whole.append(self._choice(here, row))
        self.whole: Array = np.array(whole)
        self._left = list(_chunks(question.source_count, logits.shape[-1])) if left else []
        self._right = list(self._groups(logits.shape[-1])) if right else []
        self._done, self._total = 0, len(self._left) + sum(end - begin for begin, end in self._right) + 1
        tick(0, self._total)

    def from_left(self) -> Array:
        """Return D at every position of the whole text, float64 ``(row, source)``."""
        ids = torch.tensor([self.question.ids], device=self.question.model.device)
        seen = np.zeros((len(self.question.targets), self.question.source_count))
        for begin, end in self._left:
            with torch.no_grad():
                logits = logits_at(self.question.model, ids, range(begin, end))[0]
            for row in range(len(seen)):
                seen[row, begin:end] = self._choice(logits, row)
            self.forward += 1
            self._advance(1)
        return seen

    def from_right(self) -> Array:
        """Return D of the text that starts at every source, float64 ``(row, source)``; 0 where nothing is left."""
        seen = np.zeros((len(self.question.targets), self.question.source_count))
        for begin, end in self._right:
            in_batches(end - begin, end - begin, partial(self._together, seen, begin))
        if self._head:  # the text from BOS on is the text from the next token on, with BOS in front
            alone = np.array(self.question.targets) == 1
            seen[:, 0] = np.where(alone, self.whole, seen[:, 1])
        return seen

    def finish(self) -> None:
        """Report that all is done."""
        self.tick(self._total, self._total)

    def _advance(self, count: int) -> None:
        self._done += count
        self.tick(self._done, self._total)

    def _choice(self, logits: torch.Tensor, row: int) -> Array:
        """Return D of a row from logits ``(..., vocabulary)``, float64 ``(...)``."""
        target, foil = self.pairs[row]
        out: Array = np.tanh((logits[..., target] - logits[..., foil]).double().cpu().numpy() / 2)
        return out

    def _groups(self, vocabulary: int) -> Iterator[tuple[int, int]]:
        """Yield half-open ranges of starts whose texts share a pass; neighbors differ by one token."""
        count, rows = self.question.source_count, len(self.question.targets)
        tokens = TOKENS_AT_ONCE.get(self.question.model.device.type, 512)
        begin = len(self._head)
        while begin < count:
            length = count - begin + len(self._head)
            size = max(1, min(max(_FEWEST, length // _PART), tokens // length, count - begin))
            while size > 1 and size * (size + rows) * vocabulary > _LOGITS_AT_ONCE:
                size -= 1
            yield begin, begin + size
            begin += size

    def _together(self, seen: Array, offset: int, begin: int, end: int) -> None:
        """Run the texts that start at sources ``offset + begin`` to ``offset + end`` in one pass.

        Shorter ones are filled up on the right: nothing there is visible to what comes before, and each text has the
        positions that it has alone.
        """
        question = self.question
        starts = np.arange(offset + begin, offset + end)
        texts = [[*self._head, *question.ids[start:]] for start in starts]
        width = len(texts[0])
        ids = torch.tensor([text + text[-1:] * (width - len(text)) for text in texts], device=question.model.device)
        # per row, where each text predicts its target; negative where a text starts behind that place
        reads = [target - 1 - starts + len(self._head) for target in question.targets]
        holds = [starts < target for target in question.targets]
        places = sorted({int(place) for read, held in zip(reads, holds, strict=True) for place in read[held]})
        with torch.no_grad():
            logits = logits_at(question.model, ids, places)
        for row, (read, held) in enumerate(zip(reads, holds, strict=True)):
            slots = torch.from_numpy(np.searchsorted(places, read[held])).to(logits.device)
            texts_held = torch.from_numpy(np.flatnonzero(held)).to(logits.device)
            seen[row, starts[held]] = self._choice(logits[texts_held, slots], row)
        self.forward += ids.numel() / question.source_count
        self._advance(end - begin)


def _single_foil(question: Question) -> int | None:
    """Return the request's foil if it is one token."""
    foil = [
        token
        for strand in question.strands
        for token, sign in zip(strand.tokens, strand.signs, strict=True)
        if sign < 0
    ]
    return foil[0] if len(foil) == 1 else None


def _chunks(count: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    """Cut positions so that the logits of one pass stay within bounds; one chunk unless the text is very long."""
    size = max(1, _LOGITS_AT_ONCE // vocabulary)
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)
