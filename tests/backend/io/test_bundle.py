"""The JSON form: everything survives the way out and back, and nothing malformed gets in."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backend.errors import BadFile
from backend.io import bundle
from backend.io.schema import SaliencyJson
from backend.types import Answer, Check, Passes, Prompt, Turn
from tests.support.explanations import explanation, result, token

PROMPT = (token("<s>", "bos", group=0, special=True), token("Hi", group=1), token(" 👩", group=2), token("", group=2))
ANSWER = (token(" <b>", "answer", group=3), token("؟", "answer", group=4), token(".", "answer", group=5))


def sample(**more):
    signed = result(
        "occlusion",
        [[np.nan, 0.5, -0.25, 0.0], [np.nan, 1.0, 2.0, 3.0]],
        signed=True,
        measured=np.array([False, True, True, True]),
        units=((0, 1), (1, 2), (2, 4), (4, 5)),
        checks=(Check("noise_floor", 1e-7, "info", "small"), Check("nan", math.nan, "fail", "none")),
        passes=Passes(3.5, 0.0),
    )
    norm = result("gradient_norm", np.arange(10).reshape(2, 5), signed=False)
    refused = result("attn_lrp", None, signed=True, refusal="This family has no rule for its attention.")
    return explanation(PROMPT, ANSWER, (signed, norm, refused), target=(0, 2), **more)


def same(a, b):
    """Deep equality in which NaN equals NaN and arrays compare by content."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype != bool)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_an_explanation_survives_the_round_trip():
    before = sample(prompt=Prompt(turns=(Turn("system", "s"), Turn("user", "<script>$x$"))), decoding=None)
    after = bundle.decode(bundle.encode(before))
    occlusion, norm, refused = after.results
    assert after.source_count == 5
    assert same(dataclasses.replace(after, results=()), dataclasses.replace(before, results=()))
    assert same(occlusion.scores, before.results[0].scores)
    assert occlusion.measured.tolist() == [False, True, True, True]
    assert occlusion.units == before.results[0].units
    assert [check.value for check in occlusion.checks] == [1e-7, None]
    assert norm.measured.all()
    assert (refused.scores, refused.refusal) == (None, before.results[2].refusal)
    assert bundle.encode(after) == bundle.encode(before)


def test_the_documented_fields_are_there():
    document = json.loads(bundle.encode(sample()))
    assert document["schema_version"] == 1
    assert {"id", "revision", "dtype", "device"} <= document["model"].keys()
    assert {"id", "text", "role"} <= document["tokens"][0].keys()
    assert {"id", "text", "probability", "rank"} <= document["targets"][0].keys()
    assert {"method", "params", "signed", "scores", "seconds", "passes", "checks"} <= document["results"][0].keys()
    assert document["results"][0]["scores"][0] == [None, 0.5, -0.25, 0.0], "not measured is null, not zero"
    assert len(document["results"][1]["scores"]) == len(document["targets"])
    assert len(document["results"][1]["scores"][0]) == len(document["tokens"])


def test_scores_are_read_only():
    scores = bundle.decode(bundle.encode(sample())).results[1].scores
    with pytest.raises(ValueError, match="read-only"):
        scores[0, 0] = 1


def test_one_methods_scores_survive_the_store():
    before = sample().results[0]
    assert same(bundle.decode_attribution(bundle.encode_attribution(before)).scores, before.scores)
    with pytest.raises(BadFile):
        bundle.decode_attribution(b"{}")


def test_an_answer_survives_the_round_trip():
    whole = sample()
    before = Answer(whole.model, whole.prompt, whole.decoding, whole.passage, whole.targets, 0.5, ("a note",))
    assert bundle.decode(bundle.encode(before)) == before


def edited(change):
    document = json.loads(bundle.encode(sample()))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("kind"), "not an explanation"),
        (lambda d: d.update(kind="token_saliency2"), "not an explanation"),
        (lambda d: d.update(schema_version=99), "schema version 99"),
        (lambda d: d.update(schema_version="one"), "schema_version"),
        (lambda d: d.pop("tokens"), "tokens"),
        (lambda d: d["tokens"].pop(), "every token before"),
        (lambda d: d["tokens"][0].update(role="admin"), r"tokens\.0\.role"),
        (lambda d: d["tokens"][0].update(text="x" * 3000), r"tokens\.0\.text"),
        (lambda d: d["targets"][0].update(probability=1.5), "probability"),
        (lambda d: d["targets"][-1].update(position=500), "every token before"),
        (lambda d: d["results"][1]["scores"].pop(), "are not 2 x 5"),
        (lambda d: d["results"][1]["scores"][0].pop(), "are not 2 x 5"),
        (lambda d: d["results"][1]["scores"][0].__setitem__(0, "high"), r"results\.1\.scores"),
        (lambda d: d["results"][0].update(units=[[0, 9]] * 4), "not a span"),
        (lambda d: d["results"][2].update(refusal=""), "neither scores nor a refusal"),
        (lambda d: d["answer"][0].update(id=5), "disagree"),
        (lambda d: d["targets"][1].update(id=5), "not the token of the answer"),
        (lambda d: d["targets"][0].update(position=3), "outside the answer"),
        (lambda d: d["targets"].reverse(), "every token before"),
        (lambda d: d["targets"].insert(0, d["targets"][0]), "not one span"),
        (lambda d: d["results"][0].update(units=[[0, 2], [1, 3], [3, 4], [4, 5]]), "overlap"),
        (lambda d: d["results"][0]["scores"][1].__setitem__(2, None), "some targets only"),
        (lambda d: d["results"][1].update(method="![x](http://example.com)"), r"results\.1\.method"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(change, says):
    with pytest.raises(BadFile, match=says):
        bundle.decode(edited(change))


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[1, 2]", b"\xff\xfe", b"null", b'{"kind": NaN}', b"[" * 5000])
def test_other_files_are_refused(data):
    with pytest.raises(BadFile):
        bundle.decode(data)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_json_crashes_the_reader(value):
    document = json.loads(bundle.encode(sample()))
    document["results"] = value
    assume(value != [])  # an explanation without results is legal
    with pytest.raises(BadFile):
        bundle.decode(json.dumps(document).encode())


def test_the_published_schema_is_the_one_in_force():
    published = Path(__file__).parents[3] / "assets" / "schema" / "token_saliency.v1.json"
    assert json.loads(published.read_text()) == SaliencyJson.model_json_schema()
