"""Reference cases, random models and pictures for the tests of image features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.features.anyup import AnyUp
from backend.features.jafar import JAFAR

SHARED = Path(__file__).resolve().parents[3] / "shared"  # reference data lies beside the repository
MODELS = {"jafar": JAFAR, "anyup": AnyUp}


def reference_names() -> list[tuple[str, str]]:
    """Return (model, case) of all reference cases; one empty pair if the data is not there."""
    found = []
    for model in MODELS:
        meta = SHARED / "fixtures" / model / "meta.json"
        if meta.is_file():
            found += [(model, name) for name in json.loads(meta.read_text())["cases"]]
    return found or [("", "")]


def reference_case(model: str, name: str) -> tuple[JAFAR | AnyUp, dict[str, Any], dict[str, Tensor]]:
    """Return the model with its weights, the call's arguments, and the arrays of a reference case."""
    if not model:
        pytest.skip("the reference data is not beside the repository")
    folder = SHARED / "fixtures" / model
    meta = json.loads((folder / "meta.json").read_text())
    case = meta["cases"][name]
    network = MODELS[model](**meta["models"].get(case["model"], {}).get("constructor", {}))
    network.load_state_dict(load_file(folder / f"{case['model']}.safetensors"), strict=True)
    with np.load(folder / f"{name}.npz") as stored:
        arrays = {key: torch.from_numpy(stored[key]) for key in stored.files}
    size = arrays["output_size"].tolist() if "output_size" in arrays else case["output_size"]
    arguments = {"output_size": None if size is None or size[0] < 0 else tuple(size), **case.get("call_kwargs", {})}
    arrays["wanted_channels"] = torch.tensor(case["out_channel_stride"])
    return network, arguments, arrays


def shaken(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Move all weights away from their initial values, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.3 if parameter.ndim == 1 else float(parameter.std()) * 0.7
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return network.train(False)


def picture(height: int, width: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Return smooth color blobs with sharp edges and a little noise, (B, 3, H, W) in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(batch, 3, 5, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    edges = torch.nn.functional.interpolate(
        torch.rand(batch, 1, 3, 4, generator=generator), size=(height, width), mode="nearest"
    )
    noise = torch.rand(batch, 3, height, width, generator=generator)
    return (0.6 * smooth + 0.35 * edges + 0.05 * noise).clamp(0, 1)
