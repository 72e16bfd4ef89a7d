"""Sanity checks that must notice: a method that leaves a trace, one that samples, one that ignores the model."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from backend import registry
from backend.errors import Cancelled, NotApplicable
from backend.evaluation.sanity import randomized, sanity
from backend.types import MethodSpec, Passes, Scores, no_tick
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import Ticks, passage_of, request_for, toy_model

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(1)).tolist()
PASSAGE = passage_of(IDS, 20)


@dataclass(frozen=True)
class Params:
    """No settings."""


def leaves_a_trace(model, question, params, tick):
    model.module.lm_head.weight.data.mul_(1.001)
    return constant(model, question, params, tick)


def samples(model, question, params, tick):
    rng = np.random.default_rng(question.seed)
    base = np.arange(question.source_count, dtype=float)
    return Scores((base + rng.normal(size=len(base)))[None], Passes())


def guesses(model, question, params, tick):
    return Scores(np.random.default_rng(question.seed).normal(size=(1, question.source_count)), Passes())


def constant(model, question, params, tick):
    values = np.arange(question.source_count, dtype=float)[None]
    return Scores(values, Passes(), measured=np.arange(question.source_count) > 3)


def refuses_the_broken(model, question, params, tick):
    if "randomized" in model.info.revision:
        raise NotApplicable("Not trained for this model.")
    return constant(model, question, params, tick)


def refuses(model, question, params, tick):
    raise NotApplicable("This model will not do.")


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    for run in (leaves_a_trace, samples, guesses, constant, refuses, refuses_the_broken):
        registry.register(
            run.__name__, label=run.__name__, family="gradient", signed=True, additive=True, params=Params,
            cost=lambda params, work: Passes(), summary="", reading="",
        )(run)  # fmt: skip


def check(model, *names, **more):
    request = request_for(PASSAGE, (0, 1), methods=tuple(MethodSpec.of(name) for name in names))
    found = sanity(model, PASSAGE, request, more.pop("tick", no_tick), **more)
    return [{c.name: c for c in one.checks} or one.refusal for one in found]


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_honest_methods_pass_on_every_family(family):
    model = tiny_model(family)
    before = [p.clone() for p in model.module.parameters()]
    for found in check(model, "gradient_norm", "input_x_gradient", "occlusion", blocks=2):
        assert found["plain_logits_unchanged"].verdict == "ok"
        assert found["plain_logits_unchanged"].value == 0.0
        assert found["unmeasured_share"].value == 0.0
        assert found["seed_spread"].verdict == "ok"
        assert "nothing is sampled" in found["seed_spread"].text
        assert found["randomized_weights"].value < 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))


def test_a_trace_is_found(model, fakes):
    (found,) = check(model, "leaves_a_trace")
    assert found["plain_logits_unchanged"].verdict == "fail"
    assert found["plain_logits_unchanged"].value > 0


def test_a_map_that_ignores_the_model_is_found(model, fakes):
    constant_map, uniform = check(model, "constant", "uniform")
    assert constant_map["randomized_weights"].verdict == "fail"
    assert constant_map["unmeasured_share"].value == pytest.approx(4 / 20)
    assert uniform["randomized_weights"].verdict == "info"  # a baseline may


def test_sampling_is_found_and_measured(model, fakes):
    steady, unsteady = check(model, "samples", "guesses")
    assert steady["seed_spread"].verdict == "ok" and 0.9 < steady["seed_spread"].value < 1
    assert unsteady["seed_spread"].verdict == "warn" and abs(unsteady["seed_spread"].value) < 0.5
    assert "3 seeds" in unsteady["seed_spread"].text
    # by hand: the mean rank correlation of three pairs
    runs = [np.arange(20) + np.random.default_rng(seed).normal(size=20) for seed in range(3)]
    ranks = [np.argsort(np.argsort(values)) for values in runs]
    wanted = np.mean([np.corrcoef(ranks[a], ranks[b])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))])
    assert steady["seed_spread"].value == pytest.approx(wanted, abs=1e-6)


def test_refusals_are_told_apart(model, fakes):
    nowhere, not_broken = check(model, "refuses", "refuses_the_broken")
    assert nowhere == "This model will not do."
    assert not_broken["randomized_weights"].verdict == "info"
    assert "Not trained for this model" in not_broken["randomized_weights"].text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_copy_is_another_model_that_shares_what_it_keeps(family, blocks):
    model = tiny_model(family)
    twin = randomized(model, blocks=blocks, seed=0)
    assert twin.module is not model.module
    assert not {id(m) for m in model.module.modules()} & {id(m) for m in twin.module.modules()}
    changed = {
        block_of(name)
        for (name, a), (_, b) in zip(model.module.named_parameters(), twin.module.named_parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {str(i) for i in range(2 - blocks, 2)}
    for (name, a), (_, b) in zip(model.module.named_parameters(), twin.module.named_parameters(), strict=True):
        learned = block_of(name) in changed
        assert (a.data_ptr() != b.data_ptr()) == learned
        assert a.requires_grad == b.requires_grad
        if learned and a.dim() > 1:
            assert b.std().item() == pytest.approx(a.std().item(), rel=0.1)
        if learned and a.dim() == 1:
            assert torch.equal(a.sort().values, b.sort().values)
    assert twin.info.revision != model.info.revision
    again, other = randomized(model, blocks=blocks, seed=0), randomized(model, blocks=blocks, seed=1)
    a, b, c = (torch.cat([p.flatten() for p in m.module.parameters()]) for m in (twin, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def block_of(name):
    found = re.search(r"\.(\d+)\.", name)
    return found and found.group(1)


def test_hooks_on_the_copy_do_not_reach_the_model(model):
    twin = randomized(model)
    twin.module.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 0)
    ids = torch.tensor([IDS])
    assert not torch.equal(model.module(ids).logits, twin.module(ids).logits)
    assert not model.module.get_input_embeddings()._forward_hooks


def test_models_without_blocks_are_refused():
    with pytest.raises(NotApplicable, match="blocks"):
        randomized(toy_model("linear"))


def test_progress_and_cancel(model):
    ticks = Ticks()
    check(model, "gradient_norm", "occlusion", tick=ticks)
    done = [d for d, _ in ticks.calls]
    assert done == sorted(done) and done[-1] == ticks.calls[-1][1]
    for at in (1, len(ticks.calls) // 2, len(ticks.calls) - 1):
        stopping = Ticks(stop_at=at)
        with pytest.raises(Cancelled):
            check(model, "gradient_norm", "occlusion", tick=stopping)
        assert len(stopping.calls) == at
