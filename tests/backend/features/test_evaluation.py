"""The benchmark's protocols: metrics by hand, published yardsticks, what must win where the truth is known."""

from __future__ import annotations

import pytest
import torch

from backend.features.encoders import load_encoder
from backend.features.evaluation import (
    CONTESTANTS,
    MEAN_VECTOR,
    PICK_BEST,
    Contestant,
    as_table,
    dense_rows,
    dense_truth,
    encoder_rows,
    pick_best,
    scores,
)
from backend.features.photos import HELD_OUT, read_photo, square
from tests.support.feature_cases import SHARED

PLAIN = CONTESTANTS[:5]


def test_metrics_by_hand() -> None:
    truth = torch.tensor([[[[1.0, 3.0]], [[0.0, 0.0]]]])  # two positions: (1, 0) and (3, 0)
    result = torch.tensor([[[[0.0, 3.0]], [[1.0, 0.0]]]])
    cosine, centered, error = scores(result, truth)
    assert cosine == pytest.approx(0.5)  # 0 and 1
    assert error == pytest.approx(2 / 2)  # (1 + 1) / (1 + 1)
    assert centered == pytest.approx((2 / 5**0.5 + 1) / 2)  # (-2, 1) against (-1, 0), and (1, 0) against (1, 0)


def test_the_best_pick_is_the_nearest_vector() -> None:
    low = torch.tensor([[[[0.0, 10.0]], [[0.0, 0.0]]]])
    truth = torch.tensor([[[[1.0, 8.0, 4.0]], [[1.0, 0.0, 0.0]]]])
    assert pick_best(low, truth)[0, 0, 0].tolist() == [0, 10, 0]


def test_dense_channels_give_the_published_numbers() -> None:
    """Means over eight photos at 16 × 16: relative MSE and cosine of the specification's table."""
    wanted = {"nearest": (0.336, 0.907), "bilinear": (0.311, 0.922), "bicubic": (0.288, 0.930)}
    wanted |= {"joint_bilateral": (0.241, 0.951), "guided": (0.192, 0.963)}
    contestants = list(PLAIN)
    weights = SHARED / "weights" / "anyup_paper.safetensors"
    if weights.is_file():
        wanted["official"] = (0.237, 0.947)
        contestants.append(Contestant("official", "anyup", (("weights", str(weights)),)))
    photos = {name: square(read_photo(name)) for name in HELD_OUT}
    seen = {str(line["method"]): line for line in as_table(dense_rows(photos, contestants, (16,)))["summary"]}
    for name, (error, cosine) in wanted.items():
        assert seen[name]["relative_mse"] == pytest.approx(error, abs=0.003), name
        assert seen[name]["cosine"] == pytest.approx(cosine, abs=0.003), name


def test_encoder_protocols_and_their_rows() -> None:
    encoder = load_encoder(layer="s16")
    photos = {name: square(read_photo(name), 256) for name in ("coffee", "china")}
    rows = encoder_rows(encoder, photos, PLAIN, factors=(2,))
    settings = {(row.protocol, row.image, row.method, row.factor) for row in rows}
    names = {contestant.name for contestant in PLAIN} | {MEAN_VECTOR, PICK_BEST}
    assert len(rows) == len(settings) == 2 * 2 * len(names)
    assert {row.encoder for row in rows} == {"efficientnet_lite0_s16"}
    for row in rows:
        if row.method == MEAN_VECTOR:
            assert row.relative_mse == pytest.approx(1, abs=1e-4)
    table = as_table(rows)
    assert len(table["summary"]) == 2 * len(names)
    assert all(line["images"] == 2 for line in table["summary"])
    by_method = {str(s["method"]): float(s["relative_mse"]) for s in table["summary"] if s["protocol"] == "pooled"}
    assert by_method["bicubic"] < by_method["nearest"] < by_method["joint_bilateral"]


def test_dense_truth_has_a_pixel_where_the_picture_has_an_edge() -> None:
    image = torch.zeros(1, 3, 20, 20)
    image[..., 10:] = 1
    truth = dense_truth(image)
    assert truth.shape == (1, 48, 20, 20)
    jump = (truth[..., 1:] - truth[..., :-1]).abs().mean((0, 1, 2))
    assert int(jump.argmax()) == 9
    assert not dense_truth(image, seed=2).equal(truth)
