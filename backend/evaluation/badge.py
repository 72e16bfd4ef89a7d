"""The measured number that stands beside a map: how well this method found planted needles, on this very model.

Reads a benchmark's document (``bench_table.document``), the shipped one or another; knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

SHIPPED = Path(__file__).resolve().parents[2] / "assets" / "benchmarks" / "saliency.json"

_WARNINGS = {
    "lift": "it puts no more on what the answer needs than a uniform map",
    "recall": "it finds the needle no better than chance",
}


@dataclass(frozen=True, slots=True)
class Badge:
    """A measured number beside a map.

    Attributes:
        text: One clause, e.g. "needle recall@k 0.71 at 512 tokens, measured on this model".
        warning: A sentence where the method does not beat a map that found nothing; empty if it does.
        recall_at_k: The number, in [0, 1].
        chance: What a random order reaches.
        length: Tokens of the prompts it was measured on.
        needles: Prompts that it is the mean of.
    """

    text: str
    warning: str
    recall_at_k: float
    chance: float
    length: int
    needles: int


@lru_cache(maxsize=1)
def shipped_table() -> Mapping[str, Any] | None:
    """Return the benchmark document that comes with the application; None if there is none that can be read."""
    try:
        found = orjson.loads(SHIPPED.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def badge(model: str, revision: str, method: str, length: int, table: Mapping[str, Any] | None) -> Badge | None:
    """Return what was measured for a method on a model, at the length nearest to that of the prompt on screen.

    Args:
        model: Id of the model of the map.
        revision: Its revision; numbers of other weights are not shown.
        method: Registry name.
        length: Tokens of the prompt on screen.
        table: A benchmark's document; None for none.

    Returns:
        None where this method was not measured on this model.
    """
    about = (table or {}).get("about", {})
    if table is None or (about.get("model"), about.get("revision")) != (model, revision):
        return None
    known = [one for one in table["summary"] if one["method"] == method and one["recall_at_k"] is not None]
    if not known:
        return None
    best = min(known, key=lambda one: (abs(one["length"] - length), one["length"]))
    reasons = [_WARNINGS[flag] for flag in best["flags"]]
    warning = f"On planted needles of {best['length']:,} tokens, {' and '.join(reasons)}." if reasons else ""
    return Badge(
        text=f"needle recall@k {best['recall_at_k']:.2f} at {best['length']:,} tokens, measured on this model",
        warning=warning,
        recall_at_k=best["recall_at_k"],
        chance=best["chance"],
        length=best["length"],
        needles=best["needles"],
    )
