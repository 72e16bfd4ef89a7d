"""Clocks and scales of the benchmarks: seconds, memory at its peak, what else kept the machine busy, and on what."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from backend.models.language import LanguageModel


class Meter:
    """Times and weighs one call; synchronizes on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def seconds(self, call: Callable[[], Any]) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        call()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Run once and return what it added to the memory at its peak; None where the system does not say."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            call()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - before
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier runs left with the allocator counts for nobody
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is in use
            before = _status("VmRSS")
            call()
            return _status("VmHWM") - before
        except OSError:
            call()
            return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def interleaved(meter: Meter, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, one per round after a round of warming up; every round begins with another call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for call in calls.values():
        call()
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(meter.seconds(calls[name]))
    return times


def ratio(times: list[float], others: list[float]) -> float:
    """Median of the quotients round by round: what slows a whole round cancels out."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


class Others:
    """How busy other programs kept the CPU; on Linux only."""

    def __init__(self) -> None:
        self.at = self._now()

    def share(self) -> float | None:
        """Part of the machine's CPU time since the start that went to other programs, in [0, 1]."""
        if self.at is None or (now := self._now()) is None:
            return None
        own, used, total = (b - a for a, b in zip(self.at, now, strict=True))
        return max(0.0, (used - own) / total) if total > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        first = next(iter(_lines("/proc/stat")), "").split()
        if len(first) < 5:
            return None
        ticks = [int(x) for x in first[1:9]]
        return time.process_time() * os.sysconf("SC_CLK_TCK"), sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def heading(model: LanguageModel) -> dict[str, str]:
    """What the numbers belong to."""
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "unknown CPU")
    hardware = f"{cpu}, {torch.get_num_threads()} threads"
    if model.device.type == "cuda":
        hardware = torch.cuda.get_device_name(model.device)
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    commit = subprocess.run(  # noqa: S603 - a fixed command
        command, capture_output=True, text=True, check=False, cwd=here
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "model": f"{model.info.id} {model.info.dtype} on {model.info.device}, {model.info.attention}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}",
        "commit": commit or "unknown",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
