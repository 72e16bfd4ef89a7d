"""The rules of AttnLRP, as hooks on one model instance: every value stays as it is, gradients follow the rules.

A rule is a change of the backward pass alone. Each hook returns the very output of its module; what is exchanged is
the way from there back to the module's input. No attention code is touched, since scaling the gradients of queries,
keys and values is the same as treating the two products of attention by their rule. So every attention kernel works.

A layer without a rule would pass plain gradients on without a word. Hence a model is taken only if every one of its
modules is of a listed class and as many rules apply as its configuration has layers for.
Knows layers; knows nothing of questions or scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backend.errors import NotApplicable

Variant = Literal["attn_lrp", "cp"]
Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]

SUPPORTED = "Llama, Mistral, Qwen2, Qwen3, Gemma 3 and GPT-2"

_NEAR = 1e-6
"""Size of an input below which f(x) / x is replaced by its limit."""

_GENERAL = {
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.sparse.Embedding",
    "torch.nn.modules.dropout.Dropout",  # does nothing outside of training
}
_SLOPES = {  # f'(0) of each activation, the limit of f(x) / x
    "torch.nn.modules.activation.ReLU": 0.0,
    "torch.nn.modules.activation.SiLU": 0.5,
    "torch.nn.modules.activation.GELU": 0.5,
    "transformers.activations.SiLUActivation": 0.5,
    "transformers.activations.GELUActivation": 0.5,
    "transformers.activations.GELUTanh": 0.5,
    "transformers.activations.NewGELUActivation": 0.5,
    "transformers.activations.FastGELUActivation": 0.5,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture whose layers have rules.

    Attributes:
        classes: Full names of the classes it consists of, besides linear layers and general ones.
        norm: Full name of its normalization.
        norms: Normalizations per layer; one more stands at the end.
        shift: What is added to a normalization's weight.
        gated: Whether the activation gates a second projection.
        variant: The variant that its authors recommend for it.
    """

    classes: frozenset[str]
    norm: str
    norms: int
    shift: float = 0.0
    gated: bool = True
    variant: Variant = "attn_lrp"

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of part with a rule of its own stands in a layer."""
        names = ("q_proj", "k_proj", "v_proj", "up_proj") if self.gated else ("c_attn",)
        return {"norm": self.norms, "activation": 1} | dict.fromkeys(names, 1)


def _family(
    package: str, prefix: str, norms: int, *, inner: str = "", more: tuple[str, ...] = (), shift: float = 0.0
) -> Family:
    """Describe a family with the usual parts of the library's decoders."""
    parts = ("ForCausalLM", f"{inner}Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", *more)
    where = f"transformers.models.{package}.modeling_{package}.{prefix}"
    return Family(frozenset(where + part for part in parts), f"{where}RMSNorm", norms, shift)


_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
_FAMILIES = {
    "LlamaForCausalLM": _family("llama", "Llama", 2),
    "MistralForCausalLM": _family("mistral", "Mistral", 2),
    "Qwen2ForCausalLM": _family("qwen2", "Qwen2", 2),
    "Qwen3ForCausalLM": _family("qwen3", "Qwen3", 4),
    "Gemma3ForCausalLM": _family("gemma3", "Gemma3", 6, inner="Text", more=("TextScaledWordEmbedding",), shift=1.0),
    "GPT2LMHeadModel": Family(
        frozenset(
            {
                *(_GPT2 + part for part in ("LMHeadModel", "Model", "Block", "Attention", "MLP")),
                "transformers.pytorch_utils.Conv1D",
                "torch.nn.modules.normalization.LayerNorm",
            }
        ),
        "torch.nn.modules.normalization.LayerNorm",
        2,
        gated=False,
        variant="cp",
    ),
}


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model all of whose layers have rules.

    Raises:
        NotApplicable: If the architecture or one of its layers has none, or their number is not that of the config.
    """
    found = _FAMILIES.get(type(model).__name__)
    if found is None:
        raise _refusal(f"{type(model).__name__} is not among them")
    for module in model.modules():
        name = _name(module)
        if not (name in found.classes or name in _GENERAL or name in _SLOPES or isinstance(module, nn.Linear)):
            raise _refusal(f"this model holds a {type(module).__name__}")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.config, cap, None) is not None:
            raise _refusal(f"this model bends its numbers ({cap})")
    counted = dict(Counter(kind for kind, _ in _parts(model, found)))
    layers = int(model.config.num_hidden_layers)
    wanted = {kind: count * layers + (kind == "norm") for kind, count in found.counts.items()}
    if counted != wanted:
        kinds = [kind for kind in wanted if counted.get(kind, 0) != wanted[kind]]
        missing = ", ".join(f"{counted.get(kind, 0)} of {wanted[kind]} {kind}" for kind in kinds)
        raise _refusal(f"this model of {layers} layers has other parts than its configuration says ({missing})")
    return found


def conserves(model: PreTrainedModel, variant: Variant) -> bool:
    """Whether scores must add up to the logit: nothing flows through softmax or gates, and nothing else adds to it.

    Biases and learned positions take a share of the logit that belongs to no token.
    """
    if variant != "cp" or not family_of(model).gated:
        return False
    # queries and keys are constants in this variant, so their biases take no part
    return not any(
        name.endswith(".bias") and not name.endswith(("q_proj.bias", "k_proj.bias")) and bool(weight.any())
        for name, weight in model.named_parameters()
    )


@contextmanager
def relevance_rules(model: PreTrainedModel, variant: Variant) -> Iterator[int]:
    """Let gradients follow the rules within the block; yields the number of hooks.

    Raises:
        NotApplicable: As ``family_of``.
    """
    family = family_of(model)
    hooks = [
        (module, hook)
        for kind, module in _parts(model, family)
        for hook in [_hook(kind, module, family, variant)]
        if hook is not None
    ]
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for module, hook in hooks:
            handles.append(module.register_forward_hook(hook))
        yield len(handles)
    finally:
        for handle in handles:
            handle.remove()


def _refusal(reason: str) -> NotApplicable:
    return NotApplicable(
        f"AttnLRP needs a rule for every layer and has them for {SUPPORTED}; {reason}.",
        "Use input × gradient, integrated gradients or occlusion.",
    )


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _parts(model: PreTrainedModel, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that has a rule of its own, with its kind."""
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if _name(module) == family.norm:
            yield "norm", module
        elif _name(module) in _SLOPES:
            yield "activation", module
        elif last in family.counts:
            yield last, module


def _hook(kind: str, module: nn.Module, family: Family, variant: Variant) -> Hook | None:
    """Return the hook that makes a module follow its rule; None where plain gradients do."""
    full = variant == "attn_lrp"
    if kind == "norm":
        return layer_norm_rule if isinstance(module, nn.LayerNorm) else rms_norm_rule(family.shift)
    if kind == "activation":
        if not family.gated:
            return activation_rule(1.0)
        return activation_rule(0.5) if full else _constant
    if kind == "c_attn":
        return _fused_scaled if full else _fused_constant
    if kind in ("q_proj", "k_proj"):
        return scaled(0.25) if full else _constant
    return scaled(0.5) if full else None  # values, and what the gate multiplies


class _Ruled(torch.autograd.Function):
    """Returns ``value`` as it is; its gradient reaches ``source`` times ``factor``."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = source.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return (grads[0] * factor).to(ctx.dtype), None, None


def _ruled(source: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    out: Tensor = _Ruled.apply(source.to(value.device), value.detach(), factor)
    return out


def scaled(factor: float) -> Hook:
    """Uniform rule at products: a module's output passes on only part of its gradient."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _ruled(output, output, torch.tensor(factor, device=output.device))

    return hook


def rms_norm_rule(shift: float) -> Hook:
    """Identity rule of RMSNorm: the scale 1 / rms(x) counts as a constant."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        wide = args[0].detach().to(output.device).float()
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0)
        weight: Any = module.weight
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return _ruled(args[0], output, scale * (shift + weight.float()))

    return hook


def layer_norm_rule(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Identity rule of LayerNorm: the scale 1 / std counts as a constant; taking off the mean keeps its gradient."""
    wide = args[0].to(output.device).float()
    centered = wide - wide.mean(-1, keepdim=True)
    eps: Any = module.eps
    weight: Any = module.weight
    scale = torch.rsqrt(centered.detach().square().mean(-1, keepdim=True) + eps)
    return _ruled(centered, output, scale * weight.float())


def activation_rule(factor: float) -> Hook:
    """Identity rule of activations: f counts as the line through the origin, f(x) / x, times ``factor``."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x = args[0].detach().to(output.device).float()
        near = x.abs() < _NEAR
        ratio = torch.where(near, _SLOPES[_name(module)], output.detach().float() / torch.where(near, 1.0, x))
        return _ruled(args[0], output, factor * ratio)

    return hook


def _constant(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.detach()


def _fused_scaled(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Queries, keys and values in one: a quarter for the first two, half for the last."""
    width = output.shape[-1] // 3
    factor = torch.full((3 * width,), 0.25, device=output.device)
    factor[2 * width :] = 0.5
    return _ruled(output, output, factor)


def _fused_constant(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    width = output.shape[-1] // 3
    return torch.cat([output[..., : 2 * width].detach(), output[..., 2 * width :]], dim=-1)
