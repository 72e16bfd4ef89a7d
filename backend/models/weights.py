"""What weight files say about themselves: names, shapes, sizes, whether they are whole. Reads headers, loads nothing.

Knows the two file formats, safetensors and GGUF; knows neither architectures nor devices.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backend.errors import ModelUnavailable
from backend.types import Tick, no_tick

_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_CHUNK = 1 << 24  # bytes hashed between two ticks
_DAMAGED = "Download or copy the model again."

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model on disk.

    Attributes:
        files: Absolute paths, sorted by name.
        parameters: Number of stored numbers.
        names: Tensor names; empty for GGUF.
        file_bytes: Size on disk.
    """

    files: tuple[Path, ...]
    parameters: int
    names: frozenset[str]
    file_bytes: int


def find_weights(folder: Path) -> Weights:
    """Find the safetensors files of a model folder and check that each is whole.

    Raises:
        ModelUnavailable: If there are none, if a file named in the index is missing, or if one is damaged.
    """
    files = _listed_files(folder)
    if not files:
        _refuse_missing(folder)
    parameters, size, names = 0, 0, set()
    for file in files:
        for name, count in read_header(file).items():
            names.add(name)
            parameters += count
        size += file.stat().st_size
    return Weights(tuple(files), parameters, frozenset(names), size)


def _listed_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if (folder / SINGLE).is_file():  # the loader prefers the single file as well
        return [folder / SINGLE]
    if not index.is_file():
        return []
    names = index_files(index)
    for name in names:
        if not (folder / name).is_file():
            raise ModelUnavailable(
                f"The weights are incomplete: {name} is named in {INDEX} but missing.",
                "Download or copy the missing file.",
            )
    return [folder / name for name in names]


def index_files(index: Path) -> list[str]:
    """Return the names of the weight files that an index lists, sorted.

    Raises:
        ModelUnavailable: If the index is damaged or names a file outside its folder.
    """
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelUnavailable(f"The index of the weights, {INDEX}, is damaged.", _DAMAGED) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelUnavailable(f"The index of the weights names {name!r}, which is no safetensors file beside it.")
    return names


def _refuse_missing(folder: Path) -> None:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if pickles:
        raise ModelUnavailable(
            f"The model has no safetensors weights, only {pickles[0]}, which can run code when it is opened.",
            "Choose a revision or a copy with safetensors, or convert it elsewhere.",
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise ModelUnavailable(
            "The folder holds GGUF files and no safetensors.", f"Give the path of one file, e.g. {ggufs[0].name}."
        )
    raise ModelUnavailable(
        f"There are no weights: neither {SINGLE} nor {INDEX} exists.", "Check that this is a model's folder."
    )


def read_header(file: Path) -> dict[str, int]:
    """Read a safetensors header and return tensor name to number of elements.

    Raises:
        ModelUnavailable: If the file is cut short or is no safetensors file.
    """
    size = file.stat().st_size
    damaged = ModelUnavailable(f"The weights file {file.name} is damaged or cut short.", _DAMAGED)
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise damaged
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        counts = {name: math.prod(entry["shape"]) for name, entry in tensors.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise damaged from None
    if end + 8 + length != size:
        raise damaged
    return counts


def content_hash(files: Iterable[Path], tick: Tick = no_tick) -> str:
    """Hash names and whole contents of files; 16 hex digits. Unchanged files are not read twice in one process.

    Two fine-tuned copies of a model have the same header and size, so nothing less than the content tells them apart.
    """
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0".encode())
        digest.update(_file_hash(str(file), stat.st_size, stat.st_mtime_ns, tick).encode())
    return digest.hexdigest()[:16]


_hashes: dict[tuple[str, int, int], str] = {}  # (path, size, time of change) -> sha256, for this process


def _file_hash(path: str, size: int, mtime: int, tick: Tick) -> str:
    key = (path, size, mtime)
    if key not in _hashes:
        digest, done = hashlib.sha256(), 0
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                tick(min(done, size), max(size, 1))
        _hashes[key] = digest.hexdigest()
    return _hashes[key]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file: its architecture ("llama", "bert") and the number of stored numbers."""

    architecture: str
    parameters: int


def read_gguf(file: Path) -> GgufHeader:
    """Read the header of a GGUF file. Takes seconds for a large vocabulary.

    Raises:
        ModelUnavailable: If the file is cut short or is no GGUF file.
    """
    from gguf import GGUFReader

    damaged = ModelUnavailable(f"The file {file.name} is damaged, cut short, or no GGUF file.", _DAMAGED)
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise damaged
    try:
        reader = GGUFReader(file)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else ""
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError):
        raise damaged from None
    if end > file.stat().st_size or not parameters:
        raise damaged
    return GgufHeader(architecture, parameters)
