"""Learn AT2's weights for a model, so that the method ``at2`` serves it.

    python -m scripts.train_at2 --model owner/name
    python -m scripts.train_at2 --prompts 100 --minutes 4

Generates texts, hides random tokens, measures the model's answers and fits one number per head; minutes on a CPU for a
small model. A run that was interrupted, or reached ``--minutes``, goes on where it stopped. Writes the weights with
their training record into the cache folder, where the app finds them, and prints how good they are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from backend.errors import AppError, Cancelled
from backend.models.hub import ModelHub
from backend.saliency import at2_weights
from backend.saliency.at2_fitting import Settings
from backend.saliency.at2_training import train
from backend.settings import get_settings
from backend.types import EMBEDDED_MODEL, ModelRef

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Read the command line, measure, fit, write, and print the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Settings()
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="embedded model, hub id, folder or GGUF file")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    for name in ("prompts", "masks", "sentences", "answer", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    for name in ("keep", "rate"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    parser.add_argument("--minutes", type=float, help="stop after so many; run again to go on")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "training", help="measured texts")
    parser.add_argument("--out", type=Path, help="file to write instead of the one in the cache folder")
    given = parser.parse_args()
    settings = Settings(**{name: getattr(given, name) for name in asdict(defaults)})
    try:
        with ModelHub(get_settings()).lease(ModelRef(given.model, given.revision, given.device, given.dtype)) as model:
            identity = at2_weights.identity_of(model)
            folder = given.work / f"at2-{identity.file_name.removesuffix('.json')}"
            fitted = train(model, settings, folder, _Progress(given.minutes))
    except Cancelled:
        raise SystemExit(f"Stopped after {given.minutes} minutes; run the same command again to go on.") from None
    except AppError as error:
        raise SystemExit(str(error)) from None
    path = given.out or at2_weights.cached_path(identity)
    at2_weights.write(fitted, path)
    record = fitted.record
    print(
        f"correlation on {record.held_out} texts kept aside: {record.correlation:.3f} (equal weights "
        f"{record.equal_weights:.3f}, random weights {record.random_weights:.3f})"
    )
    print(", ".join(f"{kind} {value:.3f}" for kind, value in record.by_kind.items()))
    print(f"written to {path}")


class _Progress:
    """Prints each finished text with the time that is left; ends the run when its minutes are over."""

    def __init__(self, minutes: float | None) -> None:
        self._began = time.monotonic()
        self._end = None if minutes is None else self._began + 60 * minutes
        self._first: int | None = None
        self._last = -1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._end is not None and now > self._end and done < total:
            raise Cancelled
        if done == self._last:
            return
        spent = now - self._began
        if self._first is None and self._last >= 0 and spent > 1:
            self._first = done - 1  # texts before were measured by an earlier run
        self._last = done
        if self._first is not None and done > self._first:
            left = (total - done) * spent / (done - self._first)
            print(f"text {done} of {total}, {spent:.0f} s, about {left:.0f} s left", flush=True)


if __name__ == "__main__":
    main()
