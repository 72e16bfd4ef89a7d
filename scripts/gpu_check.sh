#!/bin/sh
# Run the contract tests on CUDA, compare CPU with CUDA, and print the cost table. Takes under four minutes on one GPU.
# PYTHON names the interpreter; default is the virtual environment that `make setup-dev` makes.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: this machine has no CUDA device that PyTorch can use. Nothing was run." >&2
    exit 1
fi
"$PYTHON" -m pytest -q --device cuda \
    tests/backend/saliency/test_contract.py \
    tests/backend/saliency/test_cpu_against_cuda.py \
    tests/backend/models/test_loading.py
"$PYTHON" -m benchmarks.saliency_cost --device cuda --no-others
