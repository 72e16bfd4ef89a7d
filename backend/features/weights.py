"""From a name or a path to a ready upsampler: shipped weights, official ones, a person's own file.

Knows the table of official weights, the assets folder and the download cache; builds the model that a file's shapes
describe and loads it strictly, with a sentence for every misfit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.errors import BadFile, NotApplicable
from backend.features.anyup import AnyUp
from backend.features.catalog import Official, official
from backend.features.conversion import converted
from backend.features.jafar import JAFAR
from backend.features.learned_model import LearnedUpsampler
from backend.features.state_files import read_state
from backend.settings import get_settings

SHIPPED = Path(__file__).parents[2] / "assets" / "upsamplers"
_WIDEST = 4096  # a guard against absurd shapes in damaged files


@dataclass(frozen=True, slots=True, eq=False)
class LoadedUpsampler:
    """A model with its weights and their provenance.

    Attributes:
        model: In eval mode, frozen, on the CPU.
        kind: "jafar" or "anyup".
        file: File name.
        sha256: Of the file that was read.
        license: Short name; empty if unknown.
        credit: What a reader must be shown; empty if unknown.
        encoder: Tag of the encoder that JAFAR weights are bound to; empty if the file does not say.
        remarks: The file's own metadata.
        notes: Things the reader must know.
    """

    model: LearnedUpsampler
    kind: str
    file: str
    sha256: str
    license: str
    credit: str
    encoder: str
    remarks: dict[str, str]
    notes: tuple[str, ...] = ()

    def on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LearnedUpsampler:
        """Return the model on a device; a copy unless it is there already."""
        first = next(self.model.parameters())
        if first.device == device and first.dtype == dtype:
            return self.model
        return _moved(self, device, dtype)


@lru_cache(maxsize=8)
def _moved(loaded: LoadedUpsampler, device: torch.device, dtype: torch.dtype) -> LearnedUpsampler:
    twin = build(dict(loaded.model.state_dict()), loaded.remarks)
    return twin.to(device=device, dtype=dtype)


def load_file(path: Path, kind: str | None = None, channels: int | None = None) -> LoadedUpsampler:
    """Load a parameter file; what was loaded before is not read again unless the file changed.

    Args:
        path: ``.safetensors``, or an official ``.pth``, which is converted once.
        kind: "jafar" or "anyup" if only that will do.
        channels: The encoder's width, which JAFAR weights must have.

    Raises:
        BadFile: If the file is damaged, of another kind or model, or for another width.
    """
    try:
        stat = path.stat()
    except OSError:
        raise BadFile(f"There is no file {path.name}.", "Check the path.") from None
    loaded = _load(path, stat.st_size, stat.st_mtime_ns)
    names = {"jafar": "JAFAR", "anyup": "AnyUp"}
    if kind is not None and loaded.kind != kind:
        raise BadFile(
            f"{path.name} holds weights of {names[loaded.kind]}, not of {names[kind]}.", "Choose the other upsampler."
        )
    if channels is not None and isinstance(loaded.model, JAFAR) and loaded.model.v_dim != channels:
        raise BadFile(
            f"{path.name} is for {loaded.model.v_dim} channels, the encoder gives {channels}.",
            "Choose the weights of this encoder, or AnyUp, which takes any number of channels.",
        )
    return loaded


@lru_cache(maxsize=8)
def _load(path: Path, size: int, mtime: int) -> LoadedUpsampler:
    del mtime  # part of the key: an edited file is read again
    sha = _sha256(path) if size < 1 << 28 else ""
    source = path
    if path.suffix.lower() in {".pth", ".pt"} and sha:
        source = converted(path, get_settings().cache_dir / "upsamplers" / f"{sha}.safetensors")
    state, remarks = read_state(source)
    model = build(state, remarks, path.name)
    entry = next((e for e in _official_hashes() if e.sha256 == sha), None)
    return LoadedUpsampler(
        model=model,
        kind="jafar" if isinstance(model, JAFAR) else "anyup",
        file=path.name,
        sha256=sha,
        license=entry.license if entry else remarks.get("license", ""),
        credit=entry.credit if entry else remarks.get("credit", ""),
        encoder=remarks.get("encoder", ""),
        remarks=remarks,
    )


def _official_hashes() -> list[Official]:
    from backend.features.catalog import OFFICIAL

    return [entry for entry in OFFICIAL if entry.sha256]


def build(state: dict[str, Tensor], remarks: dict[str, str], file: str = "the file") -> LearnedUpsampler:
    """Build the model that the shapes describe, with these weights, frozen and in eval mode.

    Args:
        state: Tensors by official name.
        remarks: ``num_heads`` and ``window_ratio``, which shapes do not tell; the official values if absent.
        file: Name for messages.

    Raises:
        BadFile: If these are not the weights of a JAFAR or AnyUp model.
    """
    model = _empty(state, remarks, file)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    seen = {name: tuple(value.shape) for name, value in state.items()}
    if wanted != seen:
        missing, extra = sorted(wanted.keys() - seen.keys()), sorted(seen.keys() - wanted.keys())
        other = [name for name in wanted.keys() & seen.keys() if wanted[name] != seen[name]]
        detail = (
            f"{missing[0]} is missing"
            if missing
            else f"{extra[0]} is too much"
            if extra
            else f"{other[0]} has shape {seen[other[0]]} instead of {wanted[other[0]]}"
        )
        raise BadFile(f"{file} does not fit the official layout: {detail}.", "Give an unchanged file of the model.")
    if not all(bool(torch.isfinite(value).all()) for value in state.values() if value.is_floating_point()):
        raise BadFile(f"{file} holds NaN or infinite weights.", "Download or copy the file again.")
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    model.requires_grad_(False)
    return model.train(False)


def _empty(state: dict[str, Tensor], remarks: dict[str, str], file: str) -> LearnedUpsampler:
    wrong = BadFile(
        f"{file} holds neither JAFAR nor AnyUp weights; its first entry is {next(iter(sorted(state)), 'missing')}.",
        "Give the file of a JAFAR or AnyUp model.",
    )
    is_anyup, is_jafar = "key_features_encoder.0.basis" in state, "sft_key.gamma.weight" in state
    if is_anyup == is_jafar:
        raise wrong
    try:
        dim = state["cross_decode.conv2d.weight"].shape[0]
        first = state["image_encoder.0.weight"].shape
        heads = int(remarks.get("num_heads", 4))
        shared: dict[str, Any] = {"input_dim": first[1], "qk_dim": dim, "kernel_size": first[2], "num_heads": heads}
        sizes = [dim, first[1]]
        if is_jafar:
            width = state["key_features_encoder.0.weight"].shape[1]
            sizes.append(width)
            if max(sizes) > _WIDEST:
                raise wrong
            return JAFAR(v_dim=width, **shared)
        basis = state["key_features_encoder.0.basis"].shape
        sizes.append(basis[0])
        if max(sizes) > _WIDEST:
            raise wrong
        ratio = float(remarks.get("window_ratio", 0.1))
        return AnyUp(lfu_dim=basis[0], kernel_size_lfu=basis[2], window_ratio=ratio, **shared)
    except (KeyError, IndexError, ValueError):
        raise wrong from None


def find_anyup(weights: str) -> LoadedUpsampler:
    """Return AnyUp weights by name or path; "auto" is what the app comes with.

    Raises:
        NotApplicable: If they are not here.
        BadFile: If the file is not what it should be.
    """
    if weights != "auto":
        return load_file(_path(weights, "anyup"), "anyup")
    path = SHIPPED / "anyup.safetensors"
    if path.is_file():
        return load_file(path, "anyup")
    raise NotApplicable(
        "The app came without AnyUp weights.", "Download the official ones, or give a file of your own."
    )


def find_jafar(weights: str, encoder: str, channels: int, any_encoder: bool = False) -> LoadedUpsampler:
    """Return the JAFAR weights for an encoder.

    Args:
        weights: "auto" for what fits the encoder, a name from the table, or a path.
        encoder: Tag of the encoder; empty if unknown.
        channels: Its width.
        any_encoder: Accept weights of another encoder of the same width, with a note.

    Raises:
        NotApplicable: If there are none, or they belong to another encoder.
        BadFile: If the file is not what it should be.
    """
    if weights == "auto":
        return _jafar_for(encoder, channels)
    entry = official(weights)
    loaded = load_file(_path(weights, "jafar"), "jafar", channels)
    bound = loaded.encoder or (entry.encoder if entry else "")
    if not bound or bound == encoder:
        note = () if bound else ("The file does not say for which encoder these weights were made.",)
        return _with_notes(loaded, note)
    if not any_encoder:
        raise NotApplicable(
            f"These JAFAR weights were made for {bound}, not for {encoder or 'an unnamed encoder'}: shapes fit, but "
            "the result would mean nothing.",
            "Choose AnyUp, or allow weights of another encoder.",
        )
    return _with_notes(loaded, (f"These weights were made for {bound}; with {encoder or 'this encoder'} they guess.",))


def _jafar_for(encoder: str, channels: int) -> LoadedUpsampler:
    from backend.features.catalog import OFFICIAL

    path = SHIPPED / f"jafar_{encoder}.safetensors"
    if encoder.replace("_", "").isalnum() and path.is_file():
        return load_file(path, "jafar", channels)
    entry = next((e for e in OFFICIAL if e.model == "jafar" and e.encoder == encoder), None)
    if entry is not None:
        return load_file(_path(entry.name, "jafar"), "jafar", channels)
    raise NotApplicable(
        f"There are no JAFAR weights for {encoder or 'this encoder'}.",
        "Choose AnyUp, which serves every encoder, or give a file.",
    )


def _path(weights: str, kind: str) -> Path:
    entry = official(weights)
    if entry is None:
        return Path(weights).expanduser()
    if entry.model != kind:
        raise BadFile(f"{weights} names weights of another upsampler.", "Choose the other upsampler.")
    path = download_path(entry)
    if not path.is_file():
        raise NotApplicable(
            f"The weights {entry.name} have not been downloaded ({entry.license}).",
            f"Download them once, or put the file from {entry.url} anywhere and give its path.",
        )
    return path


def download_path(entry: Official) -> Path:
    """Return where a downloaded official file is kept."""
    return get_settings().cache_dir / "upsamplers" / f"{entry.name}.pth"


def _with_notes(loaded: LoadedUpsampler, notes: tuple[str, ...]) -> LoadedUpsampler:
    from dataclasses import replace

    return replace(loaded, notes=notes) if notes else loaded


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
