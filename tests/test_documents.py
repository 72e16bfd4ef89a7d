"""The README tells the truth about settings, methods and files."""

import re
from pathlib import Path

from backend.registry import list_methods
from backend.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_every_setting_is_listed_with_its_default():
    for name, spec in Settings.model_fields.items():
        default = spec.default if name != "cache_dir" else "~/.cache/attriscope"
        default = str(default).lower() if isinstance(default, bool) else default
        row = f"| `ATTRISCOPE_{name.upper()}` | `{default}` | {spec.description} |"
        assert row in README, row


def test_no_setting_is_listed_that_does_not_exist():
    listed = set(re.findall(r"ATTRISCOPE_([A-Z_]+)", README))
    assert listed == {name.upper() for name in Settings.model_fields}


def test_every_method_is_listed():
    for method in list_methods():
        assert f"| `{method.name}` |" in README


def test_links_lead_to_files():
    for document in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "assets/README.md"):
        text = (ROOT / document).read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / document).parent.joinpath(link).exists(), f"{document} links to {link}"
