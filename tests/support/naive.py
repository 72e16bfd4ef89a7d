"""Small transformers written out in float64, from the weights of the library's models, with attention in plain sight.

``change(scores, allowed)`` receives the attention scores ``(head, query, key)`` of a layer before the softmax and
returns the scores to use; so tests can do by hand what methods do through masks and kernels.
"""

import torch


def naive_logits(module, ids, change=lambda scores, allowed: scores):
    """Logits ``(length, vocabulary)`` of a tiny Llama, Mistral or GPT-2."""
    weights = {name: p.detach().double() for name, p in module.state_dict().items()}
    if module.config.model_type == "gpt2":
        return _gpt2(module.config, weights, ids, change)
    return _llama(module.config, weights, ids, change)


def _attend(q, k, v, window, change):
    """Queries, keys and values ``(head, length, width)``; returns ``(length, head * width)``."""
    at = torch.arange(q.shape[1])
    allowed = (at[:, None] >= at) & (at[:, None] - at < window)
    scores = change(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, allowed)
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).reshape(q.shape[1], -1)


def _llama(config, w, ids, change):
    length, heads, pairs = len(ids), config.num_attention_heads, config.num_key_value_heads
    width = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angle.cos(), angle.sin()

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def split(x, count):
        return x.view(length, count, width).transpose(0, 1)

    def rotate(x):
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    window = getattr(config, "sliding_window", None) or length
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        h = norm(x, w[f"{at}.input_layernorm.weight"])
        q = rotate(split(linear(h, f"{at}.self_attn.q_proj"), heads))
        k = rotate(split(linear(h, f"{at}.self_attn.k_proj"), pairs)).repeat_interleave(heads // pairs, 0)
        v = split(linear(h, f"{at}.self_attn.v_proj"), pairs).repeat_interleave(heads // pairs, 0)
        x = x + linear(_attend(q, k, v, window, change), f"{at}.self_attn.o_proj")
        h = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(linear(h, f"{at}.mlp.gate_proj"))
        x = x + linear(gate * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def _gpt2(config, w, ids, change):
    length, heads = len(ids), config.n_head

    def norm(x, name):
        spread = (x.var(-1, unbiased=False, keepdim=True) + config.layer_norm_epsilon).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][torch.tensor(ids)] + w["transformer.wpe.weight"][:length]
    for layer in range(config.n_layer):
        at = f"transformer.h.{layer}"
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, -1)
        q, k, v = (part.view(length, heads, -1).transpose(0, 1) for part in parts)
        x = x + linear(_attend(q, k, v, length, change), f"{at}.attn.c_proj")
        h = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T
