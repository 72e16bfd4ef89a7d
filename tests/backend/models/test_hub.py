"""Leases, eviction, the load lock: models are shared, evicted before the next one loads, and never while in use."""

import gc
import json
import shutil
import threading
import weakref

import pytest
import torch

from backend.errors import Cancelled, ModelUnavailable, OutOfMemory
from backend.models import hub as hub_module
from backend.models.hub import ModelHub
from backend.settings import Settings
from backend.types import ModelRef
from tests.support.hub_server import serve_hub
from tests.support.tiny import save_tiny


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    return [save_tiny(root / name, seed=seed) for seed, name in enumerate("abc")]


@pytest.fixture
def refs(shelf, tmp_path):
    """Three models of the same size, each in a folder that the test may change."""
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in shelf]
    return [ModelRef(str(folder), device="cpu") for folder in copies]


SIZE = 176_800  # bytes of one tiny model, with its rotary table


def make_hub(models: float, tmp_path, **changes):
    """A hub with room for that many tiny models."""
    return ModelHub(Settings(memory_budget_gb=models * SIZE / 1e9, cache_dir=tmp_path / "cache", **changes))


@pytest.fixture
def loads(monkeypatch):
    """Record each load with the models that were alive when it began."""
    real, record, alive = hub_module.load, [], []

    def watched(plan, ref, revision, tick):
        gc.collect()
        record.append((ref.id, [name for name, model in alive if model() is not None]))
        model = real(plan, ref, revision, tick)
        alive.append((ref.id, weakref.ref(model.module)))
        return model

    monkeypatch.setattr(hub_module, "load", watched)
    return record


def use(hub, ref):
    with hub.lease(ref) as model:
        return model.info


# ---------------------------------------------------------------------------------------------------- sharing


def test_size_of_the_tiny_models_is_what_these_tests_assume(refs, tmp_path):
    with make_hub(9, tmp_path).lease(refs[0]) as model:
        assert model.nbytes == SIZE


def test_model_is_loaded_once_and_shared(refs, tmp_path, loads):
    hub = make_hub(9, tmp_path)
    with hub.lease(refs[0]) as one, hub.lease(refs[0]) as two:
        assert one is two
        assert [m.leases for m in hub.loaded()] == [2]
    assert [m.leases for m in hub.loaded()] == [0]
    use(hub, refs[0])
    assert len(loads) == 1


def test_same_model_asked_for_in_other_words_is_shared(refs, tmp_path, loads):
    hub = make_hub(9, tmp_path, device="cpu")
    use(hub, refs[0])
    use(hub, ModelRef(refs[0].id, device="auto", dtype="float32"))
    assert len(loads) == 1
    use(hub, ModelRef(refs[0].id, device="cpu", dtype="bfloat16"))
    assert len(loads) == 2


def test_many_threads_load_one_model_once(refs, tmp_path, loads):
    hub = make_hub(9, tmp_path)
    inside, gate, models = [], threading.Barrier(6), []

    def work():
        gate.wait()
        with hub.lease(refs[0]) as model:
            models.append(model)
            inside.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 6 and len(loads) == 1
    assert all(model is models[0] for model in models)


def test_different_models_never_load_at_the_same_time(refs, tmp_path, monkeypatch):
    real, busy, overlaps = hub_module.load, threading.Lock(), []

    def watched(*args):
        if not busy.acquire(blocking=False):
            overlaps.append(args)
            return real(*args)
        try:
            return real(*args)
        finally:
            busy.release()

    monkeypatch.setattr(hub_module, "load", watched)
    hubs = [make_hub(9, tmp_path), make_hub(9, tmp_path)]  # the lock belongs to the process
    threads = [threading.Thread(target=use, args=(hub, ref)) for hub in hubs for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert all(len(hub.loaded()) == 3 for hub in hubs)


def test_loaded_models_are_described(refs, tmp_path):
    hub = make_hub(9, tmp_path)
    assert hub.loaded() == ()
    use(hub, refs[0])
    with hub.lease(refs[1]):
        first, second = hub.loaded()
        assert (first.id, first.leases, first.idle_seconds) == (refs[1].id, 1, 0.0)
        assert (second.id, second.leases, second.nbytes) == (refs[0].id, 0, SIZE)
        assert second.idle_seconds > 0


# ---------------------------------------------------------------------------------------------------- eviction


def test_old_model_is_gone_before_the_new_one_loads(refs, tmp_path, loads):
    hub = make_hub(1.5, tmp_path)
    for ref in refs:
        use(hub, ref)
    assert loads == [(ref.id, []) for ref in refs]
    assert [m.id for m in hub.loaded()] == [refs[2].id]


def test_least_recently_used_goes_first(refs, tmp_path, loads):
    hub = make_hub(2.5, tmp_path)
    use(hub, refs[0])
    use(hub, refs[1])
    use(hub, refs[0])
    use(hub, refs[2])
    assert loads[-1] == (refs[2].id, [refs[0].id])
    assert [m.id for m in hub.loaded()] == [refs[2].id, refs[0].id]


def test_no_more_than_needed_is_evicted(refs, tmp_path):
    hub = make_hub(3.5, tmp_path)
    for ref in refs:
        use(hub, ref)
    assert len(hub.loaded()) == 3


def test_evicted_model_loads_again(refs, tmp_path, loads):
    hub = make_hub(1.5, tmp_path)
    for ref in (refs[0], refs[1], refs[0]):
        use(hub, ref)
    assert len(loads) == 3


def test_leased_model_is_not_evicted_and_the_next_waits_for_it(refs, tmp_path, loads):
    hub = make_hub(1.5, tmp_path)
    waiting, order = threading.Event(), []

    def other():
        with hub.lease(refs[1], lambda done, total: waiting.set()):
            order.append("second in")

    with hub.lease(refs[0]) as model:
        thread = threading.Thread(target=other)
        thread.start()
        assert waiting.wait(60)
        assert not order
        assert torch.isfinite(model.module(torch.tensor([[5]])).logits).all()
        order.append("first out")
        del model
    thread.join()
    assert order == ["first out", "second in"]
    assert loads[-1] == (refs[1].id, [])


def test_waiting_for_room_can_be_cancelled(refs, tmp_path):
    hub = make_hub(1.5, tmp_path)
    raised = []

    def other():
        def tick(done, total):
            raise Cancelled

        try:
            with hub.lease(refs[1], tick):
                pass
        except Cancelled:
            raised.append(True)

    with hub.lease(refs[0]):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert raised == [True]
    assert use(hub, refs[1]).id == refs[1].id  # the load lock was given back


def test_second_lease_of_one_job_beyond_the_budget_is_refused_and_does_not_wait_for_itself(refs, tmp_path):
    hub = make_hub(1.5, tmp_path)
    with hub.lease(refs[0]), pytest.raises(OutOfMemory, match="Both models together"):
        use(hub, refs[1])
    assert use(hub, refs[1]).id == refs[1].id


def test_lease_ends_when_the_job_fails(refs, tmp_path):
    hub = make_hub(1.5, tmp_path)
    with pytest.raises(ZeroDivisionError), hub.lease(refs[0]):
        raise ZeroDivisionError
    assert [m.leases for m in hub.loaded()] == [0]


def test_idle_models_can_all_be_dropped(refs, tmp_path):
    hub = make_hub(9, tmp_path)
    use(hub, refs[0])
    with hub.lease(refs[1]):
        hub.evict_idle()
        assert [m.id for m in hub.loaded()] == [refs[1].id]


# ---------------------------------------------------------------------------------------------------- memory


def test_model_beyond_the_budget_loads_alone_if_memory_allows(refs, tmp_path, loads):
    hub = make_hub(0.5, tmp_path)
    use(hub, refs[0])
    use(hub, refs[1])
    assert loads == [(refs[0].id, []), (refs[1].id, [])]
    assert len(hub.loaded()) == 1


def test_model_beyond_all_memory_is_refused_with_numbers(refs, tmp_path, monkeypatch, loads):
    monkeypatch.setattr(hub_module, "free_bytes", lambda device: 100_000)
    hub = make_hub(9, tmp_path)
    with pytest.raises(OutOfMemory, match=r"takes 0\.0 GB in float32; cpu has 0\.0 GB left and the budget is"):
        use(hub, refs[0])
    assert loads == []


def test_idle_models_make_room_when_memory_is_short_within_the_budget(refs, tmp_path, monkeypatch):
    hub = make_hub(9, tmp_path)
    use(hub, refs[0])
    monkeypatch.setattr(hub_module, "free_bytes", lambda device: 0 if hub.loaded() else 10**9)
    use(hub, refs[1])
    assert [m.id for m in hub.loaded()] == [refs[1].id]


def test_out_of_memory_while_loading_evicts_and_tries_once_more(refs, tmp_path, monkeypatch):
    hub = make_hub(9, tmp_path)
    use(hub, refs[0])
    use(hub, refs[1])
    real = hub_module.load

    def short(*args):
        if hub.loaded():
            raise OutOfMemory("no room")
        return real(*args)

    monkeypatch.setattr(hub_module, "load", short)
    use(hub, refs[2])
    assert [m.id for m in hub.loaded()] == [refs[2].id]


def test_out_of_memory_with_nothing_to_evict_is_told_and_the_hub_lives_on(refs, tmp_path, monkeypatch):
    def fail(*args):
        raise OutOfMemory("no room")

    hub = make_hub(9, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hub_module, "load", fail)
        with pytest.raises(OutOfMemory, match="no room"):
            use(hub, refs[0])
    assert use(hub, refs[0]).id == refs[0].id


def test_model_too_large_for_memory_is_refused_before_its_download(tmp_path, monkeypatch, shelf):
    monkeypatch.setattr(hub_module, "free_bytes", lambda device: 1000)
    with serve_hub() as server:
        server.add("lab/large", shelf[0])
        hub = make_hub(9, tmp_path, hub_endpoint=server.url, offline=False)
        with pytest.raises(OutOfMemory, match="lab/large would take at least"):
            use(hub, ModelRef("lab/large", device="cpu"))
        assert "model.safetensors" not in server.downloads()


# ---------------------------------------------------------------------------------------------------- files


def test_model_from_a_hub_is_leased_with_its_commit_and_notes(tmp_path, shelf):
    with serve_hub() as server:
        commit = server.add("lab/a", shelf[0])
        hub = make_hub(9, tmp_path, hub_endpoint=server.url, offline=False, hub_timeout_s=1)
        with hub.lease(ModelRef("lab/a", device="cpu")) as model:
            assert model.info.revision == commit and model.notes == ()
        endpoint = server.url
    later = make_hub(9, tmp_path, hub_endpoint=endpoint, offline=False, hub_timeout_s=1)
    with later.lease(ModelRef("lab/a", device="cpu")) as model:
        assert model.info.revision == commit
        assert "downloaded copy" in model.notes[0]


def test_deleted_files_do_not_matter_to_a_model_in_memory(refs, tmp_path, loads):
    hub = make_hub(9, tmp_path)
    with hub.lease(refs[0]) as model:
        before = model.module(torch.tensor([[5, 6]])).logits
        shutil.rmtree(refs[0].id)
        assert torch.equal(model.module(torch.tensor([[5, 6]])).logits, before)
    with hub.lease(refs[0]) as model:
        assert torch.equal(model.module(torch.tensor([[5, 6]])).logits, before)
    hub.evict_idle()
    with pytest.raises(ModelUnavailable, match="no file or folder"):
        use(hub, refs[0])


def test_replaced_files_are_loaded_anew(refs, tmp_path, shelf):
    hub = make_hub(9, tmp_path)
    with hub.lease(refs[0]) as old:
        shutil.copy(shelf[1] / "model.safetensors", f"{refs[0].id}/model.safetensors")
        with hub.lease(refs[0]) as new:
            assert new is not old
            assert new.info.revision != old.info.revision
    assert [m.leases for m in hub.loaded()] == [0]


def test_edited_configuration_is_loaded_anew(refs, tmp_path, loads):
    hub = make_hub(9, tmp_path)
    use(hub, refs[0])
    file = f"{refs[0].id}/config.json"
    with open(file) as stream:
        config = json.load(stream)
    with open(file, "w") as stream:
        json.dump({**config, "rms_norm_eps": 0.01}, stream)
    use(hub, refs[0])
    assert len(loads) == 2


def test_refused_model_does_not_block_the_next(refs, tmp_path):
    hub = make_hub(9, tmp_path)
    with pytest.raises(ModelUnavailable):
        use(hub, ModelRef(str(tmp_path / "gone"), device="cpu"))
    assert use(hub, refs[0]).id == refs[0].id


@pytest.mark.smollm
def test_embedded_model_is_leased_by_its_name(own_environment):
    hub = ModelHub(Settings(cache_dir=own_environment))
    info = use(hub, ModelRef(device="cpu"))
    assert (info.id, info.parameters) == ("smollm2-135m-instruct", 134_515_008)
    assert hub.loaded()[0].nbytes >= 4 * info.parameters
