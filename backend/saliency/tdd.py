"""TDD: token distribution dynamics, how the choice between target and foil moves as tokens are added.

Idea: D is the difference of a softmax over just two tokens, target y and foil f: D = tanh((z(y) - z(f)) / 2), from -1
(surely the foil) to 1 (surely the target). Reading from the left, D_i comes from the logits at position i, and token i
scores what it adds: D_i - D_(i-1). Reading from the right, D_i comes from the text that starts at token i, and token i
scores D_i - D_(i+1). The default is the mean of both.
Cost: one forward pass from the left; from the right one per token over ever shorter texts, together half a pass per
token. No backward pass.
Sign: positive moves the choice towards the target, negative towards the foil. Unit: that of D, whatever scalar was
asked about.
Check: the scores of a row add up to D of the whole text in every direction; above 0.99 D is nearly flat, and scores say
little.
The foil is the request's foil if that is one token, else the runner-up of each target. BOS stays in front of every
shorter text where the prompt begins with one, and scores 0 from the right. Read from the left, positions in the middle
of the prompt are asked for an answer that is not due yet, so words after which the target would be a good next word
score high, and the last tokens score most. Differences of neighbors are noisy: sentences tell more than tokens.
Source: Feng et al. 2024 (arXiv:2405.11891). Own implementation from the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backend.models.language import LanguageModel
    from backend.saliency.choices import Choices
    from backend.saliency.question import Question

SATURATED = 0.99
"""Size of D above which tanh is nearly flat."""


@dataclass(frozen=True)
class Params:
    """Settings of token distribution dynamics."""

    direction: str = field(
        default="bidirectional",
        metadata={
            "choices": ("bidirectional", "forward", "backward"),
            "help": "forward: what each token adds when the text is read from the left, one pass; backward: what it "
            "adds in front of the tokens after it, half a pass per token; bidirectional: the mean of both.",
        },
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes: about half a pass per token unless only read from the left."""
    left = 1.0 if params.direction != "backward" else 0.0
    right = 0.55 * (work.length + 1) if params.direction != "forward" else 0.0
    return Passes(forward=left + right)


@register(
    "tdd",
    label="TDD",
    family="prediction",
    signed=True,
    additive=True,
    params=Params,
    cost=cost,
    summary="How does each token move the model's choice between the target and a foil?",
    reading="Positive: this token moves the choice from the foil towards the target; negative: towards the foil "
    "(difference of the two tokens' probabilities among themselves, from −1 to 1).",
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Follow the choice between target and foil along the text.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows and sources.
        params: In which direction the text is read.
        tick: Progress and cancellation, once per pass.

    Returns:
        Scores ``(row, source)``.

    Raises:
        NotApplicable: If the model's logits are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.choices import Choices

    left, right = params.direction != "backward", params.direction != "forward"
    choices = Choices(question, left=left, right=right, tick=tick)
    parts = []
    if left:
        parts.append(np.diff(choices.from_left(), axis=1, prepend=0.0))
        for row, end in enumerate(question.targets):
            parts[0][row, end:] = 0.0
    if right:
        parts.append(-np.diff(choices.from_right(), axis=1, append=0.0))
    values = np.mean(parts, axis=0)
    choices.finish()
    checks.require_finite(values)
    found = [
        *_foils(choices),
        _sums(choices, values),
        *_saturation(choices),
        *checks.no_signal(question.with_objective("logit"), values),
        checks.first_token_share(question, values),
    ]
    return Scores(values.astype(np.float32), Passes(forward=choices.forward), checks=tuple(found))


def _foils(choices: Choices) -> list[Check]:
    """Say which foil each target was compared with."""
    question = choices.question
    names = [_quoted(question, foil) for _, foil in choices.pairs]
    found = []
    if any(choices.chosen):
        text = f"The target is compared with the foil {names[0]}."
        if len(names) > 1:
            text = f"The first target is compared with the foil {names[0]}, the others with their runner-up."
    else:
        text = f"The target is compared with {names[0]}, the runner-up: the most likely other token at its place."
        if len(names) > 1:
            text = f"Each target is compared with its runner-up, the most likely other token: {_listed(names)}."
    if question.has_foil and not any(choices.chosen):
        found.append(
            Check(
                "foil_not_used",
                None,
                "warn",
                "This method compares two single tokens. The foil that was asked for is not one token that differs "
                "from the target, so it was not used.",
            )
        )
    return [*found, Check("foil", None, "info", text)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _quoted(question: Question, token: int) -> str:
    """Return a token's characters in quotes, or its id where the model came without a tokenizer."""
    from backend.models.characters import token_text
    from backend.types import visible

    tokenizer = question.model.tokenizer
    return f"“{visible(token_text(tokenizer, token))}”" if tokenizer is not None else f"token {token}"


def _sums(choices: Choices, values: npt.NDArray[np.float64]) -> Check:
    """Compare each row's sum with D of the whole text: they are equal in every direction."""
    import numpy as np

    total = values.sum(axis=1)
    gap = float(np.abs(total - choices.whole).max())
    text = f"The scores add up to {total[0]:.4g}; D of the whole text is {choices.whole[0]:.4g}"
    if len(total) > 1:
        text = f"The scores of {len(total)} targets add up to D of the whole text"
    if gap <= choices.question.plain.tolerance:
        return Check("telescoping_sum", gap, "ok", f"{text} (largest difference {gap:.1e}).")
    return Check(
        "telescoping_sum",
        gap,
        "fail",
        f"{text} only to within {gap:.2g}: the model answers differently when several texts share a pass.",
    )


def _saturation(choices: Choices) -> list[Check]:
    """Warn of targets whose choice is so clear that nothing moves it."""
    import numpy as np

    size = np.abs(choices.whole)
    flat = size > SATURATED
    if not flat.any():
        return []
    top = float(choices.whole[int(size.argmax())])
    which = "The choice between target and foil is" if len(size) == 1 else f"{flat.sum()} of {len(size)} choices are"
    return [
        Check(
            "clear_choice",
            top,
            "warn",
            f"{which} clear-cut (D = {top:.4f}), so single tokens hardly move D until it flips. Name a closer foil.",
        )
    ]
