"""From an explanation back to the question: what to ask to get it again. Needs no model and no torch."""

from __future__ import annotations

import re

from backend.errors import BadRequest
from backend.registry import default_params, get_method, make_params, params_dict
from backend.types import EMBEDDED_MODEL, AnswerRequest, Explanation, MethodSpec, ModelInfo, ModelRef, SaliencyRequest

_COMMIT = re.compile(r"[0-9a-f]{40}")
_USUAL_DTYPES = {"cuda": "bfloat16"}  # what "auto" gives; float32 elsewhere


def model_ref_of(model: ModelInfo) -> ModelRef:
    """Return a reference that loads this model again, with the same numbers, on whatever device there is.

    Only a commit of the hub is a revision that can be asked for; embedded and local models carry a content hash.
    """
    revision = model.revision if model.id != EMBEDDED_MODEL and _COMMIT.fullmatch(model.revision) else None
    usual = _USUAL_DTYPES.get(model.device.partition(":")[0], "float32")
    return ModelRef(model.id, revision, dtype="auto" if model.dtype == usual else model.dtype)


def answer_request_of(explanation: Explanation) -> AnswerRequest:
    """Return the question that led to an explanation's answer."""
    ref = model_ref_of(explanation.model)
    if explanation.decoding is not None:
        return AnswerRequest(ref, explanation.prompt, explanation.decoding)
    given = "".join(token.text for token in explanation.passage.answer_tokens)
    return AnswerRequest(ref, explanation.prompt, continuation=given)


def request_of(explanation: Explanation) -> SaliencyRequest | None:
    """Return the request that an explanation answers; None if this version lacks a method or parameter of it."""
    specs = []
    for result in explanation.results:
        try:
            method = get_method(result.method)
            params = params_dict(make_params(method, result.params))
        except BadRequest:
            return None
        usual = default_params(method)
        specs.append(MethodSpec.of(method.name, {name: v for name, v in params.items() if v != usual[name]}))
    start, positions = explanation.passage.prompt_length, [target.position for target in explanation.targets]
    return SaliencyRequest(
        model=model_ref_of(explanation.model),
        prompt=explanation.prompt,
        answer_ids=tuple(token.id for token in explanation.passage.answer_tokens),
        target=(positions[0] - start, positions[-1] - start + 1),
        methods=tuple(specs),
        foil="".join(token.text for token in explanation.foil),
        objective=explanation.objective,
        level=explanation.level,
        decoding=explanation.decoding,
        seed=explanation.seed,
    )
