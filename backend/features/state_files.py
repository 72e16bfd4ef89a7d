"""Parameter files of upsamplers as tensors by name: safetensors, or official ``.pth`` read without running code.

Knows file formats and the layouts in which the official files come; knows neither models nor where files are from.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.errors import BadFile, ModelUnavailable
from backend.models.weights import read_header

LARGEST = 64 << 20  # bytes; official files take 2.5 to 11 MB
_PLAIN: dict[str, Any] = {
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.int": int,
    "collections.defaultdict": defaultdict,
}
_LAYOUTS = ("jafar", "anyup", "state_dict")
_AGAIN = "Download or copy the file again."
_torch_wide = threading.Lock()  # the list of names that torch lets a file use belongs to the whole process


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a parameter file.

    Args:
        path: ``.safetensors``, ``.pth`` or ``.pt``.

    Returns:
        Tensors by name on the CPU, and the file's own remarks (safetensors only).

    Raises:
        BadFile: If the file is missing, too large, damaged, cut short, of another format, or wants to run code.
    """
    if not path.is_file():
        raise BadFile(f"There is no file {path.name}.", "Check the path.")
    size = path.stat().st_size
    if size > LARGEST:
        raise BadFile(
            f"{path.name} has {size / 1e6:.0f} MB; weights of an upsampler have at most {LARGEST / 1e6:.0f} MB.",
            "Choose the upsampler's own file, not the encoder's.",
        )
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return _read_safetensors(path)
    if suffix in {".pth", ".pt"}:
        return _state_inside(_read_pickle(path), path), {}
    raise BadFile(f"{path.name} is no weights file.", "Give a .safetensors file or an official .pth file.")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        read_header(path)
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}, dict(stream.metadata() or {})
    except (ModelUnavailable, SafetensorError):
        raise BadFile(f"{path.name} is damaged, cut short, or no safetensors file.", _AGAIN) from None


def _read_pickle(path: Path) -> Any:
    """Unpickle with torch's restricted loader. Configuration objects of the official training become empty shells."""
    damaged = BadFile(f"{path.name} is damaged, cut short, or no PyTorch file.", _AGAIN)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        pass  # it wants names beyond tensors; which ones is asked below
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise damaged from None
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError):
        raise damaged from None
    refused = [n for n in names if n not in _PLAIN and n != "typing.Any" and not n.startswith("omegaconf.")]
    if refused:
        raise BadFile(
            f"{path.name} could run code when it is opened: it asks for {', '.join(sorted(refused)[:5])}.",
            "Use the official file, or one in safetensors.",
        )
    allowed: list[Any] = [(_PLAIN.get(name) or _shell(name), name) for name in names]
    try:
        with _torch_wide, torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError):
        raise damaged from None


def _shell(name: str) -> type[Any]:
    """Return a class that stands where a configuration object would be and does nothing at all."""

    def ignore(self: Any, *args: Any, **kwargs: Any) -> None: ...

    return type(name.rpartition(".")[2], (), {"__init__": ignore, "__setstate__": ignore})


def _state_inside(content: Any, path: Path) -> dict[str, Tensor]:
    for key in _LAYOUTS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise BadFile(f"{path.name} holds no weights by name.", "Give the file of a JAFAR or AnyUp model.")
    return {str(name): value.detach() for name, value in content.items()}
