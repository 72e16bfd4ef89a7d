"""Encoders: grids, tokens, layers, sizes and normalization, on tiny random models and the embedded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

from backend.errors import BadRequest, ModelUnavailable, NotApplicable
from backend.features.encoders import EncodedImage, Encoder, encode, fit_size, load_encoder
from backend.features.timm_encoder import TimmEncoder
from backend.features.transformers_encoder import TransformersEncoder
from tests.support.feature_cases import picture

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def embedded() -> Encoder:
    return load_encoder()


def test_sizes_keep_the_aspect_ratio_and_round_to_multiples() -> None:
    assert fit_size(300, 451, 448, 14) == (294, 448)
    assert fit_size(480, 640, 448, 32) == (320, 448) or fit_size(480, 640, 448, 32) == (352, 448)
    assert fit_size(1, 5000, 448, 16) == (16, 448)
    for bad in (13, 5000):
        with pytest.raises(BadRequest, match="long side"):
            fit_size(10, 10, bad, 14)
    with pytest.raises(BadRequest, match="no pixels"):
        fit_size(0, 10, 448, 14)


@pytest.mark.parametrize(("name", "prefix"), [("test_vit", 1), ("test_vit2", 1), ("vit_tiny_patch16_siglip", 0)])
def test_timm_transformers_give_their_final_tokens_as_a_grid(name: str, prefix: int) -> None:
    torch.manual_seed(0)
    if name == "vit_tiny_patch16_siglip":  # no class token, attention pooling: the bare tensor comes back
        model = timm.models.VisionTransformer(
            img_size=64, patch_size=16, embed_dim=32, depth=2, num_heads=2, class_token=False, global_pool="map",
            num_classes=0, dynamic_img_size=True,
        )  # fmt: skip
        encoder = TimmEncoder("x", "test_vit")
        encoder._model, encoder._index = model.eval(), 1
    else:
        encoder = TimmEncoder("x", name)
        assert encoder.info.prefix_tokens == prefix
        model = encoder._model
    image = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        seen = encoder.features(image)
        tokens = model.forward_features(image)[:, prefix:]
    assert seen.shape[2:] == (3, 5)
    torch.testing.assert_close(seen, tokens.transpose(1, 2).reshape(seen.shape))


def test_timm_layers_can_be_chosen() -> None:
    torch.manual_seed(1)
    first = TimmEncoder("x", "test_vit", "block0")
    assert first.info.layers == ("block0", "block1", "block2", "block3", "block4", "last")
    assert first.info.tag == "timm/test_vit/block0"
    image = torch.randn(1, 3, 32, 48)
    blocks: list[torch.Tensor] = []
    first._model.blocks[0].register_forward_hook(lambda _m, _i, out: blocks.append(out))
    seen = first.features(image)
    torch.testing.assert_close(seen.flatten(2).transpose(1, 2), blocks[0][:, 1:])
    with pytest.raises(BadRequest, match=r"no layer 'block9'.*|Its layers"):
        TimmEncoder("x", "test_vit", "block9")
    with pytest.raises(BadRequest, match="no model named"):
        TimmEncoder("x", "nothing_like_it")


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet"])
def test_timm_levels_have_the_stride_that_they_say(name: str) -> None:
    for layer in ("s8", "s16", "s32"):
        encoder = TimmEncoder("x", name, layer)
        image = encode(encoder, picture(60, 90), 96)
        assert image.picture.shape == (1, 3, 64, 96)
        stride = int(layer[1:])
        assert image.features.shape == (1, encoder.info.channels, 64 // stride, 96 // stride)
    assert TimmEncoder("x", name).info.layer == "s16"


def test_hierarchical_models_with_channels_last_are_turned() -> None:
    encoder = TimmEncoder("x", "swin_tiny_patch4_window7_224", "s32")
    with torch.no_grad():
        assert encoder.features(torch.randn(1, 3, 64, 96)).shape == (1, 768, 2, 3)


def tiny(kind: str) -> tuple[Any, int]:
    """Return a tiny transformers vision model and its number of tokens before the patches."""
    shared: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(2)
    if kind == "dinov2":
        return transformers.Dinov2Model(transformers.Dinov2Config(**shared)), 1
    if kind == "dinov2_with_registers":
        config = transformers.Dinov2WithRegistersConfig(**shared, num_register_tokens=4)
        return transformers.Dinov2WithRegistersModel(config), 5
    if kind == "dinov3_vit":
        return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**shared, num_register_tokens=4)), 5
    if kind == "vit":
        return transformers.ViTModel(transformers.ViTConfig(**shared)), 1
    if kind == "clip_vision_model":
        return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**shared)), 1
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**shared)), 0


KINDS = ["dinov2", "dinov2_with_registers", "dinov3_vit", "vit", "clip_vision_model", "siglip_vision_model"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_patches_lie_where_the_picture_is(kind: str, tmp_path: Path) -> None:
    model, prefix = tiny(kind)
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1] * 3})
    )
    encoder = load_encoder(str(tmp_path))
    assert encoder.info.mean == (0.1, 0.2, 0.3) and encoder.info.prefix_tokens == prefix
    assert encoder.info.layers == ("block0", "last")
    seen = encode(encoder, picture(70, 100), 84)
    assert seen.picture.shape == (1, 3, 56, 84) and seen.features.shape == (1, 32, 4, 6)
    # A change of one patch of pixels changes its own cell most.
    image = torch.randn(1, 3, 56, 84)
    other = image.clone()
    other[:, :, 28:42, 14:28] += 2.0
    for layer in ("block0", "last"):
        reader = load_encoder(str(tmp_path), layer)
        with torch.no_grad():
            change = (reader.features(other) - reader.features(image))[0].norm(dim=0)
        assert int(change.argmax()) == 2 * 6 + 1
    with pytest.raises(BadRequest, match="no layer"):
        load_encoder(str(tmp_path), "s16")


def test_transformers_backbones_by_stage(tmp_path: Path) -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
    transformers.ConvNextModel(config).save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
    assert (encoder.info.layer, encoder.info.channels, encoder.info.layers) == ("s16", 24, ("s8", "s16", "s32"))
    assert encode(encoder, picture(64, 96), 96).features.shape == (1, 24, 4, 6)


def test_timm_folders_load_and_normalize_as_they_say(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source = timm.create_model("test_vit", num_classes=7)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    config = {
        "architecture": "test_vit",
        "num_classes": 7,
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4] * 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(str(tmp_path))
    assert encoder.info.mean == (0.1, 0.2, 0.3) and encoder.info.std == (0.4, 0.4, 0.4)
    assert len(encoder.info.revision) == 16
    image = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        wanted = source.eval().forward_features(image)[:, 1:]
        torch.testing.assert_close(encoder.features(image).flatten(2).transpose(1, 2), wanted)


def test_models_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no readable config\.json"):
        load_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "radio", "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(NotApplicable, match="program code of its own"):
        load_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(NotApplicable, match="type llama"):
        load_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    with pytest.raises(ModelUnavailable, match="no weights"):
        load_encoder(str(tmp_path))
    with pytest.raises(BadRequest, match="neither a folder nor a name"):
        load_encoder("no such thing")
    with pytest.raises(ModelUnavailable, match="switched off"):
        load_encoder("timm/vit_small_patch14_dinov2.lvd142m")


def test_a_model_that_drops_tokens_is_caught() -> None:
    model, _ = tiny("dinov2")
    encoder = TransformersEncoder("x", model, "dinov2_with_registers")  # it has no registers
    encoder._prefix = 5
    with pytest.raises(ModelUnavailable, match="tokens"):
        encoder.features(torch.zeros(1, 3, 28, 28))


@pytest.mark.parametrize(("layer", "channels", "stride"), [("s8", 40, 8), ("s16", 112, 16), ("s32", 320, 32)])
def test_the_embedded_encoder_has_three_levels(layer: str, channels: int, stride: int) -> None:
    encoder = load_encoder(layer=layer)
    assert encoder.info.tag == f"efficientnet_lite0_{layer}"
    seen = encode(encoder, (picture(50, 70)[0].permute(1, 2, 0) * 255).to(torch.uint8).numpy(), 96)
    assert isinstance(seen, EncodedImage) and seen.original_size == (50, 70)
    assert seen.features.shape == (1, channels, 64 // stride, 96 // stride)
    scene = seen.scene()
    assert scene.size == (64, 96) and scene.mean == (0.5, 0.5, 0.5) and scene.encoder == encoder.info.tag


def test_the_embedded_encoder_knows_a_cat() -> None:
    data = pytest.importorskip("skimage.data")
    from backend.features.embedded_encoder import _state

    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(_state())
    cat = torch.from_numpy(data.chelsea()).permute(2, 0, 1)[None].float() / 255
    cat = F.interpolate(cat[:, :, :, 75:375], size=(224, 224), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        best = model.eval()(cat * 2 - 1)[0].topk(5).indices.tolist()
    assert set(best) & set(range(281, 286)), "one of ImageNet's five cats"


def test_the_embedded_grid_is_not_shifted(embedded: Encoder) -> None:
    """The center of the input's influence on a cell lies near the cell's center."""
    torch.manual_seed(4)
    offsets = []
    for row, column in ((3, 3), (3, 4), (4, 3), (4, 4)):
        image = (0.3 * torch.randn(1, 3, 128, 128)).requires_grad_()
        out = embedded.features(image)[0, :, row, column]
        (gradient,) = torch.autograd.grad((out * torch.randn(out.shape)).sum(), image)
        mass = gradient.square().sum((0, 1))
        place = torch.arange(128, dtype=torch.float32) + 0.5
        center = [float((mass.sum(1 - axis) * place).sum() / mass.sum()) for axis in (0, 1)]
        offsets.append([center[0] - (row + 0.5) * 16, center[1] - (column + 0.5) * 16])
    assert np.abs(np.mean(offsets, axis=0)).max() < 5  # pixels, of 16 per cell


def test_encoding_changes_nothing_in_the_encoder(embedded: Encoder) -> None:
    before = {name: value.clone() for name, value in embedded._model.state_dict().items()}
    encode(embedded, picture(64, 64), 64)
    assert all(value.equal(before[name]) for name, value in embedded._model.state_dict().items())
    with pytest.raises(BadRequest, match="8 bits"):
        encode(embedded, np.zeros((4, 4)), 64)
    with pytest.raises(BadRequest, match="shape"):
        encode(embedded, torch.zeros(3, 4, 4), 64)
