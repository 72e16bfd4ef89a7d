"""Turns an official ``.pth`` file into safetensors, in a process of its own; only the result is opened afterwards.

Run as ``python -m backend.features.conversion SOURCE TARGET``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from backend.errors import AppError, BadFile

_LIMIT_S = 120.0


def converted(source: Path, target: Path) -> Path:
    """Return ``target``, the safetensors form of ``source``; convert first where that has not been done.

    Raises:
        BadFile: If the file cannot be read, or the folder not be written.
    """
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "backend.features.conversion", str(source.resolve()), str(target.resolve())],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadFile(
            f"{source.name} cannot be converted: {type(error).__name__}.", "Check the cache folder."
        ) from None
    if done.returncode == 0 and target.is_file():
        return target
    message, _, hint = done.stdout.strip().partition("\t")
    raise BadFile(message or f"{source.name} cannot be converted.", hint or "Download or copy the file again.")


def convert(source: Path, target: Path) -> None:
    """Read ``source`` and write its tensors to ``target``, whole or not at all.

    Raises:
        BadFile: If the file cannot be read.
    """
    from safetensors.torch import save_file

    from backend.features.state_files import read_state

    state, _ = read_state(source)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".new")
    os.close(handle)
    try:
        save_file({key: value.contiguous().clone() for key, value in state.items()}, name)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def main(source: str, target: str) -> int:
    """Convert; print a refusal as sentence, tab, hint."""
    try:
        convert(Path(source), Path(target))
    except AppError as error:
        sys.stdout.write(f"{error.message}\t{error.hint}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
