"""Results on disk by content hash, within a size bound. Knows nothing of how they were computed.

Values are bytes only: the underlying diskcache would pickle anything else, and would unpickle it when reading a
folder that a stranger prepared, so its serializer is replaced by one that refuses.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from pathlib import Path
from typing import Any

import diskcache

from backend.errors import StoreProblem

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")


class _BytesOnly(diskcache.Disk):  # type: ignore[misc]  # diskcache ships no types
    """A diskcache backend that neither writes nor reads pickles."""

    def store(self, value: Any, read: bool, key: Any = diskcache.core.UNKNOWN) -> Any:
        if not isinstance(value, bytes):
            raise TypeError("the store takes bytes only")
        return super().store(value, read, key=key)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode == diskcache.core.MODE_PICKLE:
            raise StoreProblem("a stored result has an unexpected format")
        return super().fetch(mode, filename, value, read)


class ResultStore:
    """A mapping from content hash to bytes that survives restarts and forgets the least recently used first.

    A disk that is full or damaged never breaks a computation: writing then does nothing, and ``trouble`` says why.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._cache: diskcache.Cache | None = None
        self._lock = threading.Lock()
        self.trouble = ""

    def get(self, key: str) -> bytes | None:
        """Return the bytes stored under ``key``, or None."""
        cache = self._open()
        if cache is None or not is_key(key):
            return None
        try:
            value = cache.get(key)
        except (OSError, sqlite3.Error, diskcache.Timeout, StoreProblem) as error:
            self._note(error)
            return None
        return value if isinstance(value, bytes) else None

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value`` under ``key``; return whether it was stored.

        Raises:
            ValueError: If ``key`` is not a sha256 hex digest.
        """
        if not is_key(key):
            raise ValueError("store keys are sha256 hex digests")
        cache = self._open()
        if cache is None:
            return False
        try:
            cache.set(key, value)
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            self._note(error)
            return False
        self.trouble = ""
        return True

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()
                self._cache = None

    def _open(self) -> diskcache.Cache | None:
        with self._lock:
            if self._cache is None:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._cache = diskcache.Cache(
                        str(self._folder),
                        disk=_BytesOnly,
                        size_limit=self._limit,
                        eviction_policy="least-recently-used",
                    )
                except (OSError, sqlite3.Error, diskcache.Timeout) as error:
                    self._note(error)
            return self._cache

    def _note(self, error: Exception) -> None:
        self.trouble = f"Results cannot be kept on disk ({error}). They are shown, but a restart will forget them."
        log.warning("result store: %s", error)


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a store key. Links carry keys, so this is checked before any use."""
    return bool(_KEY.fullmatch(text))
