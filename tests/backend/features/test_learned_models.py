"""JAFAR and AnyUp: the official numbers, two routes with one result, windows, chunks, gradients, half precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from backend.errors import BadRequest
from backend.features.anyup import AnyUp, gaussian_derivatives, unify
from backend.features.attention import window_bounds
from backend.features.blocks import pool, pool_axis
from backend.features.jafar import JAFAR
from tests.support import dense_upsamplers, feature_cases
from tests.support.feature_cases import SHARED, picture, reference_case, reference_names, shaken


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("model", "case"), reference_names())
def test_the_official_numbers_are_reproduced(model: str, case: str, gradients: bool) -> None:
    network, arguments, arrays = reference_case(model, case)
    with torch.set_grad_enabled(gradients):
        result = network(arrays["image"], arrays["features"], **arguments)
    assert result.requires_grad == gradients
    seen = result.detach()[:, :: int(arrays["wanted_channels"])]
    torch.testing.assert_close(seen, arrays["output"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["jafar", "anyup"])
def test_the_parts_agree_with_the_official_parts(model: str) -> None:
    network, arguments, arrays = reference_case(*(model, "small_inter") if reference_names()[0][0] else ("", ""))
    seen = {}
    for name, module in network.named_modules():
        if f"mid.{name}" in arrays and name != "norm":
            module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out.detach()))
    network(arrays["image"], arrays["features"], **arguments)
    assert len(seen) >= 9
    for name, part in seen.items():
        wanted = arrays[f"mid.{name}"]
        if name.endswith(("norm_q", "norm_k")):  # (B, H, W, D) here, (B, H·W, D) there
            part = part.flatten(1, 2)
        if name == "rope":  # (B, D, H, W) here, (B, H·W, D) there
            part = part.flatten(2).transpose(1, 2)
        torch.testing.assert_close(part.reshape(wanted.shape), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["jafar", "anyup"])
def test_a_pixel_reads_what_the_official_attention_reads(model: str) -> None:
    network, arguments, arrays = reference_case(*(model, "small_inter") if reference_names()[0][0] else ("", ""))
    operator = network.prepare(arrays["image"], arrays["features"], **arguments)
    wanted = arrays["mid.attn_mean_heads"][0].view(*operator.size, *operator.grid)
    for row, column in ((0, 0), (7, 8), (9, 12), (16, 0)):
        read = operator.reads(row, column)
        torch.testing.assert_close(read, wanted[row, column], atol=1e-5, rtol=1e-4)
        assert float(read.sum()) == pytest.approx(1, abs=1e-5)


def test_windows_have_the_official_bounds() -> None:
    path = SHARED / "fixtures" / "anyup" / "window_masks.npz"
    if not path.is_file():
        pytest.skip("the reference data is not beside the repository")
    checked = 0
    with np.load(path) as stored:
        for key in stored.files:
            if not key.startswith("bounds_"):
                continue
            size, grid, ratio = key.removeprefix("bounds_").split("_")
            (height, width), (rows, columns) = (tuple(map(int, text.split("x"))) for text in (size, grid))
            by_row = window_bounds(height, rows, float(ratio))
            by_column = window_bounds(width, columns, float(ratio))
            wanted = stored[key]
            assert (wanted[..., 0] == by_row.low.numpy()[:, None]).all()
            assert (wanted[..., 1] == by_row.high.numpy()[:, None]).all()
            assert (wanted[..., 2] == by_column.low.numpy()).all()
            assert (wanted[..., 3] == by_column.high.numpy()).all()
            checked += 1
    assert checked


def test_windows_are_never_empty_and_hold_the_own_cell() -> None:
    for length, cells in itertools.product((1, 2, 3, 7, 16, 100, 280, 448, 511), (1, 2, 5, 16, 33, 72)):
        bounds = window_bounds(length, cells, 0.1)
        own = ((torch.arange(length, dtype=torch.float64) + 0.5) / length * cells).long()
        assert (bounds.low <= own).all() and (own < bounds.high).all()
        assert (bounds.low.diff() >= 0).all() and (bounds.high.diff() >= 0).all()


SIZES = [
    # image, grid, output
    ((24, 40), (3, 5), (24, 40)),
    ((33, 21), (7, 4), (33, 21)),
    ((33, 21), (7, 4), (50, 64)),
    ((32, 32), (16, 12), (8, 9)),
    ((20, 28), (2, 2), (1, 1)),
    ((9, 8), (12, 11), (30, 7)),
    ((1, 17), (3, 4), (5, 40)),
    ((64, 48), (8, 6), (1, 70)),
]


@pytest.mark.parametrize(("image", "grid", "size"), SIZES)
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.0])
def test_anyup_equals_the_dense_masked_form(
    image: tuple[int, int], grid: tuple[int, int], size: tuple[int, int], ratio: float
) -> None:
    network = shaken(AnyUp(qk_dim=16, window_ratio=ratio, num_heads=2), seed=1).double()
    guidance, features = torch.randn(2, 3, *image).double(), torch.randn(2, 11, *grid).double()
    with torch.no_grad():
        wanted = dense_upsamplers.anyup(network.state_dict(), guidance, features, size, heads=2, ratio=ratio)
        for chunk in (None, 1, 37):
            seen = network(guidance, features, size, q_chunk_size=chunk)
            torch.testing.assert_close(seen, wanted, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(network(guidance, features, size).detach(), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("image", "grid", "size"), [*SIZES, ((16, 16), (1, 1), (9, 9)), ((16, 24), (1, 3), (16, 24))])
@pytest.mark.parametrize("channels", [12, 16])
def test_jafar_equals_the_dense_form(
    image: tuple[int, int], grid: tuple[int, int], size: tuple[int, int], channels: int
) -> None:
    network = shaken(JAFAR(qk_dim=16, v_dim=channels, num_heads=2), seed=2).double()
    guidance, features = torch.randn(2, 3, *image).double(), torch.randn(2, channels, *grid).double()
    with torch.no_grad():
        wanted = dense_upsamplers.jafar(network.state_dict(), guidance, features, size, heads=2)
        for chunk in (None, 1, 37):
            seen = network(guidance, features, size, q_chunk_size=chunk)
            torch.testing.assert_close(seen, wanted, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(network(guidance, features, size).detach(), wanted, atol=1e-9, rtol=1e-9)


def test_wide_first_convolutions_and_other_filter_counts() -> None:
    guidance, features = torch.randn(1, 3, 19, 26).double(), torch.randn(1, 5, 4, 6).double()
    with torch.no_grad():
        for network in (
            shaken(AnyUp(qk_dim=16, kernel_size=5, lfu_dim=24, kernel_size_lfu=3, use_natten=True, unknown=1)).double(),
            shaken(AnyUp(qk_dim=16, kernel_size=3, kernel_size_lfu=7)).double(),
        ):
            wanted = dense_upsamplers.anyup(network.state_dict(), guidance, features, (19, 26))
            torch.testing.assert_close(network(guidance, features), wanted, atol=1e-9, rtol=1e-9)
        other = shaken(JAFAR(qk_dim=16, v_dim=5, kernel_size=3, feature_dim=9, unknown=1)).double()
        wanted = dense_upsamplers.jafar(other.state_dict(), guidance, features, (19, 26))
        torch.testing.assert_close(other(guidance, features), wanted, atol=1e-9, rtol=1e-9)


def test_the_official_number_of_parameters() -> None:
    counts = {
        sum(p.numel() for p in AnyUp().parameters()): 878_080,
        sum(p.numel() for p in JAFAR().parameters()): 628_480,
        sum(p.numel() for p in JAFAR(v_dim=1280).parameters()): 858_752,
        len(AnyUp().state_dict()): 73,
        len(AnyUp(lfu_dim=64).state_dict()): 74,
        len(JAFAR().state_dict()): 65,
        len(JAFAR(v_dim=128).state_dict()): 63,
    }
    assert all(seen == wanted for seen, wanted in counts.items())


@pytest.mark.parametrize("model", ["jafar", "anyup"])
def test_gradients_are_right(model: str) -> None:
    torch.manual_seed(3)
    network = JAFAR(qk_dim=8, v_dim=3, num_heads=2) if model == "jafar" else AnyUp(qk_dim=8, num_heads=2)
    shaken(network.double())
    image = torch.randn(1, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    features = torch.randn(1, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda i, f: network(i, f, (4, 9)), (image, features), atol=1e-6, rtol=1e-4)

    names = [n for n, _ in network.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in network.parameters()]

    def along(*weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (image, features, (4, 9)))

    loss = along(*values).square().sum()
    gradients = torch.autograd.grad(loss, values, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    for name, gradient, value in zip(names, gradients, values, strict=True):
        dead = any(part in name for part in ("norm_v", "v_proj", "out_proj"))
        assert (gradient is None) == dead, name
        if gradient is None:
            continue
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        shifted = [dict(zip(names, values, strict=True)) for _ in range(2)]
        for step, table in zip((1e-6, -1e-6), shifted, strict=True):
            table[name] = value + step * direction
        with torch.no_grad():
            up, down = (along(*table.values()).square().sum() for table in shifted)
        torch.testing.assert_close(
            (gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-4, atol=1e-6, msg=f"gradient of {name}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model", ["jafar", "anyup"])
def test_half_precision_stays_close_on_a_picture(model: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    network = JAFAR(v_dim=24) if model == "jafar" else AnyUp()
    image = (picture(96, 80) - 0.45) / 0.22
    features = torch.nn.functional.avg_pool2d(torch.randn(1, 24, 12, 10), 3, 1, 1) + 0.3
    with torch.no_grad():
        wanted = network(image, features)
        seen = network.to(dtype)(image.to(dtype), features)
    assert seen.dtype == torch.float32
    likeness = torch.cosine_similarity(seen, wanted, dim=1).flatten()
    # Eight bits of mantissa leave a few pixels below that.
    worst = likeness.min() if dtype == torch.float16 else likeness.quantile(0.01)
    assert float(worst) >= 0.999


def test_released_weights_in_half_precision() -> None:
    if not (SHARED / "weights").is_dir():
        pytest.skip("the released weights are not beside the repository")
    network, _, _ = reference_case("anyup", "trained_multi_c384_112_16x16")
    image = (picture(160, 128) - 0.45) / 0.22
    smooth = torch.nn.functional.interpolate(torch.randn(1, 64, 5, 4), size=(10, 8), mode="bicubic")
    with torch.no_grad():
        wanted = network(image, smooth)
        seen = network.half()(image.half(), smooth.half())
    assert float(torch.cosine_similarity(seen, wanted, dim=1).min()) >= 0.999


def test_the_unification_reads_its_table_without_transposing() -> None:
    torch.manual_seed(5)
    basis = torch.randn(3, 1, 3, 3)
    features = torch.randn(1, 2, 4, 5)
    r = torch.nn.functional.conv2d(features, basis.repeat(2, 1, 1, 1), padding=1, groups=2)[0]  # r00 r01 r02 r10 …
    inside = torch.nn.functional.conv2d(torch.ones(1, 1, 4, 5), torch.ones(1, 1, 3, 3), padding=1)[0]
    r = (r / inside).exp()
    first = r[[0, 2, 4]] / (r[0] + r[2] + r[4])
    second = r[[1, 3, 5]] / (r[1] + r[3] + r[5])
    torch.testing.assert_close(unify(features, basis)[0], (first + second) / 2)


def test_unification_in_strips_equals_unification_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    basis, features = torch.randn(8, 1, 5, 5), torch.randn(2, 13, 9, 6)
    whole = unify(features, basis)
    monkeypatch.setattr("backend.features.anyup._STRIP_BYTES", 1)
    torch.testing.assert_close(unify(features, basis), whole)
    torch.testing.assert_close(whole.sum(1), torch.ones(2, 9, 6))


@pytest.mark.parametrize("channels", [1, 3, 130])
def test_anyup_takes_any_number_of_channels(channels: int) -> None:
    network = shaken(AnyUp(qk_dim=16)).double()
    guidance, features = torch.randn(1, 3, 18, 14).double(), torch.randn(1, channels, 3, 2).double()
    with torch.no_grad():
        wanted = dense_upsamplers.anyup(network.state_dict(), guidance, features, (18, 14))
        torch.testing.assert_close(network(guidance, features), wanted, atol=1e-9, rtol=1e-9)


def test_pooling_equals_torchs_adaptive_pooling() -> None:
    for length, cells in itertools.product((1, 2, 3, 7, 12, 30), (1, 2, 5, 7, 24, 31)):
        x = torch.randn(2, 3, length, 6)
        wanted = torch.nn.functional.adaptive_avg_pool2d(x, (cells, 4))
        torch.testing.assert_close(pool(x, (cells, 4)), wanted)
        for start in range(0, cells, 3):
            stop = min(start + 3, cells)
            part = torch.nn.functional.adaptive_avg_pool2d(x, (cells, 6))[:, :, start:stop]
            torch.testing.assert_close(pool_axis(x, 2, cells, start, stop), part)


def test_gaussian_derivatives_are_filters_of_unit_length() -> None:
    bank = gaussian_derivatives(128, 5)
    assert bank.shape == (128, 1, 5, 5)
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(128))
    first_order = bank[1::3].flatten(1)
    assert float(first_order.sum(1).abs().max()) < 1e-5, "a first derivative does not answer to a constant"
    assert AnyUp(init_gaussian_derivatives=True).key_features_encoder[0].basis.equal(bank)


def test_inputs_stay_as_they_were_and_weights_too() -> None:
    network = shaken(AnyUp(qk_dim=16))
    image, features = torch.randn(1, 3, 16, 16), torch.randn(1, 4, 4, 4)
    copies = image.clone(), features.clone(), {k: v.clone() for k, v in network.state_dict().items()}
    with torch.no_grad():
        network(image, features)
    assert image.equal(copies[0]) and features.equal(copies[1])
    assert all(value.equal(copies[2][name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("image", "features", "options", "words"),
    [
        (torch.zeros(1, 4, 8, 8), torch.zeros(1, 6, 2, 2), {}, "guidance image must have shape"),
        (torch.zeros(2, 3, 8, 8), torch.zeros(1, 6, 2, 2), {}, "2 guidance images but 1 feature maps"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(6, 2, 2), {}, "feature map must have shape"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 0, 2), {}, "feature map must have shape"),
        (torch.full((1, 3, 8, 8), torch.nan), torch.zeros(1, 6, 2, 2), {}, "NaN"),
        (torch.zeros(1, 3, 8, 8), torch.full((1, 6, 2, 2), torch.inf), {}, "infinite"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 6, 2, 2), {}, "floating-point"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 2, 2), {"output_size": (0, 8)}, "output size"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 2, 2), {"output_size": (8, 8.5)}, "output size"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 2, 2), {"output_size": (8,)}, "output size"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 2, 2), {"q_chunk_size": 0}, "at least one query"),
    ],
)
def test_misfits_are_refused_with_a_sentence(
    image: torch.Tensor, features: torch.Tensor, options: dict[str, object], words: str
) -> None:
    for network in (JAFAR(qk_dim=8, v_dim=6), AnyUp(qk_dim=8)):
        with pytest.raises(BadRequest, match=words):
            network(image, features, **options)


def test_each_model_refuses_what_only_it_cannot_do() -> None:
    with pytest.raises(BadRequest, match="for 6 channels; the feature map has 7"):
        JAFAR(qk_dim=8, v_dim=6)(torch.zeros(1, 3, 8, 8), torch.zeros(1, 7, 2, 2))
    with pytest.raises(BadRequest, match="at least 2 × 2"):
        AnyUp(qk_dim=8)(torch.zeros(1, 3, 8, 8), torch.zeros(1, 7, 1, 4))
    for model, arguments in itertools.product(
        feature_cases.MODELS.values(), ({"qk_dim": 12}, {"qk_dim": 24, "num_heads": 5}, {"kernel_size": 2})
    ):
        with pytest.raises(ValueError, match="divisible"):
            model(**arguments)
