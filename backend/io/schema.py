"""The versioned JSON form of results, as pydantic models: what is written, what is accepted, and its JSON schema.

Knows nothing of how results are computed or drawn; ``bundle`` converts between these models and ``backend.types``.
``python -m scripts.write_schema`` prints the schema to ``assets/schema/``; a test keeps file and code equal.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backend.types import Level, Objective, Role, Verdict

SCHEMA_VERSION = 1

Text = Annotated[str, Field(max_length=200_000)]
Short = Annotated[str, Field(max_length=2_000)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    # unknown fields are ignored: a later minor addition must not make old readers fail
    model_config = ConfigDict(extra="ignore", frozen=True)


class ModelJson(_Model):
    """The model that was explained."""

    id: Short
    revision: Short
    dtype: Short
    device: Short
    device_reason: Short = ""
    architecture: Short = ""
    attention: Short = ""
    parameters: Count = 0
    context_length: int | None = None
    has_chat_template: bool = False


class TurnJson(_Model):
    """One chat message."""

    role: Short
    content: Text


class PromptJson(_Model):
    """The prompt as asked: a text, or chat turns."""

    text: Text = ""
    turns: list[TurnJson] = []


class DecodingJson(_Model):
    """How the answer was generated."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class TokenJson(_Model):
    """One token. Tokens that share a user-perceived character share ``group``; only the first carries its text."""

    id: Count
    text: Short
    role: Role
    group: Count = 0
    special: bool = False


class TargetJson(_Model):
    """One explained token, a row of every result's scores."""

    position: int = Field(ge=1, description="index in prompt + answer; the model predicts it one place earlier")
    id: Count
    text: Short
    probability: Probability
    rank: int = Field(ge=1)
    runner_up_id: Count = 0
    runner_up_text: Short = ""
    runner_up_probability: Probability = 0.0


class PassesJson(_Model):
    """Passes through the model, in full-length sequences."""

    forward: float
    backward: float


class CheckJson(_Model):
    """One assertion or measurement around a run."""

    name: Short
    value: float | None
    verdict: Verdict
    text: Short


class ResultJson(_Model):
    """The scores of one method, or the reason why there are none."""

    method: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
    params: dict[str, bool | int | float | str]
    signed: bool
    scores: list[list[float | None]] | None = Field(
        description="target x source, raw; null where a source was not measured. Columns are tokens, or units"
    )
    units: list[tuple[Count, Count]] | None = Field(
        None, description="half-open token spans, one per column, when units longer than a token were measured"
    )
    seconds: float
    passes: PassesJson
    peak_bytes: int | None = None
    checks: list[CheckJson] = []
    refusal: Short = ""


class SaliencyJson(_Model):
    """An explanation of answer tokens by the tokens before them."""

    kind: Literal["token_saliency"] = "token_saliency"
    schema_version: Literal[1] = 1
    created: Short = ""
    model: ModelJson
    prompt: PromptJson
    decoding: DecodingJson | None = None
    rendered: Text = Field("", description="the prompt after the chat template, exactly what was tokenized")
    prompt_length: int = Field(ge=1, description="how many of the tokens belong to the prompt")
    tokens: list[TokenJson] = Field(
        min_length=1, description="the source axis: every token that the last target can see (prompt, answer so far)"
    )
    answer: list[TokenJson] = Field(min_length=1, description="all tokens of the answer")
    targets: list[TargetJson] = Field(min_length=1)
    foil: list[TokenJson] = []
    objective: Objective = "log_prob"
    level: Level = "token"
    seed: int = 0
    results: list[ResultJson]
    versions: dict[str, Short] = {}
    notes: list[Short] = []

    @model_validator(mode="after")
    def _consistent(self) -> SaliencyJson:
        sources, prompt = len(self.tokens), self.prompt_length
        if sources < prompt:
            raise ValueError("'tokens' is shorter than 'prompt_length'")
        if sources != self.targets[-1].position:
            raise ValueError("'tokens' must hold every token before the last target")
        if any(not prompt <= target.position < prompt + len(self.answer) for target in self.targets):
            raise ValueError("a target lies outside the answer")
        first = self.targets[0].position
        if [target.position for target in self.targets] != list(range(first, first + len(self.targets))):
            raise ValueError("the targets are not one span")
        if [t.id for t in self.tokens[prompt:]] != [t.id for t in self.answer[: sources - prompt]]:
            raise ValueError("'tokens' and 'answer' disagree about the answer")
        if any(target.id != self.answer[target.position - prompt].id for target in self.targets):
            raise ValueError("a target is not the token of the answer at its place")
        for result in self.results:
            if result.scores is None:
                if not result.refusal:
                    raise ValueError(f"result {result.method!r} has neither scores nor a refusal")
                continue
            columns = sources if result.units is None else len(result.units)
            if len(result.scores) != len(self.targets) or any(len(row) != columns for row in result.scores):
                raise ValueError(f"the scores of {result.method!r} are not {len(self.targets)} x {columns}")
            if result.units is not None and any(not a < b <= sources for a, b in result.units):
                raise ValueError(f"a unit of {result.method!r} is not a span of tokens")
            if any(a[1] > b[0] for a, b in itertools.pairwise(result.units or [])):
                raise ValueError(f"the units of {result.method!r} overlap or are out of order")
        return self


class AnswerJson(_Model):
    """A generated or given answer with its probabilities. Internal: not offered as an export."""

    kind: Literal["answer"] = "answer"
    schema_version: Literal[1] = 1
    model: ModelJson
    prompt: PromptJson
    decoding: DecodingJson | None
    rendered: Text
    prompt_length: int
    tokens: list[TokenJson]
    targets: list[TargetJson]
    seconds: float
    notes: list[Short] = []
