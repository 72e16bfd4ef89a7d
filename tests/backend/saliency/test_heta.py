"""HETA's gate, curvature and information against naive float64 versions, and its parts on toys with known answers."""

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.registry import get_method
from backend.saliency import heta
from backend.saliency.attention_rows import eager_attention
from backend.saliency.embeddings import embed
from backend.saliency.heta_parts import Curvature, parts
from backend.saliency.second_order import rows_of_leaf, signs
from backend.saliency.value_flow import Flow, watched_flow
from backend.types import no_tick
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import question_of, toy_model

IDS = torch.randint(3, 300, (12,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPT = 10
SEEN = 11  # sources of the second target


def run(question, **params):
    return heta.run(question.model, question, heta.Params(**params), no_tick)


def check_of(scores, name):
    return next(check for check in scores.checks if check.name == name)


class Naive:
    """Everything in float64 and in plain loops, from the library's own hidden states and attention weights."""

    def __init__(self, family):
        self.module = tiny_model(family).module.double()
        self.module.set_attn_implementation("eager")
        self.family = family
        self.ids = torch.tensor([IDS[:SEEN]])
        self.embedded = self.module.get_input_embeddings()(self.ids)[0]
        with torch.no_grad():
            self.out = self.module(self.ids, output_attentions=True, output_hidden_states=True, use_cache=False)

    def layer(self, number, hidden):
        """Value vectors (head, token, width) as each query head reads them, and output matrices (head, width, d)."""
        if self.family == "gpt2":
            block = self.module.transformer.h[number]
            values = block.attn.c_attn(block.ln_1(hidden))[:, 64:]
            return values.view(-1, 4, 8).transpose(0, 1), block.attn.c_proj.weight.view(4, 8, 32)
        block = self.module.model.layers[number]
        values = block.self_attn.v_proj(block.input_layernorm(hidden)).view(-1, 2, 8).transpose(0, 1)
        weight = block.self_attn.o_proj.weight.T
        return torch.stack([values[0], values[0], values[1], values[1]]), weight.reshape(4, 8, -1)

    @torch.no_grad()
    def gate(self, position):
        total = torch.zeros(SEEN, dtype=torch.float64)
        for head in range(4):
            product = torch.eye(SEEN, dtype=torch.float64)
            for number in range(2):
                attention = self.out.attentions[number][0, head]
                product = (0.5 * attention + 0.5 * torch.eye(SEEN)) @ product
                values, outputs = self.layer(number, self.out.hidden_states[number][0])
                for i in range(SEEN):
                    total[i] += product[position, i] * (values[head, i] @ outputs[head]).abs().sum()
        return (total / total.sum()).numpy()

    def log_p(self, embedded, position):
        return self.module(inputs_embeds=embedded[None], use_cache=False).logits[0, position].log_softmax(-1)

    def curvature(self, token, position, target, vectors):
        def score(block):
            changed = self.embedded.clone()
            changed[token] = block
            return self.log_p(changed, position)[target]

        hessian = torch.autograd.functional.hessian(score, self.embedded[token].detach(), vectorize=True)
        return float(np.mean([(hessian @ v.double()).abs().sum() for v in vectors]))

    @torch.no_grad()
    def information(self, token, position):
        changed = self.embedded.clone()
        changed[token] = 0
        before, after = self.log_p(self.embedded, position), self.log_p(changed, position)
        return float((before.exp() * (before - after)).sum())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_the_naive_version(family):
    naive = Naive(family)
    question = question_of(tiny_model(family), IDS, PROMPT, (0, 2), seed=5)
    both, bent, told = (run(question, beta=beta, probes=2) for beta in (0.5, 1.0, 0.0))
    vectors = signs(SEEN * 2, 32, 5).view(SEEN, 2, 32)
    for row, target in enumerate((PROMPT, PROMPT + 1)):
        gate = naive.gate(target - 1)
        assert (gate[target:] == 0).all()
        wanted_c = np.array(
            [naive.curvature(i, target - 1, IDS[target], vectors[i]) if i < target else 0 for i in range(SEEN)]
        )
        wanted_i = np.array([naive.information(i, target - 1) if i < target else 0 for i in range(SEEN)])
        top = (gate * wanted_c).max()
        np.testing.assert_allclose(bent.values[row], gate * wanted_c, rtol=1e-3, atol=1e-4 * top)
        np.testing.assert_allclose(told.values[row], gate * wanted_i, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(both.values[row], gate * (wanted_c + wanted_i) / 2, rtol=1e-3, atol=1e-4 * top)
    mean = np.mean([check_of(both, name).value for name in ("curvature_mean",)])
    assert check_of(both, "curvature_to_information").value == pytest.approx(
        mean / check_of(both, "information_mean").value
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gate_sums_to_one_over_what_is_seen(family):
    model = tiny_model(family)
    flow = Flow([4, 9])
    with torch.no_grad(), watched_flow(model, flow):
        model.module(torch.tensor([IDS[:PROMPT]]), use_cache=False)
    gate = flow.gate()
    torch.testing.assert_close(gate.sum(-1), torch.ones(2, dtype=torch.float64))
    assert (gate[0, 5:] == 0).all() and (gate[0, :5] > 0).all()


def measured_curvature(kind, probes=6, compared=0):
    model = toy_model(kind, scale=0.5)
    question = question_of(model, [3, 7, 1, 9, 8], 4, objective="logit")
    leaf = embed(model, question.ids).float().requires_grad_()
    with torch.enable_grad():
        values, _ = rows_of_leaf(question, leaf, lambda: None)
        (gradient,) = torch.autograd.grad(values[0], leaf, create_graph=True)
    found = Curvature(leaf, range(4), probes, 0, compared, lambda: None)
    found.add(gradient, 4)
    return found, model.module.weight[8].detach(), signs(4 * probes, 5, 0).view(4, probes, 5)


def test_curvature_of_a_quadratic_score_is_the_averaged_absolute_row_sums():
    found, weight, vectors = measured_curvature("quadratic")  # H_ij = w w' for every pair of tokens
    hessian = torch.outer(weight, weight)
    wanted = (vectors @ hessian).abs().sum(-1).mean(-1)
    np.testing.assert_allclose(found.mean()[0], wanted, rtol=1e-5)
    assert found.products == 24


def test_joint_probes_add_the_blocks_of_pairs_and_say_how_far_off_they_are():
    found, weight, vectors = measured_curvature("quadratic", compared=3)
    hessian = torch.outer(weight, weight)
    joint = (vectors.sum(0) @ hessian).abs().sum(-1).mean().repeat(4)
    np.testing.assert_allclose(found.mean()[0], joint, rtol=1e-5)
    exact = (vectors @ hessian).abs().sum(-1).mean(-1)
    off = ((joint - exact).abs() / exact)[np.argsort(-found.mean()[0], kind="stable")[:3]]
    check = next(check for check in found.checks() if check.name == "joint_probe_deviation")
    assert check.value == pytest.approx(float(off.mean()), rel=1e-4)
    assert "approximation" in check.text
    assert found.products == 6 + 3 * 6


def test_without_curvature_only_information_counts():
    found, _, _ = measured_curvature("linear")
    assert (found.mean() == 0).all()
    told = np.array([[0.4, 0.1]])
    np.testing.assert_allclose(heta._weighed(np.zeros((1, 2)), told, heta.Params()), told / 2)
    assert not [check for check in parts(told, 0 * told, told, 2) if check.name == "curvature_to_information"]


def test_standardized_parts_weigh_the_same():
    weighed = heta._weighed(np.array([[90.0, 10.0]]), np.array([[0.1, 0.3]]), heta.Params(standardize=True))
    np.testing.assert_allclose(weighed, [[(0.9 + 0.25) / 2, (0.1 + 0.75) / 2]])


def test_candidates_are_the_tokens_with_the_largest_gradients():
    question = question_of(tiny_model("llama"), IDS, PROMPT, (0, 2))
    sizes = get_method("gradient_norm").run(question.model, question, get_method("gradient_norm").params(), no_tick)
    largest = np.argsort(-sizes.values.sum(0))[:4]
    scores = run(question, candidates=4)
    assert set(np.flatnonzero(scores.measured)) == set(largest)
    assert np.isnan(scores.values[:, ~scores.measured]).all()
    everything = run(question, candidates=12)
    assert everything.measured.all()
    assert scores.passes.backward < everything.passes.backward
    share = check_of(scores, "gate_on_candidates")
    assert 0 < share.value < 1 and "the 4 candidates of 11 tokens" in share.text


@pytest.mark.parametrize("curvature", ["exact", "joint"])
def test_the_stated_cost_is_what_is_spent(curvature):
    question = question_of(tiny_model("gpt2"), IDS, PROMPT, (0, 2))
    scores = run(question, curvature=curvature, probes=3)
    from backend.registry import Workload

    stated = heta.cost(heta.Params(curvature=curvature, probes=3), Workload(2, SEEN, SEEN))
    assert scores.passes == stated


def test_joint_probes_find_the_same_strong_tokens():
    question = question_of(tiny_model("llama"), IDS, PROMPT, (0, 1))
    exact, joint = (run(question, curvature=kind, probes=16).values[0] for kind in ("exact", "joint"))
    assert np.corrcoef(exact, joint)[0, 1] > 0.8


def test_a_model_without_a_second_derivative_is_refused():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad

    model = tiny_model("llama")
    model.module.model.layers[0].mlp.register_forward_hook(lambda part, args, output: Once.apply(output))
    with pytest.raises(NotApplicable, match=r"cannot be differentiated twice: .* one derivative only") as refusal:
        run(question_of(model, IDS, PROMPT))
    assert "occlusion" in refusal.value.hint
    assert model.module.config._attn_implementation == "sdpa"


def test_unknown_value_projections_are_refused_before_the_work():
    model = tiny_model("llama")
    model.module.model.layers[1].self_attn.v_norm = torch.nn.Identity()
    with pytest.raises(NotApplicable, match="LlamaAttention keeps its values"):
        run(question_of(model, IDS, PROMPT))
    assert sum(len(part._forward_hooks) for part in model.module.modules()) == 0


def test_the_foil_span_is_part_of_the_curved_score():
    model = tiny_model("llama")
    plain, foil = (run(question_of(model, IDS, PROMPT, (0, 1), foil=foil), beta=1.0) for foil in ([], [5, 6]))
    assert np.abs(plain.values - foil.values).max() > 1e-3 * plain.values.max()
    question = question_of(model, IDS, PROMPT, (0, 1), foil=[5, 6])
    leaf = embed(model, question.ids).float()
    with torch.no_grad(), eager_attention(model):
        values, _ = rows_of_leaf(question, leaf, lambda: None)
    np.testing.assert_allclose(values, question.plain.values, atol=1e-3)
