"""Whether a model is a causal language model that may be loaded, decided from its configuration alone.

Knows the names that transformers gives to architectures. Reads no weights, so a wrong model is refused at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.errors import ModelUnavailable

_WANTED = "Attriscope explains causal language models, e.g. Llama, Qwen, Gemma, Mistral or GPT-2 with their text heads."
_GGUF_ENCODERS = {"bert", "nomic-bert", "jina-bert-v2", "t5encoder"}
_GGUF_SEQ2SEQ = {"t5"}


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model folder.

    Raises:
        ModelUnavailable: If it is missing or damaged.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnavailable(
            "The model has no config.json, which says how it is built.", "Check that this is a transformers model."
        ) from None
    except (ValueError, OSError):
        raise ModelUnavailable("The model's config.json is damaged.", "Download or copy the model again.") from None
    if not isinstance(config, dict):
        raise ModelUnavailable("The model's config.json is damaged.", "Download or copy the model again.")
    return config


def check_architecture(config: dict[str, Any]) -> None:
    """Refuse everything that is not a causal language model known to the installed transformers.

    Raises:
        ModelUnavailable: With one sentence for each kind of refusal; each names the architecture.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = str(config.get("model_type", ""))
    listed = config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else kind or "unknown"
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in causal and "auto_map" in config:
        raise ModelUnavailable(
            f"The model {name} brings its own program code, which Attriscope never runs.",
            "Choose a model whose architecture transformers knows itself.",
        )
    decoder = bool(config.get("is_decoder"))
    if config.get("is_encoder_decoder") or (kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and not decoder):
        raise ModelUnavailable(
            f"{name} is an encoder-decoder model, which reads its prompt in both directions.", _WANTED
        )
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decoder:
        raise ModelUnavailable(f"{name} is an encoder, which fills gaps and does not continue a text.", _WANTED)
    if kind not in causal:
        if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES or kind in auto.MODEL_FOR_IMAGE_MAPPING_NAMES:
            raise ModelUnavailable(f"{name} is a vision model, which reads images and no text.", _WANTED)
        raise ModelUnavailable(f"{name} is not a causal language model that transformers knows.", _WANTED)
    if _has_another_head(name, causal[kind]):
        raise ModelUnavailable(f"{name} has no language-model head: it was trained for another task.", _WANTED)


def check_gguf_architecture(name: str) -> None:
    """Refuse GGUF files of encoders and of architectures that transformers cannot read from GGUF.

    Raises:
        ModelUnavailable: With a sentence that names the architecture.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if name in _GGUF_SEQ2SEQ:
        raise ModelUnavailable(
            f"{name} is an encoder-decoder model, which reads its prompt in both directions.", _WANTED
        )
    if name in _GGUF_ENCODERS:
        raise ModelUnavailable(f"{name} is an encoder, which fills gaps and does not continue a text.", _WANTED)
    known = sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer", "umt5"} - _GGUF_SEQ2SEQ)
    if name not in known:
        raise ModelUnavailable(
            f"GGUF files of the architecture {name or 'unknown'!r} cannot be read.",
            f"Use the model's safetensors files, or a GGUF file of: {', '.join(known)}.",
        )


def _has_another_head(name: str, causal_class: str) -> bool:
    """Say whether the saved class is a task head such as "LlamaForSequenceClassification"."""
    return name != causal_class and "For" in name and not name.endswith(("ForCausalLM", "ForConditionalGeneration"))
