"""Attention weights against the library's own, on every family; the model is the same afterwards."""

import pytest
import torch

from backend.errors import NotApplicable
from backend.saliency.attention_rows import attention_rows, eager_attention, read_attention, watched_attention
from tests.support.tiny import FAMILIES, WINDOW, tiny_model
from tests.support.toys import toy_model

LENGTH = WINDOW + 9
IDS = torch.randint(3, 300, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
QUERIES = [0, 7, LENGTH - 1]
# gemma2 adds a soft cap on attention scores; 0.1 makes it bite on these small weights
EVERY = [*[(family, {}) for family in FAMILIES], ("gemma2", {"attn_logit_softcapping": 0.1})]


def wanted_weights(model):
    """All layers' weights as transformers returns them from an eager pass: (layer, head, query, key)."""
    name = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        found = model.module(torch.tensor([IDS]), output_attentions=True, use_cache=False).attentions
    model.module.set_attn_implementation(name)
    return torch.cat(found)


def plain(model):
    with torch.no_grad():
        return model.module(torch.tensor([IDS]), use_cache=False).logits


@pytest.mark.parametrize(("family", "changes"), EVERY, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_are_those_of_the_library_and_nothing_is_left_behind(family, changes):
    model = tiny_model(family, **changes)
    before, kernel = plain(model), model.module.config._attn_implementation
    rows, logits = attention_rows(model, IDS, QUERIES)
    assert model.module.config._attn_implementation == kernel
    assert torch.equal(plain(model), before)

    assert rows.shape == (2, 4, 3, LENGTH) and rows.dtype == torch.float32
    torch.testing.assert_close(rows, wanted_weights(model)[:, :, QUERIES], atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 4, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits, before[0, QUERIES], atol=1e-3, rtol=1e-4)
    assert (rows[:, :, 1, 8:] == 0).all()
    if family in ("gemma3", "gemma2", "mistral"):  # the window is shorter than the text
        assert (rows[0, :, 2, : LENGTH - WINDOW] == 0).all()
    assert family == "mistral" or (rows[1, :, 2] > 0).all()


def test_a_soft_cap_changes_the_rows():
    capped, free = (
        attention_rows(tiny_model("gemma2", attn_logit_softcapping=cap), IDS, QUERIES)[0] for cap in (0.1, None)
    )
    assert (capped - free).abs().max() > 0.02


def test_reduced_maps_are_all_that_is_kept():
    model = tiny_model("llama")
    maps, _ = read_attention(model, IDS, [LENGTH - 1], lambda weights: weights.mean(0))
    torch.testing.assert_close(torch.stack(maps), wanted_weights(model).mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_in_the_middle_leaves_the_model_as_it_was(family):
    model = tiny_model(family)
    before, kernel = plain(model), model.module.config._attn_implementation

    def stop(weights):
        raise OverflowError("planted")

    with pytest.raises(OverflowError, match="planted"):
        read_attention(model, IDS, [1], stop)
    assert model.module.config._attn_implementation == kernel
    assert sum(len(part._forward_hooks) for part in model.module.modules()) == 0
    assert torch.equal(plain(model), before)


def test_each_nested_configuration_gets_its_own_kernel_back():
    model = tiny_model("llama")
    nested = tiny_model("gpt2").module.config
    nested._attn_implementation_internal = "flex_attention"
    model.module.model.layers[0].mlp.config = nested
    with eager_attention(model):
        assert nested._attn_implementation == model.module.config._attn_implementation == "eager"
    assert nested._attn_implementation == "flex_attention"
    assert model.module.config._attn_implementation == "sdpa"


def test_layers_without_weights_are_an_error():
    with pytest.raises(NotApplicable, match="no attention weights"):
        attention_rows(toy_model("linear"), [1, 2, 3], [2])
    model = tiny_model("llama")
    model.module.model.layers[1].self_attn.register_forward_hook(lambda part, args, output: (output[0], None))
    with pytest.raises(NotApplicable, match="LlamaAttention returns no attention weights"):
        attention_rows(model, IDS, [3])
    skipped = tiny_model("llama")
    with (
        pytest.raises(NotApplicable, match="Only 1 of 2 layers"),
        watched_attention(skipped, lambda part, weights: None),
    ):
        skipped.module.model.layers = skipped.module.model.layers[:1]
        skipped.module.config.num_hidden_layers = 1
        plain(skipped)
        skipped.module.config.num_hidden_layers = 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_give_float32_rows_that_sum_to_one(dtype):
    model = tiny_model("llama")
    model.module.to(dtype)
    rows, _ = attention_rows(model, IDS, QUERIES)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 4, 3), atol=0.02, rtol=0)
