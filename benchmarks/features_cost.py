"""Seconds and peak memory of JAFAR and AnyUp beside their dense forms, on 2 CPU threads.

Run as ``python -m benchmarks.features_cost`` (some minutes), with ``--quick`` for 224 pixels only. Every case runs in
a process of its own, so that its peak memory counts, imports included; seconds are the best of three. The dense form
(``tests/support/dense_upsamplers.py``) does what the official code does: all keys for all pixels at once, and a value
product that is thrown away.

Forms: ``dense``; ``ours``, all channels; ``pca``, three components from nothing; ``pca, prepared``, three components
where the weights are ready, as at every further view of a picture. The floor is the time of the multiply-adds that
cannot be left out (encoder convolutions, in-window products) at the matrix product rate measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

THREADS = 2
CHANNELS = 384
CASES = [(224, 16), (224, 32), (448, 16), (448, 32)]
LARGE = (1024, 32)
FORMS = ("dense", "ours", "pca", "pca, prepared")
DENSE_LIMIT = 448  # pixels; beyond, the dense form needs more memory than most machines have


def work(model: str, form: str, side: int, grid: int, repeats: int) -> dict[str, float]:
    """Measure one case in this process."""
    import torch

    from backend.features.anyup import AnyUp
    from backend.features.attention import window_bounds
    from backend.features.jafar import JAFAR
    from tests.support import dense_upsamplers

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    network = (JAFAR(v_dim=CHANNELS) if model == "jafar" else AnyUp()).eval()
    state = network.state_dict()
    image, features = torch.randn(1, 3, side, side), torch.randn(1, CHANNELS, grid, grid)
    few = features[:, :3].contiguous()
    size = (side, side)
    ready = network.prepare(image, features, keep_bytes=1 << 30) if form == "pca, prepared" else None
    calls = {
        "dense": lambda: getattr(dense_upsamplers, model)(state, image, features, size),
        "ours": lambda: network(image, features),
        "pca": lambda: network.prepare(image, features).apply(few),
        "pca, prepared": lambda: ready.apply(few) if ready else None,
    }
    call = calls[form]
    if form == "pca, prepared":
        call()  # fills what is kept
    best = min(_seconds(call) for _ in range(repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    d, pixels = network.dim, side * side
    bounds = window_bounds(side, grid, network.window_ratio)
    keys = float((bounds.high - bounds.low).double().mean()) ** 2
    values = CHANNELS if form in ("dense", "ours") else 3
    encoders = 3 * d + 4 * d * d + 2 * 5 * d * d + 9 * d * d + d * d
    macs = pixels * (encoders * (form != "pca, prepared") + keys * ((form != "pca, prepared") * d + values))
    return {"seconds": best, "peak_gb": peak, "floor": 2 * macs / (_rate(torch) * 1e9)}


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rate(torch: Any) -> float:
    """Return GFLOP/s of products of the models' own shape, in the processor's cache."""
    left, right = torch.randn(4096, 128), torch.randn(128, 128)
    out = torch.empty(4096, 128)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        times.append(time.perf_counter() - start)
    return 2 * 4096 * 128 * 128 / min(times) / 1e9


def in_process(model: str, form: str, side: int, grid: int, repeats: int) -> dict[str, float] | None:
    """Run one case in a process of its own; None if it did not finish, e.g. for lack of memory."""
    arguments = ["--case", json.dumps([model, form, side, grid, repeats])]
    done = subprocess.run(  # noqa: S603 - this very module
        [sys.executable, "-m", "benchmarks.features_cost", *arguments], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="224 pixels only, one repeat")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(work(*json.loads(chosen.case))))
        return
    import torch

    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {THREADS} threads, torch {torch.__version__}, float32")
    print(f"features {CHANNELS} channels; guidance as large as the output\n")
    print(
        f"{'model':6} {'output':>6} {'grid':>5}  {'form':14} {'seconds':>8} {'peak GB':>8} {'of floor':>9}  faster than"
    )
    repeats = 1 if chosen.quick else 3
    cases = CASES[:2] if chosen.quick else [*CASES, LARGE]
    for model in ("anyup", "jafar"):
        for side, grid in cases:
            seen: dict[str, dict[str, float]] = {}
            for form in FORMS:
                if form == "dense" and side > DENSE_LIMIT:
                    continue
                result = in_process(model, form, side, grid, repeats)
                if result is None:
                    print(f"{model:6} {side:6} {grid:5}  {form:14} did not finish")
                    continue
                seen[form] = result
                print(_line(model, side, grid, form, seen), flush=True)


def _line(model: str, side: int, grid: int, form: str, seen: dict[str, dict[str, float]]) -> str:
    own = seen[form]
    against = {"ours": "dense", "pca": "ours", "pca, prepared": "ours"}.get(form)
    ratio = f"{seen[against]['seconds'] / own['seconds']:.2f} × {against}" if against in seen else ""
    return (
        f"{model:6} {side:6} {grid:5}  {form:14} {own['seconds']:8.2f} {own['peak_gb']:8.2f} "
        f"{own['seconds'] / own['floor']:8.1f}x  {ratio}"
    )


if __name__ == "__main__":
    main()
