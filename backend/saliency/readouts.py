"""What masked runs say of units: sparse linear fits, differences of means, and how far to trust them.

Knows masks and numbers; knows neither models nor tokens. The LASSO is scikit-learn's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import Lasso

from backend.saliency.agreement import spearman
from backend.types import Check

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

POOR_FIT = 0.3
"""Below it, a linear model does not describe the answer."""

STABLE = 0.5
"""Rank correlation of two halves of a sample from which the ranking is more than luck."""

_FOLDS = 5


def span_log_odds(log_odds: Array, has_foil: bool) -> Array:
    """Put the log-odds of single target tokens together to those of the whole span.

    Args:
        log_odds: float64 ``(mask, row)``; of each target token against all others, or against the foil.
        has_foil: Which of the two.

    Returns:
        float64 ``(mask,)``. With P the product of the tokens' probabilities: log P - log(1 - P), where 1 - P is added
        up from the first token that fails, so that nothing cancels. With a foil, the sum.
    """
    if has_foil:
        total: Array = log_odds.sum(axis=1)
        return total
    log_p = -np.logaddexp(0.0, -log_odds)
    reached = np.cumsum(log_p, axis=1) - log_p  # all tokens before this one were right
    fails: Array = np.logaddexp.reduce(reached - np.logaddexp(0.0, log_odds), axis=1)
    odds: Array = log_p.sum(axis=1) - fails
    return odds


def fit(keep: BoolArray, odds: Array, size: int, penalty: float) -> Array:
    """Fit a sparse linear model with intercept to each column of log-odds.

    Args:
        keep: bool ``(mask, unit)``.
        odds: float64 ``(mask, column)``.
        size: Target tokens behind a column; the penalty holds per token.
        penalty: Of the LASSO, on standardized units and half of the mean squared error.

    Returns:
        float64 ``(column, unit)``; change of the log-odds where the unit is kept. NaN for units that were always, or
        never, kept.
    """
    spread = keep.std(axis=0)
    drawn = spread > 0
    weights = np.full((odds.shape[1], keep.shape[1]), np.nan)
    if drawn.any():
        columns = (keep[:, drawn] - keep[:, drawn].mean(axis=0)) / spread[drawn]
        for column, values in enumerate(odds.T):
            model = Lasso(alpha=penalty, max_iter=10_000).fit(columns, values / size)
            weights[column, drawn] = size * model.coef_ / spread[drawn]
    return weights


def quality(keep: BoolArray, odds: Array, size: int, penalty: float, *, exact: bool, seed: int) -> list[Check]:
    """Predict a fifth of the masks from the others, five times; tell how far other masks would move the weights.

    Args:
        keep: As for ``fit``.
        odds: As for ``fit``.
        size: As for ``fit``.
        penalty: As for ``fit``.
        exact: Whether there are no other masks.
        seed: Seed of the split.
    """
    if len(keep) < 2 * _FOLDS:
        text = f"{len(keep)} masks are too few to hold some out, so nobody knows how well the fit predicts."
        return [Check("fit_r2", None, "info", text)]
    varied = np.ptp(odds, axis=0) > 0
    if not varied.any():
        return []
    odds = odds[:, varied]
    fold = np.random.default_rng(seed).permutation(len(keep)) % _FOLDS
    predicted = np.zeros_like(odds)
    parts = []
    for number in range(_FOLDS):
        out = fold == number
        weights = np.nan_to_num(fit(keep[~out], odds[~out], size, penalty))
        predicted[out] = odds[~out].mean(axis=0) + (keep[out] - keep[~out].mean(axis=0)) @ weights.T
        parts.append(weights)
    error = ((odds - predicted) ** 2).sum(axis=0)
    explained = float((1 - error / ((odds - odds.mean(axis=0)) ** 2).sum(axis=0)).min())
    rank = min(spearman(*pair) or 0.0 for pair in zip(odds.T, predicted.T, strict=True))
    which = "" if odds.shape[1] == 1 else " (the lowest of all targets)"
    found = [
        Check(
            "fit_r2",
            explained,
            "ok" if explained >= POOR_FIT else "warn",
            f"On masks that were held out, the fit explains {max(explained, 0.0):.0%} of the variance of the "
            f"log-odds{which}." + ("" if explained >= POOR_FIT else " A linear story does not fit this answer."),
        ),
        Check(
            "fit_spearman",
            rank,
            "ok" if rank >= POOR_FIT else "fail",
            f"Predicted and real log-odds of held-out masks agree to {rank:.2f} in rank{which}."
            + ("" if rank >= POOR_FIT else " A linear story does not fit this answer: do not rank units by it."),
        ),
    ]
    stacked = np.stack(parts)  # (fold, column, unit)
    spread = float(np.sqrt((_FOLDS - 1) * stacked.var(axis=0)).max())  # jackknife by groups
    top = float(np.abs(stacked.mean(axis=0)).max())
    if top > 0 and not exact:
        text = f"With other random masks, weights would move by up to about {spread:.2g}; the largest is {top:.2g}."
        found.append(Check("mask_spread", spread, "ok" if spread <= top / 2 else "warn", text))
    return found


def differences(keep: BoolArray, values: Array) -> Array:
    """Return the mean value with each unit minus the mean without it.

    Args:
        keep: bool ``(part, unit)``.
        values: float64 ``(part, row)``.

    Returns:
        float64 ``(row, unit)``; NaN for units that every part or no part held.
    """
    held = keep.astype(np.float64)
    with np.errstate(invalid="ignore"):
        mean_with = held.T @ values / held.sum(axis=0)[:, None]
        mean_without = (1 - held).T @ values / (1 - held).sum(axis=0)[:, None]
    found: Array = (mean_with - mean_without).T
    return found


def centered(values: Array, single: BoolArray) -> Array:
    """Measure values from the mean of their kind, so that kinds of parts which differ by themselves do not count.

    Args:
        values: float64 ``(part, row)``.
        single: bool ``(part,)``; the kind: whether just one unit is missing, or a random set.
    """
    out = values.copy()
    for kind in (single, ~single):
        if kind.any():
            out[kind] -= values[kind].mean(axis=0)
    return out


def split_half(keep: BoolArray, values: Array, seed: int) -> list[Check]:
    """Score the units from two halves of the parts and compare the rankings.

    Args:
        keep: As for ``differences``.
        values: As for ``differences``.
        seed: Seed of the split.
    """
    order = np.random.default_rng(seed).permutation(len(keep))
    middle = len(order) // 2
    first, second = (differences(keep[half], values[half]) for half in (order[:middle], order[middle:]))
    both = np.isfinite(first).all(axis=0) & np.isfinite(second).all(axis=0)
    rank = spearman(first.sum(axis=0)[both], second.sum(axis=0)[both])
    if rank is None:
        return []
    text = f"Two halves of the partial prompts rank the units alike to {rank:.2f} (rank correlation)."
    if rank < STABLE:
        text += " The ranking is mostly luck of the draw: use more masks or coarser units."
    return [Check("split_half", rank, "ok" if rank >= STABLE else "warn", text)]
