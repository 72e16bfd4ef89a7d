"""SmoothGrad: gradients averaged over noisy copies of the prompt.

Idea: a gradient holds only in a tiny neighborhood and is ragged there. Gaussian noise is added to the embeddings, the
gradients of several such copies are averaged, and only the average is turned into scores: its length per token
("norm"), or its inner product with the token's embedding ("times_input").
Cost: one forward pass per sample, one backward pass per sample and target token, in small batches; without noise, one
of each.
Sign: none for the norm; for times_input, positive pushes the score up. Unit: change of S per unit of embedding length
for the norm, that of S for times_input.
Check: too much noise, and the model answers something else: how often its most likely token stays, and the mean of S.
Too few samples: the two halves of the samples must point in the same direction.
Noise comes from the request's seed, the same for every device and batch size. BOS and template tokens get none by
default, since disturbing them changes what kind of text the model reads.
Source: Smilkov et al. 2017 (arXiv:1706.03825). Own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from backend.registry import Workload, register
from backend.types import Check, Passes, Scores, Tick

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from backend.models.language import LanguageModel
    from backend.saliency.question import Question

KEPT = 0.8
"""Share of samples whose most likely token must stay, below which the noise is too strong."""

ALIKE = 0.9
"""Cosine of the two halves of the samples below which there are too few of them."""


@dataclass(frozen=True)
class Params:
    """Settings of SmoothGrad."""

    noise: float = field(
        default=0.1,
        metadata={
            "min": 0.0,
            "max": 0.3,
            "step": 0.02,
            "help": "Standard deviation of the noise, as a part of that of all entries of the prompt's embeddings. "
            "0 is the plain gradient.",
        },
    )
    samples: int = field(default=16, metadata={"min": 2, "max": 256, "step": 2, "help": "Noisy copies to average."})
    readout: str = field(
        default="norm",
        metadata={
            "choices": ("norm", "times_input"),
            "help": "norm: length of the averaged gradient, without a sign; times_input: the averaged gradient times "
            "the embedding, with a sign.",
        },
    )
    include_template: bool = field(
        default=False, metadata={"help": "Add noise to BOS and template tokens too; that often disturbs the model."}
    )


def cost(params: Params, work: Workload) -> Passes:
    """Return the passes that a run takes."""
    samples = params.samples if params.noise > 0 else 1
    return Passes(forward=samples * work.strands, backward=samples * (work.targets + work.strands - 1))


@register(
    "smooth_grad",
    label="SmoothGrad",
    family="gradient",
    signed=False,
    additive=True,
    params=Params,
    cost=cost,
    summary="How sensitive is the target to each token, on average over slightly noisy copies of the prompt?",
    reading="Norm: darker means that a small move of this token's embedding changes the target's score more, up or "
    "down, on average over noisy copies (change of the score per unit of embedding length). Times input: positive "
    "raises the target's score, negative lowers it (in the unit of the score).",
    needs_gradient=True,
)
def run(model: LanguageModel, question: Question, params: Params, tick: Tick) -> Scores:
    """Average each row's gradient over noisy inputs, then read it out per source.

    Args:
        model: The model, which ``question`` holds too.
        question: Rows, sources and the seed.
        params: Noise, samples, readout.
        tick: Progress and cancellation, once per row of each batch of samples.

    Returns:
        Scores ``(row, source)``; not negative for the readout "norm".

    Raises:
        NotApplicable: If the model has no backward pass or its gradients are not numbers.
    """
    import numpy as np

    from backend.saliency import checks
    from backend.saliency.gradients import activation_bytes, in_batches, inputs_at_once, row_passes, source_embeddings

    embeddings = source_embeddings(question)
    noised = np.full(question.source_count, True) if params.include_template else ~question.is_frame
    sigma = params.noise * float(embeddings.std(correction=0))
    quiet = sigma == 0 or not noised.any()
    samples = 1 if quiet else params.samples
    tick(0, samples * len(question.targets))
    activation_bytes(model)  # refuses models without a backward pass
    average = _Average(question, None if quiet else partial(add_noise, question, noised, sigma), samples, tick)
    for begin, end in average.halves:
        in_batches(end - begin, inputs_at_once(question, end - begin), partial(average.add, begin))
    signed = params.readout == "times_input"
    values = np.stack([_read(gradient.to(embeddings.device), embeddings, signed) for gradient in average.mean])
    checks.require_finite(values)
    norms = embeddings.norm(dim=-1).cpu().numpy()
    found = [
        *(_quiet(question, average) if quiet else _noisy(question, average)),
        *checks.saturation(question),
        *checks.no_signal(question, values if signed else values * norms),
        *([] if signed else checks.short_embeddings(question, values, norms)),
        checks.first_token_share(question, values),
    ]
    return Scores(values, row_passes(question, samples), checks=tuple(found), signed=signed)


def add_noise(
    question: Question, noised: npt.NDArray[np.bool_], sigma: float, begin: int, end: int, plain: Tensor
) -> Tensor:
    """Return noisy copies of a strand's embeddings.

    Each sample's noise depends on the seed and the sample's number alone, so that batches can be cut and repeated.

    Args:
        question: The seed and the number of sources.
        noised: bool ``(source,)``; which sources get noise.
        sigma: Standard deviation.
        begin: First sample.
        end: End of the samples.
        plain: Embeddings ``(shared, width)`` of the first sources.

    Returns:
        float32 ``(end - begin, shared, width)``.
    """
    import numpy as np
    import torch

    count, width = plain.shape
    noise = np.zeros((end - begin, question.source_count, width), np.float32)
    for at, sample in enumerate(range(begin, end)):
        draw = np.random.default_rng([question.seed & (2**63 - 1), sample])
        noise[at, noised] = sigma * draw.standard_normal((int(noised.sum()), width), dtype=np.float32)
    return plain + torch.from_numpy(noise[:, :count]).to(plain.device)


class _Average:
    """Gradients of every row, added up over samples in two halves.

    Attributes:
        halves: Half-open ranges of samples.
        sums: Per half float32 ``(row, source, width)``, on the CPU.
        values: float64 ``(sample, row)``; S.
        kept: bool ``(sample, row)``; whether the most likely token is that of the untouched prompt.
    """

    def __init__(
        self, question: Question, noisy: Callable[[int, int, Tensor], Tensor] | None, samples: int, tick: Tick
    ) -> None:
        import numpy as np

        self.question, self.noisy, self.tick = question, noisy, tick
        rows, middle = len(question.targets), (samples + 1) // 2
        self.halves = [(0, middle), (middle, samples)] if samples > 1 else [(0, 1)]
        self.sums: list[Tensor] = []
        self.values = np.zeros((samples, rows))
        self.kept = np.zeros((samples, rows), bool)
        first = question.strands[0]
        tops = question.plain.logits[0].argmax(-1).tolist()
        self.tops = [tops[first.positions.index(read)] for read in first.reads[:rows]]

    @property
    def mean(self) -> Tensor:
        """Averaged gradient, float32 ``(row, source, width)``."""
        return sum(self.sums[1:], start=self.sums[0]) / len(self.values)

    @property
    def cosine(self) -> float:
        """Smallest cosine, over rows, of the two halves; 0 where a half has no gradient."""
        first, second = (part.flatten(1).double() for part in self.sums)
        size = first.norm(dim=1) * second.norm(dim=1)
        return float(((first * second).sum(dim=1) / size.clamp_min(1e-300)).min())

    def add(self, offset: int, begin: int, end: int) -> None:
        """Run samples ``offset + begin`` to ``offset + end``, all of the half that starts at ``offset``."""
        import torch

        from backend.saliency.gradients import row_gradients

        begin, end = offset + begin, offset + end
        inputs = None if self.noisy is None else partial(self.noisy, begin, end)
        rows = len(self.tops)
        parts = []
        for index, row in enumerate(row_gradients(self.question, inputs)):
            parts.append(row.gradients.sum(dim=0).cpu())
            self.values[begin:end, index] = row.values.double().cpu().numpy()
            self.kept[begin:end, index] = (row.top == self.tops[index]).cpu().numpy()
            self.tick(begin * rows + (index + 1) * (end - begin), rows * len(self.values))
        part = torch.stack(parts)
        if begin == offset:  # only now: a batch that ran out of memory is repeated
            self.sums.append(part)
        else:
            self.sums[-1] += part


def _read(gradient: Tensor, embeddings: Tensor, signed: bool) -> npt.NDArray[np.float32]:
    """Turn an averaged gradient ``(source, width)`` into scores ``(source,)``."""
    found = (embeddings * gradient).sum(dim=-1) if signed else gradient.norm(p=2, dim=-1)
    scores: npt.NDArray[np.float32] = found.cpu().numpy()
    return scores


def _quiet(question: Question, average: _Average) -> list[Check]:
    """Say that this is the plain gradient, and that reading it changes nothing."""
    from backend.saliency import checks

    return [
        Check("no_noise", 0.0, "info", "No token got noise, so this is the plain gradient, from a single pass."),
        checks.same_as_plain(
            question, average.values[0].tolist(), "hooked_equals_plain", "Reading gradients at the embeddings"
        ),
    ]


def _noisy(question: Question, average: _Average) -> list[Check]:
    """Judge whether the noisy copies still ask the same question, and whether there are enough of them."""
    samples = len(average.values)
    kept = float(average.kept.mean(axis=0).min())
    where = "" if len(average.tops) == 1 else ", for the target where that is rarest"
    text = f"In {kept:.0%} of {samples} noisy copies the model's most likely token stays the same{where}."
    found = [
        Check("answer_kept", kept, "ok", text)
        if kept >= KEPT
        else Check("answer_kept", kept, "warn", f"{text} With so much noise it answers another question: lower it.")
    ]
    mean, plain = float(average.values.sum(axis=1).mean()), float(question.plain.values.sum())
    text = f"S is {mean:.3g} on average over the noisy copies and {plain:.3g} for the prompt itself."
    found.append(Check("noisy_score", mean, "info", text))
    text = f"The averages of the two halves of the samples have a cosine of {average.cosine:.2f}"
    if average.cosine >= ALIKE:
        found.append(Check("split_half", average.cosine, "ok", f"{text}: {samples} samples are enough."))
    else:
        found.append(Check("split_half", average.cosine, "warn", f"{text}: take more samples."))
    return found
