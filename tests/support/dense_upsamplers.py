"""JAFAR and AnyUp written the long way, as reference for results and cost: every pixel against every cell at once.

Nothing of ``backend`` is used. Attention is torch's own multi-head attention, which also computes the value product
that both models throw away, as the official classes do. Takes the official state dict.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

State = Mapping[str, Tensor]


def jafar(state: State, image: Tensor, features: Tensor, size: tuple[int, int], heads: int = 4) -> Tensor:
    """Upsample (B, C, h, w) to (B, C, H, W) with JAFAR's weights."""
    grid = (features.shape[2], features.shape[3])
    coded = _rope(state, _encoder(state, "image_encoder", image))
    queries = _plain_norm(F.adaptive_avg_pool2d(_encoder(state, "query_encoder", coded), size))
    keys = _plain_norm(F.adaptive_avg_pool2d(_encoder(state, "key_encoder", coded), grid))
    code = _encoder(state, "key_features_encoder", F.normalize(features, dim=1))
    keys = F.conv2d(code, state["sft_key.gamma.weight"]) * keys + F.conv2d(code, state["sft_key.beta.weight"])
    return _attend(state, queries, keys, features, heads, None)


def anyup(
    state: State,
    image: Tensor,
    features: Tensor,
    size: tuple[int, int],
    heads: int = 4,
    ratio: float = 0.1,
    chunk: int | None = None,
) -> Tensor:
    """Upsample (B, C, h, w) to (B, C, H, W) with AnyUp's weights."""
    grid = (features.shape[2], features.shape[3])
    coded = _rope(state, _encoder(state, "image_encoder", image))
    queries = F.adaptive_avg_pool2d(_encoder(state, "query_encoder", coded), size)
    keys = F.adaptive_avg_pool2d(_encoder(state, "key_encoder", coded), grid)
    code = _unified(state["key_features_encoder.0.basis"], features)
    for part in ("key_features_encoder.1", "key_features_encoder.2"):
        code = _residual(state, part, code)
    keys = _encoder(state, "aggregation", torch.cat((keys, code), dim=1))
    return _attend(state, queries, keys, features, heads, blocked(size, grid, ratio), chunk)


def blocked(size: tuple[int, int], grid: tuple[int, int], ratio: float) -> Tensor | None:
    """Return the (H·W, h·w) mask of the keys that a pixel may not read; None without a window."""
    if ratio <= 0:
        return None
    axes = []
    for length, cells in zip(size, grid, strict=True):
        t = (torch.arange(length, dtype=torch.float32) + 0.5) / length
        low = torch.floor(torch.clamp(t - ratio, 0, 1) * cells)
        high = torch.ceil(torch.clamp(t + ratio, 0, 1) * cells)
        cell = torch.arange(cells)
        axes.append((cell >= low[:, None]) & (cell < high[:, None]))
    rows, columns = axes
    return ~(rows[:, None, :, None] & columns[None, :, None, :]).reshape(size[0] * size[1], -1)


def _encoder(state: State, name: str, x: Tensor) -> Tensor:
    weight = state[f"{name}.0.weight"]
    margin = weight.shape[2] // 2
    x = F.conv2d(F.pad(x, (margin,) * 4, mode="reflect") if margin else x, weight)
    return _residual(state, f"{name}.2", _residual(state, f"{name}.1", x))


def _residual(state: State, name: str, x: Tensor) -> Tensor:
    if f"{name}.norm1.weight" in state:
        names = ("norm1", "conv1", "norm2", "conv2")
    else:
        names = ("block.0", "block.2", "block.3", "block.5")
    norm1, conv1, norm2, conv2 = (f"{name}.{part}" for part in names)
    y = F.conv2d(F.silu(_norm(state, norm1, x)), state[f"{conv1}.weight"])
    y = F.conv2d(F.silu(_norm(state, norm2, y)), state[f"{conv2}.weight"])
    shortcut = state.get(f"{name}.shortcut.weight")
    return y + (x if shortcut is None else F.conv2d(x, shortcut))


def _norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.group_norm(x, 8, state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)


def _plain_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 8, eps=1e-5)


def _rope(state: State, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    rows = torch.linspace(0, 1, height, dtype=x.dtype) if height > 1 else torch.zeros(1, dtype=x.dtype)
    columns = torch.linspace(0, 1, width, dtype=x.dtype) if width > 1 else torch.zeros(1, dtype=x.dtype)
    place = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)  # H, W, 2
    angle = (place @ state["rope.freqs"]).permute(2, 0, 1)
    half = x.shape[1] // 2
    turned = torch.cat((-x[:, half:], x[:, :half]), dim=1)
    return x * angle.cos() + turned * angle.sin()


def _unified(basis: Tensor, features: Tensor) -> Tensor:
    (batch, channels, height, width), filters, margin = features.shape, basis.shape[0], basis.shape[2] // 2
    lengths = F.normalize(features, dim=1)
    responses = F.conv2d(lengths, basis.repeat(channels, 1, 1, 1), padding=margin, groups=channels)
    ones = torch.ones(1, 1, height, width, dtype=features.dtype)
    responses = responses / F.conv2d(ones, torch.ones_like(basis[:1]), padding=margin)
    return responses.view(batch, filters, channels, height, width).softmax(dim=1).mean(dim=2)


def _attend(
    state: State,
    queries: Tensor,
    keys: Tensor,
    features: Tensor,
    heads: int,
    mask: Tensor | None,
    chunk: int | None = None,
) -> Tensor:
    queries = F.conv2d(queries, state["cross_decode.conv2d.weight"], padding=1)
    (batch, dim, height, width), name = queries.shape, "cross_decode.cross_attn"
    q = _rms(queries.flatten(2).permute(2, 0, 1), state[f"{name}.norm_q.weight"])
    k = _rms(keys.flatten(2).permute(2, 0, 1), state[f"{name}.norm_k.weight"])
    raw = features.flatten(2).permute(2, 0, 1)
    norm_v = state.get(f"{name}.norm_v.weight")
    v = k if norm_v is None else _rms(raw, norm_v)
    packed = state.get(f"{name}.attention.in_proj_weight")
    done = []
    for start in range(0, len(q), chunk or len(q)):
        part = slice(start, start + (chunk or len(q)))
        _, weights = F.multi_head_attention_forward(
            q[part],
            k,
            v,
            dim,
            heads,
            packed,
            state[f"{name}.attention.in_proj_bias"],
            None,
            None,
            False,
            0.0,
            state[f"{name}.attention.out_proj.weight"],
            state[f"{name}.attention.out_proj.bias"],
            training=False,
            need_weights=True,
            attn_mask=None if mask is None else mask[part],
            use_separate_proj_weight=packed is None,
            q_proj_weight=state.get(f"{name}.attention.q_proj_weight"),
            k_proj_weight=state.get(f"{name}.attention.k_proj_weight"),
            v_proj_weight=state.get(f"{name}.attention.v_proj_weight"),
        )
        done.append(weights @ raw.transpose(0, 1))
    return torch.cat(done, dim=1).transpose(1, 2).reshape(batch, -1, height, width)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.1920929e-07) * weight
