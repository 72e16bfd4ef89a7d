"""A folder or GGUF file becomes a ``LanguageModel``: checked, frozen, in eval mode, on its device.

Knows transformers; knows neither hubs nor leases. Safetensors and GGUF only, no pickles, no code from a model's folder.
Everything that can be refused without weights is refused before they are read.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from backend.errors import ModelUnavailable, OutOfMemory
from backend.models.architecture import check_architecture, check_gguf_architecture, read_config
from backend.models.language import LanguageModel
from backend.models.placement import Placement, is_out_of_memory, weight_bytes
from backend.models.quiet import quiet_loading
from backend.models.weights import content_hash, find_weights, read_gguf
from backend.types import ModelInfo, ModelRef, Tick, no_tick

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json")
_OTHER_KINDS = {".json", ".jinja", ".model", ".txt"}
_AGAIN = "Download or copy the model again."


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that passed every check that needs no weights.

    Attributes:
        path: A folder, or a ``.gguf`` file.
        files: The weight files.
        others: Configuration, tokenizer and template files.
        parameters: Number of weights.
        nbytes: Memory that the weights will take in the chosen dtype.
        placement: Device and dtype.
    """

    path: Path
    files: tuple[Path, ...]
    others: tuple[Path, ...]
    parameters: int
    nbytes: int
    placement: Placement


def plan_loading(path: Path, placement: Placement) -> Plan:
    """Check a model folder or GGUF file without reading its weights, and say how much memory it will take.

    Raises:
        ModelUnavailable: If a file is missing or damaged, or the model is no causal language model.
    """
    if path.is_file():
        header = read_gguf(path)
        check_gguf_architecture(header.architecture)
        nbytes = weight_bytes(header.parameters, placement.dtype)
        return Plan(path, (path,), (), header.parameters, nbytes, placement)
    if not path.is_dir():
        raise ModelUnavailable(f"The model's folder {path} does not exist.", "Check the path.")
    check_architecture(read_config(path))
    weights = find_weights(path)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelUnavailable("The model has no tokenizer files.", "Put its tokenizer.json into the same folder.")
    others = tuple(sorted(p for p in path.iterdir() if p.suffix in _OTHER_KINDS and p.is_file()))
    nbytes = weight_bytes(weights.parameters, placement.dtype)
    return Plan(path, weights.files, others, weights.parameters, nbytes, placement)


def load(plan: Plan, ref: ModelRef, revision: str = "", tick: Tick = no_tick) -> LanguageModel:
    """Load a planned model.

    Args:
        plan: From ``plan_loading``.
        ref: What was asked for; provenance.
        revision: Resolved revision; empty to hash the content of the files.
        tick: Called between the steps; a step itself cannot be interrupted.

    Raises:
        ModelUnavailable: If the files do not make a usable model.
        OutOfMemory: If the device is too small.
    """
    steps = 3
    tick(0, steps)
    # Hashing reports no progress of its own, or the bar would run twice; it can be cancelled all the same.
    revision = revision or content_hash((*plan.files, *plan.others), lambda done, total: tick(0, steps))
    with quiet_loading():
        tokenizer = _load_tokenizer(plan.path)
        tick(1, steps)
        module, notes = _within_memory(plan)
    tick(2, steps)
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    info = ModelInfo(
        id=ref.id,
        revision=revision,
        dtype=plan.placement.dtype_name,
        device=str(plan.placement.device),
        device_reason=plan.placement.reason,
        architecture=type(module).__name__,
        attention=str(module.config._attn_implementation),
        parameters=sum(p.numel() for p in parameters),
        context_length=_context_length(module),
        has_chat_template=bool(tokenizer.chat_template),
    )
    nbytes = sum(t.numel() * t.element_size() for t in (*parameters, *buffers))
    tick(steps, steps)
    return LanguageModel(ref=ref, info=info, module=module, tokenizer=tokenizer, nbytes=nbytes, notes=notes)


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        if path.is_file():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file; nothing narrower fits
        raise ModelUnavailable(
            f"The model's tokenizer cannot be read: {_first_line(error)}", f"It needs a valid tokenizer.json. {_AGAIN}"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelUnavailable(
            "The model has no fast tokenizer, so its tokens cannot be traced to characters.",
            "Use a copy of the model with a tokenizer.json.",
        )
    return cast(PreTrainedTokenizerBase, tokenizer)


def _load_module(plan: Plan) -> tuple[PreTrainedModel, dict[str, Any]]:
    options: dict[str, Any] = {
        "dtype": plan.placement.dtype,
        "trust_remote_code": False,
        "output_loading_info": True,
        "local_files_only": True,
    }
    path = plan.path
    if path.is_file():
        path, options["gguf_file"] = path.parent, path.name
    else:
        options["use_safetensors"] = True
        if plan.placement.device.type != "cpu":
            options["device_map"] = {"": plan.placement.device}  # weights go to the device without a copy in between
    # No attention kernel is named: the library takes sdpa, and eager for models that sdpa would compute wrongly.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    except ImportError as error:
        raise ModelUnavailable(
            f"The model needs a package that is not installed: {_first_line(error)}",
            "Choose a copy that is not quantized, or a GGUF file.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelUnavailable(
            f"The model's files do not fit together: {_first_line(error)}", f"{_AGAIN} Check config.json and weights."
        ) from error
    module, report = loaded
    return module, report


def _within_memory(plan: Plan) -> tuple[PreTrainedModel, tuple[str, ...]]:
    try:
        return _build(plan)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block the traceback, which pins half-loaded tensors, is gone.
    gc.collect()
    if plan.placement.device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(
        f"The model needs about {plan.nbytes / 1e9:.1f} GB, more than {plan.placement.device} has left.",
        "Choose a smaller model, dtype bfloat16 or another device, or close other programs.",
    )


def _build(plan: Plan) -> tuple[PreTrainedModel, tuple[str, ...]]:
    module, report = _load_module(plan)
    notes = _check_report(report, module)
    _check_ties(module)
    network = cast(nn.Module, module)
    network.train(False)
    network.requires_grad_(False)
    if plan.path.is_file():
        network.to(plan.placement.device)
    _check_numbers(module, plan)
    return module, notes


def _check_report(report: dict[str, Any], module: PreTrainedModel) -> tuple[str, ...]:
    """Refuse a model of which parts would be random numbers; an explanation of those explains nothing."""
    missing = sorted(report.get("missing_keys", ()))
    odd = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report.get("mismatched_keys", ()))
    name = type(module).__name__
    if missing:
        raise ModelUnavailable(
            f"The weights of {len(missing)} parts of {name} are missing, e.g. {missing[0]}; they would be random.",
            f"{_AGAIN} A model saved without its language-model head cannot be explained.",
        )
    if odd:
        raise ModelUnavailable(
            f"{len(odd)} weights have another shape than config.json says, e.g. {odd[0]}.", "Check config.json."
        )
    unused = sorted(report.get("unexpected_keys", ()))
    if unused:
        return (f"{len(unused)} stored weights are not used by {name}, e.g. {unused[0]}.",)
    return ()


def _check_ties(module: PreTrainedModel) -> None:
    """Check that input and output embedding are one matrix where the configuration says so.

    A wrong load gives plausible but scaled logits.
    """
    config = module.config.get_text_config()
    head, table = cast(Any, module).get_output_embeddings(), module.get_input_embeddings()
    tied = getattr(config, "tie_word_embeddings", False)
    if not tied or not isinstance(head, nn.Linear) or not isinstance(table, nn.Embedding):
        return
    if head.weight.data_ptr() != table.weight.data_ptr():
        raise ModelUnavailable(
            "The configuration says that input and output embedding are one matrix, but the weights hold two.",
            'Set "tie_word_embeddings" to false in config.json if the model was trained with two.',
        )


@torch.no_grad()
def _check_numbers(module: PreTrainedModel, plan: Plan) -> None:
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not bool(torch.isfinite(weight.sum(dtype=torch.float32))):
            # The sum of huge finite numbers can overflow; only then is the full look worth its memory.
            if bool(torch.isfinite(weight).all()):
                continue
            hint = (
                "float16 overflows easily: choose float32 or bfloat16."
                if plan.placement.dtype == torch.float16
                else _AGAIN
            )
            raise ModelUnavailable(f"The weights {name} hold numbers that are infinite or not numbers.", hint)


def _context_length(module: PreTrainedModel) -> int | None:
    length = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if isinstance(length, int) and length > 0 else None


def _first_line(error: BaseException, limit: int = 200) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
