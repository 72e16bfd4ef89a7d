"""Views of upsampled features: affine ones commute with every upsampler, the others equal the long way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from backend.errors import BadRequest
from backend.features import clusters, pca, probe, views
from backend.features.anyup import AnyUp
from backend.features.jafar import JAFAR
from backend.features.operator import Operator
from backend.features.scene import Scene
from backend.features.similarity import Similarity
from backend.registry import default_params, get_method, make_params
from backend.types import no_tick
from tests.support.feature_cases import picture, shaken

NAMES = ("nearest", "bilinear", "bicubic", "joint_bilateral", "guided", "jafar", "anyup")


def scene(channels: int = 10, seed: int = 0) -> Scene:
    features = torch.randn(1, channels, 6, 5, generator=torch.Generator().manual_seed(seed))
    return Scene(picture(34, 27, seed), features, (34, 27))


def prepared(name: str, at: Scene, keep_bytes: int = 0) -> Operator:
    torch.manual_seed(7)
    if name in ("jafar", "anyup"):
        network = JAFAR(qk_dim=16, v_dim=at.features.shape[1]) if name == "jafar" else AnyUp(qk_dim=16)
        return shaken(network).prepare(at.picture, at.features, at.size, keep_bytes=keep_bytes)
    method = get_method(name, "upsampler")
    return method.run(at, make_params(method, default_params(method)), no_tick)


@pytest.mark.parametrize("name", NAMES)
def test_affine_heads_commute_with_upsampling(name: str) -> None:
    at = scene()
    operator = prepared(name, at)
    weight, bias = torch.randn(4, 10), torch.randn(4)
    seen = views.affine_view(operator, at.features, weight, bias)
    long_way = torch.einsum("kc,bchw->bkhw", weight, operator.apply(at.features)) + bias[None, :, None, None]
    torch.testing.assert_close(seen, long_way, atol=2e-5, rtol=1e-4)


def test_weights_must_come_from_the_original_features() -> None:
    at = scene()
    weight = torch.randn(3, 10)
    network = shaken(AnyUp(qk_dim=16))
    small = views.affine(at.features, weight)
    with torch.no_grad():
        wrong = network(at.picture, small)
        right = views.affine_view(network.prepare(at.picture, at.features), at.features, weight)
    assert float((wrong - right).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["jafar", "anyup"])
def test_kept_weights_give_the_same_answers(name: str) -> None:
    at = scene()
    fresh, kept = prepared(name, at), prepared(name, at, keep_bytes=1 << 30)
    wanted = fresh.apply(at.features)
    for rows in (1, 5, 8, 34):
        torch.testing.assert_close(kept.apply(at.features, rows=rows), wanted, atol=1e-6, rtol=1e-5)
    assert kept.nbytes > 0 and fresh.nbytes > 0
    torch.testing.assert_close(kept.reads(33, 26), fresh.reads(33, 26))
    starved = prepared(name, at, keep_bytes=5000)
    torch.testing.assert_close(starved.apply(at.features), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["guided", "jafar", "anyup"])
def test_norms_and_differences_equal_the_long_way(name: str) -> None:
    at = scene()
    operator, plain = prepared(name, at), prepared("bilinear", at)
    one, other = operator.apply(at.features), plain.apply(at.features)
    budget = 4 * operator.row_bytes(10)
    torch.testing.assert_close(views.norms(operator, at.features, budget=budget), one.norm(dim=1, keepdim=True))
    gap = (one - other).norm(dim=1, keepdim=True) / at.features.norm(dim=1).mean()
    torch.testing.assert_close(views.difference(operator, plain, at.features, budget=budget), gap)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_the_area_average(name: str) -> None:
    at = scene()
    operator = prepared(name, at)
    back = F.adaptive_avg_pool2d(operator.apply(at.features), (6, 5))
    spread = (at.features - at.features.mean((2, 3), keepdim=True)).square().sum()
    wanted = float((back - at.features).square().sum() / spread)
    seen = views.round_trip(operator, at.features, budget=8 * operator.row_bytes(10))
    assert seen.relative_mse == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert seen.error.shape == (1, 6, 5)


def test_nearest_survives_the_round_trip_where_cells_are_whole_pixels() -> None:
    at = Scene(picture(30, 20), torch.randn(1, 3, 6, 5), (30, 20))
    assert views.round_trip(prepared("nearest", at), at.features).relative_mse == pytest.approx(0, abs=1e-10)


def test_reading_of_a_pixel() -> None:
    at = scene()
    nearest = views.reading(prepared("nearest", at), 33, 26)
    assert nearest.total == 1 and nearest.entropy == pytest.approx(0, abs=1e-6) and nearest.largest == 1
    assert int(nearest.weights.argmax()) == 6 * 5 - 1
    learned = views.reading(prepared("jafar", at), 3, 3)
    assert learned.total == pytest.approx(1, abs=1e-5) and 0 < learned.entropy <= 4.91


@pytest.mark.parametrize("name", ["bilinear", "anyup", "jafar"])
@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_cosine_to_a_point_equals_the_long_way(name: str, keep: int) -> None:
    at = scene()
    operator = prepared(name, at)
    full = operator.apply(at.features)[0]
    ready = Similarity(operator, at.features, keep_bytes=keep)
    vector = ready.vector(20, 11)
    torch.testing.assert_close(vector, full[:, 20, 11], atol=1e-5, rtol=1e-4)
    seen = ready.to(vector)
    wanted = F.cosine_similarity(full, full[:, 20:21, 11:12], dim=0)
    torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-4)
    assert float(seen[20, 11]) == pytest.approx(1, abs=1e-5)
    box = ready.box_vector(2, 3, 30, 9)
    torch.testing.assert_close(box, full[:, 2:30, 3:9].mean((1, 2)), atol=1e-5, rtol=1e-4)


def test_cosine_refuses_what_it_cannot_compare_and_takes_empty_vectors() -> None:
    at = Scene(picture(8, 8), torch.zeros(1, 3, 4, 4), (8, 8))
    ready = Similarity(prepared("bilinear", at), at.features)
    assert not ready.to(torch.zeros(3)).any()
    with pytest.raises(BadRequest, match="one encoder"):
        ready.to(torch.zeros(4))
    with pytest.raises(BadRequest, match="box"):
        ready.box_vector(3, 3, 3, 5)
    with pytest.raises(BadRequest, match="outside"):
        ready.vector(8, 0)


def test_basis_finds_planted_directions() -> None:
    torch.manual_seed(8)
    directions = torch.linalg.qr(torch.randn(12, 3))[0].T
    strength = torch.tensor([5.0, 2.0, 0.5])
    cells = torch.randn(400, 3) * strength
    features = (cells @ directions + 3).T.reshape(1, 12, 20, 20)
    basis = pca.fit_basis([features], 3)
    assert (basis.components @ directions.T).abs().diagonal().min() > 0.97
    assert basis.shares.tolist() == sorted(basis.shares.tolist(), reverse=True)
    assert float(basis.shares.sum()) == pytest.approx(1, abs=1e-4)
    assert (basis.components.gather(1, basis.components.abs().argmax(1, keepdim=True)) > 0).all()
    projected = basis.project(features)
    assert projected.mean((0, 2, 3)).abs().max() < 1e-3
    assert basis.positions.max() < 0.1
    assert basis.useful() == [0, 1, 2]


def test_components_that_encode_position_are_told() -> None:
    rows = torch.linspace(-1, 1, 16)[:, None].expand(16, 16)
    content = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * 0.3
    features = torch.stack((rows * 4, content, -content * 0.5))[None]
    basis = pca.fit_basis([features], 2)
    assert basis.positions[0] > 0.9 and basis.positions[1] < 0.2
    assert basis.useful() == [1]


def test_one_basis_and_one_color_range_for_several_pictures() -> None:
    maps = [torch.randn(1, 5, 4, 6), torch.randn(1, 5, 3, 3)]
    basis = pca.fit_basis(maps, 3)
    projected = [basis.project(m) for m in maps]
    low, high = pca.color_range(projected, clip=0.0)
    colors = [pca.to_colors(p, low, high) for p in projected]
    assert colors[0].shape == (4, 6, 3) and colors[0].dtype == torch.uint8
    assert max(int(c.max()) for c in colors) == 255 and min(int(c.min()) for c in colors) == 0
    with pytest.raises(BadRequest, match="one encoder"):
        pca.fit_basis([maps[0], torch.randn(1, 4, 2, 2)])


def test_background_leaves_the_basis() -> None:
    torch.manual_seed(9)
    features = torch.zeros(1, 4, 8, 8)
    features[0, 0, :, :4] = 10  # an even left half
    features[0, 1:, :, 4:] = torch.randn(3, 8, 4)
    first = pca.fit_basis([features], 1)
    mask = pca.foreground(first, features, keep_high=False)
    assert mask[:, 4:].all() and not mask[:, :4].any()
    assert pca.fit_basis([features], 1, [mask]).components[0, 0].abs() < 1e-6
    with pytest.raises(BadRequest, match="Fewer than two"):
        pca.fit_basis([features], 1, [torch.zeros(8, 8, dtype=torch.bool)])


def test_kmeans_finds_planted_groups_and_every_pixel_gets_the_nearest_center() -> None:
    torch.manual_seed(10)
    middles = torch.tensor([[5.0, 0, 0], [0, 5.0, 0], [0, 0, 5.0]])
    owner = torch.zeros(8, 6, dtype=torch.long)
    owner[5:], owner[:5, 4:] = 1, 2
    features = (middles[owner] + 0.2 * torch.randn(8, 6, 3)).permute(2, 0, 1)[None]
    centers = clusters.kmeans(features, 3)
    distance = torch.cdist(middles, centers)
    assert distance.min(0).values.max() < 0.3
    at = Scene(picture(32, 24), features, (32, 24))
    operator = prepared("bilinear", at)
    seen = clusters.segments(operator, features, centers)[0]
    full = operator.apply(features)[0].flatten(1).T
    assert (seen.flatten() == torch.cdist(full, centers).argmin(1)).float().mean() > 0.999
    sizes = torch.bincount(clusters.segments(prepared("nearest", at), features, centers).flatten())
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
    assert clusters.kmeans(features, 3).equal(centers), "the same result twice"
    with pytest.raises(BadRequest, match="cannot be made"):
        clusters.kmeans(features, 49)
    assert clusters.kmeans(torch.ones(1, 2, 3, 3), 2).isfinite().all()


def test_a_probe_learns_a_linear_rule() -> None:
    torch.manual_seed(11)
    vectors = torch.randn(2000, 5) * torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0]) + 3
    rule = torch.randn(3, 5) / torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0])
    labels = ((vectors - 3) @ rule.T).argmax(1)
    fitted = probe.fit_probe(vectors, labels, 3)
    assert ((vectors @ fitted.weight.T + fitted.bias).argmax(1) == labels).float().mean() > 0.97
    at = Scene(picture(12, 12), torch.randn(1, 5, 4, 4), (12, 12))
    assert fitted.scores(prepared("bilinear", at), at.features).shape == (1, 3, 12, 12)
