"""A model that reads: it answers with the word that stands only in the needle. Its attributions are known by hand."""

import torch

from backend.evaluation.distractors import SECRETS
from tests.support.tiny import as_language_model, byte_tokenizer
from tests.support.toys import Toy, ToyConfig


class Reader(Toy):
    """A toy that also takes a switch for the cache and a mask that hides nothing, as token statistics pass them."""

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        own = None if attention_mask is None or attention_mask.dim() == 2 else attention_mask
        return super().forward(input_ids, own)


def reading_model(strength=30.0, chat=True):
    """A linear toy with one-hot embeddings: the logit of a secret is ``strength`` where it stands in the text.

    All other logits are 0, so the answer hangs on the secret's own token and on nothing else.
    """
    tokenizer = byte_tokenizer(chat)
    tokenizer.add_tokens([f" {word}" for word in SECRETS])
    count = len(tokenizer)
    weight = torch.zeros(count, count)
    for word in SECRETS:
        (i,) = tokenizer(f" {word}", add_special_tokens=False).input_ids
        weight[i, i] = strength
    weight[3, 3] = 0.1  # a character that no needle prompt holds; without it the probe of gradients finds none
    config = ToyConfig(vocab_size=count, hidden_size=count, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    module = Reader(config, "linear", torch.eye(count), weight).eval().requires_grad_(False)
    return as_language_model(module, tokenizer, "toy-reader")
