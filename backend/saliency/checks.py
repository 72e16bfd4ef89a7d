"""Checks that several methods share: assertions and warnings that travel with the scores.

Knows questions and numbers; knows nothing of how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backend.errors import NotApplicable
from backend.saliency.agreement import spearman
from backend.saliency.question import Question
from backend.types import Check, Verdict

Array = npt.NDArray[np.floating]

CERTAIN = 0.99
"""Probability of a target above which gradients of its log-probability vanish."""

GREEN, AMBER = 0.05, 0.2
"""Residuals up to which scores add up, and up to which they nearly do."""

_NORM_CORRELATION = 0.5  # above it, scores mostly tell which embeddings are short
_SINK = 0.2  # share of the first token from which it is worth a word
_FEW = 5  # sources that a correlation needs at least


def require_finite(values: Array, measured: npt.NDArray[np.bool_] | None = None) -> None:
    """Refuse scores that are not numbers; they are never drawn as 0.

    Args:
        values: Scores ``(row, source)``.
        measured: bool ``(source,)``; sources that count; None for all.

    Raises:
        NotApplicable: If a measured score is NaN or infinite; says how many.
    """
    counted = values if measured is None else values[:, measured]
    bad = int((~np.isfinite(counted)).sum())
    if bad:
        raise NotApplicable(
            f"{bad} of {counted.size} scores are not finite numbers, so none are shown.",
            "Load the model in float32 or bfloat16; float16 overflows in many models.",
        )


def same_as_plain(question: Question, values: Sequence[float], name: str, what: str) -> Check:
    """Compare S under a method's own set-up, without any change to the input, with S of the untouched model.

    Args:
        question: The question.
        values: S per row, as the method's set-up computes it.
        name: Name of the check.
        what: What was set up, for the sentence.
    """
    plain = question.plain
    gap = float(np.abs(np.asarray(values, np.float64) - plain.values).max())
    if gap <= plain.tolerance:
        return Check(name, gap, "ok", f"{what} leaves the model's answer as it is (largest difference {gap:.1e}).")
    return Check(
        name, gap, "fail", f"{what} changes the model's answer by {gap:.2g}: the scores explain another model."
    )


def saturation(question: Question) -> list[Check]:
    """Warn of targets that are so certain that gradients of log p vanish. A foil or the logit is not affected."""
    if question.has_foil or question.objective == "logit":
        return []
    certain = question.plain.probabilities > CERTAIN
    if not certain.any():
        return []
    top = float(question.plain.probabilities.max())
    which = "The target is" if len(certain) == 1 else f"{int(certain.sum())} of {len(certain)} targets are"
    return [
        Check(
            "saturation",
            top,
            "warn",
            f"{which} nearly certain (p up to {top:.4f}), where gradients vanish. Name a foil or explain the logit.",
        )
    ]


def no_signal(question: Question, effects: Array) -> list[Check]:
    """Say of rows whose scores all lie within rounding that there is nothing to rank.

    Args:
        question: The question.
        effects: float ``(row, source)``; how far each source can move S to first order, in the unit of S.
    """
    floor = np.full(len(effects), question.plain.spacing)
    if question.objective == "prob":
        floor *= np.maximum(question.plain.probabilities, 1e-12)  # a step of log p is a step of p times p
    silent = np.nansum(np.abs(effects), axis=1) <= floor
    if not silent.any():
        return []
    which = "no signal" if len(silent) == 1 else f"no signal for {int(silent.sum())} of {len(silent)} targets"
    return [
        Check(
            "no_signal",
            float(np.nansum(np.abs(effects[silent]), axis=1).max()),
            "fail",
            f"There is {which}: all scores lie within rounding. Do not rank tokens by them.",
        )
    ]


def first_token_share(question: Question, scores: Array) -> Check:
    """Tell how much of all scores lies on BOS, or on the first token where there is no BOS."""
    has_bos = "bos" in question.roles
    first = np.array([role == "bos" for role in question.roles]) if has_bos else np.arange(len(question.ids)) == 0
    size = np.nan_to_num(np.abs(np.asarray(scores, np.float64))).sum(axis=0)
    total = float(size.sum())
    share = float(size[first].sum() / total) if total > 0 else 0.0
    name = "BOS" if has_bos else "the first token"
    text = f"{share:.0%} of all absolute scores lie on {name}."
    if share > _SINK:
        text += " Many models park attention there, whatever it says."
    return Check("first_token_share", share, "info", text)


def short_embeddings(question: Question, scores: Array, norms: Array) -> list[Check]:
    """Warn where the ranking mostly repeats which embeddings are short.

    Layers that normalize their input see a short embedding magnified, so its gradient is larger for that reason alone.

    Args:
        question: The question.
        scores: Unsigned scores ``(row, source)``.
        norms: Length of each source's embedding ``(source,)``.
    """
    with np.errstate(divide="ignore"):
        inverse = 1.0 / np.asarray(norms, np.float64)
    found = [
        spearman(row[:end], inverse[:end])
        for row, end in zip(scores, question.targets, strict=True)
        if end >= _FEW and np.isfinite(inverse[:end]).all()
    ]
    known = [value for value in found if value is not None]
    if not known:
        return []
    top = max(known)
    verdict: Verdict = "warn" if top > _NORM_CORRELATION else "ok"
    text = f"The ranking agrees with that of the shortest embeddings to {top:.2f} (rank correlation)."
    if verdict == "warn":
        text += " It may tell more about embedding lengths than about the text."
    return [Check("embedding_norm_correlation", top, verdict, text)]


def sum_beside_value(question: Question, scores: Array) -> Check:
    """Put the sum of the scores beside S, for methods that promise no sum."""
    total = float(np.asarray(scores, np.float64).sum())
    value = float(question.plain.values.sum())
    return Check(
        "sum_of_scores", total, "info", f"The scores add up to {total:.3g}; S is {value:.3g}. They need not agree."
    )


def completeness(
    question: Question,
    row: int,
    scores: Array,
    wanted: float,
    residuals: list[float],
    steps: int,
) -> Check:
    """Judge whether a row's scores add up to the change of S that they claim to explain.

    Args:
        question: The question.
        row: Index of the row.
        scores: float ``(source,)``.
        wanted: S of the text minus S of the baseline.
        residuals: Gap relative to ``wanted`` at each step count so far; every count is twice the one before it.
        steps: The last step count.
    """
    name, total = "completeness_residual", float(scores.sum())
    which = f"Target {row + 1}: " if len(question.targets) > 1 else ""
    if abs(wanted) <= max(question.plain.tolerance, 0.01 * float(np.abs(scores).sum())):
        return Check(
            name,
            abs(total - wanted),
            "info",
            f"{which}The score changes by only {wanted:.2g} between baseline and prompt, so there is no relative "
            f"residual; the tokens' scores add up to {total:.2g}. Another baseline may tell more.",
        )
    now = float(residuals[-1])
    gap = f"{which}At {steps} steps the scores add up to {total:.3g} of {wanted:.3g} (residual {now:.2f})"
    if now > AMBER:
        return Check(name, now, "fail", f"{gap}: scores do not add up; do not rank tokens by them.")
    if now > GREEN:
        return Check(name, now, "warn", f"{gap}: scores nearly add up; read the ranking with care.")
    if len(residuals) > 1 and residuals[-2] <= GREEN:
        return Check(name, now, "ok", f"{gap}, and to within {residuals[-2]:.2f} at {steps // 2} steps.")
    return Check(
        name, now, "warn", f"{gap}. Not confirmed at a second step count, and one count can agree by luck: use refine."
    )
