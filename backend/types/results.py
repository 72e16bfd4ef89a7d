"""What comes out: tokens, answers, scores, explanations. Frozen; arrays are numpy, on the CPU, read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.types.base import FloatArray, Level, Objective, Role, Scalar, Verdict
from backend.types.requests import Decoding, Prompt


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Where a result comes from.

    Attributes:
        id: As requested.
        revision: Resolved commit on the hub; for local and embedded models a content hash of the weights' listing.
        dtype: "float32", "bfloat16", "float16".
        device: "cpu", "cuda:0", "mps".
        device_reason: One clause that says why this device and dtype.
        architecture: Model class, e.g. "LlamaForCausalLM".
        attention: Attention kernel in use, e.g. "sdpa".
        parameters: Number of weights.
        context_length: Longest sequence in tokens that the model was built for; None if the config does not say.
        has_chat_template: Whether chat turns can be rendered.
    """

    id: str
    revision: str
    dtype: str
    device: str
    device_reason: str = ""
    architecture: str = ""
    attention: str = ""
    parameters: int = 0
    context_length: int | None = None
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the model reads it and as a person should see it.

    Attributes:
        id: Id in the model's vocabulary.
        text: Characters of the rendered text that this token adds; the texts of all tokens that are not inserted
            by the tokenizer concatenate to the rendered text. Empty for the second and later pieces of a character.
        role: Which part of the prompt or answer it belongs to.
        group: Display unit: tokens that share a user-perceived character have the same number; ascending.
        special: Whether it is a control token such as BOS or end of turn.
    """

    id: int
    text: str
    role: Role
    group: int
    special: bool = False


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt with its answer, as ids and as text.

    Attributes:
        tokens: Prompt tokens, then answer tokens.
        prompt_length: Number of prompt tokens.
        rendered: The prompt as text after the chat template, exactly what was tokenized.
        notes: Things the reader must know about how the text was read, e.g. that a message was not located.
    """

    tokens: tuple[Token, ...]
    prompt_length: int
    rendered: str
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all tokens."""
        return tuple(token.id for token in self.tokens)

    @property
    def prompt_tokens(self) -> tuple[Token, ...]:
        """Tokens of the prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def answer_tokens(self) -> tuple[Token, ...]:
        """Tokens of the answer."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class TargetToken:
    """A token being explained.

    Attributes:
        position: Index in ``Passage.tokens``. The model predicts it at ``position - 1``.
        id: Token id.
        text: Its characters.
        probability: p(token | everything before it), in [0, 1].
        rank: 1 if the model prefers it to every other token.
        runner_up_id: The most likely *other* token at this position.
        runner_up_text: Its characters.
        runner_up_probability: Its probability.
    """

    position: int
    id: int
    text: str
    probability: float
    rank: int
    runner_up_id: int
    runner_up_text: str
    runner_up_probability: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, or how likely it finds what it was given.

    Attributes:
        model: The model.
        prompt: The prompt as asked.
        decoding: How the answer was generated; None for a given continuation.
        passage: Prompt and answer tokens.
        targets: One entry per answer token.
        seconds: Wall time.
        notes: Things the reader must know, e.g. that the answer stopped at the length limit.
    """

    model: ModelInfo
    prompt: Prompt
    decoding: Decoding | None
    passage: Passage
    targets: tuple[TargetToken, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Ids of the answer tokens."""
        return tuple(token.id for token in self.passage.answer_tokens)


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion or measurement around a run.

    Attributes:
        name: Stable snake_case name, e.g. "completeness_residual".
        value: The measured number; None where there is none.
        verdict: "ok", "warn", "fail", or "info" for a number that passes no judgement.
        text: One plain sentence for the reader.
    """

    name: str
    value: float | None
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes through the model, in full-length sequences (a batch of eight counts as eight)."""

    forward: float = 0.0
    backward: float = 0.0


def _frozen(array: npt.ArrayLike) -> FloatArray:
    out = np.array(array, dtype=np.float32)
    out.setflags(write=False)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a method returns: the numbers and how they were obtained; provenance is the caller's.

    Attributes:
        values: float32, shape ``(target, source)``; ``source`` is a token, or a unit if ``units`` is given. NaN only
            where a source was not measured (``measured`` is False there). Sources that a target cannot see
            (itself and later tokens) are exactly 0.
        passes: What it cost.
        units: Half-open token spans, one per column, when the method measured units longer than a token; else None.
        measured: bool, shape ``(source,)``; False where the method left a source out on purpose.
        checks: Residuals, warnings, assertions.
        signed: Whether negative scores mean "against the target"; None for what is registered. Set it where a
            parameter decides.
    """

    values: FloatArray
    passes: Passes
    units: tuple[tuple[int, int], ...] | None = None
    measured: npt.NDArray[np.bool_] | None = None
    checks: tuple[Check, ...] = ()
    signed: bool | None = None

    def __post_init__(self) -> None:
        values = _frozen(self.values)
        if values.ndim != 2:
            raise ValueError(f"scores must have shape (target, source), got {values.shape}")
        measured = np.ones(values.shape[1], bool) if self.measured is None else np.array(self.measured, bool)
        measured.setflags(write=False)
        if measured.shape != values.shape[1:]:
            raise ValueError(f"measured has shape {measured.shape}, scores have {values.shape}")
        if not np.isfinite(values[:, measured]).all():
            raise ValueError("scores are not finite")
        if self.units is not None and len(self.units) != values.shape[1]:
            raise ValueError("one unit per column of the scores is needed")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "measured", measured)


@dataclass(frozen=True, slots=True, eq=False)
class TokenAttribution:
    """How much each source token moved each target token, according to one method.

    Attributes:
        method: Registry name.
        params: Every parameter of the run, defaults included.
        signed: Whether a negative score means "speaks against the target".
        scores: float32 ``(target, source)``, raw; see ``Scores``. None if the method refused or failed.
        units: See ``Scores``.
        measured: See ``Scores``.
        seconds: Wall time of the method alone.
        passes: Passes through the model.
        peak_bytes: Extra memory at the peak, where the device reports it (CUDA); None elsewhere.
        checks: See ``Scores``.
        refusal: Why there are no scores; empty if there are.
        from_cache: Whether the scores were read from the store. Not part of exports.
    """

    method: str
    params: Mapping[str, Scalar]
    signed: bool
    scores: FloatArray | None
    units: tuple[tuple[int, int], ...] | None = None
    measured: npt.NDArray[np.bool_] | None = None
    seconds: float = 0.0
    passes: Passes = Passes()
    peak_bytes: int | None = None
    checks: tuple[Check, ...] = ()
    refusal: str = ""
    from_cache: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """The answer to a ``SaliencyRequest``: everything needed to draw it again without the model.

    Attributes:
        model: The model, as it was loaded.
        prompt: The prompt as asked.
        decoding: How the answer was generated; None for a given continuation.
        passage: Prompt and whole answer. The source axis of all scores is ``passage.tokens[:source_count]``.
        targets: One entry per row of the scores.
        foil: Ids and texts of the foil; empty if there is none.
        objective: The scalar that is explained.
        level: Unit that ablation methods removed.
        seed: Seed of sampling methods.
        results: One entry per requested method, in order, refusals included.
        versions: Package name to version.
        notes: Things the reader must know, e.g. "the target is nearly certain".
        created: UTC time, ISO 8601, seconds.
    """

    model: ModelInfo
    prompt: Prompt
    decoding: Decoding | None
    passage: Passage
    targets: tuple[TargetToken, ...]
    foil: tuple[Token, ...]
    objective: Objective
    level: Level
    seed: int
    results: tuple[TokenAttribution, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    created: str = ""

    @property
    def source_count(self) -> int:
        """Number of source tokens: all that the last target can see."""
        return self.targets[-1].position

    @property
    def sources(self) -> tuple[Token, ...]:
        """The tokens of the source axis."""
        return self.passage.tokens[: self.source_count]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could stand at a place, with its probability before and after an intervention, in [0, 1]."""

    id: int
    text: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Intervention:
    """What changed when prompt tokens were weighed differently, hidden or taken out.

    Attributes:
        candidates: The likeliest tokens before and after, and the answer's own, by falling probability before.
        target: Index in ``candidates`` of the answer's own token.
        distance: Total variation distance of the two distributions over the whole vocabulary, in [0, 1].
        answer: Tokens of the new greedy answer; empty if none was asked for.
        first_change: Index of the first token that differs from the original answer; None if the new answer is the
            original or its beginning, or none was asked for.
    """

    candidates: tuple[Candidate, ...]
    target: int
    distance: float
    answer: tuple[Token, ...] = ()
    first_change: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will cost, extrapolated from passes measured on this machine.

    Attributes:
        seconds: Expected wall time.
        peak_bytes: Expected extra memory at the peak.
        basis: One sentence: what was measured, at which lengths.
        per_method: Method name to seconds.
    """

    seconds: float
    peak_bytes: int
    basis: str
    per_method: Mapping[str, float]
