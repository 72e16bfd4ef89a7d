"""Results to JSON bytes and back. The one reader and writer of the form that ``schema`` defines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from backend.errors import BadFile
from backend.io.schema import SCHEMA_VERSION, AnswerJson, ModelJson, PromptJson, ResultJson, SaliencyJson, TokenJson
from backend.types import (
    Answer,
    Check,
    Decoding,
    Explanation,
    ModelInfo,
    Passage,
    Passes,
    Prompt,
    Scores,
    TargetToken,
    Token,
    TokenAttribution,
    Turn,
)

Result = Answer | Explanation


def encode(result: Result) -> bytes:
    """Return the JSON form of a result, UTF-8, NaN as null."""
    document = _explanation_json(result) if isinstance(result, Explanation) else _answer_json(result)
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_attribution(result: TokenAttribution) -> bytes:
    """Return the JSON form of one method's scores, as it stands in an explanation's ``results``."""
    return orjson.dumps(_attribution_json(result), option=orjson.OPT_SERIALIZE_NUMPY)


def decode_attribution(data: bytes) -> TokenAttribution:
    """Read what ``encode_attribution`` wrote.

    Raises:
        BadFile: If it is something else.
    """
    try:
        return _attribution(ResultJson.model_validate(orjson.loads(data)))
    except (ValidationError, ValueError) as error:
        raise BadFile(f"A stored result cannot be read: {_first_fault(error)}.") from error


def decode(data: bytes) -> Result:
    """Read a result from JSON, checking everything: form, sizes, shapes, ranges.

    Raises:
        BadFile: If the bytes are not a result of this application, or of a newer version; the message says what.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadFile(f"This is not a JSON file: {error}.", "Choose a file that was exported as JSON.") from error
    kind = document.get("kind") if isinstance(document, dict) else None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if kind not in ("token_saliency", "answer"):
        raise BadFile(
            "This JSON file is not an explanation exported by Attriscope.",
            "Choose a file that was exported as JSON from the token saliency page or the command line.",
        )
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadFile(
            f"This file has schema version {version}; this application reads up to version {SCHEMA_VERSION}.",
            "Update the application.",
        )
    try:
        if kind == "answer":
            return _answer(AnswerJson.model_validate(document))
        return _explanation(SaliencyJson.model_validate(document))
    except (ValidationError, ValueError) as error:
        raise BadFile(f"The file is damaged or was edited: {_first_fault(error)}.", "Export it again.") from error


def _first_fault(error: ValidationError | ValueError) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        return f"{where}: {fault['msg']}" if where else str(fault["msg"])
    return str(error)


# ------------------------------------------------------------------------------------------------ to JSON


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value)


def _attribution_json(result: TokenAttribution) -> dict[str, Any]:
    scores = None
    if result.scores is not None:
        scores = result.scores.copy()
        if result.measured is not None:
            scores[:, ~result.measured] = np.nan  # becomes null: "not measured" is not zero
    return {
        "method": result.method,
        "params": dict(result.params),
        "signed": result.signed,
        "scores": scores,
        "units": result.units,
        "seconds": result.seconds,
        "passes": _plain(result.passes),
        "peak_bytes": result.peak_bytes,
        "checks": [_check_json(check) for check in result.checks],
        "refusal": result.refusal,
    }


def _check_json(check: Check) -> dict[str, Any]:
    value = None if check.value is None or not np.isfinite(check.value) else float(check.value)
    return {"name": check.name, "value": value, "verdict": check.verdict, "text": check.text}


def _explanation_json(explanation: Explanation) -> dict[str, Any]:
    passage = explanation.passage
    return {
        "kind": "token_saliency",
        "schema_version": SCHEMA_VERSION,
        "created": explanation.created,
        "model": _plain(explanation.model),
        "prompt": _plain(explanation.prompt),
        "decoding": _plain(explanation.decoding) if explanation.decoding else None,
        "rendered": passage.rendered,
        "prompt_length": passage.prompt_length,
        "tokens": [_plain(token) for token in explanation.sources],
        "answer": [_plain(token) for token in passage.answer_tokens],
        "targets": [_plain(target) for target in explanation.targets],
        "foil": [_plain(token) for token in explanation.foil],
        "objective": explanation.objective,
        "level": explanation.level,
        "seed": explanation.seed,
        "results": [_attribution_json(result) for result in explanation.results],
        "versions": dict(explanation.versions),
        "notes": list(explanation.notes),
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "kind": "answer",
        "schema_version": SCHEMA_VERSION,
        "model": _plain(answer.model),
        "prompt": _plain(answer.prompt),
        "decoding": _plain(answer.decoding) if answer.decoding else None,
        "rendered": answer.passage.rendered,
        "prompt_length": answer.passage.prompt_length,
        "tokens": [_plain(token) for token in answer.passage.tokens],
        "targets": [_plain(target) for target in answer.targets],
        "seconds": answer.seconds,
        "notes": list(answer.notes),
    }


# ------------------------------------------------------------------------------------------------ from JSON


def _model(document: ModelJson) -> ModelInfo:
    return ModelInfo(**document.model_dump())


def _prompt(document: PromptJson) -> Prompt:
    return Prompt(document.text, tuple(Turn(turn.role, turn.content) for turn in document.turns))


def _tokens(documents: list[TokenJson]) -> tuple[Token, ...]:
    return tuple(Token(t.id, t.text, t.role, t.group, t.special) for t in documents)


def _attribution(document: ResultJson) -> TokenAttribution:
    scores, measured = None, None
    if document.scores is not None:
        values = np.array(document.scores, dtype=np.float32)
        measured = np.asarray(np.isfinite(values).all(axis=0), dtype=np.bool_)
        if np.isfinite(values[:, ~measured]).any():
            raise ValueError(f"a source of {document.method!r} is measured for some targets only")
        units = None if document.units is None else tuple(document.units)
        checked = Scores(values, Passes(), units, measured)
        scores, measured = checked.values, checked.measured
    params: Mapping[str, Any] = document.params
    return TokenAttribution(
        method=document.method,
        params=params,
        signed=document.signed,
        scores=scores,
        units=None if document.units is None else tuple(document.units),
        measured=measured,
        seconds=document.seconds,
        passes=Passes(document.passes.forward, document.passes.backward),
        peak_bytes=document.peak_bytes,
        checks=tuple(Check(c.name, c.value, c.verdict, c.text) for c in document.checks),
        refusal=document.refusal,
    )


def _explanation(document: SaliencyJson) -> Explanation:
    prompt_tokens = _tokens(document.tokens[: document.prompt_length])
    return Explanation(
        model=_model(document.model),
        prompt=_prompt(document.prompt),
        decoding=Decoding(**document.decoding.model_dump()) if document.decoding else None,
        passage=Passage(prompt_tokens + _tokens(document.answer), document.prompt_length, document.rendered),
        targets=tuple(TargetToken(**target.model_dump()) for target in document.targets),
        foil=_tokens(document.foil),
        objective=document.objective,
        level=document.level,
        seed=document.seed,
        results=tuple(_attribution(result) for result in document.results),
        versions=dict(document.versions),
        notes=tuple(document.notes),
        created=document.created,
    )


def _answer(document: AnswerJson) -> Answer:
    return Answer(
        model=_model(document.model),
        prompt=_prompt(document.prompt),
        decoding=Decoding(**document.decoding.model_dump()) if document.decoding else None,
        passage=Passage(_tokens(document.tokens), document.prompt_length, document.rendered),
        targets=tuple(TargetToken(**target.model_dump()) for target in document.targets),
        seconds=document.seconds,
        notes=tuple(document.notes),
    )
