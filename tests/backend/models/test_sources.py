"""Ids to files: the real hub client against a hub on the loopback interface, local paths, and every refusal."""

import errno
import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.errors import BadRequest, Cancelled, ModelUnavailable
from backend.models import download
from backend.models.loading import load, plan_loading
from backend.models.placement import choose_placement
from backend.models.sources import find_source, is_remote
from backend.settings import Settings
from backend.types import ModelRef, no_tick
from tests.support.hub_server import black_hole, closed_port, serve_hub
from tests.support.tiny import save_tiny


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two model folders to publish: one file of weights, and three shards."""
    folder = tmp_path_factory.mktemp("shelf")
    return {
        "single": save_tiny(folder / "single", "llama", seed=1),
        "shards": save_tiny(folder / "shards", "qwen3", seed=2, shard="60KB"),
    }


@pytest.fixture
def hub(shelf):
    with serve_hub() as hub:
        hub.add("lab/single", shelf["single"])
        hub.add("lab/shards", shelf["shards"])
        yield hub


@pytest.fixture
def settings(hub, tmp_path):
    return settings_for(hub.url, tmp_path)


def settings_for(url: str, tmp_path: Path, **changes) -> Settings:
    changes = {"hub_timeout_s": 1.0, "offline": False, "device": "cpu", **changes}
    return Settings(hub_endpoint=url, cache_dir=tmp_path / "cache", **changes)


def open_model(ref: ModelRef, settings: Settings):
    source = find_source(ref, settings)
    return load(plan_loading(source.path, choose_placement(ref, settings)), ref, source.revision)


# ---------------------------------------------------------------------------------------------------- downloads


@pytest.mark.parametrize("name", ["single", "shards"])
def test_model_loads_by_id_and_again_without_the_hub(name, hub, shelf, settings, tmp_path):
    commit = hub.repositories[f"lab/{name}"].branches["main"]
    model = open_model(ModelRef(f"lab/{name}"), settings)
    assert model.info.revision == commit
    direct = AutoModelForCausalLM.from_pretrained(shelf[name])
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.module(ids).logits, direct(ids).logits)

    asked = len(hub.requests)
    for again in (settings_for(hub.url, tmp_path, offline=True), settings_for(closed_port(), tmp_path)):
        assert open_model(ModelRef(f"lab/{name}"), again).info.revision == commit
    assert len(hub.requests) == asked


def test_shards_are_several_files(shelf):
    assert len(list(shelf["shards"].glob("*.safetensors"))) >= 3


def test_cached_copy_used_without_the_hub_is_noted(hub, settings, tmp_path):
    assert find_source(ModelRef("lab/single"), settings).notes == ()
    (note,) = find_source(ModelRef("lab/single"), settings_for(closed_port(), tmp_path)).notes
    assert "cannot be reached" in note and "downloaded copy" in note


def test_second_look_fetches_nothing_again(hub, settings):
    find_source(ModelRef("lab/single"), settings)
    fetched = hub.downloads()
    find_source(ModelRef("lab/single"), settings)
    assert hub.downloads() == fetched
    assert "model.safetensors" in fetched


def test_revisions_are_told_apart(hub, shelf, settings):
    other = hub.add("lab/single", shelf["shards"], branch="v2")
    main = find_source(ModelRef("lab/single"), settings)
    named = find_source(ModelRef("lab/single", "v2"), settings)
    pinned = find_source(ModelRef("lab/single", other), settings)
    assert named.revision == pinned.revision == other != main.revision
    assert named.path == pinned.path != main.path


def test_pinned_and_cached_commit_asks_no_hub(hub, settings):
    commit = find_source(ModelRef("lab/single"), settings).revision
    asked = len(hub.requests)
    assert find_source(ModelRef("lab/single", commit), settings).revision == commit
    assert len(hub.requests) == asked


def test_new_commit_on_the_branch_is_fetched(hub, shelf, settings, tmp_path):
    old = find_source(ModelRef("lab/single"), settings)
    new = hub.add("lab/single", save_tiny(tmp_path / "new", seed=9))
    assert find_source(ModelRef("lab/single"), settings).revision == new != old.revision


def test_pickles_and_programs_are_never_fetched(hub, shelf, settings, tmp_path):
    folder = save_tiny(tmp_path / "mixed")
    for name in ("pytorch_model.bin", "modeling_evil.py", "optimizer.pt", "extra.pkl", "README.md"):
        (folder / name).write_bytes(b"x")
    hub.add("lab/mixed", folder)
    find_source(ModelRef("lab/mixed"), settings)
    assert {Path(name).suffix for name in hub.downloads()} <= {".json", ".jinja", ".safetensors"}


def test_wrong_architecture_is_refused_before_its_weights_are_fetched(hub, settings, tmp_path):
    folder = save_tiny(tmp_path / "t5")
    change_config(folder, model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)
    hub.add("lab/t5", folder)
    with pytest.raises(ModelUnavailable, match="T5ForConditionalGeneration is an encoder-decoder"):
        find_source(ModelRef("lab/t5"), settings)
    assert hub.downloads() == ["config.json"]


def test_progress_counts_bytes_and_approval_sees_the_size(hub, shelf, settings):
    seen, sizes = [], []
    hub.slow_s = 0.02
    find_source(ModelRef("lab/single"), settings, lambda done, total: seen.append((done, total)), sizes.append)
    size = (shelf["single"] / "model.safetensors").stat().st_size
    assert sizes == [size]
    assert any(0 < done < total for done, total in seen)
    assert all(0 <= done <= total for done, total in seen)


def test_refused_approval_fetches_no_weights(hub, settings):
    def refuse(size):
        raise BadRequest("too big")

    with pytest.raises(BadRequest, match="too big"):
        find_source(ModelRef("lab/single"), settings, no_tick, refuse)
    assert "model.safetensors" not in hub.downloads()


def test_cancelled_download_leaves_nothing_half_done(hub, settings):
    hub.slow_s = 0.2
    started = threading.Event()

    def tick(done, total):
        if any("model.safetensors" in r for r in hub.requests):
            started.set()
            raise Cancelled

    with pytest.raises(Cancelled):
        find_source(ModelRef("lab/single"), settings, tick)
    assert started.is_set()
    assert not (download.hub_cache(settings) / "models--lab--single" / "refs").exists()
    hub.slow_s = 0
    source = find_source(ModelRef("lab/single"), settings)
    assert plan_loading(source.path, choose_placement(ModelRef(), settings)).parameters > 0


def test_interrupted_download_is_not_taken_for_a_cached_model(hub, settings, tmp_path):
    source = find_source(ModelRef("lab/shards"), settings)
    next(source.path.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(ModelUnavailable, match="has not been downloaded"):
        find_source(ModelRef("lab/shards"), settings_for(hub.url, tmp_path, offline=True))
    repaired = find_source(ModelRef("lab/shards"), settings)
    assert plan_loading(repaired.path, choose_placement(ModelRef(), settings)).parameters > 0


# ---------------------------------------------------------------------------------------------------- refusals


def test_default_time_limit_answers_within_ten_seconds():
    assert Settings.model_fields["hub_timeout_s"].default + 0.5 < 10


def test_hub_that_refuses_connections(tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        find_source(ModelRef("lab/single"), settings_for(closed_port(), tmp_path))


def test_hub_that_never_answers(tmp_path):
    with black_hole() as url, pytest.raises(ModelUnavailable, match="cannot be reached"):
        find_source(ModelRef("lab/single"), settings_for(url, tmp_path))


def test_hub_that_hangs_after_the_request(hub, settings):
    hub.hang = True
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        find_source(ModelRef("lab/single"), settings)


def test_waiting_for_the_hub_can_be_cancelled(hub, tmp_path):
    hub.hang = True

    def tick(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        find_source(ModelRef("lab/single"), settings_for(hub.url, tmp_path, hub_timeout_s=30), tick)


def test_stalled_download_ends(hub, settings, monkeypatch):
    monkeypatch.setattr(download, "_STALL_S", 0.5)
    hub.hang_on = "tokenizer.json"
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        find_source(ModelRef("lab/single"), settings)
    assert "config.json" in hub.downloads()


def test_hub_with_a_server_error(hub, settings):
    hub.broken = 503
    with pytest.raises(ModelUnavailable, match="error 503"):
        find_source(ModelRef("lab/single"), settings)


def test_address_that_is_no_hub(hub, settings):
    hub.gibberish = True
    with pytest.raises(ModelUnavailable, match="does not answer like a model hub"):
        find_source(ModelRef("lab/single"), settings)


def test_endpoint_that_is_no_address(tmp_path):
    with pytest.raises(ModelUnavailable):
        find_source(ModelRef("lab/single"), settings_for("nonsense", tmp_path))


def test_unknown_id(settings):
    with pytest.raises(ModelUnavailable, match="no model named 'lab/nothing'"):
        find_source(ModelRef("lab/nothing"), settings)


def test_unknown_revision(settings):
    with pytest.raises(ModelUnavailable, match="no revision 'v9'"):
        find_source(ModelRef("lab/single", "v9"), settings)


@pytest.mark.parametrize("status", [401, 403])
def test_gated_model(hub, settings, status):
    hub.repositories["lab/single"].gated = status
    with pytest.raises(ModelUnavailable, match="lab/single is gated"):
        find_source(ModelRef("lab/single"), settings)


def test_only_pickles_on_the_hub(hub, settings, tmp_path):
    folder = save_tiny(tmp_path / "old")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.add("lab/old", folder)
    with pytest.raises(ModelUnavailable, match="no safetensors weights, only files that can run code"):
        find_source(ModelRef("lab/old"), settings)
    assert hub.downloads() == []


def test_only_gguf_on_the_hub(hub, settings, tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").write_bytes(b"GGUF")
    hub.add("lab/gguf", tmp_path / "gguf")
    with pytest.raises(ModelUnavailable, match="holds GGUF files"):
        find_source(ModelRef("lab/gguf"), settings)


def test_no_weights_on_the_hub(hub, settings, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    hub.add("lab/bare", tmp_path / "bare")
    with pytest.raises(ModelUnavailable, match="no weights on the hub"):
        find_source(ModelRef("lab/bare"), settings)


def test_no_config_on_the_hub(hub, settings, tmp_path):
    folder = save_tiny(tmp_path / "noconfig")
    (folder / "config.json").unlink()
    hub.add("lab/noconfig", folder)
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        find_source(ModelRef("lab/noconfig"), settings)


def test_missing_shard_on_the_hub(hub, shelf, settings):
    shard = sorted(p.name for p in shelf["shards"].glob("*.safetensors"))[1]
    hub.repositories["lab/shards"].missing.add(shard)
    with pytest.raises(ModelUnavailable, match=f"incomplete on the hub: the file {shard} is missing"):
        find_source(ModelRef("lab/shards"), settings)


def test_full_disk_is_seen_before_the_download(hub, settings, monkeypatch):
    real = download.shutil.disk_usage
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: real(path)._replace(free=10))
    with pytest.raises(ModelUnavailable, match=r"full: .* MB are needed"):
        find_source(ModelRef("lab/single"), settings)
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "is full"), (errno.EACCES, "cannot be written")])
def test_disk_that_takes_no_file(settings, monkeypatch, number, words):
    def fail(*args, **kwargs):
        raise OSError(number, "simulated")

    monkeypatch.setattr(download, "hf_hub_download", fail)
    with pytest.raises(ModelUnavailable, match=words):
        find_source(ModelRef("lab/single"), settings)


def test_offline_without_a_copy(hub, tmp_path):
    with pytest.raises(ModelUnavailable, match="offline"):
        find_source(ModelRef("lab/single"), settings_for(hub.url, tmp_path, offline=True))
    assert hub.requests == []


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "   ",
        "https://example.org/model",
        "owner/name/more",
        "owner/../name",
        "../../secret",
        "a b/c",
        "owner/na--me",
        "ownér/name",
        "owner/name?x=1",
        "x\0y",
        "o" * 400,
        "owner/" + "n" * 5000,
        "<script>",
    ],
)
def test_ids_that_are_neither_path_nor_name(bad, hub, settings):
    with pytest.raises((BadRequest, ModelUnavailable)):
        find_source(ModelRef(bad), settings)
    assert hub.requests == []


@pytest.mark.parametrize("bad", ["../../x", "a b", "", "-x", "v1\0", "x" * 300])
def test_revisions_that_are_none(bad, hub, settings):
    with pytest.raises(BadRequest, match="not a revision"):
        find_source(ModelRef("lab/single", bad), settings)
    assert hub.requests == []


# ---------------------------------------------------------------------------------------------------- local files


def test_local_folder_and_file_are_told_from_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert not is_remote("here") and not is_remote("./gone") and not is_remote("gone.gguf") and not is_remote("/gone")
    assert is_remote("owner/name") and is_remote("gpt2")


def test_local_folder_that_does_not_exist(settings, tmp_path):
    with pytest.raises(ModelUnavailable, match="no file or folder"):
        find_source(ModelRef(str(tmp_path / "gone")), settings)


def test_local_file_that_is_no_gguf(settings, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelUnavailable, match="not a GGUF file"):
        find_source(ModelRef(str(tmp_path / "model.bin")), settings)


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
