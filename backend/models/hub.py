"""Loaded models: lent by lease, loaded one at a time, evicted when memory is needed. Knows nothing of requests.

Importing this module imports torch and transformers; pages and the engine import it when the first job runs.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from backend.errors import OutOfMemory
from backend.models.language import LanguageModel
from backend.models.loading import Plan, load, plan_loading
from backend.models.placement import Placement, choose_placement, free_bytes
from backend.models.sources import Source, find_source, is_remote
from backend.settings import Settings
from backend.types import ModelInfo, ModelRef, Tick, no_tick

_LOAD_LOCK = threading.Lock()  # transformers' from_pretrained is not thread-safe: one load at a time in the process
_POLL_S = 0.1  # between two looks at a lock or a lease, so that waiting can be cancelled

_Key = tuple[str, str | None, str, str]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, for the home page.

    Attributes:
        info: What it is and where.
        nbytes: Memory that its weights take.
        leases: Jobs that use it now.
        idle_seconds: Seconds since the last lease ended; 0 while there is one.
    """

    info: ModelInfo
    nbytes: int
    leases: int
    idle_seconds: float

    @property
    def id(self) -> str:
        """The id as requested."""
        return self.info.id


@dataclass(slots=True, eq=False)
class _Entry:
    model: LanguageModel
    seal: dict[Path, tuple[int, int]]
    holders: list[int] = field(default_factory=list)  # thread ids, one per lease
    last_used: float = field(default_factory=time.monotonic)


class ModelHub:
    """Holds models within the memory budget of the settings. All methods may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._entries: dict[_Key, _Entry] = {}
        self._state = threading.Lock()  # guards _entries and the entries' leases; held for moments only

    @contextmanager
    def lease(self, ref: ModelRef, tick: Tick = no_tick) -> Iterator[LanguageModel]:
        """Lend a model for the block; load it first where needed, after making room for it.

        A leased model is never evicted. It is shared: jobs that hold the same model must not use it at once.

        Args:
            ref: Which model, where.
            tick: Progress of downloads, and cancellation while waiting.

        Raises:
            BadRequest: If the id, device or dtype is unknown.
            ModelUnavailable: If the model cannot be had; see ``sources`` and ``loading``.
            OutOfMemory: If it does not fit.
            Cancelled: If ``tick`` raised it.
        """
        holder = threading.get_ident()
        entry = self._acquire(ref, tick)
        try:
            yield entry.model
        finally:
            with self._state:
                entry.holders.remove(holder)
                entry.last_used = time.monotonic()

    def loaded(self) -> tuple[LoadedModel, ...]:
        """Return the models in memory, most recently used first."""
        now = time.monotonic()
        with self._state:
            entries = sorted(self._entries.values(), key=lambda e: (not e.holders, -e.last_used))
            return tuple(
                LoadedModel(e.model.info, e.model.nbytes, len(e.holders), 0.0 if e.holders else now - e.last_used)
                for e in entries
            )

    def evict_idle(self) -> None:
        """Drop every model that nobody uses."""
        while self._evict_one():
            pass

    # ------------------------------------------------------------------------------------------ inside

    def _acquire(self, ref: ModelRef, tick: Tick) -> _Entry:
        placement = choose_placement(ref, self._settings)
        revision = ref.revision if is_remote(ref.id) else None  # local files have none
        key = (ref.id, revision, str(placement.device), placement.dtype_name)
        entry = self._take(key)
        if entry:
            return entry
        # Downloads need no lock: files appear under their final name only when they are whole.
        source = self._find(ref, placement, tick) if is_remote(ref.id) else None
        while not _LOAD_LOCK.acquire(timeout=_POLL_S):
            tick(0, 1)
        try:
            entry = self._take(key)  # another job may have loaded it meanwhile
            if entry:
                return entry
            entry = self._load(ref, source or self._find(ref, placement, tick), placement, tick)
            with self._state:
                entry.holders.append(threading.get_ident())
                self._entries[key] = entry
            return entry
        finally:
            _LOAD_LOCK.release()

    def _take(self, key: _Key) -> _Entry | None:
        with self._state:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if _changed(entry.seal):
                # Its files were replaced. Whoever still holds it goes on; the next lease loads the new ones.
                del self._entries[key]
                return None
            entry.holders.append(threading.get_ident())
            return entry

    def _find(self, ref: ModelRef, placement: Placement, tick: Tick) -> Source:
        def approve(stored: int) -> None:
            # At most four bytes per number are stored, so this is a lower bound of what the model will take.
            self._check_fits(stored * placement.dtype.itemsize // 4, placement, f"{ref.id} would take at least")

        return find_source(ref, self._settings, tick, approve)

    def _load(self, ref: ModelRef, source: Source, placement: Placement, tick: Tick) -> _Entry:
        plan = plan_loading(source.path, placement)
        gc.collect()  # models whose files were replaced
        self._make_room(plan, tick)
        self._check_fits(plan.nbytes, placement, f"{ref.id} takes")
        seal = _seal(plan)
        try:
            model = load(plan, ref, source.revision, tick)
        except OutOfMemory:
            if not self._evict_one():
                raise
            model = None
        if model is None:  # once more, with all the memory there is; outside the except block nothing is pinned
            self.evict_idle()
            model = load(plan, ref, source.revision, tick)
        return _Entry(replace(model, notes=(*source.notes, *model.notes)), seal)

    def _make_room(self, plan: Plan, tick: Tick) -> None:
        """Evict idle models, least recently used first, until the new one is within the budget."""
        budget = self._settings.memory_budget_bytes
        while True:
            with self._state:
                held = sum(entry.model.nbytes for entry in self._entries.values())
                mine = any(threading.get_ident() in entry.holders for entry in self._entries.values())
            if not held or held + plan.nbytes <= budget:
                return
            if self._evict_one():
                continue
            if mine:  # waiting for our own lease would never end
                raise OutOfMemory(
                    f"Both models together take {(held + plan.nbytes) / 1e9:.1f} GB; "
                    f"the budget is {budget / 1e9:.1f} GB.",
                    "Raise ATTRISCOPE_MEMORY_BUDGET_GB, or use smaller models.",
                )
            tick(0, 1)
            time.sleep(_POLL_S)

    def _check_fits(self, needed: int, placement: Placement, words: str) -> None:
        """Refuse a model that the device has no memory for, now that idle models could make room."""
        free = free_bytes(placement.device)
        while free is not None and needed > free and self._evict_one(placement.device):
            free = free_bytes(placement.device)
        if free is not None and needed > free:
            raise OutOfMemory(
                f"{words} {needed / 1e9:.1f} GB in {placement.dtype_name}; {placement.device} has {free / 1e9:.1f} GB "
                f"left and the budget is {self._settings.memory_budget_gb:g} GB.",
                "Choose a smaller model, dtype bfloat16 or another device, or close other programs.",
            )

    def _evict_one(self, device: torch.device | None = None) -> bool:
        """Drop the least recently used idle model (of a device) and give its memory back; False if there is none."""
        with self._state:
            idle = [
                (entry.last_used, key)
                for key, entry in self._entries.items()
                if not entry.holders and (device is None or key[2] == str(device))
            ]
            if not idle:
                return False
            _, key = min(idle)
            del self._entries[key]
        gc.collect()  # modules and their hooks refer to each other in circles
        if key[2].startswith("cuda"):
            torch.cuda.empty_cache()
        elif key[2] == "mps":
            torch.mps.empty_cache()
        return True


def _seal(plan: Plan) -> dict[Path, tuple[int, int]]:
    """Note size and time of the files that decide what a model is."""
    return {file: _stamp(file) for file in (*plan.files, *plan.others)}


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _changed(seal: dict[Path, tuple[int, int]]) -> bool:
    """Say whether a file was replaced. A deleted file does not count: the model in memory is still what it was."""
    for file, stamp in seal.items():
        try:
            if _stamp(file) != stamp:
                return True
        except OSError:
            continue
    return False
