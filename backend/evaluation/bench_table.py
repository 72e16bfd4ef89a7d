"""The benchmark's rows: one JSON line each, so that a run can stop anywhere and go on; means; the final document.

Knows plain values; knows neither models nor methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import orjson

from backend.errors import BadRequest

Record = dict[str, Any]

METRICS = (
    "mass", "lift", "needle_mass", "needle_lift", "recall_at_k", "auprc", "secret_rank", "bos_share", "template_share",
    "mass_absolute", "needle_mass_absolute", "recall_at_k_absolute", "secret_rank_absolute", "chance", "unmeasured",
    "seconds", "forward", "backward",
)  # fmt: skip
"""Numbers of a row, each a mean over its needles; None where a method gives none."""

SPREADS = ("needle_mass", "recall_at_k")
"""Numbers whose standard deviation over seeds is part of the summary."""

_SAME_RUN = ("model", "revision", "dtype", "device", "quick", "chat", "words", "methods_version")


class RowsFile:
    """A file of JSON lines: ``{"kind": "about" | "plan" | "row", ...}``."""

    def __init__(self, path: Path) -> None:
        """Open for reading and appending; the file appears with the first record."""
        self.path = path

    def read(self) -> list[Record]:
        """Return all whole records; a line that a crash cut off is left out.

        Raises:
            BadRequest: If the file cannot be read.
        """
        try:
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        except OSError as error:
            raise BadRequest(f"Cannot read {self.path}: {error.strerror}.") from error
        found = []
        for line in lines:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict) and "kind" in record:
                found.append(record)
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record to the end, on a line of its own.

        Raises:
            BadRequest: If the file cannot be written.
        """
        try:
            with self.path.open("ab+") as file:
                size = file.seek(0, 2)
                if size:
                    file.seek(size - 1)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(orjson.dumps(record) + b"\n")
        except OSError as error:
            raise BadRequest(f"Cannot write {self.path}: {error.strerror}.") from error


def require_same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to mix rows of different models or settings in one file.

    Raises:
        BadRequest: Names what differs.
    """
    for key in _SAME_RUN:
        if old.get(key) != new.get(key):
            raise BadRequest(
                f"The file holds rows of another run: {key} was {old.get(key)!r} and is {new.get(key)!r} now.",
                "Name another file, or delete this one.",
            )


def mean_row(measured: Sequence[Mapping[str, float | None]]) -> Record:
    """Return the mean of each metric over needles, None where no needle has a number."""
    out: Record = {}
    for name in METRICS:
        known = [value for one in measured if (value := one.get(name)) is not None]
        out[name] = fmean(known) if known else None
    return out


def summary(rows: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return means per method and length, weighted by needles, in order of appearance."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["length"]), []).append(row)
    return [_summed(method, length, group) for (method, length), group in groups.items()]


def _summed(method: str, length: int, group: Sequence[Mapping[str, Any]]) -> Record:
    needles, tried = (sum(row[name] for row in group) for name in ("needles", "tried"))
    out: Record = {
        "method": method,
        "length": length,
        "needles": needles,
        "pass_rate": needles / tried if tried else None,
        "share": group[0]["share"],
        "level": group[0]["level"],
        "params": group[0]["params"],
    }
    out |= {name: _weighted(group, name) for name in METRICS}
    for name in SPREADS:
        seeds = sorted({row["seed"] for row in group})
        means = [_weighted([row for row in group if row["seed"] == seed], name) for seed in seeds]
        known = [mean for mean in means if mean is not None]
        out[f"{name}_seed_std"] = pstdev(known) if len(known) > 1 else None
    out["refusal"] = next((row["refusal"] for row in group if row["refusal"]), "")
    out["flags"] = flags(out)
    return out


def _weighted(group: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [(row[name], row["needles"]) for row in group if row.get(name) is not None and row["needles"]]
    if not known:
        return None
    if len({value for value, _ in known}) == 1:  # a mean of equal numbers is that number, without rounding
        return float(known[0][0])
    return float(sum(value * weight for value, weight in known) / sum(weight for _, weight in known))


def flags(summed: Mapping[str, Any]) -> list[str]:
    """Say where a method does not beat a map that found nothing: "lift", "recall"; empty if it does."""
    found = []
    if summed["lift"] is not None and summed["lift"] <= 1:
        found.append("lift")
    if summed["recall_at_k"] is not None and summed["recall_at_k"] <= summed["chance"]:
        found.append("recall")
    return found


def document(records: Sequence[Mapping[str, Any]]) -> Record:
    """Return the table: what was measured, rows, summary."""
    parts = {
        kind: [{key: value for key, value in r.items() if key != "kind"} for r in records if r.get("kind") == kind]
        for kind in ("about", "plan", "row")
    }
    return {
        "schema_version": 1,
        "kind": "saliency_benchmark",
        "about": parts["about"][0] if parts["about"] else {},
        "plan": parts["plan"],
        "rows": parts["row"],
        "summary": summary(parts["row"]),
    }
