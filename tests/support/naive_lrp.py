"""AttnLRP rule by rule in float64 numpy: relevance is handed from every layer's output to its inputs.

Nothing here is a gradient. Every rule divides the relevance of an output among what it was added up from, in the form
in which the rules are stated; a model is run by hand from its weights. One sequence, no batch.
"""

import numpy as np


def relevance(module, ids, target, variant):
    """Return the logit of ``target`` after ``ids``, and the relevance of each token ``(n,)``."""
    config = module.config
    weights = {name: value.double().numpy() for name, value in module.state_dict().items()}
    run = _gpt2 if config.model_type == "gpt2" else _decoder
    return run(config, weights, list(ids), target, variant)


def share(part, whole):
    """Relevance per unit of the output; an output of exactly zero holds none."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole != 0)


def linear(x, weight, out, given):
    """The epsilon rule at epsilon 0; ``weight`` is (out, in). A bias is part of ``out`` and keeps its share."""
    return x * (share(given, out) @ weight)


def attention(q, k, v, scale):
    """Causal attention of ``(n, head, d)``; scores, weights, outputs."""
    n = len(q)
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    hidden = np.triu(np.ones((n, n), bool), 1)
    masked = np.where(hidden, -np.inf, scores)
    weights = np.exp(masked - masked.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.where(hidden, 0, scores), weights, np.einsum("hij,jhd->ihd", weights, v)


def attention_back(q, k, v, scale, scores, weights, out, given, variant):
    """Relevance of queries, keys and values: uniform rule at both products, Taylor rule at the softmax."""
    per = share(given, out)
    to_values = v * np.einsum("hij,ihd->jhd", weights, per)
    if variant == "cp":
        return 0 * q, 0 * k, to_values
    to_weights = weights * np.einsum("ihd,jhd->hij", per, v) / 2
    to_scores = scores * (to_weights - weights * to_weights.sum(-1, keepdims=True))
    each = share(to_scores, scores) * scale / 2
    return q * np.einsum("hij,jhd->ihd", each, k), k * np.einsum("hij,ihd->jhd", each, q), to_values / 2


def _decoder(config, w, ids, target, variant):
    """Llama and Qwen3."""
    n, heads, groups = len(ids), config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    angle = np.arange(n)[:, None] / config.rope_parameters["rope_theta"] ** (np.arange(0, width, 2) / width)
    cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    half = width // 2

    def rms(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rotate(x):
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    def rotate_back(x, given):
        per = share(given, rotate(x))
        turned = per * sin
        return x * (per * cos + np.concatenate([turned[..., half:], -turned[..., :half]], -1))

    def project(x, name):
        out = x @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    x = w["model.embed_tokens.weight"][ids]
    kept = []
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        a = rms(x, w[at + "input_layernorm.weight"])
        raw = {name: project(a, f"{at}self_attn.{name}_proj") for name in "qkv"}
        split = {name: value.reshape(n, -1, width) for name, value in raw.items()}
        if at + "self_attn.q_norm.weight" in w:
            for name in "qk":
                split[name] = rms(split[name], w[f"{at}self_attn.{name}_norm.weight"])
        repeat = heads // groups
        q, k, v = rotate(split["q"]), rotate(split["k"]).repeat(repeat, 1), split["v"].repeat(repeat, 1)
        scores, weights, o = attention(q, k, v, width**-0.5)
        flat = o.reshape(n, -1)
        attended = project(flat, at + "self_attn.o_proj")
        middle = x + attended
        b = rms(middle, w[at + "post_attention_layernorm.weight"])
        gate, up = project(b, at + "mlp.gate_proj"), project(b, at + "mlp.up_proj")
        product = gate / (1 + np.exp(-gate)) * up
        down = project(product, at + "mlp.down_proj")
        kept.append((at, x, a, raw, split, q, k, v, scores, weights, o, flat, attended, middle, b, gate, up, product,
                     down))  # fmt: skip
        x = middle + down
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])[target]
    last = rms(x, w["model.norm.weight"])[-1]
    given = np.zeros_like(x)
    given[-1] = last * head  # the last normalization hands on what it gets
    for at, x0, a, raw, split, q, k, v, scores, weights, o, flat, attended, middle, b, gate, up, product, down in kept[
        ::-1
    ]:
        per = share(given, middle + down)
        to_product = linear(product, w[at + "mlp.down_proj.weight"], down, down * per)
        to_up, to_gate = (to_product, 0 * to_product) if variant == "cp" else (to_product / 2, to_product / 2)
        given = middle * per
        given = given + linear(b, w[at + "mlp.up_proj.weight"], up, to_up)
        given = given + linear(b, w[at + "mlp.gate_proj.weight"], gate, to_gate)  # the activation hands on what it gets
        per = share(given, x0 + attended)
        to_o = linear(flat, w[at + "self_attn.o_proj.weight"], attended, attended * per).reshape(o.shape)
        to = dict(zip("qkv", attention_back(q, k, v, width**-0.5, scores, weights, o, to_o, variant), strict=True))
        for name in "kv":  # heads that share keys and values
            to[name] = to[name].reshape(n, groups, -1, width).sum(2)
        for name in "qk":
            to[name] = rotate_back(split[name], to[name])
        given = x0 * per
        for name in "qkv":
            weight = w[f"{at}self_attn.{name}_proj.weight"]
            given = given + linear(a, weight, raw[name], to[name].reshape(n, -1))
    return float(last @ head), given.sum(-1)


def _gpt2(config, w, ids, target, variant):
    n, heads, d = len(ids), config.num_attention_heads, config.hidden_size

    def norm(x, name):
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
        scaled = scaled * w[name + ".weight"]
        return centered, scaled, scaled + w[name + ".bias"]

    def norm_back(x, state, given):
        centered, scaled, out = state
        per = share(scaled * share(given, out), centered)  # the bias keeps its share
        return x * (per - per.mean(-1, keepdims=True))

    def project(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def linear_back(x, name, out, given):
        return linear(x, w[name + ".weight"].T, out, given)

    embedded = w["transformer.wte.weight"][ids]
    x = start = embedded + w["transformer.wpe.weight"][:n]
    kept = []
    for layer in range(config.num_hidden_layers):
        at = f"transformer.h.{layer}."
        first = norm(x, at + "ln_1")
        fused = project(first[2], at + "attn.c_attn")
        q, k, v = (part.reshape(n, heads, -1) for part in np.split(fused, 3, -1))
        scale = (d // heads) ** -0.5
        scores, weights, o = attention(q, k, v, scale)
        attended = project(o.reshape(n, d), at + "attn.c_proj")
        middle = x + attended
        second = norm(middle, at + "ln_2")
        inner = project(second[2], at + "mlp.c_fc")
        active = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        down = project(active, at + "mlp.c_proj")
        kept.append((at, x, first, fused, (q, k, v, scale, scores, weights, o), attended, middle, second, inner,
                     active, down))  # fmt: skip
        x = middle + down
    final = norm(x, "transformer.ln_f")
    head = w["lm_head.weight"][target]
    given = np.zeros_like(x)
    given[-1] = final[2][-1] * head
    given = norm_back(x, final, given)
    for at, x0, first, fused, attend, attended, middle, second, inner, active, down in kept[::-1]:
        per = share(given, middle + down)
        to_active = linear_back(active, at + "mlp.c_proj", down, down * per)
        to_second = linear_back(second[2], at + "mlp.c_fc", inner, to_active)
        given = middle * per + norm_back(middle, second, to_second)
        per = share(given, x0 + attended)
        o = attend[-1]
        to_o = linear_back(o.reshape(n, d), at + "attn.c_proj", attended, attended * per).reshape(o.shape)
        to = np.concatenate([part.reshape(n, d) for part in attention_back(*attend, to_o, variant)], -1)
        given = x0 * per + norm_back(x0, first, linear_back(first[2], at + "attn.c_attn", fused, to))
    return float(final[2][-1] @ head), (embedded * share(given, start)).sum(-1)
