"""The result store: survives restarts, stays within its bound, refuses pickles, never breaks a computation."""

from __future__ import annotations

import hashlib
import pickle
import sqlite3
from pathlib import Path

import pytest

from backend.store import ResultStore, is_key


def key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_values_survive_a_restart(tmp_path: Path) -> None:
    first = ResultStore(tmp_path, limit_bytes=10**7)
    assert first.put(key("a"), b"value" * 50_000)
    first.close()
    assert ResultStore(tmp_path, limit_bytes=10**7).get(key("a")) == b"value" * 50_000


def test_the_size_bound_holds_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, limit_bytes=3_000_000)
    for number in range(100):
        store.put(key(str(number)), bytes(200_000))
        store.get(key("0"))
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert on_disk < 6_000_000
    assert store.get(key("99")) is not None
    assert store.get(key("0")) is not None, "recently used, so it stays"
    assert store.get(key("1")) is None


@pytest.mark.parametrize("bad", ["", "abc", "../../etc/passwd", "g" * 64, "A" * 64, key("a") + "\n"])
def test_only_hashes_are_keys(tmp_path: Path, bad: str) -> None:
    store = ResultStore(tmp_path, limit_bytes=10**7)
    assert not is_key(bad)
    assert store.get(bad) is None
    with pytest.raises(ValueError, match="sha256"):
        store.put(bad, b"x")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_a_planted_pickle_is_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "the-pickle-ran"
    store = ResultStore(tmp_path, limit_bytes=10**7)
    store.put(key("a"), b"x")
    store.close()
    planted = sqlite3.connect(tmp_path / "cache.db")
    with planted:
        planted.execute("UPDATE Cache SET mode = 4, value = ?", (sqlite3.Binary(pickle.dumps(Bomb(marker))),))
    planted.close()
    again = ResultStore(tmp_path, limit_bytes=10**7)
    assert again.get(key("a")) is None
    assert "unexpected format" in again.trouble
    assert not marker.exists()


def test_a_folder_that_cannot_be_written_is_said_and_survived(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = ResultStore(blocked, limit_bytes=10**7)
    assert store.put(key("a"), b"x") is False
    assert store.get(key("a")) is None
    assert "cannot be kept" in store.trouble


def test_a_full_disk_is_said_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore(tmp_path, limit_bytes=10**7)
    store.put(key("a"), b"x")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    assert store._cache is not None
    monkeypatch.setattr(store._cache, "set", full)
    assert store.put(key("b"), b"y") is False
    assert "No space left" in store.trouble
    assert store.get(key("a")) == b"x"
