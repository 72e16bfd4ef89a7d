"""Where random ablations are kept under their content hash, so that no method runs again what another one ran.

Within a request they stay in memory; between requests they lie where ``explain`` was told to keep them. Bytes only:
knows nothing of what they mean.
"""

from __future__ import annotations

from typing import Protocol


class Shelf(Protocol):
    """Something that keeps bytes by key and may forget them, such as the result store."""

    def get(self, key: str) -> bytes | None:
        """Return the bytes, or None."""

    def put(self, key: str, value: bytes) -> bool:
        """Keep the bytes; return whether that worked."""


class Runs:
    """The runs of one request, in front of a shelf that outlives it."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._own: dict[str, bytes] = {}
        self._shelf = shelf

    def get(self, key: str) -> bytes | None:
        """Return what was kept under a key in this request or an earlier one."""
        if key in self._own:
            return self._own[key]
        return None if self._shelf is None else self._shelf.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Keep bytes for this request and, where there is a shelf, for later ones."""
        self._own[key] = value
        if self._shelf is not None:
            self._shelf.put(key, value)
