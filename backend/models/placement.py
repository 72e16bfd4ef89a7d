"""Device and dtype for a model, and what fits there. Knows hardware and sizes; loads nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from backend.errors import BadRequest
from backend.settings import Settings
from backend.types import ModelRef

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model goes, in which number format, and one clause that says why."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    @property
    def dtype_name(self) -> str:
        """The dtype as users write it, e.g. "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def choose_placement(ref: ModelRef, settings: Settings) -> Placement:
    """Choose device and dtype: the request decides, then the settings, then the hardware.

    Raises:
        BadRequest: If the device or dtype is unknown, or this machine does not have the device.
    """
    device, why_device = _device(ref, settings)
    dtype, why_dtype = _dtype(ref, settings, device)
    return Placement(device, dtype, f"{why_device}; {why_dtype}")


def _device(ref: ModelRef, settings: Settings) -> tuple[torch.device, str]:
    for wanted, asker in ((ref.device, "chosen in the request"), (settings.device, "set by ATTRISCOPE_DEVICE")):
        if wanted != "auto":
            return _checked(wanted), f"{wanted} was {asker}"
    if torch.cuda.is_available():
        return torch.device("cuda:0"), "a CUDA device is present"
    if torch.backends.mps.is_available():
        return torch.device("mps"), "an Apple GPU is present"
    return torch.device("cpu"), "no GPU is present"


def _checked(name: str) -> torch.device:
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda", "mps"} or (number and (kind != "cuda" or not number.isdecimal())):
        raise BadRequest(f"There is no kind of device named {name!r}.", "Use auto, cpu, cuda, cuda:1 or mps.")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise BadRequest("This machine has no CUDA device that PyTorch can use.", "Choose auto or cpu.")
        index, count = int(number or 0), torch.cuda.device_count()
        if index >= count:
            raise BadRequest(f"There is no device {name}.", f"CUDA devices are numbered 0 to {count - 1} here.")
        return torch.device("cuda", index)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise BadRequest("This machine has no Apple GPU that PyTorch can use.", "Choose auto or cpu.")
    return torch.device(kind)


def _dtype(ref: ModelRef, settings: Settings, device: torch.device) -> tuple[torch.dtype, str]:
    for wanted, asker in ((ref.dtype, "chosen in the request"), (settings.dtype, "set by ATTRISCOPE_DTYPE")):
        if wanted != "auto":
            if wanted not in _DTYPES:
                raise BadRequest(f"There is no number format named {wanted!r}.", f"Use auto, {', '.join(_DTYPES)}.")
            return _DTYPES[wanted], f"{wanted} was {asker}"
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16, "bfloat16 is fast and stable there"
    return torch.float32, "float32 is exact and works everywhere"


def weight_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Return the memory that this many weights take in a dtype, in bytes."""
    return parameters * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory a device has left, in bytes; None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return _available_ram()


def _available_ram() -> int | None:
    """Read what Linux calls available: free memory and caches that it would give up, bounded by a container's limit."""
    found: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            found += [int(line.split()[1]) * 1024 for line in stream if line.startswith("MemAvailable:")]
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            most = limit.read().strip()
        with (
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as used,
            open("/sys/fs/cgroup/memory.stat", encoding="ascii") as stat,
        ):
            cached = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
            if most.isdecimal():
                found.append(int(most) - int(used.read()) + cached)
    except OSError:
        pass  # not Linux, or no container: what was found so far counts
    if found:
        return max(0, min(found))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that a device or the machine ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
