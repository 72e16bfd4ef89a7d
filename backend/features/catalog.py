"""The table of official upsampler weights: addresses, sizes, hashes, licences, the encoder each is bound to.

Pure data; imports no torch. JAFAR weights mean something for one encoder, one layer and one normalization only.
"""

from __future__ import annotations

from dataclasses import dataclass

_JAFAR = "https://github.com/PaulCouairon/JAFAR/releases/download/Weights"
_ANYUP = "https://github.com/wimmerth/anyup/releases/download"


@dataclass(frozen=True, slots=True)
class Official:
    """Published weights.

    Attributes:
        name: Stable name, for menus and links.
        model: "jafar" or "anyup".
        url: Address of the file.
        size: Bytes; 0 if unknown.
        sha256: Of the file; empty if unknown.
        encoder: Tag of the encoder that JAFAR weights are bound to, with layer; for AnyUp what it was trained on.
        channels: Width of that encoder; 0 for AnyUp.
        license: Short name.
        credit: What a reader must be shown wherever the weights are used.
    """

    name: str
    model: str
    url: str
    size: int
    sha256: str
    encoder: str
    channels: int
    license: str
    credit: str


_ANYUP_CREDIT = "AnyUp: Universal Feature Upsampling, Wimmer et al., ICLR 2026, github.com/wimmerth/anyup, CC BY 4.0"
_JAFAR_CREDIT = "JAFAR, Couairon et al., NeurIPS 2025, github.com/PaulCouairon/JAFAR, Apache-2.0"


def _jafar(file: str, channels: int, tag: str = "") -> Official:
    return Official(
        f"jafar_{file}",
        "jafar",
        f"{_JAFAR}/{file}.pth",
        0,
        "",
        f"timm/{tag or file}/last",
        channels,
        "Apache-2.0",
        _JAFAR_CREDIT,
    )


OFFICIAL: tuple[Official, ...] = (
    Official(
        "anyup_paper",
        "anyup",
        f"{_ANYUP}/checkpoint/anyup_paper.pth",
        3_540_612,
        "9d035c0f27114a6f32bdd3d8ed93b6cd39dad4b8f8bf94e69fddbfbf022901b2",
        "DINOv2 ViT-S/14",
        0,
        "CC BY 4.0",
        _ANYUP_CREDIT,
    ),
    Official(
        "anyup_multi_backbone",
        "anyup",
        f"{_ANYUP}/checkpoint_v2/anyup_multi_backbone.pth",
        3_541_624,
        "b6cc407da8986c7e5c9098e61f7531767a9aca8fff20a1bc6c99d488e61aac59",
        "DINOv2, DINOv2 with registers, CLIP, SigLIP 2, supervised ViT",
        0,
        "CC BY 4.0",
        _ANYUP_CREDIT,
    ),
    # The tags on the right pin what the plain names meant when the weights were made.
    _jafar("vit_small_patch14_dinov2.lvd142m", 384),
    _jafar("vit_base_patch14_dinov2.lvd142m", 768),
    _jafar("vit_small_patch14_reg4_dinov2", 384, "vit_small_patch14_reg4_dinov2.lvd142m"),
    _jafar("vit_base_patch16_224.dino", 768),
    _jafar("vit_base_patch16_224", 768, "vit_base_patch16_224.augreg2_in21k_ft_in1k"),
    _jafar("vit_base_patch16_clip_384", 768, "vit_base_patch16_clip_384.laion2b_ft_in12k_in1k"),
    _jafar("vit_base_patch16_siglip_512.v2_webli", 768),
)


def official(name: str) -> Official | None:
    """Return an entry by name; None if there is none."""
    return next((entry for entry in OFFICIAL if entry.name == name), None)
