"""The ablation engine against loops that run every variant alone, in full, with masks made here."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.registry import get_method
from backend.saliency import ablation
from backend.saliency.ablation import Ablator
from backend.saliency.grouping import group
from backend.saliency.masks import additive, visible_keys
from backend.types import no_tick
from tests.support.tiny import FAMILIES, WINDOW, tiny_model
from tests.support.toys import question_of

LONG = WINDOW + 9
IDS = torch.randint(3, 300, (LONG + 4,), generator=torch.Generator().manual_seed(1)).tolist()
TARGET = (1, 3)
COUNT = LONG + 2  # sources


def ask(model, **more):
    return question_of(model, IDS, LONG, more.pop("target", TARGET), **more)


def random_sets(rows, seed=0, share=0.2):
    removed = np.random.default_rng(seed).random((rows, COUNT)) < share
    removed[:, LONG - 1 :] = False  # the tokens that predict targets stay, so that all operators mean the same
    return removed


def singles():
    return np.eye(COUNT, dtype=bool)[: LONG - 1]


def scores_of(logits):
    """log p of both targets from logits ``(n, vocabulary)`` of the whole text."""
    found = logits.log_softmax(-1)
    return [float(found[LONG + k, IDS[LONG + 1 + k]]) for k in range(2)]


def window_mask(length, window):
    at = torch.arange(length)
    return (at[:, None] >= at) & (at[:, None] - at < window)


def naive_hide(model, removed):
    """One variant after the other, no cache, whole text."""
    full, sliding = window_mask(COUNT, COUNT), window_mask(COUNT, WINDOW)
    out = []
    for gone in torch.from_numpy(removed):

        def masked(allowed, gone=gone):
            keep = allowed & (~gone[None] | torch.eye(COUNT, dtype=torch.bool))
            return torch.where(keep, 0.0, -1e9)[None, None]

        kind = model.info.id.removeprefix("tiny-")
        mask = masked(sliding if kind == "mistral" else full)
        if kind == "gemma3":
            mask = {"full_attention": mask, "sliding_attention": masked(sliding)}
        with torch.no_grad():
            ids = torch.tensor([IDS[:COUNT]])
            out.append(scores_of(model.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]))
    return np.array(out)


def naive_delete(model, removed, old_positions=False):
    out = []
    for gone in removed:
        kept = [i for i in range(COUNT) if not gone[i]]
        positions = torch.tensor([kept]) if old_positions else None
        with torch.no_grad():
            ids = torch.tensor([[IDS[i] for i in kept]])
            # without a mask, the library takes a gap in the positions for the start of another text
            mask = torch.ones_like(ids) if old_positions else None
            logits = model.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        found = logits.log_softmax(-1)
        out.append([float(found[kept.index(LONG + k), IDS[LONG + 1 + k]]) for k in range(2)])
    return np.array(out)


def naive_replace(model, removed, fill):
    out = []
    for gone in torch.from_numpy(removed):
        with torch.no_grad():
            embedded = torch.where(gone[:, None], fill, model.embedding(torch.tensor(IDS[:COUNT])))
            out.append(scores_of(model.module(inputs_embeds=embedded[None], use_cache=False).logits[0]))
    return np.array(out)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("sets", [singles(), random_sets(20)], ids=["singles", "sets"])
def test_hiding_equals_one_masked_pass_per_variant(model, sets):
    ablator = Ablator(ask(model), "hide")
    assert ablator._runners[0].layers is not None  # the beginning is computed once, in every family
    found = ablator.without(sets, lambda done: None)
    np.testing.assert_allclose(found, naive_hide(model, sets), atol=1e-5)


@pytest.mark.parametrize("sets", [singles(), random_sets(20)], ids=["singles", "sets"])
def test_deleting_equals_one_shorter_text_per_variant(model, sets):
    ablator = Ablator(ask(model), "delete")
    assert ablator._runners[0].layers is not None
    found = ablator.without(sets, lambda done: None)
    np.testing.assert_allclose(found, naive_delete(model, sets), atol=1e-5)


@pytest.mark.parametrize("sets", [singles(), random_sets(20)], ids=["singles", "sets"])
def test_replacing_equals_exchanged_embeddings(model, sets):
    # Gemma scales embeddings inside the module, so what replaces one is a scaled embedding too
    fill = model.embedding(torch.tensor([7]))[0].detach()
    ablator = Ablator(ask(model), "replace", fill)
    assert ablator._runners[0].layers is not None
    found = ablator.without(sets, lambda done: None)
    np.testing.assert_allclose(found, naive_replace(model, sets, fill), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_hiding_is_deleting_while_all_others_keep_their_positions(family):
    model = tiny_model(family)
    sets = np.concatenate([singles(), random_sets(10)])
    found = Ablator(ask(model), "hide").without(sets, lambda done: None)
    np.testing.assert_allclose(found, naive_delete(model, sets, old_positions=True), atol=1e-5)
    moved_up = naive_delete(model, sets)
    assert np.abs(moved_up - found).max() > 1e-3  # where positions count, "delete" is another question


@pytest.mark.parametrize("operator", ["hide", "delete", "replace"])
def test_one_variant_at_a_time_equals_many_at_once(model, operator, monkeypatch):
    sets = random_sets(12)
    many = Ablator(ask(model), operator)
    together = many.without(sets, lambda done: None)
    monkeypatch.setattr(ablation, "_AT_ONCE", {"cpu": 1})
    monkeypatch.setattr(ablation, "_OVERHEAD", {"cpu": 0})
    alone = Ablator(ask(model), operator)
    done = []
    np.testing.assert_allclose(together, alone.without(sets, done.append), atol=1e-5)
    assert done[-1] == 12 and len(done) == 13 and alone.forward < many.forward


@pytest.mark.parametrize("operator", ["hide", "delete", "replace"])
def test_removing_nothing_gives_exactly_the_plain_score(model, operator):
    question = ask(model, foil=[5, 6, 7])
    found = Ablator(question, operator).without(np.zeros((2, COUNT), bool), lambda done: None)
    assert np.array_equal(found, np.stack([question.plain.values] * 2))
    np.testing.assert_allclose(question.plain.values[0], plain_with_foil(model)[0], atol=1e-5)
    np.testing.assert_allclose(question.plain.values[1], plain_with_foil(model)[1], atol=1e-5)


def plain_with_foil(model):
    """S of both rows for the foil 5 6 7, by two plain passes."""
    with torch.no_grad():
        found = model.module(input_ids=torch.tensor([IDS[:COUNT]])).logits[0].log_softmax(-1)
        foil = model.module(input_ids=torch.tensor([[*IDS[: LONG + 1], 5, 6, 7]])).logits[0].log_softmax(-1)
    said = [float(found[LONG + k, IDS[LONG + 1 + k]]) for k in range(2)]
    other = [float(foil[LONG + k, token]) for k, token in enumerate([5, 6, 7])]
    return said[0] - other[0], said[1] - other[1] - other[2]


@pytest.mark.parametrize("operator", ["hide", "delete"])
def test_foils_are_ablated_in_their_own_sequence(model, operator):
    question = ask(model, foil=[5, 6, 7])
    sets = singles()
    found = Ablator(question, operator).without(sets, lambda done: None)
    plain = Ablator(ask(model), operator).without(sets, lambda done: None)
    # the foil alone, as a target of its own: rows 5 | 6 7
    ids = [*IDS[: LONG + 1], 5, 6, 7]
    foil = Ablator(question_of(model, ids, LONG, (1, 4)), operator).without(
        np.pad(sets, ((0, 0), (0, 1))), lambda done: None
    )
    np.testing.assert_allclose(found[:, 0], plain[:, 0] - foil[:, 0], atol=1e-5)
    visible = sets[:, : LONG + 1].any(axis=1)  # tokens of the target span are no part of the foil's sequence
    np.testing.assert_allclose(found[visible, 1], (plain[:, 1] - foil[:, 1] - foil[:, 2])[visible], atol=1e-5)


def test_deleting_the_predicting_token_reads_the_target_one_token_earlier():
    model = tiny_model("llama")
    question = ask(model, target=(0, 1))
    gone = np.zeros((3, LONG), bool)
    gone[0, -1] = gone[1, -3:] = gone[2, :] = True
    found = Ablator(question, "delete").without(gone, lambda done: None)
    with torch.no_grad():
        logits = model.module(input_ids=torch.tensor([IDS[:LONG]])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(found[:2, 0], [float(logits[LONG - 2, IDS[LONG]]), float(logits[LONG - 4, IDS[LONG]])],
                               atol=1e-5)  # fmt: skip
    assert np.isnan(found[2, 0])  # nothing is left that could predict


def test_a_unit_that_is_the_whole_past_of_a_target_is_not_measured():
    model = tiny_model("llama")
    question = question_of(model, IDS[:3], 1, (0, 2))
    method = get_method("occlusion")
    scores = method.run(model, question, method.params(operator="delete"), no_tick)
    assert scores.measured.tolist() == [False, True]
    assert np.isnan(scores.values[:, 0]).all()


def test_template_tokens_are_left_out_unless_asked_for():
    model = tiny_model("llama")
    roles = ["bos", *["template"] * 2, *["user"] * (LONG - 4), "template", *["answer"] * 4]
    question = ask(model, target=(0, 1), roles=roles)
    method = get_method("occlusion")
    scores = method.run(model, question, method.params(), no_tick)
    frame = np.array([role in ("bos", "template") for role in roles[:LONG]])
    assert np.array_equal(~scores.measured, frame)
    assert np.isnan(scores.values[0, frame]).all() and np.isfinite(scores.values[0, ~frame]).all()
    everything = method.run(model, question, method.params(include_template=True), no_tick)
    assert everything.measured.all()
    np.testing.assert_allclose(everything.values[0, ~frame], scores.values[0, ~frame], atol=1e-5)
    with pytest.raises(NotApplicable, match="Only BOS and template"):
        bare = question_of(model, IDS[:4], 3, roles=["bos", "template", "template", "answer"])
        method.run(model, bare, method.params(), no_tick)


def test_units_are_removed_as_a_whole():
    model = tiny_model("llama")
    groups = [i // 2 for i in range(LONG)] + [LONG + i for i in range(4)]  # pairs of tokens share a character
    question = ask(model, target=(0, 1), groups=groups)
    assert question.units[0] == (0, 2)
    method = get_method("occlusion")
    scores = method.run(model, question, method.params(), no_tick)
    assert scores.units == question.units and scores.values.shape == (1, len(question.units))
    pairs = np.zeros((len(question.units), LONG), bool)
    for row, (begin, end) in enumerate(question.units):
        pairs[row, begin:end] = True
    direct = question.plain.values[0] - Ablator(question, "hide").without(pairs, lambda done: None)[:, 0]
    np.testing.assert_allclose(scores.values[0], direct, atol=1e-6)


def test_a_dropped_sliding_window_is_found_before_anything_is_scored(monkeypatch):
    model = tiny_model("mistral")
    monkeypatch.setattr(ablation, "visible_keys", lambda model, length: torch.ones(length, length).tril().bool())
    with pytest.raises(NotApplicable, match="answers differently"):
        Ablator(ask(model), "hide")
    short = question_of(model, IDS[:8], 6)  # inside the window there is nothing to drop
    assert Ablator(short, "hide").checks[0].verdict == "ok"


def test_layers_that_read_tokens_without_attention_are_found():
    model = tiny_model("llama")
    # mixes each token with the one before it, as recurrent layers and convolutions do
    model.module.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out + out.roll(1, dims=1))
    with pytest.raises(NotApplicable, match="without attention"):
        Ablator(ask(model), "hide")


def test_a_model_without_a_usable_cache_runs_every_variant_in_full(monkeypatch):
    model = tiny_model("llama")
    fast = Ablator(ask(model), "hide")
    monkeypatch.setattr(ablation, "read_prefix", lambda model, ids: None)
    slow = Ablator(ask(model), "hide")
    assert "in full" in slow.checks[0].text and "computed once" in fast.checks[0].text
    sets = random_sets(6)
    np.testing.assert_allclose(fast.without(sets, lambda done: None), slow.without(sets, lambda done: None), atol=1e-5)


def test_a_wrong_cache_is_not_used(monkeypatch):
    model = tiny_model("llama")
    real = ablation.read_prefix
    monkeypatch.setattr(ablation, "read_prefix", lambda m, ids: [(k * 1.5, v) for k, v in real(m, ids)])
    ablator = Ablator(ask(model), "hide")
    assert ablator._runners[0].layers is None
    np.testing.assert_allclose(ablator.without(singles(), lambda done: None), naive_hide(model, singles()), atol=1e-5)


def test_a_model_whose_answers_depend_on_the_batch_is_refused():
    model = tiny_model("llama")
    model.module.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * len(out))
    for operator in ("hide", "delete", "replace"):
        with pytest.raises(NotApplicable):
            Ablator(ask(model), operator)


def test_memory_that_runs_out_leads_to_smaller_groups(monkeypatch):
    model = tiny_model("llama")
    sets = random_sets(12)
    wanted = Ablator(ask(model), "hide").without(sets, lambda done: None)
    real, sizes = ablation.logits_at, []

    def short_of_memory(model, ids, positions, **more):
        sizes.append(len(ids))
        if len(ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, ids, positions, **more)

    ablator = Ablator(ask(model), "hide")
    monkeypatch.setattr(ablation, "logits_at", short_of_memory)
    np.testing.assert_allclose(ablator.without(sets, lambda done: None), wanted, atol=1e-5)
    assert max(sizes) > 3 and min(sizes) <= 3
    monkeypatch.setattr(ablation, "logits_at", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
    with pytest.raises(torch.OutOfMemoryError):
        ablator.without(sets, lambda done: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_finite_and_keep_the_diagonal(model, dtype):
    hidden = torch.ones(2, COUNT, dtype=torch.bool)
    made = additive(visible_keys(model, COUNT), 3, COUNT, hidden, dtype)
    for mask in made.values() if isinstance(made, dict) else [made]:
        assert mask.dtype == dtype and torch.isfinite(mask).all()
        assert mask.shape == (2, 1, COUNT - 3, COUNT)
        allowed = mask[0, 0] == 0
        assert torch.equal(allowed, torch.eye(COUNT, dtype=torch.bool)[3:])


def test_grouping_is_as_cheap_as_any_other():
    def price(groups, starts, length, overhead):
        return sum(overhead + (end - begin) * (length - starts[begin]) for begin, end in groups)

    def every_grouping(count):
        for bits in range(2 ** (count - 1)):
            cuts = [0, *(i + 1 for i in range(count - 1) if bits >> i & 1), count]
            yield list(pairwise(cuts))

    rng = np.random.default_rng(0)
    for _ in range(30):
        count, length = int(rng.integers(1, 9)), 20
        starts = sorted(rng.integers(0, length, count).tolist())
        overhead, at_once = int(rng.integers(0, 15)), int(rng.integers(10, 80))
        found = group(starts, length, at_once=at_once, overhead=overhead)
        assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == count
        fits = [
            groups for groups in every_grouping(count)
            if all(end - begin == 1 or (end - begin) * (length - starts[begin]) <= at_once for begin, end in groups)
        ]  # fmt: skip
        assert price(found, starts, length, overhead) == min(price(g, starts, length, overhead) for g in fits)


def test_about_half_of_the_passes_are_saved():
    model = tiny_model("llama")
    ids = torch.randint(3, 300, (161,), generator=torch.Generator().manual_seed(2)).tolist()
    method = get_method("occlusion")
    scores = method.run(model, question_of(model, ids, 160), method.params(), no_tick)
    assert 75 < scores.passes.forward < 0.65 * 160
