"""Nearest, bilinear, bicubic, joint bilateral, guided: formulas written the long way, torch's modes, exact answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import BadRequest, OutOfMemory
from backend.features.filters import resized
from backend.features.operator import Operator
from backend.features.scene import Scene
from backend.registry import get_method, list_methods, make_params
from backend.types import no_tick
from tests.support.feature_cases import picture

BASELINES = ("nearest", "bilinear", "bicubic", "joint_bilateral", "guided")


def prepared(name: str, scene: Scene, **params: float) -> Operator:
    method = get_method(name, "upsampler")
    return method.run(scene, make_params(method, params), no_tick)


def test_all_upsamplers_are_registered() -> None:
    assert [method.name for method in list_methods("upsampler")] == [*BASELINES, "jafar", "anyup"]


@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mode=st.sampled_from([("nearest", "nearest-exact"), ("bilinear", "bilinear"), ("bicubic", "bicubic")]),
)
@settings(max_examples=60, deadline=None)
def test_interpolations_equal_torchs_modes(grid: tuple[int, int], size: tuple[int, int], mode: tuple[str, str]) -> None:
    features = torch.randn(2, 3, *grid, generator=torch.Generator().manual_seed(1))
    operator = prepared(mode[0], Scene(picture(8, 8, batch=2), features, size))
    corners = {} if mode[1] == "nearest-exact" else {"align_corners": False}
    wanted = F.interpolate(features, size=size, mode=mode[1], **corners)
    torch.testing.assert_close(operator.apply(features), wanted, atol=2e-5, rtol=1e-5)


def test_joint_bilateral_is_its_formula() -> None:
    torch.manual_seed(2)
    features, guide, radius, space, color = torch.randn(1, 2, 4, 3), picture(14, 9), 1, 0.8, 0.3
    operator = prepared("joint_bilateral", Scene(guide, features, (14, 9)), radius=1, sigma_space=0.8, sigma_range=0.3)
    small = F.adaptive_avg_pool2d(guide, (4, 3))
    result = torch.zeros(2, 14, 9)
    for y in range(14):
        for x in range(9):
            at = ((y + 0.5) * 4 / 14 - 0.5, (x + 0.5) * 3 / 9 - 0.5)
            total, mass = torch.zeros(2), 0.0
            for i in range(-radius, radius + 1):
                for j in range(-radius, radius + 1):
                    q = (int((at[0] + 0.5) // 1) + i, int((at[1] + 0.5) // 1) + j)
                    inside = (min(max(q[0], 0), 3), min(max(q[1], 0), 2))
                    far = (at[0] - q[0]) ** 2 + (at[1] - q[1]) ** 2
                    unlike = float((guide[0, :, y, x] - small[0, :, inside[0], inside[1]]).square().sum())
                    weight = float(torch.exp(torch.tensor(-far / (2 * space**2) - unlike / (2 * color**2))))
                    total += weight * features[0, :, inside[0], inside[1]]
                    mass += weight
            result[:, y, x] = total / mass
    torch.testing.assert_close(operator.apply(features)[0], result, atol=1e-5, rtol=1e-5)


def test_joint_bilateral_falls_back_to_bilinear_where_no_cell_has_a_like_color() -> None:
    guide = torch.zeros(1, 3, 8, 8)
    guide[:, :, ::2] = 1.0  # the average of a cell is gray, no pixel is
    features = torch.randn(1, 2, 4, 4)
    operator = prepared("joint_bilateral", Scene(guide, features, (8, 8)), sigma_range=0.01)
    wanted = F.interpolate(features, size=(8, 8), mode="bilinear", align_corners=False)
    torch.testing.assert_close(operator.apply(features), wanted)


def test_guided_filter_is_its_formula() -> None:
    torch.manual_seed(3)
    features, guide, eps = torch.randn(1, 2, 5, 4).double(), picture(15, 12).double(), 1e-2
    operator = prepared("guided", Scene(guide, features, (15, 12)))
    small = F.adaptive_avg_pool2d(guide, (5, 4))[0]
    a, b = torch.zeros(2, 3, 5, 4).double(), torch.zeros(2, 5, 4).double()
    for i in range(5):
        for j in range(4):
            rows, columns = slice(max(i - 1, 0), i + 2), slice(max(j - 1, 0), j + 2)
            colors = small[:, rows, columns].flatten(1)
            values = features[0, :, rows, columns].flatten(1)
            count = colors.shape[1]
            mean, level = colors.mean(1), values.mean(1)
            spread = colors @ colors.T / count - torch.outer(mean, mean)
            shared = values @ colors.T / count - torch.outer(level, mean)
            a[:, :, i, j] = torch.linalg.solve(spread + eps * torch.eye(3).double(), shared.T).T
            b[:, i, j] = level - a[:, :, i, j] @ mean
    a = F.avg_pool2d(a.flatten(0, 1)[None], 3, 1, 1, count_include_pad=False)
    b = F.avg_pool2d(b[None], 3, 1, 1, count_include_pad=False)
    a = F.interpolate(a, size=(15, 12), mode="bilinear", align_corners=False).view(2, 3, 15, 12)
    b = F.interpolate(b, size=(15, 12), mode="bilinear", align_corners=False)[0]
    wanted = (a * guide).sum(1) + b
    torch.testing.assert_close(operator.apply(features)[0], wanted, atol=1e-6, rtol=1e-6)


def test_guided_filter_returns_functions_of_color() -> None:
    guide = picture(64, 48)
    small = F.adaptive_avg_pool2d(guide, (8, 6))
    weight = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, 0.0]])
    features = torch.einsum("kc,bchw->bkhw", weight, small) + 0.7
    seen = prepared("guided", Scene(guide, features, (64, 48)), epsilon=1e-6).apply(features)
    wanted = torch.einsum("kc,bchw->bkhw", weight, guide) + 0.7
    # Where a window holds hardly any color contrast the fit is loose; the median shows the rule.
    assert float((seen - wanted).abs().median()) < 0.01


@pytest.mark.parametrize("name", BASELINES)
def test_constants_come_back_exactly_and_weights_sum_to_one(name: str) -> None:
    features = torch.full((1, 2, 5, 7), -3.25)
    operator = prepared(name, Scene(picture(31, 40), features, (31, 40)))
    torch.testing.assert_close(operator.apply(features), torch.full((1, 2, 31, 40), -3.25))
    for row, column in ((0, 0), (15, 22), (30, 39)):
        assert float(operator.reads(row, column).sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_the_result_is_the_sum_of_what_each_pixel_reads_whatever_the_chunks(name: str) -> None:
    torch.manual_seed(4)
    features = torch.randn(2, 3, 4, 5)
    operator = prepared(name, Scene(picture(17, 22, batch=2), features, (17, 22)))
    whole = operator.apply(features)
    assert whole.shape == (2, 3, 17, 22) and whole.dtype == torch.float32
    for rows in (1, 4, 100):
        torch.testing.assert_close(operator.apply(features, rows=rows), whole)
    weights = operator.reads(6, 9, image=1)
    read = (weights * features[1]).sum((1, 2))
    torch.testing.assert_close(read, whole[1, :, 6, 9], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("size", [(1, 1), (3, 50), (90, 2), (5, 6)])
def test_any_output_size(name: str, size: tuple[int, int]) -> None:
    features = torch.randn(1, 3, 5, 6)
    result = prepared(name, Scene(picture(20, 24), features, size)).apply(features)
    assert result.shape == (1, 3, *size)
    assert bool(torch.isfinite(result).all())


def test_memory_budget_chooses_chunks_or_refuses() -> None:
    features = torch.randn(1, 64, 4, 4)
    operator = prepared("bilinear", Scene(picture(64, 64), features, (64, 64)))
    ticks: list[tuple[int, int]] = []
    operator.apply(features, budget=operator.row_bytes(64) * 10, tick=lambda done, total: ticks.append((done, total)))
    assert ticks == [(10, 64), (20, 64), (30, 64), (40, 64), (50, 64), (60, 64), (64, 64)]
    with pytest.raises(OutOfMemory, match="One row of the result needs"):
        operator.apply(features, budget=1000)


def test_operators_refuse_maps_of_another_grid() -> None:
    operator = prepared("bilinear", Scene(picture(8, 8), torch.randn(1, 3, 4, 4), (8, 8)))
    with pytest.raises(BadRequest, match="this operator takes"):
        operator.apply(torch.randn(1, 3, 4, 5))
    with pytest.raises(BadRequest, match="NaN"):
        operator.apply(torch.full((1, 3, 4, 4), torch.nan))
    with pytest.raises(BadRequest, match="outside"):
        operator.reads(8, 0)


def test_pictures_shrink_by_area_and_grow_linearly() -> None:
    guide = picture(12, 10)
    torch.testing.assert_close(resized(guide, (5, 10)), F.adaptive_avg_pool2d(guide, (5, 10)))
    wanted = F.interpolate(guide, size=(30, 10), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resized(guide, (30, 10)), wanted)
