"""Gradient methods, and replacing occlusion, against Captum on the embedded model, to 1e-4 of the largest score.

Captum is given the model as a function of embeddings; the methods run it on ids, as they always do.
"""

import numpy as np
import pytest
import torch
from captum.attr import FeatureAblation, InputXGradient, IntegratedGradients, Saliency

from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method
from backend.saliency.embeddings import baseline_vector
from backend.saliency.question import ask
from backend.types import ModelRef, Prompt, SaliencyRequest, Turn, no_tick

pytestmark = pytest.mark.smollm

PROMPTS = {
    "plain": (Prompt("The capital of France is Paris. The capital of Italy is"), " Rome."),
    "chat": (Prompt(turns=(Turn("user", "Name the capital of Germany."),)), "Berlin"),
}


@pytest.fixture(scope="module", params=list(PROMPTS))
def asked(request, smollm):
    prompt, answer = PROMPTS[request.param]
    ids = encode_text(smollm, answer)
    passage = append_answer(smollm, encode_prompt(smollm, prompt), ids)
    wanted = SaliencyRequest(ModelRef(), prompt, ids, (0, 1), ())
    return ask(smollm, passage, wanted)


def run(name, question, **params):
    method = get_method(name)
    return method.run(question.model, question, method.params(**params), no_tick).values[0]


def as_function(question):
    """log p of the target as a function of embeddings ``(batch, n, width)``."""
    strand = question.strands[0]

    def score(embedded):
        logits = question.model.module(inputs_embeds=embedded, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1)[:, strand.tokens[0]]

    return score, question.model.embedding(torch.tensor([question.ids])).detach().requires_grad_()


def assert_close(found, wanted):
    wanted = wanted.detach().numpy()
    assert np.abs(wanted).max() > 1e-3
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_gradient_norm(asked, p):
    score, embedded = as_function(asked)
    wanted = Saliency(score).attribute(embedded, abs=False)[0].norm(p=p, dim=-1)
    assert_close(run("gradient_norm", asked, p=p), wanted)


def test_input_x_gradient(asked):
    score, embedded = as_function(asked)
    assert_close(run("input_x_gradient", asked), InputXGradient(score).attribute(embedded)[0].sum(-1))


@pytest.mark.parametrize("baseline", ["mean", "eos"])
def test_integrated_gradients(asked, baseline):
    score, embedded = as_function(asked)
    start = embedded.detach().clone()
    frame = torch.from_numpy(asked.is_frame)
    start[0, ~frame] = baseline_vector(asked.model, baseline)
    wanted = IntegratedGradients(score).attribute(
        embedded, baselines=start, n_steps=16, method="riemann_middle", internal_batch_size=4
    )
    assert_close(run("integrated_gradients", asked, steps=16, baseline=baseline), wanted[0].sum(-1))


def test_replacing_occlusion(asked):
    score, embedded = as_function(asked)
    fill = baseline_vector(asked.model, "mean")
    columns = torch.arange(embedded.shape[1])[None, :, None].expand_as(embedded)
    with torch.no_grad():
        wanted = FeatureAblation(score).attribute(
            embedded, baselines=fill.expand_as(embedded), feature_mask=columns, perturbations_per_eval=8
        )[0, :, 0]
    assert_close(run("occlusion", asked, operator="replace", include_template=True), wanted)


def test_the_baseline_is_the_mean_of_the_vocabulary(smollm):
    wanted = smollm.embedding.weight.double().mean(0).float()
    torch.testing.assert_close(baseline_vector(smollm, "mean"), wanted, rtol=1e-5, atol=1e-7)
    eos = smollm.tokenizer.eos_token_id
    torch.testing.assert_close(baseline_vector(smollm, "eos"), smollm.embedding.weight[eos].detach())
    assert not baseline_vector(smollm, "zero").any()
