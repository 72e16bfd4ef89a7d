"""Writes a tiny Llama with a byte-level tokenizer as a GGUF file, so that reading GGUF is tested without a download."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.tiny import byte_tokenizer, tiny_model


def write_gguf(file: Path, architecture: str = "llama"):
    """Write the model of ``tiny_model("llama")`` in float32 and return it for comparison.

    GGUF keeps the two halves of a rotary head interleaved, so queries and keys are permuted on the way.
    """
    model = tiny_model("llama")
    config, state = model.module.config, model.module.state_dict()
    tokenizer = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)

    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)

    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, tensor in state.items():
        data = tensor.numpy().astype(np.float32)
        for letter, count in heads.items():
            if f"self_attn.{letter}_proj" in name:
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.layers.": "blk.",
    }
    for ours, theirs in table.items():
        name = name.replace(ours, theirs)
    return name
