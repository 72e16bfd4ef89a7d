"""Weight files: official layouts, restricted reading, strict fit, a sentence for every misfit, checked downloads."""

from __future__ import annotations

import collections
import hashlib
import http.server
import pickle
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backend.errors import BadFile, ModelUnavailable, NotApplicable
from backend.features import weights as module
from backend.features.anyup import AnyUp
from backend.features.catalog import OFFICIAL, Official, official
from backend.features.fetch import fetch
from backend.features.jafar import JAFAR
from backend.features.state_files import read_state
from backend.features.weights import build, find_anyup, find_jafar, load_file
from backend.settings import get_settings
from tests.support.feature_cases import SHARED, picture, shaken


def jafar_state(channels: int = 12) -> dict[str, torch.Tensor]:
    return shaken(JAFAR(qk_dim=16, v_dim=channels)).state_dict()


def anyup_state() -> dict[str, torch.Tensor]:
    return shaken(AnyUp(qk_dim=16)).state_dict()


def test_files_say_which_model_they_are(tmp_path: Path) -> None:
    models = [
        JAFAR(qk_dim=16, v_dim=12, kernel_size=3),
        JAFAR(qk_dim=16, v_dim=16),
        AnyUp(qk_dim=16, lfu_dim=24, kernel_size_lfu=3),
    ]
    for number, model in enumerate(models):
        shaken(model)
        path = tmp_path / f"{number}.safetensors"
        save_file(model.state_dict(), path)
        loaded = load_file(path)
        assert type(loaded.model) is type(model)
        assert all(value.equal(model.state_dict()[name]) for name, value in loaded.model.state_dict().items())
        assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
        assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_shapes_do_not_tell_is_read_from_the_files_remarks(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(anyup_state(), path, {"num_heads": "2", "window_ratio": "0.25", "license": "CC0", "encoder": "any"})
    loaded = load_file(path)
    assert (loaded.model.num_heads, loaded.model.window_ratio) == (2, 0.25)
    assert (loaded.license, loaded.encoder) == ("CC0", "any")


def official_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint as the official training does: state, moments of the optimizer, an OmegaConf object."""
    config = type("DictConfig", (), {"__module__": "omegaconf.dictconfig"})
    package, part = types.ModuleType("omegaconf"), types.ModuleType("omegaconf.dictconfig")
    part.DictConfig = config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", package)
    monkeypatch.setitem(sys.modules, "omegaconf.dictconfig", part)
    filled = config()
    filled.content = {"lr": 3, "other": collections.defaultdict(list)}
    path = tmp_path / "official.pth"
    moments = {"state": {0: {"exp_avg": torch.zeros(4)}}}
    torch.save({"jafar": collections.OrderedDict(state), "optimizer_jafar": moments, "cfg": filled}, path)
    return path


def test_official_training_checkpoints_are_read_without_their_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = jafar_state()
    with monkeypatch.context() as patch:
        path = official_layout(tmp_path, patch, state)
    read, _ = read_state(path)
    assert read.keys() == state.keys()
    loaded = load_file(path, "jafar", 12)
    assert all(value.equal(state[name]) for name, value in loaded.model.state_dict().items())
    kept = get_settings().cache_dir / "upsamplers" / f"{loaded.sha256}.safetensors"
    assert kept.is_file(), "converted once, opened as safetensors from then on"


@pytest.mark.parametrize("layout", ["bare", "anyup", "state_dict"])
def test_official_layouts(tmp_path: Path, layout: str) -> None:
    state = anyup_state()
    path = tmp_path / "x.pth"
    torch.save(state if layout == "bare" else {layout: state, "epoch": 3}, path)
    read, _ = read_state(path)
    assert read.keys() == state.keys()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_files_that_could_run_code_are_refused_by_name(tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    path = tmp_path / "bad.pth"
    torch.save({"jafar": jafar_state(), "cfg": Bomb(marker)}, path)
    with pytest.raises(BadFile, match=r"could run code .*pathlib\.Path"):
        load_file(path)
    path.write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(BadFile):
        read_state(path)
    assert not marker.exists()


def test_misfits_each_have_a_sentence(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    save_file(jafar_state(768), good)
    with pytest.raises(BadFile, match="is for 768 channels, the encoder gives 384"):
        load_file(good, "jafar", 384)
    with pytest.raises(BadFile, match="holds weights of JAFAR, not of AnyUp"):
        load_file(good, "anyup")

    cases: dict[str, tuple[bytes, str]] = {
        "cut.safetensors": (good.read_bytes()[:-100], "damaged, cut short"),
        "empty.safetensors": (b"", "damaged, cut short"),
        "text.safetensors": (b"hello, this is text" * 10, "damaged, cut short"),
        "text.pth": (b"hello, this is text" * 10, "damaged, cut short"),
        "picture.png": (b"\x89PNG", "no weights file"),
    }
    torch.save(jafar_state(), tmp_path / "whole.pth")
    cases["cut.pth"] = ((tmp_path / "whole.pth").read_bytes()[:-500], "damaged, cut short")
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadFile, match=words):
            load_file(tmp_path / name)
    with pytest.raises(BadFile, match="There is no file gone"):
        load_file(tmp_path / "gone.safetensors")

    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(BadFile, match="damaged"):
        load_file(tmp_path / "zip.pth")
    torch.save([1, 2, 3], tmp_path / "list.pth")
    with pytest.raises(BadFile, match="holds no weights by name"):
        load_file(tmp_path / "list.pth")
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.safetensors")
    with pytest.raises(BadFile, match=r"neither JAFAR nor AnyUp .* conv1\.weight"):
        load_file(tmp_path / "resnet.safetensors")
    with (tmp_path / "huge.pth").open("wb") as stream:
        stream.truncate(80 << 20)
    with pytest.raises(BadFile, match="84 MB"):
        read_state(tmp_path / "huge.pth")


def test_a_state_that_does_not_fit_exactly_is_refused() -> None:
    state = jafar_state()
    missing = {k: v for k, v in state.items() if k != "rope.freqs"}
    with pytest.raises(BadFile, match=r"rope\.freqs is missing"):
        build(missing, {})
    with pytest.raises(BadFile, match="extra is too much"):
        build({**state, "extra": torch.zeros(1)}, {})
    with pytest.raises(BadFile, match=r"norm_q\.weight has shape \(3,\)"):
        build({**state, "cross_decode.cross_attn.norm_q.weight": torch.zeros(3)}, {})
    with pytest.raises(BadFile, match="NaN"):
        build({**state, "rope.freqs": torch.full((2, 16), torch.nan)}, {})


def test_released_weights_load_and_act(tmp_path: Path) -> None:
    if not (SHARED / "weights").is_dir():
        pytest.skip("the released weights are not beside the repository")
    for name in ("anyup_paper", "anyup_multi_backbone"):
        loaded = load_file(SHARED / "weights" / f"{name}.safetensors", "anyup")
        features = torch.randn(1, 5, 4, 4)
        result = loaded.model((picture(32, 32) - 0.45) / 0.22, features)
        assert float(result.min()) >= float(features.min()) and float(result.max()) <= float(features.max())


def test_jafar_weights_are_bound_to_their_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    save_file(jafar_state(), tmp_path / "jafar_lite_s16.safetensors", {"encoder": "lite_s16"})
    assert find_jafar("auto", "lite_s16", 12).encoder == "lite_s16"
    with pytest.raises(NotApplicable, match="no JAFAR weights for other"):
        find_jafar("auto", "other", 12)
    with pytest.raises(NotApplicable, match="no JAFAR weights for"):
        find_jafar("auto", "../jafar_lite_s16", 12)
    path = str(tmp_path / "jafar_lite_s16.safetensors")
    with pytest.raises(NotApplicable, match="made for lite_s16, not for other"):
        find_jafar(path, "other", 12)
    allowed = find_jafar(path, "other", 12, any_encoder=True)
    assert "made for lite_s16" in allowed.notes[0]
    with pytest.raises(NotApplicable, match="came without"):
        find_anyup("auto")
    with pytest.raises(NotApplicable, match="not been downloaded"):
        find_anyup("anyup_paper")
    with pytest.raises(NotApplicable, match="not been downloaded"):
        find_jafar("auto", "timm/vit_base_patch16_224.dino/last", 768)
    with pytest.raises(BadFile, match="another upsampler"):
        find_jafar("anyup_paper", "x", 3)


def test_the_table_of_official_weights_is_sound() -> None:
    assert len({entry.name for entry in OFFICIAL}) == len(OFFICIAL)
    for entry in OFFICIAL:
        assert entry.url.startswith("https://github.com/") and entry.url.endswith(".pth")
        assert entry.license and entry.credit
        assert len(entry.sha256) in {0, 64}
        assert official(entry.name) is entry


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *args: object) -> None: ...

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", files
    running.shutdown()
    running.server_close()


def test_downloads_are_whole_and_checked(tmp_path: Path, server: tuple[str, dict[str, bytes]]) -> None:
    address, files = server
    content = b"x" * 100_000
    files["/w.pth"] = content
    entry = Official(
        "w", "anyup", f"{address}/w.pth", len(content), hashlib.sha256(content).hexdigest(), "", 0, "CC0", "nobody"
    )
    online = get_settings().model_copy(update={"offline": False})
    target = tmp_path / "folder" / "w.pth"
    seen: list[int] = []
    assert fetch(entry, target, online, lambda done, total: seen.append(done)).read_bytes() == content
    assert seen[-1] == len(content)

    def refused(changed: Official, words: str) -> None:
        with pytest.raises(ModelUnavailable, match=words):
            fetch(changed, tmp_path / "folder" / "other.pth", online)
        assert [p.name for p in (tmp_path / "folder").iterdir()] == ["w.pth"], "nothing half-done is left"

    refused(replace(entry, sha256="0" * 64), "not the published one")
    refused(replace(entry, size=len(content) + 5, sha256=""), "should have 100,005 bytes")
    refused(replace(entry, size=50_000), "larger than expected")
    refused(replace(entry, url=f"{address}/gone.pth"), "status 404")
    refused(replace(entry, url="http://127.0.0.1:9/w.pth"), "does not answer")
    with pytest.raises(ModelUnavailable, match="switched off"):
        fetch(entry, tmp_path / "other.pth", get_settings())
