"""What every registered method owes, on every family of tiny models: a new method is tested because it exists."""

import numpy as np
import pytest
import torch

from backend.errors import Cancelled, NotApplicable
from backend.registry import list_methods
from backend.saliency.gradients import activation_bytes
from backend.saliency.passes import logits_at
from backend.types import Scores, no_tick
from tests.support.learned import equal_weights
from tests.support.tiny import FAMILIES, WINDOW, tiny_model
from tests.support.toys import Ticks, question_of

METHODS = list_methods()
LONG = WINDOW + 9  # longer than the sliding window of the families that have one
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


@pytest.fixture(scope="module", autouse=True)
def learned_weights():
    """Weights for the method that needs some learned per model: equal ones, for each tiny model."""
    with equal_weights(*(tiny_model(family) for family in FAMILIES)):
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, device):
    made = tiny_model(request.param)
    made.module.to(device)
    return made


def ids_of(count, seed=0):
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def question(model, prompt=LONG, answer=4, target=(1, 3), **more):
    return question_of(model, ids_of(prompt + answer), prompt, target, **more)


def snapshot(module):
    """Everything that a method could leave behind, and the weights."""
    return {
        "hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks)
            for m in module.modules()
        ),
        "grad": [p.requires_grad for p in module.parameters()],
        "grads": [p.grad is None for p in module.parameters()],
        "training": [m.training for m in module.modules()],
        "attention": module.config._attn_implementation,
        "cache": getattr(module.config, "use_cache", None),
        "enabled": torch.is_grad_enabled(),
        "weights": [p.detach().clone() for p in module.parameters()],
    }


def assert_same(before, after):
    weights = zip(before.pop("weights"), after.pop("weights"), strict=True)
    assert before == after
    assert all(torch.equal(a, b) for a, b in weights)


def plain_logits(model):
    with torch.no_grad():
        return logits_at(model, torch.tensor([ids_of(LONG)], device=model.device), range(LONG))


@each_method
def test_scores_have_their_form_and_the_model_stays_as_it_is(model, method):
    asked = question(model)
    before, logits, ticks = snapshot(model.module), plain_logits(model), Ticks()
    scores = method.run(model, asked, method.params(), ticks)
    assert_same(before, snapshot(model.module))
    assert torch.equal(plain_logits(model), logits)

    assert isinstance(scores, Scores)
    assert scores.values.dtype == np.float32
    assert scores.values.shape == (2, asked.source_count) == (2, LONG + 2)
    assert scores.measured[:LONG].all()  # random ablation leaves the answer so far as it is, and does not score it
    assert np.isfinite(scores.values[:, scores.measured]).all()
    assert (scores.values[0, asked.targets[0] :] == 0).all()  # a target cannot be driven by itself
    assert np.abs(scores.values[:, :LONG]).sum() > 0
    assert method.signed or (scores.values[:, scores.measured] >= 0).all()
    assert not [check for check in scores.checks if check.name in ("hooked_equals_plain", "neutral_ablation")
                and check.verdict != "ok"]  # fmt: skip

    done = [d for d, _ in ticks.calls]
    assert done == sorted(done) and len({total for _, total in ticks.calls}) == 1
    assert ticks.calls[0][0] == 0 and ticks.calls[-1][0] == ticks.calls[-1][1]
    expected = method.cost(method.params(), _work(asked))
    assert (scores.passes.forward > 0) == (expected.forward > 0)
    assert scores.passes.backward == expected.backward


def _work(asked):
    from backend.registry import Workload

    return Workload(len(asked.targets), asked.source_count, len(asked.spans), len(asked.strands))


@each_method
def test_the_same_question_gets_the_same_answer(model, method):
    first = method.run(model, question(model), method.params(), no_tick)
    second = method.run(model, question(model), method.params(), no_tick)
    if model.device.type == "cpu":
        assert np.array_equal(first.values, second.values, equal_nan=True)
    else:
        np.testing.assert_allclose(first.values, second.values, rtol=1e-3, atol=1e-4 * np.nanmax(np.abs(first.values)))


@each_method
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": 1, "answer": 1, "target": (0, 1)},
        {"prompt": 1, "answer": 3, "target": (0, 3)},
        {"answer": 1, "target": (0, 1)},
        {"answer": 9, "target": (0, 9)},
        {"target": (1, 2), "foil": [5]},
        {"target": (1, 3), "foil": [5]},
        {"target": (1, 3), "foil": [5, 6, 7]},
        {"target": (1, 2), "objective": "logit"},
        {"target": (1, 2), "objective": "prob"},
    ],
    ids=lambda asked: "-".join(f"{key}={value}" for key, value in asked.items()).replace(" ", ""),
)
def test_all_kinds_of_targets(method, asked, device):
    model = tiny_model("llama")
    model.module.to(device)
    made = question(model, **asked)
    scores = method.run(model, made, method.params(), no_tick)
    assert scores.values.shape == (len(made.targets), made.source_count)
    assert np.isfinite(scores.values[:, scores.measured]).all()
    for row, target in enumerate(made.targets):
        assert (scores.values[row, target:] == 0).all()


def stops(count, most=40):
    """Every tick to stop at; of very many, the first ones and some of the others."""
    return range(1, count + 1) if count <= most else [*range(1, 7), *np.linspace(7, count, 6).astype(int).tolist()]


@each_method
def test_cancel_takes_effect_at_every_tick(model, method):
    whole = Ticks()
    method.run(model, question(model), method.params(), whole)
    activation_bytes(model)  # four tokens, once per model
    calls = []
    counter = model.module.register_forward_hook(lambda *_: calls.append(1))
    try:
        before = snapshot(model.module)
        for stop_at in stops(len(whole.calls)):
            asked = question(model)
            _ = asked.plain
            ticks, made = Ticks(stop_at), len(calls)
            with pytest.raises(Cancelled):
                method.run(model, asked, method.params(), ticks)
            assert len(ticks.calls) == stop_at
            # each tick is followed by at most one pass through the model, so a click waits for one pass
            assert len(calls) - made <= stop_at - 1
        assert_same(before, snapshot(model.module))
    finally:
        counter.remove()


@each_method
def test_a_model_that_fails_is_left_as_it_was(model, method):
    asked = question(model)
    _ = asked.plain
    passes = []
    layer = next(m for m in reversed(list(model.module.modules())) if isinstance(m, torch.nn.LayerNorm) or "Norm" in
                 type(m).__name__)  # fmt: skip

    def fail(*_):
        passes.append(1)
        if len(passes) >= 2:
            raise OverflowError("planted")

    hook = layer.register_forward_pre_hook(fail)
    try:
        before = snapshot(model.module)
        if method.cost(method.params(), _work(asked)).forward > 1:
            with pytest.raises(OverflowError, match="planted"):
                method.run(model, asked, method.params(), no_tick)
        else:
            method.run(model, asked, method.params(), no_tick)
        assert_same(before, snapshot(model.module))
    finally:
        hook.remove()


@pytest.mark.parametrize("method", [m for m in METHODS if m.needs_gradient], ids=lambda m: m.name)
def test_a_model_without_a_backward_pass_is_refused(method):
    model = tiny_model("llama")

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("this kernel has no backward")

    model.module.model.layers[0].mlp.register_forward_hook(lambda m, a, out: Forward.apply(out))
    with pytest.raises(NotApplicable, match="no backward") as refusal:
        method.run(model, question(model), method.params(), no_tick)
    assert "occlusion" in refusal.value.hint


@pytest.mark.parametrize("method", [m for m in METHODS if m.family != "baseline"], ids=lambda m: m.name)
def test_numbers_that_are_not_finite_are_refused(method):
    model = tiny_model("llama")
    asked = question(model)
    _ = asked.plain
    model.module.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * float("nan"))
    with pytest.raises(NotApplicable):
        method.run(model, asked, method.params(), no_tick)


def test_every_method_is_described():
    assert [m.name for m in METHODS if m.default] == ["gradient_norm", "input_x_gradient"]
    assert {m.name for m in METHODS} >= {
        "uniform", "gradient_norm", "input_x_gradient", "integrated_gradients", "occlusion"
    }  # fmt: skip
    for method in METHODS:
        assert method.summary.endswith(("?", ".")) and len(method.reading) > 30
        assert method.run.__module__ == f"backend.saliency.{method.name}"
