"""What is asked: the targets, the foil, and the number S that every method explains.

One row per target token: S_k = log p(y_k | everything before it), or its logit, or its probability. With a foil the
same quantity of the foil's k-th token is subtracted; foil tokens beyond the last row belong to the last row, so that
the rows always sum to log P(span) - log P(foil span). Foil tokens after the first continue from the foil, not from
the target, so they are scored in a sequence ("strand") of their own.

Knows models only as something that returns logits; knows nothing of methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.errors import BadRequest, NotApplicable, PromptTooLong
from backend.models.language import LanguageModel
from backend.saliency.passes import logits_at
from backend.saliency.runs import Runs
from backend.saliency.units import make_units
from backend.types import Objective, Passage, Role, SaliencyRequest


@dataclass(frozen=True, slots=True)
class Strand:
    """A token sequence whose continuations are scored. One entry of the last four fields per scored token ("term").

    Attributes:
        ids: The sequence, up to the last position that predicts a term.
        shared: Its first ``shared`` tokens are sources; what follows is foil, fixed context without a score.
        reads: Position that predicts the term.
        tokens: Id of the term.
        rows: Row that the term belongs to.
        signs: +1 for a target, -1 for a foil token.
    """

    ids: tuple[int, ...]
    shared: int
    reads: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    signs: tuple[float, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions that predict terms, ascending, each once."""
        return tuple(sorted(set(self.reads)))


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """What the untouched model says.

    Attributes:
        values: float64 ``(row,)``; S of each row.
        probabilities: float64 ``(row,)``; p of each target token.
        logits: Per strand float32 ``(len(positions), vocabulary)``, on the model's device.
        tolerance: Largest difference of logits that two ways to compute the same thing may show.
        spacing: Distance of neighboring numbers in the model's dtype at the size of the largest logit.
    """

    values: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    logits: tuple[Tensor, ...]
    tolerance: float
    spacing: float


@dataclass(frozen=True, eq=False)
class Question:
    """Which sources drove these rows? Built by ``ask``.

    Attributes:
        model: The model that answers.
        ids: Ids of the sources: every token before the last target.
        roles: Role of each source.
        targets: Position of each row's target token; a source at or after it cannot have driven the row.
        strands: The sequences to run; the first holds the targets.
        objective: The scalar.
        units: Half-open spans of sources that ablation removes together; None if each source is its own unit.
        seed: Seed of methods that sample.
        runs: Random ablations of this question, which several methods read.
    """

    model: LanguageModel
    ids: tuple[int, ...]
    roles: tuple[Role, ...]
    targets: tuple[int, ...]
    strands: tuple[Strand, ...]
    objective: Objective
    units: tuple[tuple[int, int], ...] | None
    seed: int
    runs: Runs = field(default_factory=Runs)

    @property
    def source_count(self) -> int:
        """Number of sources."""
        return len(self.ids)

    @property
    def has_foil(self) -> bool:
        """Whether targets are compared with an alternative."""
        return any(sign < 0 for strand in self.strands for sign in strand.signs)

    @property
    def is_frame(self) -> npt.NDArray[np.bool_]:
        """BOS and template tokens, which frame the text and stay as they are by default; bool ``(source,)``."""
        return np.array([role in ("bos", "template") for role in self.roles], bool)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The units, also where each source is its own unit."""
        return self.units or tuple((i, i + 1) for i in range(self.source_count))

    def terms(self, strand: Strand, logits: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return each term's quantity, unsigned.

        Args:
            strand: The strand.
            logits: float32 ``(batch, position, vocabulary)``.
            slots: int64 ``(batch, term)``; index on the position axis that predicts each term. By default the logits
                are those of ``strand.positions``.

        Returns:
            float32 ``(batch, term)``.
        """
        slots = self._slots(strand, logits) if slots is None else slots
        which = torch.arange(len(logits), device=logits.device)[:, None]
        tokens = torch.tensor([strand.tokens], device=logits.device)
        if self.objective == "logit":
            return logits[which, slots, tokens]
        chosen = logits.log_softmax(-1)[which, slots, tokens]
        return chosen.exp() if self.objective == "prob" else chosen

    def log_odds(self, strand: Strand, logits: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return each term's log-odds against all other tokens, whatever the objective; arguments as for ``terms``.

        Computed against the other tokens' logits, so that certain tokens keep their odds: log p of a token rounds to
        0 where 1 - p falls below the spacing of the format. With a foil the terms are log-probabilities, since their
        differences are the log-odds of the target against the foil.
        """
        slots = self._slots(strand, logits) if slots is None else slots
        which = torch.arange(len(logits), device=logits.device)[:, None]
        tokens = torch.tensor([strand.tokens], device=logits.device)
        if self.has_foil:
            return logits.log_softmax(-1)[which, slots, tokens]
        read = logits[which, slots]  # (batch, term, vocabulary)
        own = tokens.expand(read.shape[:2])[..., None]
        others = read.scatter(-1, own, -torch.inf).logsumexp(-1)
        return read.gather(-1, own)[..., 0] - others

    def _slots(self, strand: Strand, logits: Tensor) -> Tensor:
        """Where terms are read if the logits are those of ``strand.positions``; int64 ``(1, term)``."""
        places = strand.positions
        return torch.tensor([[places.index(read) for read in strand.reads]], device=logits.device)

    def rows(self, strand: Strand, terms: Tensor) -> Tensor:
        """Add a strand's terms up to rows, with their signs: ``(batch, term)`` to ``(batch, row)``."""
        signs = terms.new_tensor(strand.signs)
        index = torch.tensor(strand.rows, device=terms.device)
        return terms.new_zeros(len(terms), len(self.targets)).index_add(1, index, terms * signs)

    @cached_property
    def plain(self) -> Plain:
        """One pass per strand through the untouched model; run at the first use and kept.

        Raises:
            NotApplicable: If the model's logits are not numbers.
        """
        kept, values, probabilities = [], np.zeros(len(self.targets)), np.zeros(len(self.targets))
        with torch.no_grad():
            for index, strand in enumerate(self.strands):
                ids = torch.tensor([strand.ids], device=self.model.device)
                logits = logits_at(self.model, ids, strand.positions)
                bad = int((~torch.isfinite(logits)).sum())
                if bad:
                    raise NotApplicable(
                        f"The model itself returns {bad} numbers that are not finite for this text.",
                        "Load it in float32 or bfloat16; float16 overflows in many models.",
                    )
                values += self.rows(strand, self.terms(strand, logits)).double().cpu().numpy()[0]
                if index == 0:
                    count = len(self.targets)
                    slots = [strand.positions.index(read) for read in strand.reads[:count]]
                    chances = logits[0].softmax(-1)[slots, list(strand.tokens[:count])]
                    probabilities = chances.double().cpu().numpy()
                kept.append(logits[0])
        scale = max(1.0, max(float(logits.abs().max()) for logits in kept))
        spacing = torch.finfo(self.model.module.dtype).eps * scale
        return Plain(values, probabilities, tuple(kept), tolerance_of(self.model, scale), spacing)

    def with_objective(self, objective: Objective) -> Question:
        """Return the same question about another scalar; what the untouched model says is not run again."""
        other = replace(self, objective=objective)
        values = np.zeros(len(self.targets))
        for strand, logits in zip(self.strands, self.plain.logits, strict=True):
            values += other.rows(strand, other.terms(strand, logits[None])).double().cpu().numpy()[0]
        other.__dict__["plain"] = replace(self.plain, values=values)  # where the cached property keeps it
        return other


def tolerance_of(model: LanguageModel, scale: float) -> float:
    """Largest difference that two ways to compute the same logits may show, for logits of this size (at least 1)."""
    return max(1e-4 * scale, 2 * torch.finfo(model.module.dtype).eps * scale)


def ask(model: LanguageModel, passage: Passage, request: SaliencyRequest, foil_ids: tuple[int, ...] = ()) -> Question:
    """Turn a request into strands and rows.

    Args:
        model: The model.
        passage: Prompt and answer tokens.
        request: Target span, objective, level, seed.
        foil_ids: The foil as ids; empty for none.

    Raises:
        BadRequest: If the target is not part of the answer, nothing stands before it, an id is not in the
            vocabulary, or the foil is the target itself.
        PromptTooLong: If the text is longer than the model was built for.
    """
    start, stop = request.target
    length = len(passage.tokens) - passage.prompt_length
    if not 0 <= start < stop <= length:
        raise BadRequest(
            f"The target, tokens {start + 1} to {stop} of the answer, was not found: the answer has {length} tokens.",
            "Choose a token of the answer." if length else "Let the model answer first, or give a continuation.",
        )
    ids = passage.ids
    first, last = passage.prompt_length + start, passage.prompt_length + stop
    if first == 0:
        raise BadRequest("Nothing stands before the target, so nothing can have driven it.", "Enter a prompt.")
    if request.foil and not foil_ids:
        raise BadRequest("The foil became no tokens.", "Enter a word that the model could have said instead.")
    if foil_ids == ids[first:last]:
        raise BadRequest("The foil is the same as the target.", "Enter an answer that differs from the target.")
    _check_ids(model, (*ids[:last], *foil_ids))
    limit = model.info.context_length
    longest = max(last, first + len(foil_ids))
    if limit is not None and longest > limit:
        raise PromptTooLong(
            f"Prompt and answer have {longest} tokens; the model was built for at most {limit}.",
            "Shorten the prompt.",
            tokens=longest,
            limit=limit,
        )
    sources = passage.tokens[: last - 1]
    units = make_units(sources, request.level)
    return Question(
        model=model,
        ids=ids[: last - 1],
        roles=tuple(token.role for token in sources),
        targets=tuple(range(first, last)),
        strands=_strands(ids, first, last, foil_ids),
        objective=request.objective,
        units=None if all(end - begin == 1 for begin, end in units) else units,
        seed=request.seed,
    )


def _check_ids(model: LanguageModel, ids: tuple[int, ...]) -> None:
    rows = model.vocabulary_rows
    wrong = next((token for token in ids if not 0 <= token < rows), None)
    if wrong is not None:
        # on CUDA such an id would kill the whole process, so it must not reach the model
        raise BadRequest(
            f"Token id {wrong} is not in the model's vocabulary of {rows}.",
            "The tokenizer does not belong to this model: load them from the same place.",
        )


def _strands(ids: tuple[int, ...], first: int, last: int, foil: tuple[int, ...]) -> tuple[Strand, ...]:
    count = last - first
    reads, tokens = list(range(first - 1, last - 1)), list(ids[first:last])
    rows, signs = list(range(count)), [1.0] * count
    if foil:  # the first foil token has the same past as the first target token
        reads, tokens, rows, signs = [*reads, first - 1], [*tokens, foil[0]], [*rows, 0], [*signs, -1.0]
    strands = [Strand(ids[: last - 1], last - 1, tuple(reads), tuple(tokens), tuple(rows), tuple(signs))]
    if len(foil) > 1:
        more = range(1, len(foil))
        strands.append(
            Strand(
                ids=(*ids[:first], *foil[:-1]),
                shared=first,
                reads=tuple(first - 1 + j for j in more),
                tokens=foil[1:],
                rows=tuple(min(j, count - 1) for j in more),
                signs=(-1.0,) * len(more),
            )
        )
    return tuple(strands)
