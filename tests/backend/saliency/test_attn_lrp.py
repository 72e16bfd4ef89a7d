"""AttnLRP against relevance handed back rule by rule, its conservation, its refusals, and what it leaves behind."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from backend.errors import Cancelled, NotApplicable
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method
from backend.saliency import lrp_rules
from backend.saliency.lrp_rules import activation_rule, relevance_rules
from backend.saliency.passes import logits_at
from backend.saliency.question import ask
from backend.types import ModelRef, Prompt, SaliencyRequest, no_tick
from tests.support.naive_lrp import relevance
from tests.support.tiny import WINDOW, as_language_model, byte_tokenizer, tiny_model
from tests.support.toys import Ticks, question_of, toy_model

IDS = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPT = 13
LONG = torch.randint(3, 300, (WINDOW + 12,), generator=torch.Generator().manual_seed(4)).tolist()
GATED = ("llama", "qwen3", "gemma3", "mistral")


def run(question, variant="auto", tick=no_tick):
    method = get_method("attn_lrp")
    return method.run(question.model, question, method.params(variant=variant), tick)


def check_of(scores, name):
    return next(check for check in scores.checks if check.name == name)


def uneven(model, seed=1):
    """Give weights of normalizations and all biases values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def biased(family):
    return tiny_model(family, **({"attention_bias": True, "mlp_bias": True} if family == "llama" else {}))


def qwen2():
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return as_language_model(module.eval().requires_grad_(False), byte_tokenizer(), "tiny-qwen2")


# ------------------------------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("variant", ["attn_lrp", "cp"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_scores_are_those_of_relevance_handed_back_rule_by_rule(family, variant):
    model = uneven(biased(family))
    question = question_of(model, IDS, PROMPT, (0, 2))
    scores = run(question, variant)
    plain = question.with_objective("logit").plain.values
    for row in range(2):
        past = IDS[: PROMPT + row]
        logit, wanted = relevance(model.module, past, IDS[PROMPT + row], variant)
        assert logit == pytest.approx(plain[row], rel=1e-4, abs=1e-4)
        found = scores.values[row, : len(past)]
        np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
        assert np.abs(wanted).max() > 0.1


def test_the_variants_and_input_x_gradient_differ():
    question = question_of(uneven(tiny_model("llama")), IDS, PROMPT, objective="logit")
    gradient = get_method("input_x_gradient")
    found = [run(question, v).values for v in ("attn_lrp", "cp")]
    found.append(gradient.run(question.model, question, gradient.params(), no_tick).values)
    for i in range(3):
        assert np.abs(found[i] - found[i - 1]).max() > 0.05 * np.abs(found[i]).max()


@pytest.mark.parametrize(("family", "variant"), [("gpt2", "cp"), ("llama", "attn_lrp"), ("gemma3", "attn_lrp")])
def test_the_default_is_what_the_family_needs(family, variant):
    question = question_of(tiny_model(family), IDS, PROMPT)
    found = run(question)
    assert np.array_equal(found.values, run(question, variant).values)
    assert f"variant {variant}" in check_of(found, "conservation_residual").text


@pytest.mark.parametrize("objective", ["log_prob", "prob"])
def test_it_starts_from_the_logit_whatever_was_asked(objective):
    model = tiny_model("qwen3")
    wanted = run(question_of(model, IDS, PROMPT, (0, 2), objective="logit"))
    found = run(question_of(model, IDS, PROMPT, (0, 2), objective=objective))
    assert np.array_equal(found.values, wanted.values)
    assert "logit" in check_of(found, "conservation_residual").text


def test_a_foil_is_subtracted():
    model = tiny_model("llama")
    against = run(question_of(model, IDS, PROMPT, foil=[5])).values
    other = run(question_of(model, [*IDS[:PROMPT], 5], PROMPT)).values
    np.testing.assert_allclose(against, run(question_of(model, IDS, PROMPT)).values - other, atol=1e-4)


# ------------------------------------------------------------------------------------------ conservation


@pytest.mark.parametrize("family", GATED)
def test_cp_scores_add_up_to_the_logit(family):
    question = question_of(uneven(tiny_model(family)), LONG, len(LONG) - 3, (0, 2))
    scores = run(question, "cp")
    logits = question.with_objective("logit").plain.values
    room = 1e-4 * np.abs(scores.values).sum(1).max()
    np.testing.assert_allclose(scores.values.sum(1, dtype=np.float64), logits, atol=room)
    assert check_of(scores, "conservation_residual").verdict == "ok"
    full = run(question, "attn_lrp")
    assert check_of(full, "conservation_residual").verdict == "info"
    assert np.abs(full.values.sum(1, dtype=np.float64) - logits).max() > 100 * room


def test_cp_scores_against_a_foil_add_up_to_the_difference_of_logits():
    model = tiny_model("llama")
    one = run(question_of(model, IDS, PROMPT, foil=[5]), "cp")
    assert check_of(one, "conservation_residual").verdict == "ok"
    several = run(question_of(model, IDS, PROMPT, foil=[5, 6]), "cp")
    assert check_of(several, "conservation_residual").verdict == "info"
    assert "foil" in check_of(several, "conservation_residual").text


def test_biases_keep_a_share_except_those_of_queries_and_keys():
    model = qwen2()
    with torch.no_grad():
        for layer in model.module.model.layers:
            layer.self_attn.q_proj.bias.fill_(0.5)
            layer.self_attn.k_proj.bias.fill_(-0.5)
    assert check_of(run(question_of(model, IDS, PROMPT), "cp"), "conservation_residual").verdict == "ok"
    with torch.no_grad():
        model.module.model.layers[0].self_attn.v_proj.bias.fill_(0.5)
    scores = run(question_of(model, IDS, PROMPT), "cp")
    check = check_of(scores, "conservation_residual")
    assert check.verdict == "info" and "Biases" in check.text
    logit = question_of(model, IDS, PROMPT, objective="logit").plain.values[0]
    assert check.value == pytest.approx((scores.values.sum() - logit) / abs(logit), rel=1e-3)


def test_a_rule_that_loses_relevance_is_a_failure(monkeypatch):
    monkeypatch.setattr(lrp_rules, "rms_norm_rule", lambda shift: lrp_rules.scaled(1.0))  # plain gradients
    scores = run(question_of(tiny_model("llama"), IDS, PROMPT), "cp")
    check = check_of(scores, "conservation_residual")
    assert check.verdict == "fail" and "Do not trust" in check.text


def net(activation, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = nn.Linear(6, 9, bias=False), nn.Linear(9, 1, bias=False)
    return nn.Sequential(first, activation, second)


def under_rules(layers, x):
    handle = layers[1].register_forward_hook(activation_rule(1.0))
    try:
        start = x.clone().requires_grad_()
        out = layers(start).sum()
        return x * torch.autograd.grad(out, start)[0], out.detach()
    finally:
        handle.remove()


@pytest.mark.parametrize(("activation", "same"), [(nn.ReLU(), True), (nn.SiLU(), False)])
def test_a_relu_net_without_biases_has_the_scores_of_input_x_gradient(activation, same):
    layers, x = net(activation), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    found, out = under_rules(layers, x)
    start = x.clone().requires_grad_()
    plain = x * torch.autograd.grad(layers(start).sum(), start)[0]
    assert torch.allclose(found, plain, atol=1e-6) == same
    torch.testing.assert_close(found.sum(), out)  # without biases nothing is lost


def test_an_activation_near_zero_has_its_slope_as_limit():
    layers = net(nn.SiLU())
    with torch.no_grad():
        layers[0].weight.copy_(torch.eye(9, 6))
    x = torch.tensor([0.0, 1e-9, -1e-9, 1e-7, -1e-5, 1e-4], requires_grad=True)
    handle = layers[1].register_forward_hook(activation_rule(1.0))
    (found,) = torch.autograd.grad(layers[1](layers[0](x)).sum(), x)
    handle.remove()
    torch.testing.assert_close(found, torch.full((6,), 0.5), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------ the model stays as it is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["attn_lrp", "cp"])
@pytest.mark.parametrize("family", [*GATED, "gpt2"])
def test_logits_under_the_rules_are_the_plain_ones_bit_by_bit(family, variant, dtype):
    model = uneven(tiny_model(family))
    model.module.to(dtype)
    ids = torch.tensor([LONG])
    for kernel in ("sdpa", "eager"):
        model.module.set_attn_implementation(kernel)
        with torch.no_grad():
            plain = logits_at(model, ids, range(len(LONG)))
            with relevance_rules(model.module, variant) as hooks:
                ruled = logits_at(model, ids, range(len(LONG)))
        assert torch.equal(ruled, plain) and hooks > 0


def others(model):
    question = question_of(model, LONG, len(LONG) - 3, (0, 2))
    methods = [get_method(name) for name in ("gradient_norm", "input_x_gradient", "occlusion")]
    return [method.run(model, question, method.params(), no_tick).values for method in methods]


@pytest.mark.parametrize("family", [*GATED, "gpt2"])
def test_other_methods_give_the_same_bits_afterwards(family):
    model = tiny_model(family)
    before = others(model)
    question = question_of(model, LONG, len(LONG) - 3, (0, 2))
    run(question)
    assert all(np.array_equal(a, b) for a, b in zip(before, others(model), strict=True))
    for stop_at in (1, 2, 3):
        with pytest.raises(Cancelled):
            run(question, tick=Ticks(stop_at))
        assert all(np.array_equal(a, b) for a, b in zip(before, others(model), strict=True))


def test_other_methods_give_the_same_bits_after_an_error_inside():
    model = tiny_model("llama")
    before = others(model)
    question = question_of(model, LONG, len(LONG) - 3)
    _ = question.plain

    def fail(*_):
        raise OverflowError("planted")

    hook = model.module.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(OverflowError, match="planted"):
        run(question)
    hook.remove()
    assert not any(module._forward_hooks for module in model.module.modules())
    assert all(np.array_equal(a, b) for a, b in zip(before, others(model), strict=True))


def test_another_instance_is_not_touched_while_the_rules_hold():
    model, other = tiny_model("llama"), tiny_model("llama")
    wanted = others(other)
    with relevance_rules(model.module, "attn_lrp"):
        assert all(np.array_equal(a, b) for a, b in zip(wanted, others(other), strict=True))
        assert not np.array_equal(others(model)[1], wanted[1])


# ------------------------------------------------------------------------------------------ refusals


def broken(kind):
    if kind == "gemma2":
        return tiny_model("gemma2")
    if kind == "toy":
        return toy_model()
    if kind == "soft cap":
        return tiny_model("gemma3", final_logit_softcapping=30.0)
    if kind == "cross attention":
        return tiny_model("gpt2", add_cross_attention=True)
    if kind == "activation":
        return tiny_model("llama", hidden_act="tanh")
    model = tiny_model("llama")
    if kind == "other layer":
        model.module.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    if kind == "part missing":
        model.module.model.layers[1].post_attention_layernorm = nn.Dropout()
    if kind == "layer count":
        model.module.config.num_hidden_layers = 3
    return model


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gemma2", "Gemma2ForCausalLM is not among them"),
        ("toy", "Toy is not among them"),
        ("soft cap", "final_logit_softcapping"),
        ("cross attention", "4 of 2 c_attn"),
        ("activation", "Tanh"),
        ("other layer", "Sequential"),
        ("part missing", "4 of 5 norm"),
        ("layer count", "2 of 3 q_proj"),
    ],
)
def test_what_has_no_rule_is_refused_by_name_before_any_pass(kind, says):
    model = broken(kind)
    question = question_of(model, [3, 4, 5, 6], 3)
    passes = []
    model.module.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(NotApplicable) as refusal:
        run(question)
    assert says in str(refusal.value) and "Llama, Mistral, Qwen2, Qwen3, Gemma 3 and GPT-2" in str(refusal.value)
    assert "occlusion" in refusal.value.hint and not passes


def test_the_patent_is_told_wherever_the_method_is_seen():
    method = get_method("attn_lrp")
    assert not method.default
    assert "atented" in method.summary and "patented" in method.reading
    assert "patented" in check_of(run(question_of(tiny_model("llama"), IDS, PROMPT)), "license").text


# ------------------------------------------------------------------------------------------ the embedded model


@pytest.mark.smollm
def test_the_embedded_model_conserves_its_logit_and_answers_as_always(smollm):
    prompt = Prompt("The secret word is banana. The sky is blue. The secret word is")
    ids = encode_text(smollm, " banana")
    passage = append_answer(smollm, encode_prompt(smollm, prompt), ids)
    question = ask(smollm, passage, SaliencyRequest(ModelRef(), prompt, ids, (0, 1), ()))
    logit = question.with_objective("logit").plain.values[0]
    scores = run(question, "cp")
    assert scores.values.sum(dtype=np.float64) == pytest.approx(logit, abs=1e-3)
    assert check_of(scores, "conservation_residual").verdict == "ok"
    full = run(question, "attn_lrp")
    assert abs(full.values.sum(dtype=np.float64) - logit) > 0.1
    row = torch.tensor([question.ids])
    with torch.no_grad():
        plain = logits_at(smollm, row, range(len(question.ids)))
        for variant in ("attn_lrp", "cp"):
            with relevance_rules(smollm.module, variant) as hooks:
                assert hooks == 61 + 30 * (5 if variant == "attn_lrp" else 3)
                assert torch.equal(logits_at(smollm, row, range(len(question.ids))), plain)
