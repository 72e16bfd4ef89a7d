"""The ablation bank and the methods that read it, against sums over all subsets that are written out here."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch

from backend.errors import Cancelled, NotApplicable
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.registry import get_method
from backend.saliency import bank, readouts
from backend.saliency.ablation import Ablator
from backend.saliency.bank import Plan, draw_masks
from backend.saliency.explain import explain
from backend.saliency.question import ask
from backend.saliency.runs import Runs
from backend.types import MethodSpec, ModelRef, Prompt, SaliencyRequest, Turn, no_tick
from tests.support.tiny import tiny_model
from tests.support.toys import Ticks, question_of, toy_model

IDS = [3, 7, 1, 9, 4, 2, 8, 5, 6]  # six prompt tokens, three answer tokens
PROMPT = 6
ALL_SIX = [np.array(bits, bool) for bits in product([False, True], repeat=PROMPT)]
METHODS = ("context_cite", "ensemble_shap", "token_shap")


def run(name, question, tick=no_tick, **params):
    method = get_method(name)
    return method.run(question.model, question, method.params(**params), tick)


def check_of(scores, name):
    return next((check for check in scores.checks if check.name == name), None)


def toy_logits(model, ids, at, keep):
    """Logits at a position of the linear toy, float64; a hidden token still sees itself."""
    embedding, weight = (part.detach().double().numpy() for part in (model.module.embed.weight, model.module.weight))
    seen = [i for i in range(at + 1) if i >= len(keep) or keep[i] or i == at]
    return embedding[[ids[i] for i in seen]].sum(axis=0) @ weight.T


def toy_log_p(model, ids, row, keep):
    logits = toy_logits(model, ids, PROMPT - 1 + row, keep)
    top = logits.max()
    return logits[ids[PROMPT + row]] - top - np.log(np.exp(logits - top).sum())


def masks_of(question, plan):
    return draw_masks(len(bank.removable(question)), plan, question.seed)[0]


# ---------------------------------------------------------------------------------------------- the bank


def test_masks_follow_their_rule_and_their_seed():
    half, exact = draw_masks(30, Plan("half", "hide", 400), 3)
    assert half.shape == (400, 30) and not exact and abs(half.mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(half.T) - np.eye(30)).max() < 0.25  # units are kept independently
    size, exact = draw_masks(30, Plan("size", "hide", 400, 7), 3)
    assert not exact and (size.sum(axis=1) == 7).all()
    assert np.ptp(size.mean(axis=0)) < 0.15  # no unit is preferred
    single, _ = draw_masks(4, Plan("single", "hide"), 3)
    assert single.tolist() == [[i != j for i in range(4)] for j in range(4)]
    for plan in (Plan("half", "hide", 400), Plan("size", "hide", 400, 7)):
        assert np.array_equal(draw_masks(30, plan, 3)[0], draw_masks(30, plan, 3)[0])
        assert not np.array_equal(draw_masks(30, plan, 3)[0], draw_masks(30, plan, 4)[0])


def test_few_masks_are_all_taken_once():
    half, exact = draw_masks(6, Plan("half", "hide", 64), 0)
    assert exact and {tuple(row) for row in half.tolist()} == set(product([False, True], repeat=6)) and len(half) == 64
    size, exact = draw_masks(6, Plan("size", "hide", 20, 3), 0)
    assert exact and {tuple(np.flatnonzero(row)) for row in size} == set(combinations(range(6), 3)) and len(size) == 20
    assert not draw_masks(6, Plan("half", "hide", 63), 0)[1] and not draw_masks(6, Plan("size", "hide", 19, 3), 0)[1]


@pytest.mark.parametrize("objective", ["log_prob", "logit", "prob"])
def test_outcomes_are_those_of_one_run_per_mask(objective):
    model = toy_model("linear")
    ids = [*IDS[:PROMPT], 0, 5, 6]
    ids[PROMPT] = int(toy_logits(model, ids, PROMPT - 1, [True] * PROMPT).argmax())
    question = question_of(model, ids, PROMPT, (0, 3), objective=objective)
    runs = bank.draw(question, Plan("half", "hide", 64), lambda part: None)
    assert runs.exact and len(runs.keep) == 64
    for keep, odds, top in zip(runs.keep, runs.log_odds, runs.top, strict=True):
        for row in range(3):
            log_p = toy_log_p(model, ids, row, keep)
            assert odds[row] == pytest.approx(log_p - np.log1p(-np.exp(log_p)), abs=1e-4)
            assert top[row] == (toy_logits(model, ids, PROMPT - 1 + row, keep).argmax() == ids[PROMPT + row])
    assert 0 < runs.top.mean() < 1
    np.testing.assert_array_equal(runs.plain, runs.log_odds[runs.keep.all(axis=1)][0])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("operator", ["hide", "delete", "replace"])
def test_log_odds_and_top_tokens_agree_with_log_probabilities(family, operator):
    model = tiny_model(family)
    ids = torch.randint(3, 300, (29,), generator=torch.Generator().manual_seed(1)).tolist()
    said = torch.tensor([ids[:26]])
    with torch.no_grad():  # a target that the model would choose, so that both answers occur
        ids[26] = int(model.module(input_ids=said).logits[0, -1].argmax())
    question = question_of(model, ids, 25, (1, 3))
    removed = np.random.default_rng(0).random((12, question.source_count)) < 0.15
    removed[:, 24:] = False
    removed[0] = False
    fill = torch.zeros(model.embedding.weight.shape[1]) if operator == "replace" else None
    odds, top = Ablator(question, operator, fill, log_odds=True).outcomes(removed, lambda done: None)
    log_p = Ablator(question, operator, fill).without(removed, lambda done: None)
    np.testing.assert_allclose(-np.logaddexp(0, -odds), log_p, atol=2e-5)
    assert top[0, 0] and (top <= (log_p > np.log(1 / 300) - 3)).all()
    assert (top >= (log_p > np.log(0.5))).all()  # whoever has more than half is on top
    assert not top.all()


def test_certain_tokens_keep_their_odds():
    model = toy_model("copy")
    with torch.no_grad():
        model.module.weight.mul_(5)  # logits 40 apart: 1 - p is far below the spacing of float32
    question = question_of(model, [3, 7, 1, 9, 4, 2, 4], 6)
    assert question.plain.values[0] == 0
    odds = question.log_odds(question.strands[0], question.plain.logits[0][None])
    assert float(odds) == pytest.approx(40 - np.log(11), rel=1e-5)


def test_only_words_of_the_prompt_are_removed():
    roles = ["bos", "template", "user", "user", "template", "user"] + ["answer"] * 3
    question = question_of(toy_model("linear"), IDS, PROMPT, (1, 3), roles=roles)
    assert bank.removable(question) == [2, 3, 5]
    for name in METHODS:
        scores = run(name, question)
        assert scores.measured.tolist() == [False, False, True, True, False, True, False, False]
        assert np.isnan(scores.values[:, [0, 1, 4, 6]]).all()
        assert scores.values[0, 7] == 0 and np.isnan(scores.values[1, 7])  # the first target cannot see it
    bare = question_of(toy_model("linear"), [3, 7, 8, 5], 2, (1, 2), roles=["bos", "template", "answer", "answer"])
    for name in METHODS:
        with pytest.raises(NotApplicable, match="Only BOS, template and answer"):
            run(name, bare)


def test_masks_that_leave_nothing_to_predict_from_are_left_out_and_said():
    question = question_of(toy_model("linear"), IDS, PROMPT)
    for name in ("context_cite", "token_shap"):
        scores = run(name, question, operator="delete")
        assert check_of(scores, "lost_masks").value == 1  # nothing kept, one of the 64
        assert scores.measured.all() and np.isfinite(scores.values).all()
    alone = question_of(toy_model("linear"), [3, 8], 1)
    with pytest.raises(NotApplicable, match="nothing is left to predict"):
        run("token_shap", alone, operator="delete")


# ---------------------------------------------------------------------------------------------- runs are shared


class Shelf(dict):
    def put(self, key, value):
        assert isinstance(value, bytes) and len(key) == 64
        self[key] = value
        return True


def passes(question, name, **params):
    before = question.model.module.calls
    scores = run(name, question, **params)
    return question.model.module.calls - before, scores


def test_one_bank_serves_all_methods_of_a_request():
    ids = [*range(3, 11)] * 3
    question = question_of(toy_model("linear"), ids, len(ids) - 1)
    first, fitted = passes(question, "context_cite")
    second, _ = passes(question, "token_shap")
    alone, _ = passes(question_of(toy_model("linear"), ids, len(ids) - 1), "token_shap")
    assert first > 0 and 0 < second < alone  # what is left to run are the prompts without one unit
    assert passes(question, "context_cite", penalty=0.1)[0] == 0
    again, same = passes(question, "context_cite")
    assert again == 0 and np.array_equal(same.values, fitted.values)
    assert same.passes.forward == 0 < fitted.passes.forward
    assert check_of(same, "shared_runs") and not check_of(fitted, "shared_runs")
    assert passes(question, "ensemble_shap")[0] > 0  # other masks: of a fixed size
    assert passes(question, "ensemble_shap", vote="hard")[0] == 0


def test_a_later_request_reads_the_same_runs_if_nothing_that_decides_them_changed():
    ids, shelf, model = [*range(3, 11)] * 3, Shelf(), toy_model("linear")

    def asked(model=model, ids=ids, **more):
        return replace(question_of(model, ids, len(ids) - 1, **more), runs=Runs(shelf))

    first, fitted = passes(asked(), "context_cite")
    assert first > 0 and len(shelf) == 1
    later, same = passes(asked(), "context_cite")
    assert later == 0 and np.array_equal(same.values, fitted.values)
    assert [c for c in same.checks if c.name != "shared_runs"] == list(fitted.checks)
    assert passes(asked(objective="prob"), "context_cite")[0] == 0  # odds are odds whatever is explained
    other = replace(model, info=replace(model.info, revision="1"))
    groups = [i // 2 for i in range(len(ids))]
    for changed in (
        asked(seed=1),
        asked(foil=[5]),
        asked(other),
        asked(ids=[4, *ids[1:]]),
        asked(groups=groups),
        asked(roles=["bos", *["user"] * (len(ids) - 2), "answer"]),
    ):
        assert passes(changed, "context_cite")[0] > 0
    for params in ({"masks": 80}, {"operator": "delete"}):
        assert passes(asked(), "context_cite", **params)[0] > 0
    for key in shelf:
        shelf[key] = b'{"units": [1]}'
    repaired, same = passes(asked(), "context_cite")  # bytes that cannot be read are run again
    assert repaired == first and np.array_equal(same.values, fitted.values)


def test_equal_masks_are_run_once_and_a_cancelled_run_leaves_nothing():
    question = question_of(toy_model("linear"), IDS[:4], 3)
    scores = run("context_cite", question, masks=1024)
    assert scores.passes.forward <= 8 + 4
    for name in METHODS:
        asked = question_of(toy_model("linear"), [*range(3, 11)] * 3, 23)
        with pytest.raises(Cancelled):
            run(name, asked, Ticks(stop_at=4))
        assert not [key for key in asked.runs._own if name != "token_shap"]


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_decides(name):
    def values(seed):
        return run(name, question_of(toy_model("linear"), [*range(3, 11)] * 2, 15, seed=seed)).values

    assert np.array_equal(values(1), values(1)) and not np.array_equal(values(1), values(2))


# ---------------------------------------------------------------------------------------------- ContextCite


def test_the_lasso_has_its_closed_form_where_all_masks_are_run():
    model = toy_model("linear")
    embedding, weight = model.module.embed.weight.numpy(), model.module.weight.numpy()
    question = question_of(model, IDS, PROMPT, foil=[10])
    scores = run("context_cite", question, penalty=0.2)
    true = embedding[IDS[:PROMPT]] @ (weight[IDS[PROMPT]] - weight[10])
    true[-1] = 0  # the token that predicts cannot be hidden from itself
    # columns of all masks are orthogonal with standard deviation 1/2, so each is thresholded by itself
    wanted = np.sign(true) * np.maximum(np.abs(true) - 0.4, 0)
    np.testing.assert_allclose(scores.values[0], wanted, atol=1e-4)
    assert check_of(scores, "zero_weights").value == pytest.approx((wanted == 0).mean())
    assert check_of(scores, "fit_r2").value > 0.9 and check_of(scores, "fit_spearman").verdict == "ok"
    assert check_of(scores, "mask_spread") is None  # there are no other masks


def test_a_span_is_fitted_as_a_whole_or_token_by_token():
    question = question_of(toy_model("linear"), IDS, PROMPT, (0, 3))
    whole = run("context_cite", question)
    np.testing.assert_array_equal(whole.values[0, :PROMPT], whole.values[1, :PROMPT])
    runs = bank.draw(question, Plan("half", "hide", 64), lambda part: None)
    p = np.exp([[toy_log_p(question.model, IDS, row, keep) for row in range(3)] for keep in runs.keep]).prod(axis=1)
    np.testing.assert_allclose(readouts.span_log_odds(runs.log_odds, False), np.log(p / (1 - p)), atol=1e-4)
    direct = readouts.fit(runs.keep, np.log(p / (1 - p))[:, None], 3, 0.01)[0]
    np.testing.assert_allclose(whole.values[:, :PROMPT].sum(axis=0), direct, atol=1e-3)
    single = run("context_cite", question, whole_span=False)
    for row in range(3):
        one = run("context_cite", question_of(question.model, IDS, PROMPT, (row, row + 1)))
        np.testing.assert_allclose(single.values[row, :PROMPT], one.values[0, :PROMPT], atol=1e-4)


def test_span_odds_hold_at_both_ends():
    odds = np.array([[900.0, 50.0], [-900.0, 3.0], [40.0, 41.0], [0.0, 0.0]])
    found = readouts.span_log_odds(odds, False)
    wanted = [50.0, -900.0 - np.log1p(np.exp(-3)), -np.log(np.exp(-40) + np.exp(-41)), np.log(0.25 / 0.75)]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    np.testing.assert_array_equal(readouts.span_log_odds(odds, True), odds.sum(axis=1))


def test_a_sparse_truth_is_found_among_forty_units_with_64_masks():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        keep = rng.random((64, 40)) < 0.5
        odds = 2 * keep[:, 7] - 1.2 * keep[:, 31] + 0.3 * rng.standard_normal(64)
        weights = readouts.fit(keep, odds[:, None], 1, 0.1)[0]
        assert set(np.argsort(-np.abs(weights))[:2]) == {7, 31}
        assert weights[7] > 1 and weights[31] < -0.5 and (weights == 0).mean() > 0.5


def test_a_story_that_is_not_linear_is_called_so():
    rng = np.random.default_rng(0)
    keep = rng.random((128, 8)) < 0.5
    linear = keep @ rng.standard_normal(8)
    either = 3.0 * (keep[:, 0] ^ keep[:, 1])

    def verdicts(values):
        found = readouts.quality(keep, values[:, None], 1, 0.01, exact=False, seed=0)
        return {check.name: check for check in found}

    good, bad = verdicts(linear), verdicts(either)
    assert good["fit_r2"].value > 0.95 and good["fit_r2"].verdict == good["fit_spearman"].verdict == "ok"
    assert bad["fit_r2"].value < 0.3 and bad["fit_r2"].verdict == "warn" and bad["fit_spearman"].verdict == "fail"
    assert "linear story does not fit" in bad["fit_r2"].text and "linear" not in good["fit_r2"].text
    assert bad["mask_spread"].verdict == "warn" and good["mask_spread"].verdict == "ok"
    few = readouts.quality(keep[:9], linear[:9, None], 1, 0.01, exact=False, seed=0)
    assert few[0].value is None and "too few" in few[0].text


def test_the_spread_over_masks_is_what_new_masks_show():
    said, weights = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        keep = rng.random((64, 6)) < 0.5
        odds = (keep @ np.array([2.0, -1, 0.5, 1, 0.8, -2]) + rng.standard_normal(64))[:, None]
        weights.append(readouts.fit(keep, odds, 1, 0.01)[0])
        found = readouts.quality(keep, odds, 1, 0.01, exact=False, seed=0)
        said.append(next(check.value for check in found if check.name == "mask_spread"))
    real = np.std(weights, axis=0).max()
    assert real < np.mean(said) < 2.5 * real  # the largest of six noisy estimates lies above the truth


def test_too_many_units_are_refused_before_the_model_runs():
    model = toy_model("linear")
    question = question_of(model, [*range(3, 11)] * 9, 71)
    with pytest.raises(NotApplicable, match="71 units") as refusal:
        run("context_cite", question, masks=16)
    assert model.module.calls == 0 and "18 masks" in refusal.value.hint and "sentences" in refusal.value.hint
    assert run("context_cite", question, masks=18 * 4).measured.all()


def test_a_unit_that_was_always_kept_has_no_weight():
    keep = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    weights = readouts.fit(keep, np.array([[0.0], [2.0], [0.0], [2.0]]), 1, 0.001)
    assert np.isnan(weights[0, 0]) and weights[0, 1] == pytest.approx(2, abs=0.01) and weights[0, 2] == 0


# ---------------------------------------------------------------------------------------------- EnsembleSHAP


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_vote_shares_are_those_of_all_subsets(vote):
    model = toy_model("linear")
    question = question_of(model, IDS, PROMPT, (0, 3))
    scores = run("ensemble_shap", question, vote=vote)

    def value(subset, row):
        keep = np.isin(np.arange(PROMPT), subset)
        if vote == "hard":
            return float(toy_logits(model, IDS, PROMPT - 1 + row, keep).argmax() == IDS[PROMPT + row])
        return np.exp(toy_log_p(model, IDS, row, keep))

    subsets = list(combinations(range(PROMPT), 3))
    for row in range(3):
        votes = np.array([value(subset, row) for subset in subsets])
        shares = [np.mean([v for v, s in zip(votes, subsets, strict=True) if i in s]) for i in range(PROMPT)]
        assert np.mean(shares) == pytest.approx(votes.mean())  # what the units' shares of the vote add up to
        np.testing.assert_allclose(scores.values[row, :PROMPT], np.array(shares) - votes.mean(), atol=1e-5)
    assert check_of(scores, "sum_gap").value < 1e-6 and check_of(scores, "draws_per_unit").verdict == "ok"
    assert check_of(scores, "sampling_error") is None


def test_one_deciding_unit_and_units_without_influence():
    model = toy_model("copy")  # the token at 4 decides; without it all logits are equal and token 0 is chosen
    question = question_of(model, [3, 7, 1, 9, 4, 2, 4], 6)
    scores = run("ensemble_shap", question, vote="hard")
    d, k = 6, 3
    assert scores.values[0, 4] == pytest.approx(1 - k / d)
    np.testing.assert_allclose(np.delete(scores.values[0], 4), (k - 1) / (d - 1) - k / d, atol=1e-6)
    assert check_of(scores, "masked_ensemble").value == pytest.approx(k / d)


def test_with_a_foil_votes_are_about_the_two():
    model = toy_model("linear")
    question = question_of(model, IDS, PROMPT, foil=[10])
    subsets = list(combinations(range(PROMPT), 3))
    margins = []
    for subset in subsets:
        logits = toy_logits(model, IDS, PROMPT - 1, np.isin(np.arange(PROMPT), subset))
        margins.append(logits[IDS[PROMPT]] - logits[10])
    margins = np.array(margins)
    for vote, votes in (("hard", margins > 0), ("soft", 1 / (1 + np.exp(-margins)))):
        wanted = [np.mean(votes[[i in s for s in subsets]]) - votes.mean() for i in range(PROMPT)]
        np.testing.assert_allclose(run("ensemble_shap", question, vote=vote).values[0], wanted, atol=1e-5)


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_subsets_of_everything_score_all_units_alike(vote):
    scores = run("ensemble_shap", question_of(toy_model("linear"), IDS, PROMPT), keep=0.95, vote=vote)
    assert (scores.values == 0).all()
    assert check_of(scores, "no_signal").verdict == "fail" and "all units" in check_of(scores, "no_signal").text


def test_a_vote_that_never_turns_says_nothing():
    model = toy_model("linear")
    with torch.no_grad():
        model.module.weight.copy_(torch.zeros(12, 5))
        model.module.embed.weight[:, 0] = 1.0
        model.module.weight[8, 0] = 2.0  # always the choice, with a margin that grows with what is there
    always = run("ensemble_shap", question_of(model, IDS, PROMPT), vote="hard")
    assert "keep fewer units" in check_of(always, "no_signal").text and (always.values == 0).all()
    never = run("ensemble_shap", question_of(model, [*IDS[:PROMPT], 5], PROMPT), vote="hard")
    assert "keep more units" in check_of(never, "no_signal").text
    assert check_of(run("ensemble_shap", question_of(model, IDS, PROMPT)), "masked_ensemble").value < 1


def test_units_that_no_subset_held_are_not_sampled():
    ids = [*range(3, 11)] * 5
    question = question_of(toy_model("linear"), [*ids, 8], 40)
    scores = run("ensemble_shap", question, masks=50, keep=0.05)
    held = masks_of(question, Plan("size", "hide", 50, 2)).sum(axis=0)
    assert (held == 0).any() and np.array_equal(scores.measured, held > 0)
    assert np.isnan(scores.values[0, held == 0]).all() and np.isfinite(scores.values[0, held > 0]).all()
    assert check_of(scores, "not_sampled").value == (held == 0).sum()
    assert (
        check_of(scores, "draws_per_unit").verdict == "warn" and "2000 masks" in check_of(scores, "draws_per_unit").text
    )
    many = run("ensemble_shap", question, masks=400)
    assert many.measured.all() and check_of(many, "draws_per_unit").verdict == "ok"


def test_error_bars_are_those_of_the_draw():
    ids = [*range(3, 11)] * 3
    values, said = [], []
    for seed in range(40):
        scores = run("ensemble_shap", question_of(toy_model("linear", scale=0.5), ids, 23, seed=seed))
        values.append(scores.values[0])
        said.append(check_of(scores, "sampling_error").value)
    real = np.std(values, axis=0).max()
    # the bar is that of the share; the score is its difference to the overall share, which moves along
    assert 0.8 * real < np.mean(said) < 3 * real


# ---------------------------------------------------------------------------------------------- TokenSHAP


def mean_differences(parts, values):
    """The definition: mean value with a unit minus mean value without it."""
    return np.array([
        np.mean([v for p, v in zip(parts, values, strict=True) if p[i]])
        - np.mean([v for p, v in zip(parts, values, strict=True) if not p[i]])
        for i in range(len(parts[0]))
    ])  # fmt: skip


def test_all_parts_of_a_short_prompt():
    model = toy_model("linear")
    scores = run("token_shap", question_of(model, IDS, PROMPT, (0, 3)))
    for row in range(3):
        values = [toy_log_p(model, IDS, row, keep) for keep in ALL_SIX]
        np.testing.assert_allclose(scores.values[row, :PROMPT], mean_differences(ALL_SIX, values), atol=1e-4)
    assert check_of(scores, "split_half") is None and check_of(scores, "no_signal") is None


def test_random_parts_join_those_without_one_unit():
    model, ids = toy_model("linear", scale=0.3), [3, 7, 1, 9, 4, 2, 10, 5, 6, 0, 8]
    question = question_of(model, ids, 10)
    parts = {tuple(keep) for keep in masks_of(question, Plan("half", "hide", 32)).tolist()}
    parts |= {tuple(i != j for i in range(10)) for j in range(10)}
    found = []
    for keep in sorted(parts):
        logits = toy_logits(model, ids, 9, np.array(keep))
        found.append(logits[8] - np.log(np.exp(logits).sum()))
    raw = run("token_shap", question, masks=32, form="raw")
    wanted = mean_differences(sorted(parts), found)
    np.testing.assert_allclose(raw.values[0], wanted, atol=1e-4)
    assert check_of(raw, "common_bonus").verdict == "warn"
    published = run("token_shap", question, masks=32, form="published").values[0]
    np.testing.assert_allclose(published, (wanted - wanted.min()) / (wanted - wanted.min()).sum(), atol=1e-4)
    assert -1 <= check_of(raw, "split_half").value <= 1


def test_a_unit_without_influence_scores_zero_unless_the_bonus_is_left_in():
    model = toy_model("linear")
    with torch.no_grad():  # every token but 11 speaks for the target, against the foil
        model.module.embed.weight.zero_()
        model.module.embed.weight[:11, 0] = 0.5
        model.module.weight.zero_()
        model.module.weight[8, 0] = 1.0
    ids = [*([3] * 5), 11, *([4] * 19), 8]
    found = {form: [] for form in ("centered", "raw")}
    for seed in range(12):
        for form, values in found.items():
            scores = run("token_shap", question_of(model, ids, 25, foil=[10], seed=seed), form=form)
            values.append(scores.values[0, :24])
    centered, raw = (np.mean(found[form], axis=0) for form in ("centered", "raw"))
    # 32 of 64 random parts hold a unit, as do 24 of those without one unit, which by themselves say little about it
    wanted = 0.25 * 32 / (32 + 24) + 0.25 * 32 / (32 + 1)
    assert abs(centered[5]) < 0.15 and abs(np.delete(centered, 5).mean() - wanted) < 0.06
    assert raw[5] > 1  # almost whole prompts are worth 6 more than random halves, and hold it
    assert check_of(scores, "common_bonus").value == pytest.approx(raw[5], rel=0.2)


def test_additive_contributions_are_found_exactly_and_the_published_shift_is_an_option():
    model = toy_model("linear")
    embedding, weight = model.module.embed.weight.numpy(), model.module.weight.numpy()
    question = question_of(model, IDS, PROMPT, foil=[10])
    true = embedding[IDS[:PROMPT]] @ (weight[IDS[PROMPT]] - weight[10])
    true[-1] = 0
    np.testing.assert_allclose(run("token_shap", question).values[0], true, atol=1e-4)
    shifted = run("token_shap", question, form="published")
    np.testing.assert_allclose(shifted.values[0], (true - true.min()) / (true - true.min()).sum(), atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_constant_function_scores_zero(name):
    model = toy_model("linear")
    with torch.no_grad():
        model.module.weight.zero_()
    scores = run(name, question_of(model, [*range(3, 11)] * 2, 15))
    np.testing.assert_allclose(scores.values, 0, atol=1e-12)
    assert check_of(scores, "no_signal").verdict == "fail"


@pytest.mark.parametrize("params", [("context_cite", {}), ("ensemble_shap", {}), ("ensemble_shap", {"vote": "hard"}),
                                    ("token_shap", {})], ids=str)  # fmt: skip
@pytest.mark.parametrize("place", [0, 11, 22])
def test_a_planted_trigger_comes_first(params, place):
    name, settings = params
    model = toy_model("linear", seed=place)
    with torch.no_grad():
        model.module.embed.weight.mul_(0.2)
        model.module.embed.weight[:, 4] = model.module.weight[:, 4] = 0
        model.module.embed.weight[11] = torch.eye(5)[4]  # speaks for token 8 and of nothing else
        model.module.weight[8, 4] = 8
    ids = np.random.default_rng(place).integers(0, 8, 25).tolist()
    ids[place], ids[24] = 11, 8
    scores = run(name, question_of(model, ids, 24, seed=place), **settings)
    assert scores.values[0].argmax() == place and scores.values[0, place] > 0


# ---------------------------------------------------------------------------------------------- generated answers


def greedy(model, ids, count):
    said = []
    while len(said) < count:
        with torch.no_grad():
            said.append(int(model.module(input_ids=torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
        if said[-1] == model.tokenizer.eos_token_id:
            break
    return [token for token in said if token != model.tokenizer.eos_token_id]


def tf_idf_similarities(documents):
    """Cosine of each document to the first; idf = ln((1 + n) / (1 + df)) + 1."""
    words = sorted({word for document in documents for word in document})
    counts = np.array([[document.count(word) for word in words] for document in documents], float)
    vectors = counts * (np.log((1 + len(documents)) / (1 + (counts > 0).sum(axis=0))) + 1)
    norms = np.linalg.norm(vectors, axis=1)
    return vectors @ vectors[0] / np.where(norms > 0, norms, 1) / norms[0]


def generated_case(**more):
    ids = torch.randint(3, 300, (9,), generator=torch.Generator().manual_seed(4)).tolist()
    return ids, question_of(tiny_model("llama"), ids, 6, (1, 3), roles=["bos"] + ["user"] * 5 + ["answer"] * 3, **more)


def test_generated_answers_are_compared_word_by_word():
    ids, question = generated_case()
    scores = run("token_shap", question, value="generation", max_new_tokens=6)
    parts = list(product([False, True], repeat=5))
    said = [greedy(question.model, ids[:6], 6)]
    said += [greedy(question.model, [ids[0], *np.array(ids[1:6])[list(keep)].tolist()], 6) for keep in parts]
    similar = tf_idf_similarities(said)[1:]
    assert similar[-1] == pytest.approx(1) and np.std(similar) > 0.05
    np.testing.assert_allclose(scores.values[:, 1:6].sum(axis=0), mean_differences(parts, similar), atol=1e-5)
    np.testing.assert_array_equal(scores.values[0, 1:6], scores.values[1, 1:6])
    assert scores.measured.tolist() == [False, *[True] * 5, False, False]
    assert check_of(scores, "similarity_spread").value == pytest.approx(np.std(similar), abs=1e-5)
    assert check_of(scores, "no_signal") is None and scores.passes.forward > 30


def test_generation_stops_within_a_token():
    _, question = generated_case()
    calls = []
    question.model.module.register_forward_hook(lambda *_: calls.append(1))
    for stop_at in (1, 2, 9):
        calls.clear()
        with pytest.raises(Cancelled):
            run("token_shap", question, Ticks(stop_at), value="generation", max_new_tokens=6)
        assert len(calls) <= stop_at - 1 + (stop_at > 1)
    whole = Ticks()
    run("token_shap", question, whole, value="generation", max_new_tokens=6)
    done = [d for d, _ in whole.calls]
    assert done == sorted(done) and done[0] == 0 and whole.calls[-1] == (1000, 1000)


def test_answers_that_hardly_differ_rank_nothing():
    _, question = generated_case()
    with torch.no_grad():
        question.model.module.model.norm.weight.zero_()  # every logit is 0: always the same answer
    scores = run("token_shap", question, value="generation", max_new_tokens=3)
    assert check_of(scores, "no_signal").verdict == "fail" and "Do not rank" in check_of(scores, "no_signal").text


def test_what_cannot_be_generated_is_refused():
    _, question = generated_case(foil=[5])
    with pytest.raises(NotApplicable, match="foil"):
        run("token_shap", question, value="generation")
    long = question_of(tiny_model("llama"), [*range(3, 206)], 202)
    with pytest.raises(NotApplicable, match="202 units"):
        run("token_shap", long, value="generation")
    with pytest.raises(NotApplicable, match="cannot generate"):
        run("token_shap", question_of(toy_model("linear"), IDS, PROMPT), value="generation")
    _, question = generated_case()
    with torch.no_grad():  # the model ends every answer at once
        question.model.module.generation_config.eos_token_id = list(range(400))
    with pytest.raises(NotApplicable, match="nothing to say"):
        run("token_shap", question, value="generation")


# ---------------------------------------------------------------------------------------------- whole requests


def test_requests_share_runs_through_the_shelf(tiny):
    prompt, shelf, calls = Prompt("The capital of France is"), Shelf(), []
    ids = encode_text(tiny, " Paris, not Berlin")
    passage = append_answer(tiny, encode_prompt(tiny, prompt), ids)

    def explained(name, **params):
        calls.clear()
        specs = (MethodSpec.of(name, params),)
        request = SaliencyRequest(ModelRef("tiny"), prompt, ids, (0, 2), specs, level="word")
        return explain(tiny, passage, request, no_tick, shelf=shelf).results[0]

    tiny.module.register_forward_hook(lambda *_: calls.append(1))
    explained("context_cite")
    first = len(calls)
    found = explained("context_cite", penalty=0.1)
    assert len(calls) == 2 < first  # the targets' probabilities and the plain answer, as for every method
    assert found.passes.forward == 0 and "shared_runs" in [check.name for check in found.checks]


@pytest.mark.smollm
def test_the_evidence_of_the_embedded_model_comes_first(smollm):
    prompt = Prompt(turns=(Turn("user", "The secret word is banana. What is the secret word?"),))
    ids = encode_text(smollm, "banana")
    passage = append_answer(smollm, encode_prompt(smollm, prompt), ids)
    request = SaliencyRequest(ModelRef(), prompt, ids, (0, 1), (), level="word")
    question = ask(smollm, passage, request)
    for name, params in (("context_cite", {}), ("token_shap", {}), ("ensemble_shap", {"masks": 50})):
        scores = run(name, question, **params)
        begin, end = question.spans[int(np.nanargmax(scores.values[0]))]
        assert "banana" in "".join(token.text for token in passage.tokens[begin:end]), name
        assert not scores.measured[0] and check_of(scores, "no_signal") is None
