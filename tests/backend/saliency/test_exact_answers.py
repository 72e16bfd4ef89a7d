"""Every method against answers that are known by hand: linear, quadratic, scale-free and copying models."""

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.registry import get_method, list_methods
from backend.types import no_tick
from tests.support.toys import copying_llama, question_of, toy_model

IDS = [3, 7, 1, 9, 4, 2, 8, 5, 6]  # six prompt tokens, three answer tokens
PROMPT = 6
SPAN = (0, 3)
READ_ATTENTION = {"attention_rollout", "at2", "heta"}  # what they read is not there in toys, or not about the target
READ_NO_ATTENTION = [m for m in list_methods() if m.name not in READ_ATTENTION]
FOIL = [10, 11, 0, 1]  # one more than the span, so that it lands in the last row


def run(name, question, **params):
    method = get_method(name)
    return method.run(question.model, question, method.params(**params), no_tick)


def check_of(scores, name):
    return next(check for check in scores.checks if check.name == name)


def lower(count, rows=3):
    """1 where row k can see source i."""
    return np.array([[i < PROMPT + k for i in range(count)] for k in range(rows)], float)


@pytest.fixture
def linear():
    return toy_model("linear")


def parts(model):
    return model.module.embed.weight.numpy(), model.module.weight.numpy()


@pytest.mark.parametrize("p", [1, 2])
def test_gradient_norm_is_the_norm_of_the_weight_row(linear, p):
    _, weight = parts(linear)
    scores = run("gradient_norm", question_of(linear, IDS, PROMPT, SPAN, objective="logit"), p=p)
    wanted = np.linalg.norm(weight[IDS[PROMPT:]], ord=p, axis=1)[:, None] * lower(8)
    np.testing.assert_allclose(scores.values, wanted, rtol=1e-5)


WAYS = [
    ("input_x_gradient", {}),
    ("occlusion", {"operator": "hide"}),
    ("occlusion", {"operator": "delete"}),
    ("occlusion", {"operator": "replace", "fill": "zero"}),
]


def keep_predicting(wanted, params):
    """A token that predicts a target cannot be hidden from itself: its score for that target is 0."""
    if params.get("operator") == "hide":
        for row in range(3):
            wanted[row, PROMPT + row - 1] = 0
    return wanted


@pytest.mark.parametrize(("name", "params"), WAYS)
def test_linear_contributions_are_found_exactly(linear, name, params):
    embedding, weight = parts(linear)
    scores = run(name, question_of(linear, IDS, PROMPT, SPAN, objective="logit"), **params)
    wanted = (weight[IDS[PROMPT:]] @ embedding[IDS[:8]].T) * lower(8)
    np.testing.assert_allclose(scores.values, keep_predicting(wanted, params), atol=1e-5)
    names = [check.name for check in scores.checks]
    assert ("predicting_token" in names) == (params.get("operator") in ("hide", "delete"))


@pytest.mark.parametrize(("name", "params"), WAYS)
def test_a_foil_span_is_subtracted_row_by_row(linear, name, params):
    embedding, weight = parts(linear)
    scores = run(name, question_of(linear, IDS, PROMPT, SPAN, foil=FOIL, objective="logit"), **params)
    wanted = (weight[IDS[PROMPT:]] @ embedding[IDS[:8]].T) * lower(8)
    foil_tokens = lower(8) * 0
    foil = weight[FOIL] @ embedding[IDS[:PROMPT]].T  # foil terms know the prompt, not the target span
    foil_tokens[0, :PROMPT] = foil[0]
    foil_tokens[1, :PROMPT] = foil[1]
    foil_tokens[2, :PROMPT] = foil[2] + foil[3]
    wanted = keep_predicting(wanted, params)
    if params.get("operator") == "hide":
        foil_tokens[0, PROMPT - 1] = 0  # the first foil token is predicted by the last prompt token too
    np.testing.assert_allclose(scores.values, wanted - foil_tokens, atol=2e-5)


def test_gradient_norm_of_a_foil_is_the_norm_of_the_difference(linear):
    _, weight = parts(linear)
    question = question_of(linear, IDS, PROMPT, (0, 1), foil=[10], objective="logit")
    scores = run("gradient_norm", question)
    np.testing.assert_allclose(scores.values[0], np.linalg.norm(weight[8] - weight[10]), rtol=1e-5)


def test_log_probability_is_differentiated_through_the_softmax(linear):
    embedding, weight = parts(linear)
    logits = embedding[IDS[:PROMPT]].sum(0) @ weight.T
    p = np.exp(logits - logits.max())
    p /= p.sum()
    gradient = weight[8] - p @ weight
    question = question_of(linear, IDS, PROMPT, (0, 1))
    scores = run("input_x_gradient", question).values[0]
    np.testing.assert_allclose(scores, embedding[IDS[:PROMPT]] @ gradient, atol=1e-5)
    of_p = run("input_x_gradient", question_of(linear, IDS, PROMPT, (0, 1), objective="prob")).values[0]
    np.testing.assert_allclose(of_p / np.abs(of_p).sum(), scores / np.abs(scores).sum(), atol=1e-5)
    np.testing.assert_allclose(of_p, p[8] * scores, atol=1e-6)


def test_integrated_gradients_of_a_linear_model_at_the_smallest_step_count(linear):
    embedding, weight = parts(linear)
    question = question_of(linear, IDS, PROMPT, SPAN, objective="logit")
    scores = run("integrated_gradients", question, steps=8)
    moved = embedding[IDS[:8]] - embedding.mean(0)
    np.testing.assert_allclose(scores.values, (weight[IDS[PROMPT:]] @ moved.T) * lower(8), atol=1e-5)
    residuals = [check.value for check in scores.checks if check.name == "completeness_residual"]
    assert len(residuals) == 3 and max(residuals) < 1e-4
    zero = run("integrated_gradients", question, steps=8, baseline="zero")
    np.testing.assert_allclose(zero.values, run("input_x_gradient", question).values, atol=1e-5)


def test_integrated_gradients_is_exact_on_a_quadratic_model():
    model = toy_model("quadratic", scale=0.3)
    embedding, weight = parts(model)
    question = question_of(model, IDS, PROMPT, (0, 1), objective="logit")
    scores = run("integrated_gradients", question, steps=8, baseline="zero")
    # d/de of h·w + (h·w)²/2 along αh is w (1 + α h·w); its mean over α is w (1 + h·w / 2)
    h = embedding[IDS[:PROMPT]].sum(0) @ weight[8]
    np.testing.assert_allclose(scores.values[0], embedding[IDS[:PROMPT]] @ weight[8] * (1 + h / 2), rtol=1e-4)
    assert check_of(scores, "completeness_residual").value < 1e-4


def test_a_confirmed_residual_is_ok_and_a_single_one_is_not(linear):
    question = question_of(linear, IDS, PROMPT, (0, 1), objective="logit")
    once = run("integrated_gradients", question, steps=8)
    assert check_of(once, "completeness_residual").verdict == "warn"
    assert "second step count" in check_of(once, "completeness_residual").text
    twice = run("integrated_gradients", question, steps=8, refine=True)
    assert check_of(twice, "completeness_residual").verdict == "ok"
    assert twice.passes.backward == 8 + 16


def test_an_open_gap_is_called_one_and_refining_ends_at_its_limit():
    model = toy_model("copy")  # softmax of logits 8 apart: abrupt along the path
    question = question_of(model, IDS, PROMPT, (0, 1), objective="prob")
    scores = run("integrated_gradients", question, steps=8, baseline="zero", refine=True, max_steps=32)
    wanted = question.plain.values[0] - 1 / 12  # at zero all logits are equal
    gap = abs(scores.values.sum() - wanted) / abs(wanted)
    assert check_of(scores, "completeness_residual").value == pytest.approx(gap, rel=1e-3, abs=1e-5)
    assert scores.passes.backward in (8 + 16, 8 + 16 + 32)


def test_a_token_equal_to_its_baseline_and_frame_tokens_score_zero(linear):
    with torch.no_grad():
        linear.module.embed.weight[IDS[2]] = 0
    roles = ["bos", "user", "user", "template", "user", "user"] + ["answer"] * 3
    question = question_of(linear, IDS, PROMPT, (0, 1), roles=roles, objective="logit")
    scores = run("integrated_gradients", question, steps=8, baseline="zero").values[0]
    assert [scores[0], scores[2], scores[3]] == [0, 0, 0]
    assert np.abs(scores[[1, 4, 5]]).min() > 0
    assert check_of(run("integrated_gradients", question, steps=8), "completeness_residual").value < 1e-4


def test_no_difference_between_text_and_baseline_has_no_relative_residual(linear):
    with torch.no_grad():
        linear.module.weight[8] = 0
    question = question_of(linear, IDS, PROMPT, (0, 1), objective="logit")
    check = check_of(run("integrated_gradients", question, steps=8), "completeness_residual")
    assert check.verdict == "info" and "no relative residual" in check.text


def test_input_x_gradient_of_a_scale_free_model_is_zero_and_has_no_signal():
    question = question_of(toy_model("scale_free"), IDS, PROMPT, (0, 1))
    scores = run("input_x_gradient", question)
    assert np.abs(scores.values).max() < 1e-6
    assert np.abs(run("gradient_norm", question).values).max() > 0.01


def test_no_signal_is_stated(linear):
    with torch.no_grad():
        linear.module.weight.zero_()
        linear.module.weight[0] = 1  # there is a gradient, though not for any of the targets
    question = question_of(linear, IDS, PROMPT, SPAN, foil=[10], objective="logit")
    for name in ("input_x_gradient", "integrated_gradients", "occlusion"):
        assert check_of(run(name, question), "no_signal").verdict == "fail", name


@pytest.mark.parametrize("fill", ["mean", "zero"])
def test_replacing_scores_the_difference_to_the_fill(linear, fill):
    embedding, weight = parts(linear)
    question = question_of(linear, IDS, PROMPT, SPAN, objective="logit")
    scores = run("occlusion", question, operator="replace", fill=fill)
    other = embedding.mean(0) if fill == "mean" else 0 * embedding[0]
    wanted = (weight[IDS[PROMPT:]] @ (embedding[IDS[:8]] - other).T) * lower(8)
    np.testing.assert_allclose(scores.values, wanted, atol=2e-5)


def scores_on_a_copier(method, ids, **more):
    """Scores on the copying toy; on a real copying model for methods that need the inside of one."""
    for model in (toy_model("copy"), copying_llama()):
        try:
            return method.run(model, question_of(model, ids, 6, **more), method.params(), no_tick)
        except NotApplicable:
            continue
    raise AssertionError(f"{method.name} serves neither of the copying models")


@pytest.mark.parametrize("method", READ_NO_ATTENTION, ids=lambda m: m.name)
def test_the_copied_token_comes_first(method):
    ids = [3, 7, 1, 9, 4, 2, 4]  # the model repeats the token two before the one to come: 4 at index 4
    scores = scores_on_a_copier(method, ids)
    row = np.nan_to_num(np.abs(scores.values[0]))
    if method.family == "baseline":
        np.testing.assert_allclose(row, 1 / 6)
    else:
        assert row.argmax() == 4
        if method.signed:
            assert scores.values[0, 4] > 0


@pytest.mark.parametrize("method", [m for m in READ_NO_ATTENTION if m.signed], ids=lambda m: m.name)
def test_a_foil_turns_the_sign(method):
    ids = [3, 7, 1, 9, 4, 2, 5]  # target 5, copied token 4
    scores = scores_on_a_copier(method, ids, foil=[4], objective="logit").values[0]
    assert np.nan_to_num(scores).argmin() == 4 and scores[4] < 0


def test_redundant_evidence_is_found():
    # "is token 4 among the visible ones?": one copy is as good as two, so each alone can go
    model = toy_model("linear", vocabulary=12)
    with torch.no_grad():
        model.module.embed.weight.copy_(torch.zeros(12, 5))
        model.module.embed.weight[4, 0] = 1.0
        model.module.weight.zero_()
        model.module.weight[8, 0] = 6.0  # log p saturates with the first copy
    question = question_of(model, [4, 7, 4, 9, 3, 2, 8], 6)
    scores = run("occlusion", question)
    assert np.abs(scores.values).max() < 0.05
    assert check_of(scores, "redundancy").verdict == "warn"
    single = question_of(model, [4, 7, 1, 9, 3, 2, 8], 6)
    assert check_of(run("occlusion", single), "redundancy").verdict == "ok"


def test_saturated_targets_are_warned_of_unless_a_foil_or_the_logit_is_asked():
    model = toy_model("copy")
    ids = [3, 7, 1, 9, 4, 2, 4]
    names = {
        objective: [c.name for c in run("gradient_norm", question_of(model, ids, 6, objective=objective)).checks]
        for objective in ("log_prob", "prob", "logit")
    }
    assert "saturation" in names["log_prob"] and "saturation" in names["prob"] and "saturation" not in names["logit"]
    with_foil = run("gradient_norm", question_of(model, ids, 6, foil=[5]))
    assert "saturation" not in [check.name for check in with_foil.checks]


def test_short_embeddings_are_noticed():
    model = toy_model("scale_free", vocabulary=12)  # the gradient of e/|e| is as 1/|e|
    with torch.no_grad():
        model.module.embed.weight.mul_(torch.arange(1, 13)[:, None] ** 1.5)
    check = check_of(run("gradient_norm", question_of(model, IDS, PROMPT, (0, 1))), "embedding_norm_correlation")
    assert check.verdict == "warn" and check.value > 0.5


def test_uniform_shares_what_each_target_sees(linear):
    scores = run("uniform", question_of(linear, IDS, PROMPT, SPAN))
    np.testing.assert_allclose(scores.values.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(scores.values[2], [1 / 8] * 8)
    assert (scores.values[0, 6:] == 0).all()
