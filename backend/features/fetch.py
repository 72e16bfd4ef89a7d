"""Downloads of official upsampler weights on a person's request, checked by size and sha256. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import httpx

from backend.errors import ModelUnavailable
from backend.features.catalog import Official
from backend.settings import Settings
from backend.types import Tick, no_tick

_LARGEST = 64 << 20  # bytes, where the table does not know the size
_CHUNK = 1 << 16


def fetch(entry: Official, target: Path, settings: Settings, tick: Tick = no_tick) -> Path:
    """Download official weights to ``target``, whole and checked or not at all; nothing is done if they are there.

    Args:
        entry: Which.
        target: The file to make.
        settings: Offline switch and time limit.
        tick: Bytes done and in all.

    Raises:
        ModelUnavailable: If downloads are switched off, the address does not answer, or the file is not the one.
    """
    if target.is_file():
        return target
    if settings.offline:
        raise ModelUnavailable(
            "Downloads are switched off (ATTRISCOPE_OFFLINE).", f"Fetch {entry.url} elsewhere and give the file's path."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            sha, size = _stream(entry, out.fileno(), settings.hub_timeout_s, tick)
        if entry.size and size != entry.size:
            raise ModelUnavailable(
                f"{entry.name} should have {entry.size:,} bytes, the address gave {size:,}.", "Try again later."
            )
        if entry.sha256 and sha != entry.sha256:
            raise ModelUnavailable(
                f"The file at the address of {entry.name} is not the published one: its sha256 differs.",
                "Do not use it; ask its authors.",
            )
        os.replace(name, target)
    except OSError as error:
        raise ModelUnavailable(
            f"{entry.name} cannot be saved: {error.strerror or error}.", "Free some space."
        ) from None
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _stream(entry: Official, out: int, timeout_s: float, tick: Tick) -> tuple[str, int]:
    digest, size, most = hashlib.sha256(), 0, entry.size or _LARGEST
    try:
        with httpx.stream("GET", entry.url, follow_redirects=True, timeout=timeout_s) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_bytes(_CHUNK):
                size += len(chunk)
                if size > most:
                    break
                digest.update(chunk)
                os.write(out, chunk)
                tick(min(size, most), most)
    except httpx.HTTPStatusError as error:
        raise ModelUnavailable(
            f"The address of {entry.name} answers with status {error.response.status_code}.", "Try again later."
        ) from None
    except httpx.HTTPError:
        raise ModelUnavailable(
            f"The address of {entry.name} does not answer.", "Check the network, or give a file's path."
        ) from None
    if size > most:
        raise ModelUnavailable(f"The file at the address of {entry.name} is larger than expected.", "Do not use it.")
    return digest.hexdigest(), size
