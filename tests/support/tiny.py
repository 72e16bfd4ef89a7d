"""Tiny random language models and tokenizers, built from configuration. Nothing is downloaded, nothing is trained.

``tiny_model(family)`` is ready for methods; ``save_tiny(folder, family)`` writes it as a model folder. Weights are
drawn ten times wider than usual, so that predictions are peaked and effects of single tokens stand out of the noise.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from backend.models.language import LanguageModel
from backend.types import ModelInfo, ModelRef

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3", "mistral")
WINDOW = 16  # sliding window of gemma3's first layer and of mistral

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris. The capital of Germany is Berlin. What is the capital of Italy?",
    "Once upon a time there was a small dog, and the small dog liked to run in the garden.",
    "Answer the question with one word. A cat sat on the mat; the answer is in the text.",
    "नमस्ते दुनिया। यह एक वाक्य है।",
    "مرحبا بالعالم. هذه جملة قصيرة.",
    "你好世界。这是一个句子。",
] * 8


@lru_cache(maxsize=1)
def _byte_level() -> str:
    """A byte-level BPE like GPT-2's and Llama 3's: any text, no normalization, control tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE without BOS; 400 tokens; with a ChatML template unless ``chat`` is False."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def sentencepiece_tokenizer(kind: str = "bpe") -> PreTrainedTokenizerFast:
    """A tokenizer with BOS, a space before every text and byte fallback, like Llama 2's ("bpe") or T5's ("unigram")."""
    specials = ["<unk>", "<s>", "</s>"]
    vocabulary = [*specials, *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    vocabulary += [c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!世界" if c not in vocabulary]
    vocabulary += ["▁T", "he", "▁The", "▁P", "ar", "is", "aris", "▁Paris", "Paris", "▁a", "▁i", "▁is", "it", "al"]
    if kind == "bpe":
        pairs = "▁ T,h e,▁T he,▁ P,a r,i s,ar is,▁P aris,P aris,▁ a,▁ i,▁ is,i t,a l".split(",")
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        merges = [tuple(pair.split(" ")) for pair in pairs]
        tokenizer = Tokenizer(
            models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *strip])
    else:
        scored = [(piece, -float(30 - len(piece))) for piece in vocabulary]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiny_config(family: str = "llama", vocab_size: int = 400, **changes: Any) -> Any:
    """A two-layer configuration: width 32, 4 heads, context 256."""
    base: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "gpt2":
        names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": vocab_size}
        shared = {key: base[key] for key in ("initializer_range", "bos_token_id", "eos_token_id")}
        return GPT2Config(**{**names, **shared, **changes})
    if family == "llama":
        return LlamaConfig(**{**base, **changes})
    if family == "mistral":
        return MistralConfig(**{**base, "sliding_window": WINDOW, **changes})
    if family == "qwen3":
        return Qwen3Config(**{**base, "head_dim": 8, **changes})
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}
    if family == "gemma3":
        return Gemma3TextConfig(**{**base, **layers, **changes})
    if family == "gemma2":
        return Gemma2Config(**{**base, **layers, **changes})
    raise ValueError(f"no tiny family named {family!r}")


def tiny_module(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model in float32, eval mode, parameters frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    return module.eval().requires_grad_(False)


def as_language_model(module: Any, tokenizer: Any, name: str = "tiny") -> LanguageModel:
    """Wrap a module and a tokenizer the way the loader does."""
    info = ModelInfo(
        id=name,
        revision="0" * 16,
        dtype="float32",
        device="cpu",
        architecture=type(module).__name__,
        attention=str(module.config._attn_implementation),
        parameters=sum(p.numel() for p in module.parameters()),
        context_length=getattr(module.config, "max_position_embeddings", None),
        has_chat_template=bool(tokenizer.chat_template),
    )
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return LanguageModel(ModelRef(name), info, module, tokenizer, nbytes)


def tiny_model(family: str = "llama", seed: int = 0, tokenizer: Any = None, **changes: Any) -> LanguageModel:
    """A random model of a family with the byte-level tokenizer (or another one), on the CPU in float32."""
    tokenizer = tokenizer or byte_tokenizer()
    module = tiny_module(family, seed, **{"vocab_size": len(tokenizer), **changes})
    return as_language_model(module, tokenizer, f"tiny-{family}")


def save_tiny(
    folder: Path, family: str = "llama", seed: int = 0, *, shard: str = "50GB", tokenizer: Any = None, **changes: Any
) -> Path:
    """Write a tiny model as a folder of safetensors, configuration and tokenizer; a small ``shard`` cuts it up."""
    model = tiny_model(family, seed, tokenizer, **changes)
    model.module.save_pretrained(folder, max_shard_size=shard)
    model.tokenizer.save_pretrained(folder)
    return folder
