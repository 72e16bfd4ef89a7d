"""Removing tokens and reading what is left of S: the engine of all ablation methods.

Three ways to remove a token:

* "hide": no later query sees its keys, in any layer; positions stay. For what comes later, the same as deleting it
  while all other tokens keep their positions. It still sees itself, so it predicts what it predicted.
* "delete": its id is taken out and the rest moves up. What it predicted is read from the last token before it.
* "replace": its embedding is exchanged for a neutral one.

Everything before the first changed position is the same in all variants, so its keys and values are computed once;
neighboring variants share a pass.
What is read is S of each row, or its log-odds, and on demand whether the target is still the most likely token.
Knows variants; knows nothing of what methods make of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.errors import NotApplicable
from backend.models.placement import is_out_of_memory
from backend.saliency.embeddings import replaced_embedding
from backend.saliency.grouping import group
from backend.saliency.masks import additive, visible_keys
from backend.saliency.passes import UNFIT, Mask, logits_at
from backend.saliency.prefix import KeysValues, prefix_cache, read_prefix
from backend.saliency.question import Question, Strand
from backend.saliency.variants import GONE, PLAIN, BoolArray, IntArray, Operator, Variant, make_variant
from backend.types import Check

_AT_ONCE = {"cpu": 1024, "mps": 4096, "cuda": 32768}
"""Positions per pass beyond which a larger group no longer pays; measured with the benchmark of costs."""

_OVERHEAD = {"cpu": 64, "mps": 256, "cuda": 2048}
"""What starting a pass costs, in positions."""

_LOGITS_AT_ONCE = 2**28  # logits in one pass: a gigabyte in float32
_KEYS_PER_POSITION = (
    32  # keys in one pass for each position that pays, so that short endings do not copy long beginnings
)


class Ablator:
    """Scores a question with sets of its sources removed.

    Attributes:
        checks: That the set-up itself changes nothing, and how large its rounding is.
        noise: Largest difference of S, per row, that other batches and groupings make; float64 ``(row,)``.
        forward: Passes so far, in full-length sequences.
    """

    def __init__(
        self,
        question: Question,
        operator: Operator,
        fill: Tensor | None = None,
        *,
        log_odds: bool = False,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare: find a way in which this model can be ablated, and prove that it leaves the model as it is.

        Args:
            question: Rows and sources.
            operator: How tokens are removed.
            fill: Embedding ``(width,)`` that takes a token's place; for "replace" only.
            log_odds: Whether to read log-odds (``Question.log_odds``) instead of S.
            before_pass: Called before each pass through the model; may raise to stop.

        Raises:
            NotApplicable: If the operator does not work with this model.
        """
        self.question = question
        read = question.log_odds if log_odds else question.terms
        self._runners = [_Runner(question, strand, operator, fill, read, before_pass) for strand in question.strands]
        self.noise = sum((runner.noise for runner in self._runners), start=np.zeros(len(question.targets)))
        self.checks = (self._neutral_check(operator),)

    @property
    def forward(self) -> float:
        """Passes so far, in full-length sequences."""
        return sum(runner.forward for runner in self._runners)

    def without(self, removed: BoolArray, progress: Callable[[int], None]) -> npt.NDArray[np.float64]:
        """Return S of each row with sources removed.

        Args:
            removed: bool ``(variant, source)``.
            progress: Called with the number of variants done, at least once per pass; may raise.

        Returns:
            float64 ``(variant, row)``; NaN where nothing is left that could predict the row's target.
        """
        return self._remove(removed, progress, None)

    def outcomes(
        self, removed: BoolArray, progress: Callable[[int], None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return what ``without`` returns, and whether each row's target is the most likely token.

        Args:
            removed: bool ``(variant, source)``.
            progress: Called with the number of variants done, at least once per pass; may raise.

        Returns:
            float64 and bool, ``(variant, row)``; NaN and False where nothing is left that could predict the target.
        """
        top = np.zeros((len(removed), len(self.question.targets)), bool)
        return self._remove(removed, progress, top), top

    def _remove(
        self, removed: BoolArray, progress: Callable[[int], None], top: BoolArray | None
    ) -> npt.NDArray[np.float64]:
        count = len(removed)
        total = np.zeros((count, len(self.question.targets)))
        with torch.no_grad():
            for number, runner in enumerate(self._runners):
                # the first strand holds the targets
                done = partial(_advance, progress, number * count, len(self._runners))
                runner.run(removed, total, top if number == 0 else None, done)
        return total

    def _neutral_check(self, operator: Operator) -> Check:
        gap = max(runner.gap for runner in self._runners)
        how = "with the beginning computed once" if self._runners[0].layers else "every variant in full"
        return Check(
            "neutral_ablation",
            gap,
            "ok",
            f"With nothing removed, the set-up of “{operator}” ({how}) returns the model's own logits "
            f"(largest difference {gap:.1e}).",
        )


def _advance(progress: Callable[[int], None], before: int, strands: int, done: int) -> None:
    progress((before + done) // strands)


class _Runner:
    """One strand: how it is run, and its variants."""

    def __init__(
        self,
        question: Question,
        strand: Strand,
        operator: Operator,
        fill: Tensor | None,
        read: Callable[..., Tensor],
        before_pass: Callable[[], None],
    ) -> None:
        self.question, self.strand, self.operator, self.fill = question, strand, operator, fill
        self.read, self.before_pass = read, before_pass
        self.model = question.model
        self.device = question.model.device
        self.length = len(strand.ids)
        self.ids = np.array(strand.ids, np.int64)
        self.forward = 0.0
        self.visible: Mask | None = None
        self.layers: list[KeysValues] | None = None
        plain = question.plain.logits[question.strands.index(strand)]
        self.plain = plain
        self.plain_terms = read(strand, plain[None])[0]
        places = np.searchsorted(strand.positions, strand.reads)
        self.plain_top = self._are_top(plain[None], places[None])
        self.gap, self.noise = self._choose_route()

    # ------------------------------------------------------------------------------------------ which way works

    def _choose_route(self) -> tuple[float, npt.NDArray[np.float64]]:
        """Take the fastest way to run variants that reproduces the untouched model."""
        visible = visible_keys(self.model, self.length)
        if visible is not None:
            layers = self._prefix() if self.length > 1 else None
            for prefix in [layers, None] if layers else [None]:
                self.visible, self.layers = visible, prefix
                measured = self._neutral()
                if measured is not None:
                    if self.operator == "hide":
                        self._require_hidden()
                    return measured
        if self.operator == "hide":
            raise NotApplicable(
                "Tokens cannot be hidden in this model: it does not take our attention mask, or takes it and answers "
                "differently.",
                "Choose the operator replace or delete.",
            )
        self.visible = self.layers = None
        measured = self._neutral()
        if measured is None:
            raise NotApplicable(
                "This model answers differently when several texts share a pass, so variants cannot be compared.",
                "Use a gradient method.",
            )
        return measured

    def _prefix(self) -> list[KeysValues] | None:
        try:
            self.before_pass()
            self.forward += 1
            return read_prefix(self.model, self.strand.ids)
        except UNFIT as error:
            if is_out_of_memory(error):
                raise
            return None

    def _neutral(self) -> tuple[float, npt.NDArray[np.float64]] | None:
        """Run variants without any change: the largest difference of logits and, per row, of S.

        Once alone and once as a pair with another cut; None if that does not return the plain logits.
        """
        places = self.strand.positions
        plain = self.question.rows(self.strand, self.plain_terms[None])[0]
        gap, noise = 0.0, np.zeros(len(self.question.targets))
        for batch, cut in ((1, 0.5), (2, 0.75)):
            start = min(int(cut * self.length), places[0]) if self.layers else 0
            ids = torch.from_numpy(self.ids[start:]).to(self.device).expand(batch, -1)
            try:
                with torch.no_grad():
                    logits = self._pass(ids, start, None, [p - start for p in places])
            except UNFIT as error:
                if is_out_of_memory(error):
                    raise
                return None
            gap = max(gap, float((logits - self.plain).abs().max()))
            rows = self.question.rows(self.strand, self.read(self.strand, logits))
            noise = np.maximum(noise, (rows - plain).abs().amax(0).double().cpu().numpy())
        return (gap, noise) if gap <= self.question.plain.tolerance else None

    def _require_hidden(self) -> None:
        """Exchange a hidden token for another one: if the last logits move, it was not hidden.

        Layers without attention (recurrent ones, convolutions) take no notice of a mask.
        """
        stop = min(self.length, 8)
        if stop < 3:
            return
        at = stop // 2
        ids = torch.from_numpy(np.stack([self.ids[:stop]] * 2)).to(self.device)
        ids[1, at] = (ids[1, at] + 1) % self.model.vocabulary_rows
        hidden = torch.zeros((2, stop), dtype=torch.bool, device=self.device)
        hidden[:, at] = True
        layers, self.layers = self.layers, None
        try:
            with torch.no_grad():
                logits = self._pass(ids, 0, hidden, [stop - 1])
        finally:
            self.layers = layers
        if float((logits[0] - logits[1]).abs().max()) > self.question.plain.tolerance:
            raise NotApplicable(
                "Tokens cannot be hidden in this model: it has layers that read them without attention.",
                "Choose the operator replace or delete.",
            )

    # ------------------------------------------------------------------------------------------ variants

    def run(
        self,
        removed: BoolArray,
        total: npt.NDArray[np.float64],
        top: BoolArray | None,
        progress: Callable[[int], None],
    ) -> None:
        """Add this strand's part to ``total`` ``(variant, row)``; fill ``top`` ``(variant, row)`` if it is given."""
        shared = removed[:, : self.strand.shared]
        variants = [make_variant(index, self.strand, row, self.operator) for index, row in enumerate(shared)]
        same = [v for v in variants if not (v.reads >= 0).any()]
        for variant in same:
            self._read([variant], None, [], total, top)
        changed = sorted((v for v in variants if (v.reads >= 0).any()), key=lambda v: v.start)
        at_once = _AT_ONCE.get(self.device.type, 1024)
        overhead = _OVERHEAD.get(self.device.type, 64)
        widest = max(1, min(_LOGITS_AT_ONCE // self.plain.numel(), _KEYS_PER_POSITION * at_once // self.length))
        done = len(same)
        progress(done)
        starts = [v.start if self.layers else 0 for v in changed]
        for begin, end in group(starts, self.length, at_once=at_once, overhead=overhead):
            for first in range(begin, end, widest):
                members = changed[first : min(first + widest, end)]
                self._group(members, total, top)
                done += len(members)
                progress(done)

    def _group(self, members: list[Variant], total: npt.NDArray[np.float64], top: BoolArray | None) -> None:
        """Run variants in one pass, in halves if memory runs out."""
        try:
            self._together(members, total, top)
        except (RuntimeError, MemoryError) as error:
            if len(members) == 1 or not is_out_of_memory(error):
                raise
        else:
            return
        # outside of the handler, which would keep the failed pass alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(members) // 2
        self._group(members[:half], total, top)
        self._group(members[half:], total, top)

    def _together(self, members: list[Variant], total: npt.NDArray[np.float64], top: BoolArray | None) -> None:
        start = min(v.start for v in members) if self.layers else 0
        stop = max(v.stop for v in members)
        ids = np.full((len(members), stop - start), self.ids[-1], np.int64)  # what follows a variant is never read
        changed = np.zeros((len(members), stop), bool)
        for row, variant in enumerate(members):
            tail = self.ids[variant.order[start:stop]]
            ids[row, : len(tail)] = tail
            flags = variant.changed[:stop]
            changed[row, : len(flags)] = flags
        places = sorted({int(read) for v in members for read in v.reads if read >= 0})
        logits = self._pass(
            torch.from_numpy(ids).to(self.device),
            start,
            torch.from_numpy(changed).to(self.device) if changed.any() else None,
            [place - start for place in places],
        )
        if not torch.isfinite(logits).all():
            raise NotApplicable(
                f"With tokens removed ({self.operator}), the model returns numbers that are not finite.",
                "Choose another operator, or load the model in float32.",
            )
        self._read(members, logits, places, total, top)

    def _read(
        self,
        members: list[Variant],
        logits: Tensor | None,
        places: list[int],
        total: npt.NDArray[np.float64],
        top: BoolArray | None,
    ) -> None:
        """Put terms that were run and terms that nothing changed together, into the variants' rows."""
        reads = np.stack([v.reads for v in members])
        index = [v.index for v in members]
        terms = self.plain_terms.expand(len(members), -1).clone()
        count = len(self.question.targets)
        if top is not None:
            top[index] = (reads[:, :count] == PLAIN) & self.plain_top[:, :count]
        if logits is not None:
            at = np.searchsorted(places, np.maximum(reads, places[0]))
            slots = torch.from_numpy(at).to(logits.device)
            terms = torch.where(
                torch.from_numpy(reads >= 0).to(logits.device), self.read(self.strand, logits, slots), terms
            )
            if top is not None:
                top[index] |= (reads[:, :count] >= 0) & self._are_top(logits, at[:, :count])
        terms[torch.from_numpy(reads == GONE).to(terms.device)] = torch.nan
        total[index] += self.question.rows(self.strand, terms).double().cpu().numpy()

    def _are_top(self, logits: Tensor, slots: IntArray) -> BoolArray:
        """Whether the first terms' tokens are the most likely ones; bool, shape of ``slots`` ``(batch, term)``."""
        best = logits.argmax(dim=-1).cpu().numpy()
        found: BoolArray = np.take_along_axis(best, slots, axis=1) == np.array(self.strand.tokens[: slots.shape[1]])
        return found

    def _pass(self, ids: Tensor, start: int, changed: Tensor | None, positions: list[int]) -> Tensor:
        """Run ``ids`` ``(batch, length)`` behind the first ``start`` tokens; return logits at ``positions``.

        ``changed`` is bool ``(batch, start + length)``.
        """
        self.before_pass()
        stop = start + ids.shape[1]
        self.forward += ids.numel() / self.length
        mask = None
        if self.visible is not None:
            hidden = changed if self.operator == "hide" else None
            mask = additive(self.visible, start, stop, hidden, self.model.module.dtype)
        exchange: AbstractContextManager[None] = nullcontext()
        if self.operator == "replace" and changed is not None:
            exchange = replaced_embedding(self.model, lambda output: self._filled(output, changed[:, start:]))
        with exchange:
            return logits_at(
                self.model,
                ids,
                positions,
                position_ids=torch.arange(start, stop, device=self.device)[None],
                mask=mask,
                cache=prefix_cache(self.layers, start) if self.layers else None,
            )

    def _filled(self, output: Tensor, where: Tensor) -> Tensor:
        fill = torch.zeros_like(output[0, 0]) if self.fill is None else self.fill.to(output)
        return torch.where(where[..., None], fill, output)
