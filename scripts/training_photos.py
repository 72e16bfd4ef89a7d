"""Photographs to train upsamplers on: those in Debian's background packages, listed by name, cut into squares.

Knows packages and files; knows no model. The pictures stay where the packages put them and are never copied into the
project. Illustrations are listed apart, so that a trainer can limit their share.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

PACKAGES = {
    "mate-backgrounds": "GPL-2+, CC BY-SA",
    "plasma-workspace-wallpapers": "CC BY-SA 3.0 and 4.0, LGPL-3+",
    "lomiri-wallpapers-16.04": "CC BY-SA 2.0 to 4.0",
    "lomiri-wallpapers-20.04": "CC BY-SA 4.0",
}
_MATE = "/usr/share/backgrounds/mate/nature"
_PLASMA = "/usr/share/wallpapers"
_LOMIRI = "/usr/share/backgrounds"
PHOTOS: tuple[str, ...] = (
    *(
        f"{_MATE}/{name}.jpg"
        for name in (
            "Aqua Blinds Dune FreshFlower Garden GreenMeadow LadyBird RainDrops Storm TwoWings Wood YellowFlower"
        ).split()
    ),
    *(
        f"{_PLASMA}/{name}/contents/images/2560x1600.jpg"
        for name in (
            "BytheWater ColdRipple ColorfulCups DarkestHour EveningGlow FallenLeaf Grey Kite "
            "OneStandsOut Path summer_1am"
        ).split()
    ),
    *(
        f"{_LOMIRI}/{name}.jpg"
        for name in (
            "Bridge_by_Sander_Klootwijk Dragonfly_by_Bolly Picture_0B_by_freespace Picture_1A_by_freespace "
            "Wine_by_Jakkub_Mede aitzgorri_by_Aitzol_Berasategi free_by_Peter_Nerlich friends_by_Aitzol_Berasategi "
            "greentock_by_Peter_Nerlich life_by_Aitzol_Berasategi picosdeeuropa_by_Aitzol_Berasategi "
            "seeding_by_Clements_Engelhardt sunset_by_Aitzol_Berasategi Infinite-Sea_by_Aury88 Kleiber_by_Lukas_Baubkus"
        ).split()
    ),
)
ILLUSTRATIONS: tuple[str, ...] = (
    "/usr/share/backgrounds/mate/abstract/Elephants.jpg",
    f"{_PLASMA}/Autumn/contents/images/2560x1600.jpg",
    f"{_PLASMA}/Altai/contents/images/5120x2880.png",
    f"{_PLASMA}/Canopee/contents/images/3840x2160.png",
    f"{_PLASMA}/PastelHills/contents/images/3200x2000.jpg",
    f"{_PLASMA}/SafeLanding/contents/images/5120x2880.jpg",
    f"{_PLASMA}/Shell/contents/images/5120x2880.jpg",
)
ASIDE = ("Garden", "EveningGlow", "ColorfulCups", "life_by_Aitzol_Berasategi", "Picture_1A_by_freespace")
"""Training photographs that only decide when to stop."""

_LARGEST = 2400  # pixels; larger pictures are decoded smaller, which saves minutes
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Crop:
    """A square of a picture: file, left, top and side in pixels of the decoded picture, and whether it is mirrored."""

    file: str
    left: int
    top: int
    side: int
    mirrored: bool


def install() -> None:
    """Install the packages that are missing, with apt.

    Raises:
        SystemExit: If that is not possible here.
    """
    missing = [name for name in PACKAGES if not Path(f"/usr/share/doc/{name}").is_dir()]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise SystemExit(f"Install these Debian packages first: {' '.join(missing)}, or give --folder.")
    print(f"installing {' '.join(missing)} (about 120 MB)", flush=True)
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        if subprocess.run(["apt-get", *command], check=False).returncode:  # noqa: S603, S607 - names are ours
            raise SystemExit("apt-get failed; run as root, or install the packages by hand.")


def files(folder: Path | None = None) -> tuple[list[Path], list[Path], list[Path]]:
    """Return photographs to train on, illustrations, and photographs that are put aside.

    Args:
        folder: A folder of own pictures instead; every tenth is put aside.
    """
    if folder is not None:
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
        return [p for i, p in enumerate(found) if i % 10], [], found[::10]
    photos = [Path(name) for name in PHOTOS if Path(name).is_file()]
    aside = [p for p in photos if any(name in p.parts or name == p.stem for name in ASIDE)]
    return [p for p in photos if p not in aside], [Path(n) for n in ILLUSTRATIONS if Path(n).is_file()], aside


def decode(path: Path) -> Image.Image:
    """Open a picture as RGB, at most ``_LARGEST`` pixels wide or high; transparency becomes white."""
    with Image.open(path) as image:
        image.draft("RGB", (_LARGEST, _LARGEST))
        image.thumbnail((_LARGEST, _LARGEST))
        if image.mode in {"RGBA", "LA", "P"}:
            layered = image.convert("RGBA")
            white = Image.new("RGBA", layered.size, "white")
            return Image.alpha_composite(white, layered).convert("RGB")
        return image.convert("RGB")


def cut(paths: list[Path], per_photo: int, side: int, seed: int) -> tuple[Pixels, list[Crop]]:
    """Cut squares, sides log-uniform between 40 % and 100 % of the short side, resized to ``side``.

    Returns:
        (N, side, side, 3) 8-bit RGB, and where each square came from.
    """
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    squares, crops = [], []
    for path in paths:
        image = decode(path)
        short = min(image.size)
        for _ in range(per_photo):
            low = min(1.0, max(0.4, side / short))
            edge = round(short * math.exp(generator.uniform(math.log(low), 0.0)))
            left, top = (generator.randint(0, length - edge) for length in image.size)
            mirrored = generator.random() < 0.5
            square = image.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + edge, top + edge))
            squares.append(np.asarray(square)[:, ::-1] if mirrored else np.asarray(square))
            crops.append(Crop(str(path), left, top, edge, mirrored))
    return np.stack(squares), crops


def write_list(crops: list[Crop], path: Path) -> None:
    """Write where every square came from, so that a run can be repeated."""
    path.write_text(json.dumps([vars(crop) for crop in crops], indent=0), encoding="utf-8")
