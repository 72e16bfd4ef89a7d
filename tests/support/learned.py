"""Weights of AT2 for models that nobody trained it for, so that tests over all methods have something to run."""

from contextlib import contextmanager

from backend.saliency.at2_weights import Fitted, Record, cached_path, identity_of, write

RECORD = Record(
    prompts=8, held_out=2, masks=4, keep=0.5, steps=9, correlation=0.6, equal_weights=0.3, random_weights=0.0
)


def fitted(model, theta, record=RECORD):
    """Weights for a model; ``theta`` is a nested list, one row per layer."""
    return Fitted(identity_of(model), tuple(tuple(float(value) for value in row) for row in theta), record)


@contextmanager
def equal_weights(*models, layers=2, heads=4):
    """Let AT2 weigh all heads of these models alike within the block."""
    paths = []
    for model in models:
        paths.append(cached_path(identity_of(model)))
        write(fitted(model, [[1 / (layers * heads)] * heads] * layers), paths[-1])
    try:
        yield
    finally:
        for path in paths:
            path.unlink()
