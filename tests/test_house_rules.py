"""The plan of the house, enforced: who may import whom, file sizes, file names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "timm", "torchvision", "accelerate", "safetensors", "captum"}


def sources(*folders):
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(files, forbidden):
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if name.split(".")[0] in forbidden
    ]


def test_the_backend_knows_nothing_of_the_interface():
    files = sources("backend")
    assert len(files) > 20
    assert offenders(files, {"streamlit", "components", "pages"}) == []


def test_pages_and_components_know_nothing_of_torch():
    assert offenders(sources("pages", "components"), HEAVY) == []


def test_components_know_no_models_or_method_internals():
    names = [
        f"{file.name} imports {name}" for file in sources("pages", "components") for name in imports(file)
        if name.startswith(("backend.models", "backend.saliency.explain", "backend.saliency.question"))
    ]  # fmt: skip
    assert names == []


def test_importing_the_pages_parts_pulls_in_no_torch():
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sources("components")
        if file.stem not in ("shell", "__init__")
    ]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "from backend.registry import list_methods\nassert list_methods()\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", sources("components"), ids=lambda file: file.name)
def test_no_component_shadows_a_module(file):
    # components/ comes first on sys.path while a page runs
    assert file.stem not in sys.stdlib_module_names
    assert file.stem not in {"backend", "pages", "tests", "numpy", "plotly", "streamlit"}


def test_files_stay_readable():
    limits = {"pages": 80, "components": 300, "backend": 400, "benchmarks": 400, "scripts": 400}
    long = [
        f"{file.relative_to(ROOT)}: {lines} lines"
        for folder, limit in limits.items()
        for file in sources(folder)
        if (lines := len(file.read_text().splitlines())) > limit
    ]
    assert long == []
    assert len((ROOT / "app.py").read_text().splitlines()) <= 40


def test_tests_hide_no_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == []
