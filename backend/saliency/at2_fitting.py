"""The fit behind AT2: weights per head whose weighted features correlate best with measured effects.

Knows numbers; knows nothing of models or texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]

_FOLDS = 4


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run.

    Attributes:
        prompts: Texts, one in five of which is kept aside.
        masks: Random ablations per text.
        keep: Probability that a token stays.
        sentences: About how many sentences a text has.
        answer: Longest answer, in tokens.
        steps: Most steps of the fit; it stops where texts that were left out are predicted best.
        rate: Its highest learning rate; falls to 0 along a cosine.
        seed: Of everything random.
    """

    prompts: int = 200
    masks: int = 32
    keep: float = 0.5
    sentences: int = 7
    answer: int = 12
    steps: int = 1000
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What was measured on one text.

    Attributes:
        kind: Kind of text.
        features: float32 ``(mask, layer, head)``.
        effects: float64 ``(mask,)``; log-odds of the answer.
    """

    kind: str
    features: npt.NDArray[np.float32]
    effects: Array


def choose_steps(examples: Sequence[Example], settings: Settings) -> int:
    """Return after how many steps texts that were left out are predicted best: each quarter is left out in turn.

    There are hundreds of weights, so a fit to few texts must stop early.
    """
    if len(examples) < _FOLDS:
        return settings.steps
    curves = []
    for fold in range(_FOLDS):
        left_out = [example for index, example in enumerate(examples) if index % _FOLDS == fold]
        used = [example for index, example in enumerate(examples) if index % _FOLDS != fold]
        curves.append([correlation(left_out, theta) for theta in _path(used, settings)])
    return 1 + int(np.argmax(np.mean(curves, axis=0)))


def fit(examples: Sequence[Example], settings: Settings, steps: int | None = None) -> Tensor:
    """Find the weights whose predictions correlate best with the effects, on average over texts.

    Args:
        examples: Measured texts.
        settings: Of the run.
        steps: Where to stop; None to go on to the end.

    Returns:
        float64 ``(layer, head)``; absolute values sum to 1.
    """
    *_, found = islice(_path(examples, settings), steps)
    return found / found.abs().sum()


def _path(examples: Sequence[Example], settings: Settings) -> Iterator[Tensor]:
    """Yield the weights after each step, from equal ones on."""
    features, effects = _stack(examples)
    theta = torch.full(features.shape[2:], 1.0 / features[0, 0].numel(), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for _ in range(settings.steps):
        (gradient,) = torch.autograd.grad(-_pearson(features, effects, theta).mean(), theta)
        theta.grad = gradient / gradient.norm().clamp(min=1.0)
        optimizer.step()
        schedule.step()
        yield theta.detach().clone()


def correlation(examples: Sequence[Example], theta: Tensor) -> float:
    """Return the mean over texts of the correlation between predicted and measured effects."""
    return float(_pearson(*_stack(examples), theta.detach()).mean())


def _stack(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    features = torch.from_numpy(np.stack([example.features for example in examples])).double()
    return features, torch.from_numpy(np.stack([example.effects for example in examples])).double()


def _pearson(features: Tensor, effects: Tensor, theta: Tensor) -> Tensor:
    """Correlation per text, ``(text,)``, from features ``(text, mask, layer, head)`` and effects ``(text, mask)``."""
    predicted = torch.einsum("emlh,lh->em", features, theta)
    predicted = predicted - predicted.mean(dim=1, keepdim=True)
    measured = effects - effects.mean(dim=1, keepdim=True)
    size = predicted.norm(dim=1) * measured.norm(dim=1)
    found: Tensor = (predicted * measured).sum(dim=1) / size.clamp(min=1e-12)
    return found
