"""From a result back to the request that it answers."""

import dataclasses

import numpy as np
import pytest

from backend.io.examples import list_examples, load_example
from backend.registry import default_params, get_method
from backend.saliency.asked import answer_request_of, model_ref_of, request_of
from backend.types import EMBEDDED_MODEL, Decoding, MethodSpec, ModelInfo, ModelRef, TokenAttribution
from tests.support.explanations import explanation, result, token

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = (token("Hi", group=0), token(" you", group=1))
ANSWER = (token(" a", "answer", group=2), token(" b", "answer", group=3), token(" c", "answer", group=4))


def explained(*results, **more):
    return explanation(PROMPT, ANSWER, results, **more)


def attribution(method, **params):
    full = {**default_params(get_method(method)), **params}
    return TokenAttribution(method=method, params=full, signed=True, scores=np.zeros((1, 2), np.float32))


@pytest.mark.parametrize(
    ("model", "ref"),
    [
        (ModelInfo("owner/name", COMMIT, "float32", "cpu"), ModelRef("owner/name", COMMIT)),
        (ModelInfo("owner/name", COMMIT, "bfloat16", "cuda:0"), ModelRef("owner/name", COMMIT)),
        (ModelInfo("owner/name", COMMIT, "float16", "cuda:0"), ModelRef("owner/name", COMMIT, dtype="float16")),
        (ModelInfo("owner/name", COMMIT, "bfloat16", "cpu"), ModelRef("owner/name", COMMIT, dtype="bfloat16")),
        (ModelInfo("/some/folder", "1f" * 8, "float32", "cpu"), ModelRef("/some/folder")),
        (ModelInfo(EMBEDDED_MODEL, COMMIT, "float32", "cpu"), ModelRef()),
    ],
)
def test_only_a_commit_and_an_unusual_number_format_are_asked_for(model, ref):
    assert model_ref_of(model) == ref


def test_the_request_holds_what_the_result_says():
    made = explained(attribution("integrated_gradients", steps=16), attribution("gradient_norm"), target=(1, 3))
    made = dataclasses.replace(made, foil=(token(" x", "answer", group=9),), seed=7, objective="logit", level="word")
    request = request_of(made)
    assert request.answer_ids == tuple(t.id for t in ANSWER)
    assert request.target == (1, 3)
    assert request.methods == (MethodSpec.of("integrated_gradients", {"steps": 16}), MethodSpec("gradient_norm"))
    assert (request.foil, request.seed, request.objective, request.level) == (" x", 7, "logit", "word")
    assert (request.prompt, request.decoding) == (made.prompt, Decoding())


def test_a_given_answer_is_asked_for_as_text():
    assert answer_request_of(explained(decoding=None)).continuation == " a b c"
    assert answer_request_of(explained()).continuation is None


def test_what_this_version_lacks_cannot_be_asked():
    assert request_of(explained(result("method_of_tomorrow", [[0.0, 1.0]], signed=True))) is None
    assert request_of(explained(attribution("integrated_gradients", steps=10_000_000))) is None


def test_every_example_can_be_asked_again():
    for example in list_examples():
        made = load_example(example.name)
        assert [spec.name for spec in request_of(made).methods] == [result.method for result in made.results]
