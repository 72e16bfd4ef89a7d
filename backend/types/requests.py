"""What can be asked. Requests are frozen, hashable, and name everything that decides the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backend.types.base import EMBEDDED_MODEL, Level, Objective, Scalar


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Which model to load, and where to put it.

    Attributes:
        id: ``EMBEDDED_MODEL``, a hub id ("owner/name"), a local folder, or a path to a ``.gguf`` file.
        revision: Branch, tag or commit on the hub; None for the default branch. Ignored for local files.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto", "float32", "bfloat16", "float16".
    """

    id: str = EMBEDDED_MODEL
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat message; ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A plain text, or chat turns that the model's own template renders. Exactly one of the two is used.

    Attributes:
        text: The plain prompt; ignored when there are turns.
        turns: Chat messages, oldest first; empty for a plain prompt.
    """

    text: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is rendered by a chat template."""
        return bool(self.turns)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is generated.

    Attributes:
        max_new_tokens: Upper bound on the answer's length, in tokens.
        temperature: 0 is greedy decoding; above 0 samples.
        top_p: Nucleus mass for sampling, in (0, 1].
        seed: Seed of the sampler.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Let the model answer, or read a given continuation.

    Attributes:
        model: The model.
        prompt: The prompt.
        decoding: Used when the answer is generated.
        continuation: Text to explain instead of a generated answer; tokenized on its own and appended as ids.
    """

    model: ModelRef
    prompt: Prompt
    decoding: Decoding = Decoding()
    continuation: str | None = None


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Take characters out of a prompt that is too long, at a place that the person chose.

    Attributes:
        model: The model whose tokenizer counts.
        prompt: The prompt that is too long.
        keep: Which part stays; "ends" takes a piece out of the middle.
        room: Tokens to leave for an answer that is to be generated.
        continuation: A given answer to leave room for instead.
    """

    model: ModelRef
    prompt: Prompt
    keep: Literal["start", "end", "ends"] = "start"
    room: int = 1
    continuation: str | None = None


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Load a model and time its passes, so that costs can be estimated."""

    model: ModelRef


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A registered method with the parameters that differ from its defaults, sorted by name."""

    name: str
    params: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, name: str, params: Mapping[str, Scalar] | None = None) -> MethodSpec:
        """Build from a mapping, in canonical order."""
        return cls(name, tuple(sorted((params or {}).items())))


@dataclass(frozen=True, slots=True)
class SaliencyRequest:
    """Which prompt tokens drove these answer tokens?

    Attributes:
        model: The model.
        prompt: The prompt; rendered and tokenized again, which is deterministic.
        answer_ids: Token ids of the whole answer, as generated or as given. Never re-tokenized.
        target: Half-open span ``(start, stop)`` in ``answer_ids``; one row of scores per token in it.
        methods: The methods to run, in display order.
        foil: Text of an alternative answer to the span (contrastive explanation); empty for none.
        objective: The scalar S that is explained: "log_prob" (default), "logit" or "prob" of the target.
        level: Unit that ablation methods remove. Other methods score tokens whatever the level.
        decoding: How the answer came about; provenance only, None for a given continuation.
        seed: Seed of methods that sample.
    """

    model: ModelRef
    prompt: Prompt
    answer_ids: tuple[int, ...]
    target: tuple[int, int]
    methods: tuple[MethodSpec, ...]
    foil: str = ""
    objective: Objective = "log_prob"
    level: Level = "token"
    decoding: Decoding | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class InterventionRequest:
    """What would the model say if some prompt tokens weighed more or less, or were not there?

    Attributes:
        model: The model.
        prompt: The prompt; rendered and tokenized again.
        answer_ids: Token ids of the whole answer.
        at: Index in ``answer_ids`` of the token whose place is looked at.
        biases: Pairs of prompt token index and the number that is added to the attention scores of that key, in
            every layer and head.
        hidden: Indices of prompt tokens that no later token may attend to; a token still sees itself.
        removed: Indices of prompt tokens that are taken out of the text.
        new_tokens: Upper bound on the tokens of a new greedy answer; 0 for none.
    """

    model: ModelRef
    prompt: Prompt
    answer_ids: tuple[int, ...]
    at: int
    biases: tuple[tuple[int, float], ...] = ()
    hidden: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FaithfulnessRequest:
    """Hide what a saved explanation's methods rank highest, see ``backend.evaluation.faithfulness``.

    Attributes:
        model: The model.
        result: Key under which the explanation was saved.
        seed: Of the random orders.
    """

    model: ModelRef
    result: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SanityRequest:
    """Run a saved explanation's methods again to test them, see ``backend.evaluation.sanity``.

    Attributes:
        model: The model.
        result: Key under which the explanation was saved.
    """

    model: ModelRef
    result: str


WorkRequest = AnswerRequest | SaliencyRequest | CutRequest | InterventionRequest | FaithfulnessRequest | SanityRequest
"""What is computed on one model."""


def cache_key(*parts: Any) -> str:
    """Content hash (sha256, hex) of dataclasses and plain values: the whole content, never a sample of it."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                "__type__": type(value).__name__,
                **{f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)},
            }
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"cannot make a cache key from {type(value).__name__}")

    text = json.dumps([plain(part) for part in parts], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
