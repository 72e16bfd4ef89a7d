"""The door to compute: answers, explanations, caching on disk, cancellation, links, other requests beside it."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from backend import registry
from backend.engine import Engine
from backend.errors import AppError, BadRequest, Cancelled, ModelUnavailable, OutOfMemory, PromptTooLong
from backend.settings import Settings
from backend.types import (
    AnswerRequest,
    CutRequest,
    Decoding,
    FaithfulnessRequest,
    InterventionRequest,
    MeasureRequest,
    MethodSpec,
    ModelRef,
    Prompt,
    SaliencyRequest,
    SanityRequest,
)
from tests.support.tiny import save_tiny

PROMPT = Prompt("The capital of France is")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache", offline=True, device="cpu", warm_up=False)


@pytest.fixture
def engine(settings):
    engine = Engine(settings)
    yield engine
    engine.close()


def asked(folder, **more):
    return AnswerRequest(ModelRef(str(folder)), PROMPT, Decoding(max_new_tokens=4), **more)


def question(answer, folder, *methods):
    specs = tuple(MethodSpec(name) for name in methods)
    return SaliencyRequest(ModelRef(str(folder)), PROMPT, answer.answer_ids, (0, len(answer.answer_ids)), specs)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_answer_and_its_explanation(engine, folder):
    answer = engine.run(asked(folder))
    explanation = engine.run(question(answer, folder, "gradient_norm", "occlusion"))
    assert [result.method for result in explanation.results] == ["gradient_norm", "occlusion"]
    for result in explanation.results:
        assert result.scores.shape == (len(answer.answer_ids), explanation.source_count)
    assert explanation.model.id == str(folder)
    assert explanation.versions["torch"]


def test_the_same_question_is_answered_from_disk_after_a_restart(settings, folder, monkeypatch):
    first = Engine(settings)
    answer = first.run(asked(folder))
    explanation = first.run(question(answer, folder, "gradient_norm"))
    first.close()
    second = Engine(settings)
    monkeypatch.setattr(second, "_leased", None)  # any attempt to load a model now fails
    again = second.run(question(second.run(asked(folder)), folder, "gradient_norm"))
    np.testing.assert_array_equal(again.results[0].scores, explanation.results[0].scores)
    assert again.created == explanation.created
    second.close()


def test_scores_of_a_method_are_reused_beside_another_method(engine, folder):
    answer = engine.run(asked(folder))
    engine.run(question(answer, folder, "gradient_norm"))
    both = engine.run(question(answer, folder, "gradient_norm", "input_x_gradient"))
    assert [result.from_cache for result in both.results] == [True, False]


def test_a_changed_model_folder_is_a_new_question(engine, tmp_path):
    save_tiny(tmp_path / "m", "llama")
    request = asked(tmp_path / "m")
    engine.run(request)
    assert engine.peek(request) is not None
    (tmp_path / "m" / "config.json").write_text((tmp_path / "m" / "config.json").read_text() + "\n")
    assert engine.peek(request) is None


def test_a_submitted_job_is_found_by_its_request_and_shared_by_content(engine, folder):
    request = asked(folder)
    mine = engine.submit(("a", "panel"), request)
    assert engine.ticket_for(("a", "panel"), request) is mine
    assert engine.ticket_for(("a", "panel"), dataclasses.replace(request, continuation="x")) is None
    until(lambda: not mine.active)
    assert mine.state == "done"
    assert engine.peek(request) == mine.result


def test_cancelling_reaches_the_method_and_ends_within_a_step(engine, folder):
    answer = engine.run(asked(folder))
    ticks = []

    def tick(done, total):
        ticks.append((done, total))
        if len(ticks) > 10:
            raise Cancelled

    request = dataclasses.replace(
        question(answer, folder), methods=(MethodSpec.of("integrated_gradients", {"steps": 512}),)
    )
    with pytest.raises(Cancelled):
        engine.run(request, tick=tick)
    assert len(ticks) == 11
    assert engine.peek(request) is None


def test_links_restore_a_result_and_others_find_nothing(engine, settings, folder):
    explanation = engine.run(question(engine.run(asked(folder)), folder, "uniform"))
    key = engine.save(explanation)
    other = Engine(settings)
    found = other.load(key)
    assert found is not None
    assert found.passage == explanation.passage
    assert other.load("0" * 64) is None
    assert other.load("../" + key[3:]) is None
    other.close()


def test_errors_are_sentences_and_the_engine_lives_on(engine, folder, tmp_path):
    with pytest.raises(ModelUnavailable) as missing:
        engine.run(AnswerRequest(ModelRef(str(tmp_path / "nothing")), PROMPT))
    assert missing.value.hint
    ticket = engine.submit(("a", "p"), AnswerRequest(ModelRef(str(tmp_path / "nothing")), PROMPT))
    until(lambda: ticket.state == "failed")
    assert isinstance(ticket.error, ModelUnavailable)
    assert engine.run(asked(folder)).answer_ids


@pytest.mark.parametrize("name", ["\0", "x" * 5000, "~nobody-of-this-name/model", "a/../b", "http://x/y", "*", ""])
def test_strange_model_names_are_refused_with_a_sentence(engine, name):
    with pytest.raises(AppError):
        engine.run(AnswerRequest(ModelRef(name), PROMPT))


def test_running_out_of_memory_becomes_a_sentence(engine, folder, monkeypatch):
    def explode(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("backend.models.generation.generate_ids", explode)
    with pytest.raises(OutOfMemory, match="memory"):
        engine.run(asked(folder))
    monkeypatch.undo()
    assert engine.run(asked(folder)).answer_ids


def test_a_model_file_deleted_while_running_is_no_loss_until_it_must_be_read_again(engine, settings, tmp_path):
    save_tiny(tmp_path / "m", "llama")
    engine.run(asked(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()
    assert engine.run(asked(tmp_path / "m", continuation=" Paris")).answer_ids
    fresh = Engine(settings.model_copy(update={"cache_dir": tmp_path / "fresh"}))
    with pytest.raises(ModelUnavailable) as gone:
        fresh.run(asked(tmp_path / "m"))
    assert gone.value.hint
    fresh.close()


def test_a_cost_is_known_once_the_model_was_measured(engine, folder):
    answer = engine.run(asked(folder))
    request = question(answer, folder, "integrated_gradients")
    assert engine.estimate(request, answer.passage) is None
    engine.run(MeasureRequest(ModelRef(str(folder))))
    estimate = engine.estimate(request, answer.passage)
    assert estimate.seconds > 0
    assert set(estimate.per_method) == {"integrated_gradients"}
    assert "timed here" in estimate.basis


def test_too_long_prompts_say_by_how_much_and_can_be_cut(settings, folder):
    engine = Engine(settings.model_copy(update={"max_prompt_tokens": 24}))
    long = Prompt("start " + "word " * 60 + "end")
    with pytest.raises(PromptTooLong) as refused:
        engine.run(AnswerRequest(ModelRef(str(folder)), long))
    assert refused.value.tokens > refused.value.limit > 0
    cut = engine.run(CutRequest(ModelRef(str(folder)), long, "end"))
    assert long.text.endswith(cut.prompt.text)
    assert long.text == cut.dropped + cut.prompt.text
    assert engine.run(AnswerRequest(ModelRef(str(folder)), cut.prompt, Decoding(max_new_tokens=1))).answer_ids
    engine.close()


def test_two_models_in_two_threads_do_not_mix(engine, folder, tmp_path):
    save_tiny(tmp_path / "gpt2", "gpt2")
    alone = {name: engine.run(asked(name)) for name in (folder, tmp_path / "gpt2")}
    results = {}

    def work(name):
        answer = engine.run(asked(name, continuation=" a small dog"))
        results[name] = engine.run(question(answer, name, "gradient_norm", "occlusion"))

    threads = [threading.Thread(target=work, args=(name,)) for name in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = Engine(engine.settings.model_copy(update={"cache_dir": tmp_path / "other"}))
    for name in alone:
        answer = fresh.run(asked(name, continuation=" a small dog"))
        expected = fresh.run(question(answer, name, "gradient_norm", "occlusion"))
        for got, wanted in zip(results[name].results, expected.results, strict=True):
            np.testing.assert_array_equal(got.scores, wanted.scores)
    fresh.close()


def test_a_new_version_of_the_methods_asks_anew(engine, folder, monkeypatch):
    request = asked(folder)
    engine.run(request)
    monkeypatch.setattr("backend.registry.METHODS_VERSION", registry.METHODS_VERSION + 1)
    assert engine.peek(request) is None


def test_a_result_is_not_kept_if_the_model_changed_under_the_run(engine, tmp_path):
    save_tiny(tmp_path / "m", "llama")
    config = tmp_path / "m" / "config.json"

    def edit(stage):
        if stage == "Answering":
            config.write_text(config.read_text() + "\n")

    assert engine.run(asked(tmp_path / "m"), stage=edit).answer_ids
    assert engine.peek(asked(tmp_path / "m")) is None


def test_what_comes_from_disk_says_so(settings, folder):
    first = Engine(settings)
    request = question(first.run(asked(folder)), folder, "gradient_norm")
    assert [result.from_cache for result in first.run(request).results] == [False]
    first.close()
    second = Engine(settings)
    assert [result.from_cache for result in second.peek(request).results] == [True]
    second.close()


def test_all_names_of_the_first_device_share_one_worker(engine):
    assert engine._queue(ModelRef(device="auto")) is engine._queue(ModelRef(device="cpu"))
    assert engine._queue(ModelRef(device="cuda")) is engine._queue(ModelRef(device="cuda:0"))
    assert engine._queue(ModelRef(device="cuda:1")) is not engine._queue(ModelRef(device="cuda:0"))


def test_an_evicted_model_is_known_but_not_in_memory(engine, folder):
    ref = ModelRef(str(folder))
    assert not engine.is_loaded(ref)
    engine.run(asked(folder))
    assert engine.is_loaded(ref)
    engine._hub.evict_idle()
    assert engine.info(ref) is not None
    assert not engine.is_loaded(ref)


def test_a_cut_leaves_room_for_a_given_answer_in_tokens(engine, folder):
    context = engine.run(MeasureRequest(ModelRef(str(folder)))).context_length
    long = Prompt("word " * 2 * context)
    given = " a small dog"
    cut = engine.run(CutRequest(ModelRef(str(folder)), long, "start", 1, given))
    answer = engine.run(AnswerRequest(ModelRef(str(folder)), cut.prompt, continuation=given))
    assert cut.tokens + len(answer.answer_ids) == context


def test_a_saved_explanation_can_be_measured_and_tested(engine, folder):
    answer = engine.run(asked(folder))
    explanation = engine.run(question(answer, folder, "gradient_norm", "uniform"))
    ref, key = ModelRef(str(folder)), engine.save(explanation)
    found = engine.run(FaithfulnessRequest(ref, key))
    assert [method.method for method in found.methods] == ["gradient_norm", "uniform"]
    assert found.log_prob == pytest.approx(sum(np.log(t.probability) for t in explanation.targets), abs=1e-4)
    tested = engine.run(SanityRequest(ref, key))
    assert [method.method for method in tested] == ["gradient_norm", "uniform"]
    assert all(check.verdict == "ok" for m in tested for check in m.checks if check.name == "plain_logits_unchanged")
    for request in (FaithfulnessRequest(ref, "0" * 64), SanityRequest(ref, "0" * 64)):
        with pytest.raises(BadRequest, match="no longer keeps"):
            engine.run(request)


def test_an_intervention_changes_what_comes_next(engine, folder):
    answer = engine.run(asked(folder))
    request = InterventionRequest(ModelRef(str(folder)), PROMPT, answer.answer_ids, 0, removed=(1, 2), new_tokens=3)
    found = engine.run(request)
    assert found.distance > 0
    assert 1 <= len(found.answer) <= 3
    assert engine.peek(request) is None


def test_a_refusal_is_not_remembered(engine, folder):
    answer = engine.run(asked(folder))
    request = question(answer, folder, "gradient_norm", "at2")  # nobody has fitted AT2's weights to this model
    first = engine.run(request)
    assert first.results[1].refusal and first.results[0].scores is not None
    assert engine.peek(request) is None
    assert engine.run(request).results[0].from_cache
    assert engine.load(engine.save(first)) is first  # a link shows what was shown
