"""The curvature part of HETA, and what its readers must know: probes, halves, joint probes, the ratio of the parts.

Knows gradients and sign vectors; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from backend.saliency.agreement import spearman
from backend.saliency.second_order import block_sizes, joint_sizes, signs
from backend.types import Check

Array = npt.NDArray[np.float64]

_LOPSIDED = 10.0  # ratio of curvature to information from which the smaller one hardly matters
_STEADY = 0.9  # rank correlation of two halves of the probes below which more are needed
_LOOSE = 0.5  # deviation of the joint probe above which it is no stand-in for exact blocks


class Curvature:
    """Sizes of the candidates' own blocks of second derivatives, row after row.

    Attributes:
        products: Products with the Hessian so far.
    """

    def __init__(
        self, leaf: Tensor, tokens: Sequence[int], probes: int, seed: int, compared: int, before: Callable[[], None]
    ) -> None:
        """Draw the probes.

        Args:
            leaf: Embeddings of the sources, ``(source, width)``.
            tokens: Candidates, ascending.
            probes: Sign vectors per candidate.
            seed: Of the signs.
            compared: 0 for exact blocks; else joint probes, and so many tokens whose exact blocks judge them.
            before: Called before each product; may raise.
        """
        self.leaf, self.tokens, self.compared, self.before = leaf, list(tokens), compared, before
        width = leaf.shape[1]
        self.vectors = signs(len(self.tokens) * probes, width, seed).view(-1, probes, width).to(leaf.device)
        self.products = 0
        self._sizes: list[Array] = []  # per row (candidate, probe)
        self._seen: list[int] = []
        self._deviations: list[float] = []

    def add(self, gradient: Tensor, seen: int) -> None:
        """Measure a row.

        Args:
            gradient: Of the row, with its graph.
            seen: How many of the candidates the row can see, from the first.
        """
        tokens, probes = self.tokens[:seen], self.vectors.shape[1]
        sizes = np.zeros((len(self.tokens), probes))
        if self.compared:
            sizes[:seen] = joint_sizes(gradient, self.leaf, tokens, self.vectors[:seen], self.before).double().numpy()
            self.products += probes
            largest = np.argsort(-sizes[:seen].mean(axis=1), kind="stable")[: self.compared]
            for index in largest.tolist():
                exact = float(np.mean(self._block(gradient, index)))
                if exact > 0:
                    self._deviations.append(abs(float(sizes[index].mean()) - exact) / exact)
        else:
            for index in range(seen):
                sizes[index] = self._block(gradient, index)
        self._sizes.append(sizes)
        self._seen.append(seen)

    def _block(self, gradient: Tensor, index: int) -> list[float]:
        self.products += self.vectors.shape[1]
        return block_sizes(gradient, self.leaf, self.tokens[index], self.vectors[index], self.before)

    def mean(self) -> Array:
        """Return the mean over probes, ``(row, candidate)``; 0 where a row cannot see the candidate."""
        mean: Array = np.stack(self._sizes).mean(axis=-1)
        return mean

    def checks(self) -> list[Check]:
        """Say how steady the probes are and how far joint probes are from exact blocks."""
        return [*self._halves(), *self._joint()]

    def _halves(self) -> list[Check]:
        found = [
            spearman(sizes[:seen, ::2].mean(axis=1), sizes[:seen, 1::2].mean(axis=1))
            for sizes, seen in zip(self._sizes, self._seen, strict=True)
            if sizes.shape[1] > 1 and seen > 2
        ]
        known = [value for value in found if value is not None]
        if not known:
            return []
        low = min(known)
        steady = low >= _STEADY
        text = f"Two halves of the probes rank curvature alike to {low:.2f} (rank correlation)"
        return [
            Check("probe_agreement", low, "ok" if steady else "warn", text + ("." if steady else "; use more probes."))
        ]

    def _joint(self) -> list[Check]:
        if not self.compared:
            return []
        if not self._deviations:
            return [Check("joint_probe_deviation", None, "info", "There is no curvature to compare joint probes with.")]
        mean = float(np.mean(self._deviations))
        return [
            Check(
                "joint_probe_deviation",
                mean,
                "warn" if mean > _LOOSE else "info",
                f"Curvature is an approximation: one probe for all tokens together. On {len(self._deviations)} tokens "
                f"it deviates from exact blocks by {mean:.0%} on average (at most {max(self._deviations):.0%}).",
            )
        ]


def parts(gate: Array, curvature: Array, information: Array, sources: int) -> list[Check]:
    """State gate, curvature and information on their own.

    Args:
        gate: Share of each candidate in the flow, ``(row, candidate)``.
        curvature: ``(row, candidate)``.
        information: ``(row, candidate)``, in nats.
        sources: Number of all sources.
    """
    count = gate.shape[1]
    share = float(gate.sum(axis=1).mean())
    bent, told = float(curvature.mean()), float(information.mean())
    of = "all tokens" if count == sources else f"the {count} candidates of {sources} tokens"
    found = [
        Check("gate_on_candidates", share, "info", f"The gate M puts {share:.0%} of the flow on {of}."),
        Check("curvature_mean", bent, "info", f"Curvature C is {bent:.3g} on average, {curvature.max():.3g} at most."),
        Check(
            "information_mean",
            told,
            "info",
            f"Information I is {told:.3g} nats on average, {information.max():.3g} at most.",
        ),
    ]
    if told > 0 and bent > 0:
        ratio = bent / told
        lopsided = ratio > _LOPSIDED or ratio < 1 / _LOPSIDED
        text = f"Curvature is {ratio:.3g} times information on average"
        if lopsided:
            text += f", so {'curvature' if ratio > 1 else 'information'} decides; the option standardize weighs both."
        found.append(
            Check("curvature_to_information", ratio, "warn" if lopsided else "ok", text if lopsided else f"{text}.")
        )
    return found
