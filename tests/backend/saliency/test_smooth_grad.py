"""SmoothGrad against a plain loop over noisy copies, against Captum, and what its checks say."""

import numpy as np
import pytest
import torch

from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method
from backend.saliency import gradients
from backend.saliency.question import ask
from backend.types import ModelRef, Prompt, SaliencyRequest, no_tick
from tests.support.tiny import tiny_model
from tests.support.toys import question_of, toy_model

IDS = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(6)).tolist()
PROMPT = 13
READOUTS = ("norm", "times_input")


def run(question, name="smooth_grad", **params):
    method = get_method(name)
    return method.run(question.model, question, method.params(**params), no_tick)


def check_of(scores, name):
    return next((check for check in scores.checks if check.name == name), None)


def noise_of(seed, sample, shape):
    return np.random.default_rng([seed, sample]).standard_normal(shape, dtype=np.float32)


def naive(model, ids, target, *, ratio, samples, seed, frame=(), count=None):
    """Average over samples of the gradient of log p, by embeddings passed in, one sample at a time.

    ``count`` is the number of sources of the whole question, whose embeddings set the width of the noise.
    """
    everything = model.embedding(torch.tensor(ids)).detach()
    sigma = ratio * float(everything.numpy().astype(np.float64).std())
    noised = [i for i in range(len(ids)) if i not in frame]
    length = len(ids) if count is None else count
    embedded, total = everything[:length], 0
    for sample in range(samples):
        moved = everything.clone()
        moved[noised] += sigma * torch.from_numpy(noise_of(seed, sample, (len(noised), everything.shape[1])))
        leaf = moved[:length].clone().requires_grad_()
        logits = model.module(inputs_embeds=leaf[None]).logits[0, -1]
        total = total + torch.autograd.grad(logits.log_softmax(-1)[target], leaf)[0]
    mean = total / samples
    return {"norm": mean.norm(dim=-1).numpy(), "times_input": (embedded * mean).sum(-1).numpy()}


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_a_plain_loop(family, readout):
    model = tiny_model(family)
    roles = ["bos", "template"] + ["user"] * (PROMPT - 3) + ["template"] + ["answer"] * 3
    question = question_of(model, IDS, PROMPT, (0, 2), roles=roles, seed=7)
    scores = run(question, samples=5, noise=0.2, readout=readout)
    frame = (0, 1, PROMPT - 1)
    for row in range(2):
        length = PROMPT + row
        wanted = naive(model, IDS[: PROMPT + 1], IDS[length], ratio=0.2, samples=5, seed=7, frame=frame, count=length)
        atol = 1e-4 * np.abs(wanted[readout]).max()
        np.testing.assert_allclose(scores.values[row, :length], wanted[readout], atol=atol, rtol=0)
    assert scores.signed == (readout == "times_input") and scores.passes.backward == 10
    with_template = run(question, samples=5, noise=0.2, readout=readout, include_template=True)
    wanted = naive(model, IDS[: PROMPT + 1], IDS[PROMPT], ratio=0.2, samples=5, seed=7, count=PROMPT)[readout]
    np.testing.assert_allclose(with_template.values[0, :PROMPT], wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
    assert np.abs(with_template.values - scores.values).max() > 10 * atol


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("readout", "name"), [("norm", "gradient_norm"), ("times_input", "input_x_gradient")])
def test_without_noise_it_is_the_plain_gradient_bit_by_bit(family, readout, name):
    question = question_of(tiny_model(family), IDS, PROMPT, (0, 2), foil=[5, 6])
    scores, plain = run(question, noise=0.0, readout=readout), run(question, name)
    assert np.array_equal(scores.values, plain.values)
    assert scores.passes == plain.passes
    assert check_of(scores, "no_noise") and check_of(scores, "hooked_equals_plain").verdict == "ok"
    noisy = run(question, noise=0.02, readout=readout)
    assert not np.array_equal(noisy.values, plain.values) and check_of(noisy, "no_noise") is None


def test_a_prompt_of_template_tokens_gets_no_noise():
    question = question_of(tiny_model("llama"), IDS[:4], 3, roles=["bos", "template", "template", "answer"])
    assert np.array_equal(run(question).values, run(question, "gradient_norm").values)
    assert not np.array_equal(run(question, include_template=True).values, run(question, "gradient_norm").values)


def test_the_seed_decides_the_noise():
    model = tiny_model("llama")
    first, again, other = (run(question_of(model, IDS, PROMPT, seed=seed)).values for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_other_batches_and_exhausted_memory_change_nothing(monkeypatch):
    model = tiny_model("llama")
    wanted = run(question_of(model, IDS, PROMPT, (0, 2)), samples=7)
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "TOKENS_AT_ONCE", {"cpu": 1})
        single = run(question_of(model, IDS, PROMPT, (0, 2)), samples=7)
    np.testing.assert_allclose(single.values, wanted.values, rtol=1e-3, atol=1e-5)
    whole, failed = gradients.row_gradients, []

    def short(question, inputs=None):
        for index, row in enumerate(whole(question, inputs)):
            if index == 1 and len(row.values) > 2:  # the first row is done already
                failed.append(1)
                raise torch.OutOfMemoryError("planted")
            yield row

    monkeypatch.setattr(gradients, "row_gradients", short)
    repeated = run(question_of(model, IDS, PROMPT, (0, 2)), samples=7)
    assert failed
    np.testing.assert_allclose(repeated.values, wanted.values, rtol=1e-3, atol=1e-5)


def test_noise_does_not_touch_a_linear_model():
    model = toy_model("linear")
    weight = model.module.weight.numpy()
    scores = run(question_of(model, [3, 7, 1, 9, 4, 2, 8], 6, objective="logit"), noise=0.3)
    np.testing.assert_allclose(scores.values[0], np.linalg.norm(weight[8]), rtol=1e-5)
    assert check_of(scores, "split_half").value == pytest.approx(1) and check_of(scores, "split_half").verdict == "ok"


def test_the_mean_score_is_that_of_the_noisy_copies():
    model, ids = toy_model("linear"), [3, 7, 1, 9, 4, 2, 8]
    embedded, weight = model.module.embed.weight.numpy()[ids[:6]], model.module.weight.numpy()[8]
    scores = run(question_of(model, ids, 6, objective="logit", seed=3), noise=0.3, samples=4)
    noise = sum(noise_of(3, sample, (6, 5)) for sample in range(4)) / 4
    wanted = (embedded + 0.3 * embedded.std() * noise).sum(0) @ weight
    assert check_of(scores, "noisy_score").value == pytest.approx(float(wanted), rel=1e-4)


def test_too_much_noise_and_too_few_samples_are_warned_of():
    model = tiny_model("llama")
    question = question_of(model, IDS, PROMPT, (0, 2))
    much = run(question, noise=3.0, samples=2)
    assert check_of(much, "answer_kept").verdict == "warn" and check_of(much, "answer_kept").value < 0.8
    assert check_of(much, "split_half").verdict == "warn" and check_of(much, "split_half").value < 0.9
    little = run(question, noise=0.001, samples=2)
    assert check_of(little, "answer_kept").value == 1 and check_of(little, "answer_kept").verdict == "ok"
    assert check_of(little, "split_half").verdict == "ok"


def test_kept_answers_are_counted_by_the_top_token():
    model, ids = toy_model("linear"), [3, 7, 1, 9, 4, 2, 8]
    question = question_of(model, ids, 6, seed=5)
    embedded, weight = model.module.embed.weight.numpy()[ids[:6]], model.module.weight.numpy()
    plain = (embedded.sum(0) @ weight.T).argmax()
    sigma = 3.0 * embedded.std()
    tops = [((embedded + sigma * noise_of(5, j, (6, 5))).sum(0) @ weight.T).argmax() for j in range(30)]
    kept = np.mean([top == plain for top in tops])
    assert 0 < kept < 1
    assert check_of(run(question, noise=3.0, samples=30), "answer_kept").value == pytest.approx(kept)


@pytest.mark.smollm
@pytest.mark.parametrize("readout", READOUTS)
def test_scores_are_those_of_captum(smollm, monkeypatch, readout):
    from captum.attr import NoiseTunnel, Saliency

    prompt = Prompt("The capital of France is Paris. The capital of Italy is")
    ids = encode_text(smollm, " Rome")
    passage = append_answer(smollm, encode_prompt(smollm, prompt), ids)
    question = ask(smollm, passage, SaliencyRequest(ModelRef(), prompt, ids, (0, 1), (), seed=11))
    assert not question.is_frame.any()
    embedded = smollm.embedding(torch.tensor([question.ids])).detach().requires_grad_()

    def score(values):
        logits = smollm.module(inputs_embeds=values, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1)[:, ids[0]]

    sigma = 0.1 * float(embedded.detach().std(correction=0))
    noise = np.stack([noise_of(11, sample, embedded.shape[1:]) for sample in range(4)])
    monkeypatch.setattr(torch, "normal", lambda mean, std: mean + std * torch.from_numpy(noise))
    wanted = NoiseTunnel(Saliency(score)).attribute(
        embedded, nt_type="smoothgrad", nt_samples=4, stdevs=sigma, abs=False
    )[0]
    wanted = (wanted.norm(dim=-1) if readout == "norm" else (embedded[0] * wanted).sum(-1)).detach().numpy()
    found = run(question, samples=4, readout=readout).values[0]
    assert np.abs(wanted).max() > 1e-3
    room = 1e-4 if readout == "norm" else 1e-3  # inner products of either sign nearly cancel
    np.testing.assert_allclose(found, wanted, atol=room * np.abs(wanted).max(), rtol=0)
