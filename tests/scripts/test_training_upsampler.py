"""Training of upsamplers at toy size: losses by hand, the official bugs absent, runs that resume, files that load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from backend.features.photos import HELD_OUT
from backend.features.weights import load_file
from scripts.train_upsampler import Settings, Trainer
from scripts.training_losses import consistency_loss, input_loss, match_loss, perturbed
from scripts.training_photos import ILLUSTRATIONS, PHOTOS, cut
from tests.support.feature_cases import picture


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        pixels = (picture(470, 500, seed=number)[0].permute(1, 2, 0) * 255).to(torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_losses_by_hand() -> None:
    target = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    assert float(match_loss(target, target)) == pytest.approx(0, abs=1e-6)
    shifted = target + 2  # one range further in both channels
    cosine = (3 + 15) / (34**0.5 * 10**0.5)
    assert float(match_loss(shifted, target)) == pytest.approx(1 - cosine + 1, abs=1e-4)
    flat = torch.ones(1, 4, 3, 3)
    flat[..., 0, 0] += torch.arange(4.0)
    assert float(match_loss(flat + 0.0001, flat)) < 1, "a flat target does not dominate"
    low = torch.randn(1, 3, 2, 2)
    assert float(input_loss(low.repeat_interleave(4, 2).repeat_interleave(4, 3), low)) == pytest.approx(0, abs=1e-5)
    clean = torch.randn(1, 3, 2, 2, requires_grad=True)
    noisy = torch.randn(1, 3, 2, 2, requires_grad=True)
    consistency_loss(noisy, clean).backward()
    assert clean.grad is None and noisy.grad is not None


def test_perturbation_keeps_the_clean_picture_and_the_range_of_pixels() -> None:
    clean = picture(16, 16)
    copy = clean.clone()
    changed = 0
    for seed in range(20):
        noisy = perturbed(clean, torch.Generator().manual_seed(seed))
        assert clean.equal(copy)
        assert float(noisy.min()) >= 0 and float(noisy.max()) <= 1 and noisy.shape == clean.shape
        changed += not noisy.equal(clean)
    assert changed > 8


def test_held_out_photographs_are_not_trained_on() -> None:
    names = {Path(path).stem.lower() for path in (*PHOTOS, *ILLUSTRATIONS)}
    assert not names & set(HELD_OUT)
    assert len(set(PHOTOS)) == len(PHOTOS) >= 38


def test_squares_are_cut_as_the_list_says(photos: Path) -> None:
    squares, crops = cut(sorted(photos.iterdir()), 2, 64, seed=3)
    again, same = cut(sorted(photos.iterdir()), 2, 64, seed=3)
    assert squares.shape == (6, 64, 64, 3) and (squares == again).all() and crops == same
    assert all(0.4 * 470 <= crop.side <= 470 for crop in crops)


@pytest.mark.parametrize("model", ["jafar", "anyup"])
def test_a_run_resumes_where_it_stopped_and_its_weights_load(model: str, photos: Path, tmp_path: Path) -> None:
    settings = Settings(model, layer="s32", steps=2, batch=1, dim=16, heads=2, crops=1, check_every=1)
    whole = Trainer(settings, tmp_path / "whole", photos)
    encoders = [whole.source.encoder] if model == "jafar" else whole.source.real
    before = [{k: v.clone() for k, v in e._model.state_dict().items()} for e in encoders]
    whole.run()
    for encoder, state in zip(encoders, before, strict=True):
        assert all(v.equal(state[k]) for k, v in encoder._model.state_dict().items()), "the encoder stays frozen"

    first = Trainer(settings, tmp_path / "parts", photos)
    run_check = first._check

    def stop(loss: float) -> None:
        run_check(loss)
        raise KeyboardInterrupt

    first._check = stop
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Trainer(settings, tmp_path / "parts", photos)
    second.resume()
    assert second.step == 1
    second.run()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, atol=1e-5, rtol=1e-4)

    loaded = load_file(tmp_path / "whole" / f"{settings.name}.safetensors", model)
    assert loaded.model.num_heads == 2
    assert loaded.encoder == ("efficientnet_lite0_s32" if model == "jafar" else "")
    record = json.loads((tmp_path / "whole" / f"{settings.name}.json").read_text())
    assert record["steps"] == 2 and len(record["curve"]) == 2
