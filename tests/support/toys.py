"""Hand-made causal models whose attributions are known in advance, and questions about them without a tokenizer.

They are real transformers models (ids in, logits out, additive attention masks), so tests go the public way.
"""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from backend.models.language import LanguageModel
from backend.saliency.question import ask
from backend.types import ModelInfo, ModelRef, Passage, Prompt, SaliencyRequest, Token


class ToyConfig(PreTrainedConfig):
    model_type = "toy"


class Toy(PreTrainedModel):
    """h_t is a sum over the visible positions, weighted with exp(mask); logits are a function of h_t.

    ``kind``: "linear" (logits = h W^T), "quadratic" (logits = h W^T + (h W^T)^2 / 2), "scale_free" (the sum is over
    e_i / |e_i|), "copy" (h_t is the embedding at t - 1, so that the token two before the target decides).
    """

    config_class = ToyConfig
    _supports_sdpa = True

    def __init__(self, config, kind, embedding, weight):
        super().__init__(config)
        self.kind = kind
        self.embed = nn.Embedding.from_pretrained(embedding)
        self.weight = nn.Parameter(weight)
        self.calls = 0

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        e = self.embed(input_ids)  # (batch, n, d)
        n = e.shape[1]
        if attention_mask is None:
            visible = torch.ones(n, n).tril()[None]
        else:
            visible = attention_mask[:, 0].exp()  # 1 where nothing is added, 0 where it is forbidden
        if self.kind == "scale_free":
            e = e / e.norm(dim=-1, keepdim=True)
        if self.kind == "copy":
            visible = visible * torch.ones(n, n).tril(-1).triu(-1)
        z = (visible @ e) @ self.weight.T
        return SimpleNamespace(logits=z + z * z / 2 if self.kind == "quadratic" else z)


def toy_model(kind="linear", *, vocabulary=12, width=5, seed=0, scale=1.0):
    """A toy as a ``LanguageModel``. The copy model has one-hot embeddings and says the copied token."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "copy":
        embedding, weight = torch.eye(vocabulary), 8 * torch.eye(vocabulary)
    else:
        embedding = torch.randn(vocabulary, width, generator=generator)
        weight = scale * torch.randn(vocabulary, width, generator=generator)
    config = ToyConfig(vocab_size=vocabulary, hidden_size=width)
    config._attn_implementation = "sdpa"
    module = Toy(config, kind, embedding, weight).eval().requires_grad_(False)
    info = ModelInfo(id=f"toy-{kind}", revision="0", dtype="float32", device="cpu", parameters=1)
    return LanguageModel(ModelRef(f"toy-{kind}"), info, module, None, 0)


def copying_llama(vocabulary=12):
    """A real one-layer Llama that says the token before the last one, as the copy toy does.

    Queries and keys are the same for every token and differ by their rotation only: the score is highest one position
    back, where about four fifths of the attention go. The last token of the vocabulary is a sink: a tenth of the
    attention goes there, wherever it stands. Values are one-hot tokens, written beside the embedding, where the head
    reads them.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2 * vocabulary,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.zero_()
    layer = module.model.layers[0]
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, module.model.norm):
        norm.weight.fill_(1)
    for token in range(vocabulary):
        module.model.embed_tokens.weight[token, token] = 1
        layer.self_attn.v_proj.weight[token, token] = 1
        layer.self_attn.o_proj.weight[vocabulary + token, token] = 0.6  # three times as long as the embedding
        module.lm_head.weight[token, vocabulary + token] = 1.7  # the copied token's logit is 8
    turn = torch.tensor([1.0, 10000 ** (-1 / 8)])  # the two fastest rotations, in radians per position
    layer.self_attn.k_proj.bias[:2] = 1
    layer.self_attn.q_proj.bias[:2] = 20 * turn.cos()
    layer.self_attn.q_proj.bias[8:10] = -20 * turn.sin()
    normed = (2 * vocabulary) ** 0.5  # what the norm makes of a one-hot embedding
    layer.self_attn.k_proj.weight[:2, vocabulary - 1] = -1 / normed  # no place of its own, ...
    layer.self_attn.k_proj.weight[7, vocabulary - 1] = 1 / normed  # ... but a part that hardly rotates
    layer.self_attn.q_proj.bias[7] = 32
    info = ModelInfo(id="copying-llama", revision="0", dtype="float32", device="cpu", parameters=1)
    return LanguageModel(ModelRef("copying-llama"), info, module, None, 0)


def passage_of(ids, prompt_length, roles=None, groups=None):
    """A passage of words; roles default to user and answer."""
    roles = roles or ["user"] * prompt_length + ["answer"] * (len(ids) - prompt_length)
    groups = groups or range(len(ids))
    tokens = tuple(
        Token(i, f" w{i}", role, group, role in ("bos", "template"))
        for i, role, group in zip(ids, roles, groups, strict=True)
    )
    return Passage(tokens, prompt_length, "")


def request_for(passage, target, **more):
    return SaliencyRequest(
        ModelRef("toy"),
        Prompt("x"),
        tuple(t.id for t in passage.answer_tokens),
        target,
        more.pop("methods", ()),
        **more,
    )


def question_of(model, ids, prompt_length, target=(0, 1), foil=(), roles=None, groups=None, **more):
    """Ask about ``ids[prompt_length:]``; the foil is given as ids."""
    passage = passage_of(ids, prompt_length, roles, groups)
    return ask(model, passage, request_for(passage, target, **more), tuple(foil))


class Ticks:
    """A tick that keeps what it was told, and raises at the n-th call."""

    def __init__(self, stop_at=None):
        self.calls = []
        self.stop_at = stop_at

    def __call__(self, done, total):
        from backend.errors import Cancelled

        self.calls.append((done, total))
        if self.stop_at is not None and len(self.calls) >= self.stop_at:
            raise Cancelled
