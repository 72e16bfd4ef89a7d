"""Generated scenes and the probe on them: deterministic, disjoint, scored as by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.features.encoders import load_encoder
from backend.features.evaluation import Contestant
from backend.features.generated_scenes import BACKGROUNDS, CLASSES, scene
from backend.features.segmentation_probe import (
    Sizes,
    borders,
    boundary_f,
    confusion,
    flat_blocks,
    mean_iou,
    probe_rows,
    widened,
)


def test_scenes_are_functions_of_split_seed_and_index() -> None:
    image, labels = scene("train", 0, 0, 128)
    again = scene("train", 0, 0, 128)
    assert (image == again[0]).all() and (labels == again[1]).all()
    others = [scene("train", 0, 1, 128), scene("train", 1, 0, 128), scene("test", 0, 0, 128)]
    assert all((other[1] != labels).any() for other in others)
    assert image.shape == (128, 128, 3) and image.dtype == labels.dtype == np.uint8
    assert not set(BACKGROUNDS["train"]) & set(BACKGROUNDS["test"])


def test_all_classes_occur_and_thin_shapes_too() -> None:
    counts = np.zeros(len(CLASSES))
    for index in range(30):
        counts += np.bincount(scene("train", 0, index, 128)[1].flatten(), minlength=len(CLASSES)) > 0
    assert (counts > 0).all()


def test_scores_by_hand() -> None:
    truth = torch.zeros(20, 20, dtype=torch.long)
    truth[:, 10:] = 1
    assert borders(truth).nonzero()[:, 1].unique().tolist() == [9]
    assert widened(borders(truth), 2)[0].nonzero().flatten().tolist() == [7, 8, 9, 10, 11]
    assert boundary_f(truth, truth) == 1
    moved = torch.zeros_like(truth)
    moved[:, 15:] = 1
    assert boundary_f(moved, truth) == 0
    assert boundary_f(moved.roll(-3, 1)[:, :17], truth[:, :17]) == 1, "two pixels off is near enough"
    counts = confusion(moved, truth, 2)
    assert counts.tolist() == [[200, 0], [100, 100]]
    assert mean_iou(counts) == pytest.approx((200 / 300 + 100 / 200) / 2)


def test_flat_blocks_take_the_majority() -> None:
    truth = torch.zeros(32, 32, dtype=torch.long)
    truth[:, :9] = 3
    flat = flat_blocks(truth)
    assert (flat[:, :16] == 3).all() and (flat[:, 16:] == 0).all()


def test_the_probe_beats_chance_and_reports_every_method() -> None:
    encoder = load_encoder(layer="s16")
    contestants = [Contestant("nearest", "nearest"), Contestant("bilinear", "bilinear")]
    rows = probe_rows(encoder, contestants, seeds=(0,), sizes=Sizes(train=16, test=4, pixels=256, side=128))
    assert [row["method"] for row in rows] == ["nearest", "bilinear", "flat blocks"]
    for row in rows:
        assert row["protocol"] == "segmentation_probe" and 0 <= float(row["boundary_f"]) <= 1
        assert float(row["accuracy"]) > 0.5
        assert float(row["miou"]) > 1 / len(CLASSES)
