"""Fixtures for all tests: an environment of their own, tiny models, and the embedded model, loaded once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Converted once and kept between runs: the conversion takes half a minute.
_KEPT = Path(__file__).parent.parent / ".cache" / "tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where contract tests put their models: cpu (default) or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that compare with CUDA, unless CUDA was asked for; then a missing device is a failure."""
    if not config.getoption("--device").startswith("cuda"):
        items_left = [item for item in items if item.get_closest_marker("gpu") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in items_left])
        items[:] = items_left


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of ``--device``; a clear failure where it does not exist."""
    import torch

    name = str(request.config.getoption("--device"))
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail("--device cuda was asked for, but this machine has no CUDA device.", pytrace=False)
    return name


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
