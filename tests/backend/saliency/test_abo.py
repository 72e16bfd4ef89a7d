"""Attention bias optimization against models written out by hand, planted answers, and models that cannot take it."""

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.models.passage import append_answer, encode_prompt
from backend.registry import Workload
from backend.saliency import abo, attention_bias, checkpointing
from backend.saliency.abo import Params, cost, read_out
from backend.saliency.attention_bias import BiasedPasses
from backend.saliency.bias_descent import Plan, bias_of, descend
from backend.saliency.masks import additive, visible_keys
from backend.saliency.question import ask as ask_about
from backend.types import ModelRef, Prompt, SaliencyRequest, no_tick
from tests.support.naive import naive_logits
from tests.support.tiny import FAMILIES, WINDOW, tiny_model
from tests.support.toys import copying_llama, question_of, toy_model

LONG = WINDOW + 9  # longer than the sliding windows
IDS = torch.randint(3, 300, (LONG + 4,), generator=torch.Generator().manual_seed(1)).tolist()
COPY = [3, 7, 1, 9, 4, 2, 4]  # the copying models say the token two before: 4 at index 4


def ask(model, target=(1, 3), **more):
    return question_of(model, IDS, LONG, target, **more)


def run(question, **params):
    return abo.run(question.model, question, Params(**params), no_tick)


def check_of(scores, name):
    return next(check for check in scores.checks if check.name == name)


def names(scores):
    return [check.name for check in scores.checks]


def some_bias(count=LONG + 2, seed=3):
    return 2 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------- the bias


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_no_bias_gives_the_plain_logits(family):
    model = tiny_model(family)
    ids = torch.tensor([IDS])
    mask = additive(visible_keys(model, len(IDS)), 0, len(IDS), None, torch.float32, torch.zeros(len(IDS)))
    with torch.no_grad():
        plain = model.module(input_ids=ids, use_cache=False).logits
        found = model.module(input_ids=ids, attention_mask=mask, use_cache=False).logits
    np.testing.assert_allclose(found, plain, atol=1e-5)
    assert BiasedPasses(ask(model), "log_prob", lambda: None).gap <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_bias_and_gradient_equal_a_model_written_out_in_float64(family):
    model = tiny_model(family)
    question = ask(model)
    bias = some_bias().double().requires_grad_()
    logits = naive_logits(model.module, question.ids, lambda scores, allowed: scores + bias)
    terms = logits.log_softmax(-1)[[LONG, LONG + 1], IDS[LONG + 1 : LONG + 3]]
    (gradient,) = torch.autograd.grad(terms.sum(), bias)
    found = BiasedPasses(question, "log_prob", lambda: None).gradient(some_bias())
    assert found.value == pytest.approx(float(terms.sum().detach()), abs=1e-4)
    assert found.log_probability == pytest.approx(float(terms.mean().detach()), abs=1e-4)
    np.testing.assert_allclose(found.gradient, gradient, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma2"])
def test_the_gradient_is_the_slope(family):
    passes = BiasedPasses(ask(tiny_model(family)), "log_prob", lambda: None)
    bias, way = some_bias(), some_bias(seed=4)
    slope = (passes.value(bias + 0.01 * way).value - passes.value(bias - 0.01 * way).value) / 0.02
    found = float((passes.gradient(bias).gradient * way).sum())
    assert abs(found) > 0.1 and found == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_constant_added_to_all_biases_changes_nothing(family):
    passes = BiasedPasses(ask(tiny_model(family)), "log_prob", lambda: None)
    bias = some_bias()
    assert passes.value(bias + 3).value == pytest.approx(passes.value(bias).value, abs=1e-4)
    assert abs(passes.value(bias * 0.5).value - passes.value(bias).value) > 1e-3
    assert float(passes.gradient(bias).gradient.sum()) == pytest.approx(0, abs=1e-4)


def test_alpha_becomes_a_bias_as_written():
    alpha, fixed = torch.tensor([5.0, 2.0, -1.0, 0.5]), torch.tensor([True, False, False, False])
    anchored = bias_of(alpha, "anchored", fixed)
    np.testing.assert_allclose(anchored, [0, *np.log(1 / (1 + np.exp([-2.0, 1.0, -0.5])))], rtol=1e-5)
    literal = bias_of(alpha, "literal", fixed)
    np.testing.assert_allclose(literal, [0, 1.5, -1.5, 0], atol=1e-6)
    np.testing.assert_allclose(bias_of(alpha + 7, "literal", fixed), literal, atol=1e-5)


def test_a_foil_is_subtracted_and_a_foil_span_has_its_own_past():
    model = tiny_model("llama")
    question = ask(model, foil=[5, 6, 7])
    passes = BiasedPasses(question, "log_prob", lambda: None)
    assert passes.value(torch.zeros(LONG + 2)).value == pytest.approx(question.plain.values.sum(), abs=1e-4)
    bias = some_bias()

    def log_p(ids, read, said):
        own = torch.cat([bias[: LONG + 1], torch.zeros(len(ids) - LONG - 1)])  # foil tokens are not sources
        if ids == question.ids:
            own = bias
        logits = naive_logits(model.module, ids, lambda scores, allowed: scores + own.double())
        return float(logits.log_softmax(-1)[read, said].sum())

    start = tuple(IDS[: LONG + 1])
    target = log_p(question.ids, [LONG, LONG + 1], IDS[LONG + 1 : LONG + 3])
    first = log_p(question.ids, [LONG], [5])
    rest = log_p((*start, 5, 6), [LONG + 1, LONG + 2], [6, 7])
    assert passes.value(bias).value == pytest.approx(target - first - rest, abs=1e-3)


def test_the_likelihood_can_be_a_probability():
    question = ask(tiny_model("llama"))
    zero = torch.zeros(LONG + 2)
    found = BiasedPasses(question, "prob", lambda: None).value(zero)
    assert found.value == pytest.approx(question.plain.probabilities.sum(), rel=1e-4)
    assert found.log_probability == pytest.approx(np.log(question.plain.probabilities).mean(), abs=1e-4)
    values = [run(question, steps=4, likelihood=name).values for name in ("question", "log_prob", "prob")]
    assert np.array_equal(values[0], values[1]) and not np.allclose(values[0], values[2])
    of_p = run(ask(tiny_model("llama"), objective="prob"), steps=4).values
    np.testing.assert_array_equal(of_p, values[2])


# ----------------------------------------------------------------------------------------------------- the descent


@pytest.mark.parametrize("form", ["anchored", "literal"])
@pytest.mark.parametrize("ramp", [False, True])
def test_the_descent_equals_one_written_out_in_float64(form, ramp):
    model = tiny_model("llama")
    question = ask(model, target=(1, 2))
    fixed = np.zeros(LONG + 1, bool)
    fixed[[0, 4] if form == "anchored" else [4]] = True
    plan = Plan(form, 4, 0.5, 3.0, ramp, 0.0, fixed)
    states = list(descend(BiasedPasses(question, "log_prob", lambda: None), plan, seed=0))
    free = torch.from_numpy(~fixed)
    alpha = torch.full((LONG + 1,), 2.0 if form == "anchored" else 0.0, dtype=torch.float64)
    mean, square = torch.zeros(LONG + 1, dtype=torch.float64), torch.zeros(LONG + 1, dtype=torch.float64)
    for step in range(1, 5):
        leaf = alpha.clone().requires_grad_()
        bias = torch.log(1 / (1 + torch.exp(-leaf))) if form == "anchored" else leaf - leaf[free].mean()
        bias = bias * free
        logits = naive_logits(model.module, question.ids, lambda scores, allowed, bias=bias: scores + bias)
        log_p = logits[-1].log_softmax(-1)[IDS[LONG + 1]]
        weight = 3.0 * (step / 4 if ramp else 1)
        (grad,) = torch.autograd.grad(-log_p + weight * leaf[free].sigmoid().mean(), leaf)
        assert states[step - 1].probability == pytest.approx(float(log_p.detach().exp()), rel=1e-3)
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        alpha = alpha - 0.5 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    assert len(states) == 5 and [state.step for state in states] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(states[-1].alpha[~fixed], alpha[free], atol=2e-3)
    assert np.isnan(states[-1].alpha[fixed]).all() and (states[-1].bias[fixed] == 0).all()


def test_noise_follows_the_seed_and_runs_are_averaged():
    model = tiny_model("llama")
    first, again, other = (run(ask(model, seed=seed), noise=0.5, steps=3).values for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.allclose(first, other)
    both = run(ask(model, seed=0), noise=0.5, steps=3, runs=2)
    np.testing.assert_allclose(both.values, (first + other) / 2, atol=1e-6)
    assert "seed_agreement" in names(both)
    assert both.passes.backward == 6


# ----------------------------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize("make", [lambda: toy_model("copy"), copying_llama], ids=["toy", "llama"])
@pytest.mark.parametrize("params", [{}, {"form": "literal", "learning_rate": 0.3, "steps": 30, "penalty": 1.0}])
def test_the_copied_position_gets_the_top_score(make, params):
    for at in (1, 2, 3, 4):  # not the first token, which is the anchor
        ids = [11, 7, 1, 9, 4, 2]  # 11 is the sink of the Llama
        question = question_of(make(), [*ids[: at + 2], ids[at]], at + 2)
        row = run(question, **params).values[0]
        assert row.argmax() == at
        assert row[at] > (0.95 if not params else 1.2 * np.delete(row, at).max())


def test_targets_share_one_bias_and_its_cost():
    model = tiny_model("llama")
    scores = run(ask(model, target=(0, 3)))
    np.testing.assert_allclose(scores.values.sum(1), 1, rtol=1e-5)
    seen = scores.values[0, :LONG]
    np.testing.assert_allclose(scores.values[2, :LONG] / scores.values[2, :LONG].sum(), seen, rtol=1e-4)
    assert (scores.values[0, LONG:] == 0).all() and (scores.values[2, LONG:] > 0).all()
    assert "all 3 targets" in check_of(scores, "shared_targets").text
    single = run(ask(model, target=(0, 1)))
    assert single.passes == scores.passes
    planned = cost(Params(), Workload(3, LONG + 2, LONG + 2))
    assert (scores.passes.forward, scores.passes.backward) == (planned.forward, planned.backward) == (18, 16)
    assert "shared_targets" not in names(single)


def test_the_first_token_is_the_anchor_and_says_so():
    model = tiny_model("llama")
    roles = ["bos", "template", *["user"] * (LONG - 2), *["answer"] * 4]
    scores = run(ask(model, roles=roles))
    assert (scores.values[:, 0] == 0).all() and (scores.values[:, 1] > 0).all()
    assert "BOS" in check_of(scores, "form").text
    assert 0 < check_of(scores, "frame_share").value < 1
    frozen = run(ask(model, roles=roles), freeze_frame=True)
    assert (frozen.values[:, :2] == 0).all() and check_of(frozen, "frozen_frame").value == 1
    literal = run(ask(model, roles=roles), form="literal")
    assert (literal.values > 0)[:, :LONG].all() and "literal" in check_of(literal, "form").text


def test_nothing_to_learn_and_nothing_free():
    model = tiny_model("llama")
    alone = run(question_of(model, IDS[:2], 1))
    assert (alone.values == 0).all() and check_of(alone, "nothing_learned").verdict == "fail"
    assert alone.passes.forward == 0
    assert run(question_of(model, IDS[:2], 1), form="literal").values[0, 0] == 1
    with pytest.raises(NotApplicable, match="BOS and template"):
        run(question_of(model, IDS[:3], 2, roles=["bos", "template", "answer"]), freeze_frame=True)


def test_readouts_follow_their_formulas():
    question = question_of(toy_model("copy"), COPY, 5, (0, 2))  # the rows see 5 and 6 tokens
    alpha = np.array([np.nan, 2.0, -1.0, 0.5, 3.0, -2.0])
    a = alpha[1:]
    sizes = {
        "gate": 1 / (1 + np.exp(-a)),
        "softmax": np.exp(a),
        "centered": 1 / (1 + np.exp(-(a - a.mean()))),
        "min_shift": a - a.min(),
    }
    for name, size in sizes.items():
        found = read_out(question, alpha, Params(readout=name))
        np.testing.assert_allclose(found[0], [0, *size[:4] / size[:4].sum(), 0], rtol=1e-9)
        np.testing.assert_allclose(found[1], [0, *size / size.sum()], rtol=1e-9)
        moved = read_out(question, alpha + 4, Params(readout=name))
        assert np.allclose(moved, found) == (name != "gate")  # only the gate has an absolute meaning
    assert np.array_equal(read_out(question, alpha, Params()), read_out(question, alpha, Params(readout="gate")))
    literal = read_out(question, alpha, Params(form="literal"))
    assert np.array_equal(literal, read_out(question, alpha, Params(readout="softmax")))


# ------------------------------------------------------------------------------------------------------- checks


def test_a_target_that_needs_no_attention_has_no_signal():
    model = toy_model("linear")
    with torch.no_grad():
        model.module.weight.zero_()
        model.module.weight[0] = 1  # there is a gradient, though not for the target
    scores = run(question_of(model, COPY, 6, objective="logit"))
    assert check_of(scores, "no_signal").verdict == "fail"
    assert check_of(scores, "nothing_learned").verdict == "warn"
    np.testing.assert_allclose(scores.values[0, 1:], 1 / 5, rtol=1e-5)


def test_without_a_sink_in_front_the_anchored_form_says_that_it_found_nothing():
    question = question_of(copying_llama(), COPY, 6)  # the first token draws no attention, so it can hold none
    check = check_of(run(question), "nothing_learned")
    assert check.verdict == "warn" and "first token draws" in check.text
    literal = run(question, form="literal", learning_rate=0.3, steps=30, penalty=1.0)
    assert literal.values[0].argmax() == 4


def test_collapse_and_saturation_are_warned_of():
    crushed = run(question_of(toy_model("copy"), COPY, 6), penalty=100.0, steps=40, likelihood="prob")
    assert check_of(crushed, "likelihood").verdict == check_of(crushed, "gates").verdict == "warn"
    question = question_of(copying_llama(), COPY, 6)
    literal = run(question, form="literal", learning_rate=0.3, steps=30, penalty=1.0)
    assert check_of(literal, "likelihood").verdict == "warn" and "penalty alone" in check_of(literal, "likelihood").text
    assert check_of(run(question), "likelihood").verdict == "ok"


def test_steering_to_a_target_that_the_model_did_not_prefer_is_warned_of():
    # by itself the model says 4; biases make it say the token before that
    question = question_of(copying_llama(), [11, 7, 1, 9, 4, 2, 9], 6)
    check = check_of(run(question, form="literal", learning_rate=0.3, steps=30), "likelihood")
    assert check.value > 0.5 > 0.05 > question.plain.probabilities[0]
    assert check.verdict == "warn" and "did not prefer" in check.text


def test_a_run_that_has_not_settled_is_told_from_one_that_has():
    question = ask(tiny_model("llama"))
    assert check_of(run(question, steps=60), "half_way_agreement").value > 0.5
    assert check_of(run(question, steps=2), "half_way_agreement").value < 1


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_layers_run_twice_where_memory_is_short_and_are_left_as_they_were(family, monkeypatch):
    model = tiny_model(family)
    plain = run(ask(model), steps=3)
    assert "checkpointed" not in names(plain)
    monkeypatch.setattr(checkpointing, "free_bytes", lambda device: 1000)
    saved = run(ask(model), steps=3)
    np.testing.assert_allclose(saved.values, plain.values, rtol=1e-5)
    assert check_of(saved, "checkpointed").value == 2
    assert saved.passes.forward == plain.passes.forward + 3 and saved.passes.backward == plain.passes.backward
    assert not [layer for layer in model.module.modules() if "forward" in vars(layer)]


def test_checkpointing_keeps_less():
    model = tiny_model("llama")
    kept = []
    for saving in (False, True):
        sizes = {}

        def count(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        passes = BiasedPasses(ask(model), "log_prob", lambda: None)
        passes._save = saving
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            passes.gradient(torch.zeros(LONG + 2))
        kept.append(sum(sizes.values()))
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_estimate_covers_what_is_kept(family):
    model = tiny_model(family)
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    for count in (50, 200):
        sizes = {}

        def weigh(tensor, sizes=sizes):
            if tensor.untyped_storage().data_ptr() not in weights:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        passes = BiasedPasses(question_of(model, (IDS * 8)[: count + 1], count), "log_prob", lambda: None)
        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
            passes.gradient(torch.zeros(count))
        assert 1 < checkpointing.backward_bytes(model, count) / sum(sizes.values()) < 4


def test_layers_are_restored_after_an_error_and_keep_what_others_put_there():
    model = tiny_model("llama")
    layer = model.module.model.layers[0]
    own = layer.forward
    layer.forward = own  # as the library does for models on several devices
    with pytest.raises(OverflowError), checkpointing.checkpointed(model.module) as count:
        assert count == 2
        raise OverflowError
    assert layer.forward is own and "forward" not in vars(model.module.model.layers[1])


def test_running_out_of_memory_once_is_repaired():
    model = tiny_model("llama")
    wanted = run(ask(model), steps=2).values
    failed = []

    def fail(module, args):
        if torch.is_grad_enabled() and len(failed) < 1 and len(args) and args[0].requires_grad:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")

    attention_bias.activation_bytes(model)
    handle = model.module.model.layers[1].register_forward_pre_hook(fail)
    try:
        scores = run(ask(model), steps=2)
    finally:
        handle.remove()
    assert failed and "checkpointed" in names(scores)
    np.testing.assert_allclose(scores.values, wanted, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------ refusals


def changed_toy(change):
    """A toy whose forward pass treats the mask in its own way."""
    model = toy_model("linear")
    forward = model.module.forward

    def other(input_ids, attention_mask=None):
        return forward(input_ids, None if attention_mask is None else change(attention_mask))

    model.module.forward = other
    return model


def test_models_that_cannot_take_a_bias_are_refused():
    def refuse(mask):
        raise ValueError("no such mask")

    cases = {
        "takes no additive attention mask": refuse,
        "logits change": lambda mask: mask - 1,
        # reads every earlier token, whatever the mask says
        "without attention": lambda mask: torch.full_like(mask, -1e4).triu(1),
        "no gradient through its mask": lambda mask: mask.detach(),
    }
    for text, change in cases.items():
        question = question_of(changed_toy(change), [3, 7, 1, 9, 4, 2, 8], 6)
        with pytest.raises(NotApplicable, match=text) as refusal:
            run(question)
        assert "occlusion" in refusal.value.hint


def test_a_model_without_masks_of_its_own_is_refused():
    model = toy_model("linear")
    model.module.config.layer_types = ["something_new"]
    with pytest.raises(NotApplicable, match="no additive attention mask"):
        run(question_of(model, [3, 7, 1, 9, 4, 2, 8], 6))


# ---------------------------------------------------------------------------------------------------- real model


@pytest.mark.smollm
def test_the_needle_is_found(smollm):
    before = "The river was wide and the boats were slow. In spring the farmers brought wool to the market."
    needle = " The secret word of the tower gate is silver."
    after = " Children played near the old mill until dark. The baker sold bread at dawn."
    text = before + needle + after + " Question: What is the secret word? The secret word of the tower gate is"
    passage = encode_prompt(smollm, Prompt(text))
    answer = smollm.tokenizer.encode(" silver", add_special_tokens=False)
    passage = append_answer(smollm, passage, answer)
    request = SaliencyRequest(ModelRef(), Prompt(text), tuple(answer), (0, 1), ())
    question = ask_about(smollm, passage, request)
    assert question.plain.probabilities[0] > 0.3
    scores = run(question)
    row = scores.values[0]
    ends = np.cumsum([len(token.text) for token in passage.prompt_tokens])
    of_needle = (ends > len(before)) & (ends <= len(before + needle))
    of_hay = (ends <= len(before)) | ((ends > len(before + needle)) & (ends <= len(before + needle + after)))
    assert row[of_needle].sum() > 2 * of_needle.mean()
    assert row[of_hay].sum() < 0.2 < of_hay.mean()
    assert check_of(scores, "likelihood").verdict == "ok"
