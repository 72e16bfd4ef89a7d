"""Whole requests: every method in turn, refusals, stored scores, progress, provenance, and the cost estimate."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from backend import registry
from backend.errors import BadRequest, Cancelled, OutOfMemory, UnknownMethod
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method, list_methods
from backend.saliency.explain import Calibration, calibrate, estimate, explain
from backend.saliency.reading import traits_of
from backend.types import MethodSpec, ModelRef, Prompt, SaliencyRequest, Turn, no_tick
from tests.support.learned import equal_weights
from tests.support.tiny import tiny_model
from tests.support.toys import Ticks

ALL = tuple(MethodSpec.of(m.name, {"steps": 8} if m.name == "integrated_gradients" else {}) for m in list_methods())
PROMPT = Prompt("The capital of France is")


@pytest.fixture(scope="module", autouse=True)
def learned_weights():
    with equal_weights(tiny_model("llama")):
        yield


def case(model, methods=ALL, target=(0, 2), prompt=PROMPT, answer=" Paris, not Berlin", **more):
    ids = encode_text(model, answer)
    passage = append_answer(model, encode_prompt(model, prompt), ids)
    return passage, SaliencyRequest(ModelRef("tiny"), prompt, ids, target, methods, **more)


class Store:
    def __init__(self):
        self.kept, self.asked = {}, []

    def recall(self, key):
        self.asked.append(key)
        return self.kept.get(key)

    def remember(self, key, result):
        self.kept[key] = result


def test_an_explanation_holds_everything_needed_to_draw_it(tiny):
    passage, request = case(tiny, foil=" Berlin")
    ticks = Ticks()
    found = explain(tiny, passage, request, ticks)
    assert [r.method for r in found.results] == [spec.name for spec in ALL]
    assert found.source_count == passage.prompt_length + 1 and len(found.targets) == 2
    assert [t.id for t in found.targets] == list(request.answer_ids[:2])
    assert "".join(token.text for token in found.foil) == " Berlin"
    for result in found.results:
        assert result.scores.shape == (2, found.source_count) and not result.refusal and not result.from_cache
        assert not result.scores.flags.writeable and result.peak_bytes is None
        assert result.signed == get_method(result.method).signed
        assert result.seconds >= 0
    steps = found.results[[s.name for s in ALL].index("integrated_gradients")]
    assert steps.params == {"steps": 8, "baseline": "mean", "refine": False, "max_steps": 512}
    assert set(found.versions) == {"attriscope", "torch", "transformers", "python"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.created)
    done = [d for d, _ in ticks.calls]
    assert done == sorted(done) and ticks.calls[-1] == (1000, 1000) and len(set(done)) > 6


def test_a_parameter_may_decide_whether_scores_have_signs(tiny):
    ways = [("smooth_grad", {"readout": readout, "samples": 2}) for readout in ("norm", "times_input")]
    passage, request = case(tiny, methods=tuple(MethodSpec.of(*way) for way in ways))
    store = Store()
    norm, signed = explain(tiny, passage, request, no_tick, remember=store.remember).results
    assert not norm.signed and (norm.scores >= 0).all()
    assert signed.signed and (signed.scores < 0).any() and not get_method("smooth_grad").signed
    assert traits_of(signed).signed and not traits_of(norm).signed
    again = explain(tiny, passage, request, no_tick, recall=store.recall).results
    assert [r.signed for r in again] == [False, True] and all(r.from_cache for r in again)


def test_statistics_are_those_of_the_span(tiny):
    passage, request = case(tiny, target=(1, 3))
    found = explain(tiny, passage, request, no_tick)
    with torch.no_grad():
        logits = tiny.module(input_ids=torch.tensor([passage.ids])).logits[0].softmax(-1)
    for row, target in enumerate(found.targets):
        assert target.position == passage.prompt_length + 1 + row
        assert target.probability == pytest.approx(float(logits[target.position - 1, target.id]), rel=1e-4)


def test_a_refusal_leaves_the_other_methods_alone(tiny):
    tiny.module.model.layers[1].register_forward_hook(lambda m, a, out: out.detach())
    passage, request = case(tiny)
    store = Store()
    found = {r.method: r for r in explain(tiny, passage, request, no_tick, remember=store.remember).results}
    assert "cannot be differentiated" in found["gradient_norm"].refusal and found["gradient_norm"].scores is None
    assert "occlusion" in found["gradient_norm"].refusal  # the hint says what works
    assert found["occlusion"].scores is not None and found["uniform"].scores is not None
    assert {r.method for r in store.kept.values()} == {m.name for m in list_methods() if not m.needs_gradient}


def test_stored_scores_are_used_per_method(tiny):
    passage, request = case(tiny, methods=ALL[:2])
    store = Store()
    first = explain(tiny, passage, request, no_tick, recall=store.recall, remember=store.remember)
    assert len(store.kept) == 2 and len(set(store.asked)) == 2
    passage, request = case(tiny)
    calls = []
    tiny.module.register_forward_hook(lambda *_: calls.append(1))
    second = explain(tiny, passage, request, no_tick, recall=store.recall, remember=store.remember)
    assert [r.from_cache for r in second.results] == [True, True] + [False] * (len(ALL) - 2)
    assert np.array_equal(first.results[0].scores, second.results[0].scores)
    calls.clear()
    explain(tiny, passage, request, no_tick, recall=store.recall, remember=store.remember)
    assert len(calls) == 1  # the targets' probabilities; no method runs


def test_keys_change_with_everything_that_decides_the_scores_and_with_nothing_else(tiny):
    def keys(model=tiny, **more):
        store = Store()
        passage, request = case(model, **{"methods": (MethodSpec("occlusion"), MethodSpec("gradient_norm")), **more})
        with pytest.raises(Cancelled):
            explain(model, passage, request, Ticks(stop_at=1), recall=store.recall)
        return store.asked

    base = keys()
    assert keys() == base
    changed = [
        keys(answer=" Rome, not Berlin"),
        keys(target=(0, 1)),
        keys(foil=" Berlin"),
        keys(objective="logit"),
        keys(seed=1),
        keys(prompt=Prompt("The capital of Spain is")),
        keys(methods=(MethodSpec.of("occlusion", {"operator": "delete"}), MethodSpec.of("gradient_norm", {"p": 1}))),
    ]
    for name in ("id", "revision", "dtype", "attention"):
        other = dataclasses.replace(tiny, info=dataclasses.replace(tiny.info, **{name: "other"}))
        changed.append(keys(other))
    # the later part of the answer is not seen by the targets
    assert keys(answer=" Paris, or Berlin") == base
    seen = set(base)
    for found in changed:
        assert not seen & set(found)
        seen |= set(found)
    by_sentence = keys(level="sentence")
    assert by_sentence[0] != base[0] and by_sentence[1] == base[1]  # only ablation depends on units
    same_device = dataclasses.replace(tiny, info=dataclasses.replace(tiny.info, device_reason="because"))
    assert keys(same_device) == base


def test_a_new_version_of_the_methods_forgets_old_scores(tiny, monkeypatch):
    passage, request = case(tiny, methods=(MethodSpec("uniform"),))
    store = Store()
    explain(tiny, passage, request, no_tick, recall=store.recall, remember=store.remember)
    monkeypatch.setattr("backend.registry.METHODS_VERSION", 10**6)
    again = explain(tiny, passage, request, no_tick, recall=store.recall, remember=store.remember)
    assert not again.results[0].from_cache


def test_wrong_requests_are_refused_before_the_model_runs(tiny):
    calls = []
    tiny.module.register_forward_hook(lambda *_: calls.append(1))
    for methods, error in [
        ((MethodSpec("no_such_method"),), UnknownMethod),
        ((MethodSpec.of("integrated_gradients", {"steps": 7}),), BadRequest),
        ((MethodSpec.of("occlusion", {"operator": "burn"}),), BadRequest),
        ((MethodSpec.of("gradient_norm", {"q": 2}),), BadRequest),
    ]:
        passage, request = case(tiny, methods=methods)
        with pytest.raises(error):
            explain(tiny, passage, request, no_tick)
    passage, request = case(tiny)
    same = dataclasses.replace(request, target=(0, 1), foil=passage.answer_tokens[0].text)
    with pytest.raises(BadRequest, match="same as the target"):
        explain(tiny, passage, same, no_tick)
    with pytest.raises(ValueError, match="answer"):
        explain(tiny, passage, dataclasses.replace(request, answer_ids=(1, 2)), no_tick)
    assert not calls


def test_cancel_ends_the_request(tiny):
    passage, request = case(tiny)
    whole = Ticks()
    explain(tiny, passage, request, whole)
    for stop_at in range(1, len(whole.calls), 5):
        ticks = Ticks(stop_at)
        with pytest.raises(Cancelled):
            explain(tiny, passage, request, ticks)
        assert len(ticks.calls) == stop_at


def test_memory_that_runs_out_becomes_a_sentence(tiny, monkeypatch):
    method = get_method("gradient_norm")

    def run(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 TiB")

    monkeypatch.setitem(registry._METHODS, "gradient_norm", dataclasses.replace(method, run=run))
    passage, request = case(tiny)
    with pytest.raises(OutOfMemory) as error:
        explain(tiny, passage, request, no_tick)
    assert "Gradient norm" in error.value.message and "shorter prompt" in error.value.hint
    assert error.value.__context__ is None  # no traceback holds on to the failed pass


def test_a_mistake_in_a_method_is_no_refusal(tiny, monkeypatch):
    method = get_method("gradient_norm")

    def run(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setitem(registry._METHODS, "gradient_norm", dataclasses.replace(method, run=run))
    with pytest.raises(RuntimeError, match="a mistake"):
        explain(tiny, *case(tiny), no_tick)


def test_notes_say_what_the_model_would_rather_have_said(tiny):
    passage, request = case(tiny, methods=(MethodSpec("uniform"),), target=(0, 1))
    found = explain(tiny, passage, request, no_tick)
    assert found.targets[0].rank > 1
    assert any("would rather have said" in note for note in found.notes)


def test_chat_prompts_keep_their_roles(tiny):
    prompt = Prompt(turns=(Turn("system", "Be brief."), Turn("user", "Name the capital of France.")))
    passage, request = case(tiny, prompt=prompt, level="word", target=(0, 1))
    found = explain(tiny, passage, request, no_tick)
    occlusion = next(r for r in found.results if r.method == "occlusion")
    assert occlusion.units is not None and len(occlusion.units) == occlusion.scores.shape[1]
    for (start, _), measured in zip(occlusion.units, occlusion.measured, strict=True):
        assert measured == (passage.tokens[start].role not in ("bos", "template"))


# -------------------------------------------------------------------------------------------------- what it will cost


def measured(forward=(0.1, 0.18), backward=(0.1, 0.18), **more):
    values = {"lengths": (64, 128), "attention": 0.0, "saved": 1e6, "working": 1e4, "logits": 4000, "at_once": 512}
    return Calibration(forward=forward, backward=backward, device="cpu", **{**values, **more})


def test_estimates_count_passes(tiny):
    passage, request = case(tiny, methods=ALL, target=(0, 1))
    found = estimate(passage, request, measured())
    assert set(found.per_method) == {m.name for m in list_methods()}
    assert found.seconds == pytest.approx(sum(found.per_method.values()))
    assert found.per_method["uniform"] == 0
    assert found.per_method["gradient_norm"] == pytest.approx(found.per_method["input_x_gradient"])
    assert found.per_method["integrated_gradients"] > 2 * found.per_method["gradient_norm"]
    assert "64 and 128 tokens" in found.basis and found.peak_bytes > 0
    doubled = estimate(passage, request, measured((0.2, 0.36), (0.2, 0.36)))
    assert doubled.seconds == pytest.approx(2 * found.seconds)


def test_estimates_extrapolate_linearly_and_add_attention():
    flat = measured()
    one = flat.seconds(flat.forward, 128, 1)
    assert one == pytest.approx(0.18)
    assert flat.seconds(flat.forward, 256, 1) == pytest.approx(0.18 + 128 * 0.08 / 64)
    assert flat.seconds(flat.forward, 128, 8) < one
    steep = measured(attention=1e-3)
    assert steep.seconds(steep.forward, 1024, 1) > 1.8 * flat.seconds(flat.forward, 1024, 1)


def test_calibration_measures_and_leaves_the_model_alone(tiny):
    before = [p.clone() for p in tiny.module.parameters()]
    ticks = Ticks()
    found = calibrate(tiny, ticks)
    assert all(t > 0 for t in found.forward) and found.saved > 0 and found.device == "cpu"
    assert ticks.calls[0] == (0, 5) and ticks.calls[-1] == (5, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.module.parameters(), strict=True))
    short = tiny_model("llama", max_position_embeddings=32)
    assert calibrate(short).lengths == (16, 32)
    with pytest.raises(Cancelled):
        calibrate(tiny, Ticks(stop_at=3))


def test_calibration_of_a_model_without_a_backward_pass(tiny):
    tiny.module.model.layers[1].register_forward_hook(lambda m, a, out: out.detach())
    found = calibrate(tiny)
    assert found.saved == 0 and found.backward == found.forward


@pytest.mark.smollm
def test_estimates_of_the_embedded_model_are_of_the_right_size(smollm):
    methods = (MethodSpec("gradient_norm"), MethodSpec("occlusion"))
    prompt = Prompt("The capital of France is Paris, and everybody who has been there knows the tower. " * 3)
    passage, request = case(smollm, methods, (0, 1), prompt, " It")
    predicted = estimate(passage, request, calibrate(smollm))
    found = explain(smollm, passage, request, no_tick)
    for result in found.results:
        assert 1 / 6 < predicted.per_method[result.method] / result.seconds < 6
