"""From the id of a model to its files on this disk. Knows the cache folder and when to ask a hub; loads nothing.

An id is the embedded model's name, a path to a ``.gguf`` file, a local folder, or a hub id ("owner/name"), tried in
this order. What is cached is used without the hub: always for a pinned commit, and for branches when the hub is
switched off or does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.errors import BadRequest, ModelUnavailable
from backend.models.bundled import embedded_folder
from backend.models.download import COMMIT, REPO_ID, REVISION, HubUnreachable, download_model, hub_cache
from backend.models.weights import find_weights
from backend.settings import Settings
from backend.types import EMBEDDED_MODEL, ModelRef, Tick, no_tick


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files.

    Attributes:
        path: A folder, or a ``.gguf`` file.
        revision: Commit on the hub, or content hash of the embedded model's wheel; empty for local files, whose
            content is hashed when they are loaded.
        notes: What the reader must know, e.g. that the hub did not answer and a cached copy serves.
    """

    path: Path
    revision: str = ""
    notes: tuple[str, ...] = ()


def is_remote(model_id: str) -> bool:
    """Say whether an id names a model on the hub."""
    return model_id != EMBEDDED_MODEL and _local_path(model_id) is None


def find_source(
    ref: ModelRef, settings: Settings, tick: Tick = no_tick, approve: Callable[[int], None] | None = None
) -> Source:
    """Find a model's files; download or unpack them first where that has not been done.

    Args:
        ref: Which model.
        settings: Cache folder, hub address, offline switch.
        tick: Progress in bytes, and cancellation.
        approve: Called with the size in bytes of weights that would have to be downloaded; may raise to refuse.

    Raises:
        BadRequest: If the id or revision can be neither a path nor a name on a hub.
        ModelUnavailable: If the files cannot be had, with one sentence for each reason.
    """
    if ref.id == EMBEDDED_MODEL:
        return Source(*embedded_folder(settings.cache_dir, tick))
    path = _local_path(ref.id)
    if path is not None:
        if not path.exists():
            raise ModelUnavailable(f"There is no file or folder {path}.", "Check the path.")
        if path.is_file() and path.suffix.lower() != ".gguf":
            raise ModelUnavailable(
                f"{path.name} is not a GGUF file.", "Give a .gguf file, or the folder of a model with safetensors."
            )
        return Source(path)
    return _from_hub(ref, settings, tick, approve)


def _local_path(model_id: str) -> Path | None:
    """Return the path that an id means; None if it can only be a hub id."""
    if "\0" in model_id or not model_id.strip():
        return None
    try:
        path = Path(model_id).expanduser()
        looks = model_id.startswith((".", "~", os.sep)) or model_id.lower().endswith(".gguf") or path.is_absolute()
        return path.resolve() if looks or path.exists() else None
    except (OSError, RuntimeError):  # no path at all: too long, or in the home of nobody
        return None


def _from_hub(ref: ModelRef, settings: Settings, tick: Tick, approve: Callable[[int], None] | None) -> Source:
    if not REPO_ID.fullmatch(ref.id) or ".." in ref.id or "--" in ref.id:
        raise BadRequest(
            f"{ref.id[:100]!r} is neither a local path nor the name of a model.",
            "Give owner/name as on the hub, a folder, or a .gguf file; no addresses.",
        )
    if ref.revision is not None and (not REVISION.fullmatch(ref.revision) or ".." in ref.revision):
        raise BadRequest(f"{ref.revision[:100]!r} is not a revision.", "Give a branch, a tag or a commit.")

    cached = _cached(ref, settings)
    if cached and ref.revision and COMMIT.fullmatch(ref.revision):
        return cached
    if settings.offline:
        if cached:
            return cached
        raise ModelUnavailable(
            f"{ref.id} has not been downloaded, and the app is offline.",
            "Unset ATTRISCOPE_OFFLINE, or choose the embedded model or a local folder.",
        )
    try:
        return Source(*download_model(ref.id, ref.revision, settings, tick, approve))
    except HubUnreachable as error:
        if cached is None:
            raise
        note = f"{error.message} The downloaded copy {cached.revision[:8]} is used."
        return Source(cached.path, cached.revision, (note,))


def _cached(ref: ModelRef, settings: Settings) -> Source | None:
    """Return a complete download of this very revision, if there is one."""
    folder = hub_cache(settings) / f"models--{ref.id.replace('/', '--')}"
    commit = ref.revision or "main"
    if not COMMIT.fullmatch(commit):
        pointer = folder / "refs" / commit
        commit = pointer.read_text(encoding="ascii").strip() if pointer.is_file() else ""
    snapshot = folder / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        return None
    try:
        find_weights(snapshot)
    except ModelUnavailable:
        return None  # an interrupted or damaged download; the hub has the rest
    return Source(snapshot, commit)
