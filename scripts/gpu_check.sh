#!/bin/sh
# Checks token saliency on a CUDA machine, in under four minutes: contract tests on CUDA, CPU against CUDA, and what
# every method costs there. Run it from anywhere; the environment of `make setup-dev` must exist.
# Without CUDA it says so and fails: nothing pretends to have run.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"

if [ ! -x "$PYTHON" ]; then
    echo "gpu_check: there is no $PYTHON; run 'make setup-dev' first, or set PYTHON." >&2
    exit 2
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: NOT RUN. This machine has no CUDA device that PyTorch can use." >&2
    exit 3
fi

"$PYTHON" -c 'import torch; print("gpu_check:", torch.cuda.get_device_name(0), "- torch", torch.__version__)'
status=0
"$PYTHON" -m pytest --quiet --device cuda tests/backend/saliency/test_contract.py \
    tests/backend/saliency/test_cpu_against_cuda.py || status=1
"$PYTHON" -m benchmarks.saliency_cost --device cuda --no-others || status=1
if [ "$status" -eq 0 ]; then echo "gpu_check: passed."; else echo "gpu_check: FAILED." >&2; fi
exit "$status"
