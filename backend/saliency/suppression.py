"""Turning tokens down and reading what is left of S: the engine of attention manipulation.

Everything before the first token that is turned down is the same in all variants, so its keys and values are computed
once; neighboring variants share a pass.
Knows factors per token; knows nothing of units or of how a method chose the factors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.errors import NotApplicable
from backend.models.placement import free_bytes, is_out_of_memory
from backend.saliency.grouping import group
from backend.saliency.masks import additive, visible_keys
from backend.saliency.own_attention import suppressing
from backend.saliency.passes import UNFIT, logits_at
from backend.saliency.prefix import KeysValues, prefix_cache, read_prefix
from backend.saliency.question import Question, Strand
from backend.types import Check

FloatArray64 = npt.NDArray[np.float64]

_AT_ONCE = {"cpu": 1024, "mps": 4096, "cuda": 32768}  # positions per pass beyond which a larger group does not pay
_OVERHEAD = {"cpu": 64, "mps": 256, "cuda": 2048}  # what starting a pass costs, in positions
_LOGITS_AT_ONCE = 2**28  # logits in one pass: a gigabyte in float32
_SCORES_AT_ONCE = 2**26  # attention scores of one layer in one pass: a quarter of a gigabyte, times a few copies
_COPIES = 5  # matrices of the size of the scores that are alive at once
_MEMORY_SHARE = 0.25  # part of the free memory that they may fill


class Suppressor:
    """Scores a question with the attention to sets of its tokens scaled down.

    Attributes:
        noise: Largest difference of S, per row, that other batches and groupings make; float64 ``(row,)``.
        gap: Largest difference of logits between factors of 1 everywhere and the untouched model.
    """

    def __init__(self, question: Question, before_pass: Callable[[], None]) -> None:
        """Prepare, and prove that factors of 1 leave the model as it is.

        Args:
            question: Rows and sources.
            before_pass: Called before each pass through the model; may raise to stop.

        Raises:
            NotApplicable: If this model's attention cannot be scaled.
        """
        self._question = question
        self._runners = [_Runner(question, strand, before_pass) for strand in question.strands]
        self.noise: FloatArray64 = sum(
            (runner.noise for runner in self._runners), start=np.zeros(len(question.targets))
        )
        self.gap = max(runner.gap for runner in self._runners)

    @property
    def forward(self) -> float:
        """Passes so far, in full-length sequences."""
        return sum(runner.forward for runner in self._runners)

    def values(
        self, factors: Callable[[Strand], npt.NDArray[np.float32]], progress: Callable[[int], None]
    ) -> FloatArray64:
        """Return S of each row with tokens turned down.

        Args:
            factors: Gives float32 ``(variant, length)`` for a strand; 1 leaves a token as it is.
            progress: Called with the number of variants done, at least once per pass; may raise.

        Returns:
            float64 ``(variant, row)``.
        """
        total = np.zeros((1, len(self._question.targets)))
        strands = len(self._runners)
        with torch.no_grad():
            for number, runner in enumerate(self._runners):
                wanted = factors(runner.strand)
                before = number * len(wanted)
                total = total + runner.run(wanted, partial(_advance, progress, before, strands))
        return total

    def neutral_check(self) -> Check:
        """Say that the set-up without suppression is the model itself."""
        how = "with the beginning computed once" if self._runners[0].layers else "every variant in full"
        text = (
            f"With all factors at 1, our own attention function ({how}) returns the model's own logits (largest "
            f"difference {self.gap:.1e})."
        )
        return Check("neutral_suppression", self.gap, "ok", text)


def _advance(progress: Callable[[int], None], before: int, strands: int, done: int) -> None:
    progress((before + done) // strands)


class _Runner:
    """One strand: how it is run, and its variants."""

    def __init__(self, question: Question, strand: Strand, before_pass: Callable[[], None]) -> None:
        self.question, self.strand, self.before_pass = question, strand, before_pass
        self.model = question.model
        self.length = len(strand.ids)
        self.ids = torch.tensor(strand.ids, device=self.model.device)
        self.reads = np.array(strand.reads)
        self.forward = 0.0
        self.plain = question.plain.logits[question.strands.index(strand)]
        self.plain_terms = question.terms(strand, self.plain[None])[0]
        visible = visible_keys(self.model, self.length)
        if visible is None:
            raise NotApplicable(*_REFUSED)
        self.visible = visible
        self.layers: list[KeysValues] | None = None
        self.gap, self.noise = self._choose_route()

    # ------------------------------------------------------------------------------------------ which way works

    def _choose_route(self) -> tuple[float, FloatArray64]:
        layers = self._prefix() if self.length > 1 else None
        gaps = []
        for prefix in [layers, None] if layers else [None]:
            self.layers = prefix
            gap, noise = self._neutral()
            if gap <= self.question.plain.tolerance:
                return gap, noise
            gaps.append(gap)
        if not np.isfinite(gaps[-1]):
            raise NotApplicable(*_REFUSED)
        raise NotApplicable(
            f"With our own attention function and nothing turned down, this model's logits change by {gaps[-1]:.2g}; "
            "its attention does more than we know of.",
            "Use occlusion, which removes tokens instead.",
        )

    def _prefix(self) -> list[KeysValues] | None:
        try:
            self.before_pass()
            self.forward += 1
            return read_prefix(self.model, self.strand.ids)
        except UNFIT as error:
            if is_out_of_memory(error):
                raise
            return None

    def _neutral(self) -> tuple[float, FloatArray64]:
        """Run variants without any change, once alone and once as a pair with another cut.

        Returns:
            Largest difference of logits, infinite where the model does not take our set-up; largest difference of S
            per row.
        """
        places = self.strand.positions
        plain = self.question.rows(self.strand, self.plain_terms[None])[0]
        gap, noise = 0.0, np.zeros(len(self.question.targets))
        for batch, cut in ((1, 0.5), (2, 0.75)):
            start = min(int(cut * self.length), places[0]) if self.layers else 0
            try:
                with torch.no_grad():
                    logits = self._pass(np.ones((batch, self.length), np.float32), start, places)
            except UNFIT as error:
                if is_out_of_memory(error):
                    raise
                return np.inf, noise
            apart = (logits - self.plain).abs()
            gap = max(gap, float(torch.nan_to_num(apart, nan=torch.inf).max()))
            rows = self.question.rows(self.strand, self.question.terms(self.strand, logits))
            noise = np.maximum(noise, (rows - plain).abs().amax(0).double().cpu().numpy())
        return gap, noise

    # ------------------------------------------------------------------------------------------ variants

    def run(self, factors: npt.NDArray[np.float32], progress: Callable[[int], None]) -> FloatArray64:
        """Return this strand's part of S, float64 ``(variant, row)``, for factors ``(variant, length)``."""
        touched = factors != 1
        starts = np.where(touched.any(axis=1), touched.argmax(axis=1), self.length)
        total = np.zeros((len(factors), len(self.question.targets)))
        total[:] = self.question.rows(self.strand, self.plain_terms[None]).double().cpu().numpy()
        moved = np.flatnonzero(starts <= self.reads.max())
        order = moved[np.argsort(starts[moved], kind="stable")]
        done = len(factors) - len(order)
        progress(done)
        device = self.model.device.type
        begins = [int(starts[variant]) if self.layers else 0 for variant in order]
        groups = group(begins, self.length, at_once=_AT_ONCE.get(device, 1024), overhead=_OVERHEAD.get(device, 64))
        for begin, end in groups:
            most = self._most(self.length - begins[begin])
            for first in range(begin, end, most):
                members = order[first : min(first + most, end)]
                total[members] = self._group(factors[members], starts[members])
                done += len(members)
                progress(done)
        return total

    def _most(self, rows: int) -> int:
        """Return how many variants of so many positions may share a pass."""
        heads = int(getattr(self.model.module.config.get_text_config(), "num_attention_heads", 1))
        scores = float(_SCORES_AT_ONCE)
        free = free_bytes(self.model.device)
        if free is not None:
            scores = min(scores, _MEMORY_SHARE * free / (4 * _COPIES))
        return max(1, min(int(scores / (heads * rows * self.length)), _LOGITS_AT_ONCE // self.plain.numel()))

    def _group(self, factors: npt.NDArray[np.float32], starts: npt.NDArray[np.int64]) -> FloatArray64:
        """Run variants in one pass, in halves if memory runs out; return their rows ``(variant, row)``."""
        try:
            return self._together(factors, starts)
        except (RuntimeError, MemoryError) as error:
            if len(factors) == 1 or not is_out_of_memory(error):
                raise
        # outside of the handler, which would keep the failed pass alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(factors) // 2
        parts = (slice(None, half), slice(half, None))
        return np.concatenate([self._group(factors[part], starts[part]) for part in parts])

    def _together(self, factors: npt.NDArray[np.float32], starts: npt.NDArray[np.int64]) -> FloatArray64:
        start = int(starts.min()) if self.layers else 0
        places = [place for place in self.strand.positions if place >= start]
        logits = self._pass(factors, start, places)
        if not torch.isfinite(logits).all():
            raise NotApplicable(
                "With tokens turned down, the model returns numbers that are not finite.",
                "Load the model in float32 or bfloat16; float16 overflows in many models.",
            )
        slots = torch.from_numpy(np.searchsorted(places, np.maximum(self.reads, start))).to(logits.device)
        found = self.question.terms(self.strand, logits, slots.expand(len(factors), -1))
        # a term that is read before the first change is what it was, to the bit
        changed = torch.from_numpy(self.reads[None] >= starts[:, None]).to(logits.device)
        terms = torch.where(changed, found, self.plain_terms)
        rows: FloatArray64 = self.question.rows(self.strand, terms).double().cpu().numpy()
        return rows

    def _pass(self, factors: npt.NDArray[np.float32], start: int, places: tuple[int, ...] | list[int]) -> Tensor:
        """Run the strand from ``start`` on with factors ``(batch, length)``; return logits at ``places``."""
        self.before_pass()
        self.forward += len(factors) * (self.length - start) / self.length
        device = self.model.device
        with suppressing(self.model.module, torch.from_numpy(factors).to(device)):
            return logits_at(
                self.model,
                self.ids[start:].expand(len(factors), -1),
                [place - start for place in places],
                position_ids=torch.arange(start, self.length, device=device)[None],
                mask=additive(self.visible, start, self.length, None, self.model.module.dtype),
                cache=prefix_cache(self.layers, start) if self.layers else None,
            )


_REFUSED = (
    "This model's attention cannot be exchanged for one that turns single tokens down.",
    "Use occlusion, which removes tokens instead.",
)
