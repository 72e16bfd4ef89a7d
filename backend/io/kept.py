"""Results that were computed before: the latest in memory, the others on disk as JSON. Found by content hash."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import replace

from backend.errors import BadFile
from backend.io import bundle
from backend.store import ResultStore
from backend.types import Answer, Explanation, TokenAttribution

log = logging.getLogger(__name__)

Result = Answer | Explanation

_MOST = 64
_MOST_BYTES = 256_000_000


class KeptResults:
    """Results by key, from memory where possible, so that a page run does not parse JSON again. For any thread.

    What is read from disk says so (``from_cache``).

    Attributes:
        store: The disk behind it; random ablations are kept there, too.
    """

    def __init__(self, store: ResultStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, tuple[Result, int]] = OrderedDict()

    def get(self, key: str) -> Result | None:
        """Return a result, or None if there is none, or none that can be read."""
        with self._lock:
            recent = self._recent.get(key)
            if recent is not None:
                self._recent.move_to_end(key)
                return recent[0]
        data = self.store.get(key)
        if data is None:
            return None
        try:
            found = bundle.decode(data)
        except BadFile as error:
            log.warning("stored result %s: %s", key[:12], error)
            return None
        if isinstance(found, Explanation):
            found = replace(found, results=tuple(replace(result, from_cache=True) for result in found.results))
        self._remember(key, found)
        return found

    def put(self, key: str, result: Result, data: bytes | None = None) -> None:
        """Keep a result; ``data`` is its JSON form where that is at hand already."""
        self._remember(key, result)
        self.store.put(key, bundle.encode(result) if data is None else data)

    def get_attribution(self, key: str) -> TokenAttribution | None:
        """Return one method's scores."""
        data = self.store.get(key)
        if data is None:
            return None
        try:
            return bundle.decode_attribution(data)
        except BadFile as error:
            log.warning("stored scores %s: %s", key[:12], error)
            return None

    def put_attribution(self, key: str, result: TokenAttribution) -> None:
        """Keep one method's scores."""
        self.store.put(key, bundle.encode_attribution(result))

    def _remember(self, key: str, result: Result) -> None:
        with self._lock:
            self._recent[key] = (result, _score_bytes(result))
            self._recent.move_to_end(key)
            while len(self._recent) > 1 and (
                len(self._recent) > _MOST or sum(size for _, size in self._recent.values()) > _MOST_BYTES
            ):
                self._recent.popitem(last=False)


def _score_bytes(result: Result) -> int:
    if not isinstance(result, Explanation):
        return 0
    return sum(method.scores.nbytes for method in result.results if method.scores is not None)
