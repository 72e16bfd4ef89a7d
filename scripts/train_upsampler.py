"""Train own upsampler weights: JAFAR for a level of the embedded encoder, or AnyUp for any encoder.

    python -m scripts.train_upsampler jafar --layer s16 --steps 4000
    python -m scripts.train_upsampler anyup --steps 6000

Recipe: features of a small picture, upsampled with the picture as guidance, must match the features of the large
picture (arXiv 2506.11136 and 2510.12764, scaled down). The encoder is frozen. Photographs come from Debian packages,
which are installed when missing, or from ``--folder``. A run that was interrupted continues from its last checkpoint.
Writes weights with their provenance, and a training record beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from backend.features.anyup import AnyUp
from backend.features.encoders import load_encoder
from backend.features.jafar import JAFAR
from backend.features.scene import normalized
from scripts import training_photos
from scripts.training_losses import consistency_loss, input_loss, match_loss, perturbed
from scripts.training_sources import AnyUpSource, Example, JafarSource, Source

SIDE = 448
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run.

    Attributes:
        model: "jafar" or "anyup".
        layer: Level of the embedded encoder, for JAFAR.
        steps: Training steps.
        batch: Pictures per step.
        dim: Inner width D.
        heads: Attention heads.
        rate: Highest learning rate; falls to a tenth along a cosine.
        seed: Of everything random.
        crops: Squares per photograph.
        pooled: Share of steps whose input is the averaged target instead of features of a small picture.
        check_every: Steps between validations, checkpoints and lines of progress.
        device: Where to train.
    """

    model: str
    layer: str = "s16"
    steps: int = 4000
    batch: int = 4
    dim: int = 64
    heads: int = 4
    rate: float = 1e-3
    seed: int = 0
    crops: int = 40
    pooled: float = 0.25
    check_every: int = 100
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Name of the weights file."""
        return f"jafar_efficientnet_lite0_{self.layer}" if self.model == "jafar" else "anyup"


class Trainer:
    """One run: built, set up, then run."""

    def __init__(self, settings: Settings, folder: Path, photos: Path | None) -> None:
        self.settings, self.folder = settings, folder
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(settings.seed)
        np.random.seed(settings.seed)
        train, drawn, aside = training_photos.files(photos)
        if not train or not aside:
            raise SystemExit("There are no photographs; see --folder.")
        few = max(1, settings.crops // 3)  # illustrations: at most one picture in four
        drawn = drawn[: len(train) // 4]
        squares, crops = training_photos.cut(train, settings.crops, SIDE, settings.seed)
        more, also = training_photos.cut(drawn, few, SIDE, settings.seed) if drawn else (squares[:0], [])
        training_photos.write_list([*crops, *also], folder / "crops.json")
        self.pictures = torch.from_numpy(np.concatenate((squares, more))).permute(0, 3, 1, 2)
        held, _ = training_photos.cut(aside, 2, SIDE, settings.seed + 1)
        self.held = torch.from_numpy(held).permute(0, 3, 1, 2)
        self.packages = {} if photos else training_photos.PACKAGES
        device = torch.device(settings.device)
        self.source: Source
        # Building encoders draws random numbers only the first time in a process; weights must not depend on that.
        if settings.model == "jafar":
            encoder = load_encoder(layer=settings.layer, device=device)
            self.source = JafarSource(encoder, settings.pooled)
            torch.manual_seed(settings.seed)
            self.model: JAFAR | AnyUp = JAFAR(
                qk_dim=settings.dim, v_dim=encoder.info.channels, num_heads=settings.heads
            )
            self.tag = encoder.info.tag
        else:
            self.source = AnyUpSource(settings.seed, device)
            torch.manual_seed(settings.seed)
            self.model = AnyUp(qk_dim=settings.dim, num_heads=settings.heads, init_gaussian_derivatives=True)
            self.tag = ""
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.rate, weight_decay=1e-5)
        self.step, self.seconds, self.best = 0, 0.0, -1.0
        self.curve: list[dict[str, float]] = []

    def resume(self) -> None:
        """Continue from the last checkpoint of a run with the same settings."""
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return
        stored = torch.load(path, map_location=self.settings.device, weights_only=True)
        wanted = {k: v for k, v in asdict(self.settings).items() if k != "device"}
        if {k: v for k, v in stored["settings"].items() if k != "device"} != wanted:
            raise SystemExit(f"{path} belongs to a run with other settings; choose another --work folder.")
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.step, self.seconds, self.best = stored["step"], stored["seconds"], stored["best"]
        self.curve = stored["curve"]
        print(f"continuing at step {self.step}", flush=True)

    def run(self) -> None:
        """Train to the end; print a line at every check."""
        began, before, losses = time.perf_counter(), self.seconds, []
        while self.step < self.settings.steps:
            # Each step draws from a generator of its own, so that a resumed run sees what an unbroken one would.
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
            progress = self.step / self.settings.steps
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.rate * (0.55 + 0.45 * float(np.cos(np.pi * progress)))
            losses.append(self._train(generator))
            self.step += 1
            self.seconds = before + time.perf_counter() - began
            if self.step % self.settings.check_every == 0 or self.step == self.settings.steps:
                self._check(float(np.mean(losses)))
                losses = []

    def _train(self, generator: torch.Generator) -> float:
        chosen = torch.randint(len(self.pictures), (self.settings.batch,), generator=generator)
        pictures = self.pictures[chosen].to(self.settings.device).float() / 255
        example = self.source.example(pictures, chosen.tolist(), self.step, generator)
        loss = self._loss(example, generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, example: Example, generator: torch.Generator) -> Tensor:
        guide = normalized(example.guide, example.mean, example.std)
        whole = self.model(guide, example.low, example.size)
        part = whole if example.window is None else whole[:, :, example.window[0], example.window[1]]
        loss = match_loss(part, example.target)
        if self.settings.model == "anyup":
            loss = loss + 0.1 * input_loss(whole, example.low)
        if self.step % 4 == 3:
            noisy = normalized(perturbed(example.guide, generator), example.mean, example.std)
            size = (112, 112)
            with torch.no_grad():
                clean = self.model(guide, example.low, size)
            loss = loss + 0.1 * consistency_loss(self.model(noisy, example.low, size), clean)
        return loss

    @torch.no_grad()
    def _check(self, loss: float) -> None:
        self.model.eval()
        likeness = []
        for number, picture in enumerate(self.held):
            generator = torch.Generator().manual_seed(number)
            given = picture[None].to(self.settings.device).float() / 255
            example = self.source.example(given, [-1 - number], 3 + 4 * number, generator)
            guide = normalized(example.guide, example.mean, example.std)
            whole = self.model(guide, example.low, example.size)
            part = whole if example.window is None else whole[:, :, example.window[0], example.window[1]]
            likeness.append(float(F.cosine_similarity(part, example.target, dim=1).mean()))
        self.model.train()
        cosine = float(np.mean(likeness))
        self.curve.append({"step": self.step, "loss": loss, "cosine_aside": cosine, "seconds": round(self.seconds, 1)})
        left = (self.settings.steps - self.step) * self.seconds / self.step
        print(
            f"step {self.step}/{self.settings.steps}  loss {loss:.4f}  cosine aside {cosine:.4f}  "
            f"{self.seconds:.0f} s, about {left:.0f} s left",
            flush=True,
        )
        if cosine > self.best:
            self.best = cosine
            self._write(self.folder / f"{self.settings.name}.safetensors")
        self._save()

    def _save(self) -> None:
        path = self.folder / "checkpoint.pt"
        content: dict[str, Any] = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "curve": self.curve,
        }
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        record = {
            "settings": asdict(self.settings),
            "packages": self.packages,
            "pictures": len(self.pictures),
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "torch": torch.__version__,
            "best_cosine_aside": self.best,
            "curve": self.curve,
        }
        (self.folder / f"{self.settings.name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")

    def _write(self, path: Path) -> None:
        remarks = {
            "encoder": self.tag,
            "num_heads": str(self.settings.heads),
            "window_ratio": str(self.model.window_ratio),
            "normalization": "the encoder's own" if self.tag else "ImageNet",
            "steps": str(self.step),
            "seed": str(self.settings.seed),
            "packages": ", ".join(f"{name} ({terms})" for name, terms in self.packages.items()),
            "license": "Apache-2.0",
            "credit": f"trained by this project with the recipe of {self.settings.model.upper()}",
        }
        state = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        save_file(state, path, remarks)


def main() -> None:
    """Read the command line, train, print where the weights are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["jafar", "anyup"])
    defaults = Settings("jafar")
    parser.add_argument("--layer", default=defaults.layer, choices=["s8", "s16", "s32"])
    for name in ("steps", "batch", "dim", "heads", "seed", "crops", "check_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--pooled", type=float, default=defaults.pooled)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--folder", type=Path, help="own photographs instead of Debian's")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "training", help="checkpoints and results")
    given = vars(parser.parse_args())
    photos, work = given.pop("folder"), given.pop("work")
    settings = Settings(**given)
    if photos is None:
        training_photos.install()
    trainer = Trainer(settings, work / settings.name, photos)
    trainer.resume()
    trainer.run()
    print(f"weights and record: {trainer.folder}; copy them to assets/upsamplers/ to ship them")


if __name__ == "__main__":
    main()
