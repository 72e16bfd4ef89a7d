"""Fixtures for all tests: an environment of their own, tiny models, and the embedded model, loaded once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Converted once and kept between runs: the conversion takes half a minute.
_KEPT = Path(__file__).parent.parent / ".cache" / "tests"


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the whole run its own cache folder, without a hub, whatever the developer's environment says."""
    from backend.settings import get_settings

    folder = tmp_path_factory.mktemp("cache")
    _KEPT.joinpath("converted").mkdir(parents=True, exist_ok=True)
    folder.joinpath("converted").symlink_to(_KEPT / "converted", target_is_directory=True)
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith("ATTRISCOPE_")]:
        patch.delenv(name)
    patch.setenv("ATTRISCOPE_CACHE_DIR", str(folder))
    patch.setenv("ATTRISCOPE_OFFLINE", "1")
    patch.setenv("ATTRISCOPE_DEVICE", "cpu")
    get_settings.cache_clear()
    yield folder
    patch.undo()
    get_settings.cache_clear()


@pytest.fixture(scope="session")
def smollm(own_environment: Path):
    """The embedded SmolLM2 on the CPU in float32. Shared: tests leave it as they found it."""
    from backend.models.bundled import embedded_folder
    from backend.models.loading import load, plan_loading
    from backend.models.placement import choose_placement
    from backend.settings import get_settings
    from backend.types import ModelRef

    folder, revision = embedded_folder(own_environment)
    ref = ModelRef(device="cpu", dtype="float32")
    return load(plan_loading(folder, choose_placement(ref, get_settings())), ref, revision)


@pytest.fixture
def tiny():
    """A fresh tiny Llama with a byte-level tokenizer and a chat template."""
    from tests.support.tiny import tiny_model

    return tiny_model()
