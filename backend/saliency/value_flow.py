"""How much each token's values could flow to a position, head by head: the gate of HETA.

For each head index a rollout of its own runs through depth: R <- (A / 2 + I / 2) R. In each layer, token i's flow to
position t is R[t, i] times the size of what the head would write for it, the sum of absolute values of V_i W_O.
Knows where attention modules keep their value and output projections; refuses those it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backend.errors import NotApplicable
from backend.models.language import LanguageModel
from backend.saliency.attention_rows import attention_modules, watched_attention

_OUTPUTS = ("o_proj", "out_proj", "dense")


@dataclass(eq=False)
class Flow:
    """Collects the flow during a pass.

    Attributes:
        positions: Where it goes to.
        values: Value vectors of a layer until its weights arrive, by module.
        rollout: float32 ``(head, query, source)``, up to the current layer.
        total: float64 ``(position, source)``, summed over layers and heads.
    """

    positions: list[int]
    values: dict[int, Tensor] = field(default_factory=dict)
    rollout: Tensor | None = None
    total: Tensor | None = None

    def take(self, part: nn.Module, weights: Tensor) -> None:
        """Take a layer's weights ``(head, query, key)``."""
        half = (weights + torch.eye(weights.shape[-1], device=weights.device)) / 2
        if self.rollout is None:
            self.rollout = half
        elif self.rollout.shape != half.shape:
            raise NotApplicable("The layers of this model have different numbers of heads.", "Use another method.")
        else:
            self.rollout = half @ self.rollout.to(half.device)
        sizes = written_sizes(part, self.values.pop(id(part)), len(weights))
        flow = (self.rollout[:, self.positions] * sizes[:, None]).sum(dim=0).double().cpu()
        self.total = flow if self.total is None else self.total + flow

    def gate(self) -> Tensor:
        """Return the flow as shares, float64 ``(position, source)``; each row sums to 1."""
        if self.total is None:
            raise ValueError("no pass was watched")
        return self.total / self.total.sum(dim=-1, keepdim=True)


@contextmanager
def watched_flow(model: LanguageModel, flow: Flow) -> Iterator[None]:
    """Collect the flow during one pass over one sequence.

    Raises:
        NotApplicable: If the model shows no attention weights, or keeps its values in an unknown way.
    """
    with ExitStack() as stack:
        for part in attention_modules(model.module):
            source, piece = _value_projection(part)

            def keep(layer: nn.Module, args: Any, output: Tensor, key: int = id(part), cut: int = piece) -> None:
                flow.values[key] = output[0, :, -cut:].detach().float()

            stack.callback(source.register_forward_hook(keep).remove)
        stack.enter_context(watched_attention(model, flow.take))
        yield


def written_sizes(part: nn.Module, values: Tensor, heads: int) -> Tensor:
    """Return the size of what each head would write for each token, float32 ``(head, token)``.

    Args:
        part: An attention module.
        values: What its value projection returned, ``(token, value heads x head width)``.
        heads: Number of query heads. With grouped queries, neighboring ones share a value head.
    """
    weight = _output_weight(part)  # (heads x head width, width)
    width = weight.shape[0] // heads
    groups = values.shape[1] // width
    if width * heads != weight.shape[0] or groups * width != values.shape[1] or heads % max(groups, 1):
        raise _unknown(part)
    found = []
    for head in range(heads):
        group = head // (heads // groups)
        vectors = values[:, group * width : (group + 1) * width]
        found.append((vectors @ weight[head * width : (head + 1) * width].float()).abs().sum(dim=-1))
    return torch.stack(found)


def _value_projection(part: nn.Module) -> tuple[nn.Module, int]:
    """Return the module that makes the values, and how many of its last outputs they are."""
    fused = getattr(part, "c_attn", None)
    if fused is not None and fused.weight.shape[1] == 3 * fused.weight.shape[0]:
        return fused, int(fused.weight.shape[0])
    made = getattr(part, "v_proj", None)
    if not isinstance(made, nn.Linear) or hasattr(part, "v_norm"):
        raise _unknown(part)
    return made, made.out_features


def _output_weight(part: nn.Module) -> Tensor:
    """Return the matrix behind the heads, from heads to the residual stream."""
    fused = getattr(part, "c_proj", None)
    if fused is not None and hasattr(part, "c_attn"):
        weight: Tensor = fused.weight  # the library's Conv1D keeps (in, out)
        return weight
    for name in _OUTPUTS:
        layer = getattr(part, name, None)
        if isinstance(layer, nn.Linear) and layer.weight.is_floating_point():
            return layer.weight.T
    raise _unknown(part)


def _unknown(part: nn.Module) -> NotApplicable:
    return NotApplicable(
        f"The layer {type(part).__name__} keeps its values in a way that is not known here.",
        "Use another method; Llama, Qwen, Gemma, Mistral and GPT-2 are known.",
    )
