"""Fingerprints of model files, and which models count as downloaded."""

import pytest

from backend.models.identity import downloaded, fingerprint
from backend.settings import Settings
from backend.types import ModelRef

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache")


def download(settings, name, *files):
    folder = settings.cache_dir / "hub" / f"models--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).write_text("x")
    return snapshot


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "merges.txt", "tokenizer.model"])
def test_every_file_that_is_read_counts(settings, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    before = fingerprint(ModelRef(str(folder)), settings)
    (folder / name).write_text("1")
    assert fingerprint(ModelRef(str(folder)), settings) != before


def test_a_branch_is_its_commit_and_a_folder_in_its_place_is_nothing(settings):
    snapshot = download(settings, "a--b", "model.safetensors")
    assert fingerprint(ModelRef("a/b"), settings) == COMMIT
    (snapshot.parents[1] / "refs" / "odd").mkdir()
    assert fingerprint(ModelRef("a/b", "odd"), settings) == "odd"


def test_interrupted_downloads_are_not_offered(settings):
    download(settings, "a--whole", "config.json", "model.safetensors")
    snapshot = download(settings, "a--begun", "config.json")
    (snapshot / "model.safetensors").symlink_to("../../blobs/missing")
    assert downloaded(settings) == ("a/whole",)
