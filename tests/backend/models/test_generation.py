"""Answers: what is generated, how likely each token is, and what the reader is told."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from backend.errors import BadRequest, Cancelled, ModelUnavailable, PromptTooLong
from backend.models.generation import answer, end_ids, generate_ids, token_statistics
from backend.models.passage import encode_prompt, encode_text
from backend.settings import Settings
from backend.types import AnswerRequest, Decoding, ModelRef, Prompt, Turn
from tests.support.tiny import FAMILIES, byte_tokenizer, sentencepiece_tokenizer, tiny_model

PROMPT = Prompt("The capital of France is")


def ask(model, prompt=PROMPT, continuation=None, **decoding):
    return answer(model, AnswerRequest(ModelRef("tiny"), prompt, Decoding(**decoding), continuation))


def greedy_by_hand(model, ids, steps):
    """Greedy decoding without a cache, token by token."""
    ids = list(ids)
    ends = end_ids(model)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model.module(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answer_takes_the_most_likely_token_each_time(family):
    model = tiny_model(family)
    prompt = encode_prompt(model, PROMPT)
    result = ask(model, max_new_tokens=10)
    assert list(result.passage.ids) == greedy_by_hand(model, prompt.ids, 10)
    assert all(target.rank == 1 for target in result.targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_the_full_softmax(family):
    model = tiny_model(family)
    ids = [*encode_prompt(model, PROMPT).ids, *encode_text(model, " Paris. What?")]
    length = encode_prompt(model, PROMPT).prompt_length
    with torch.no_grad():
        table = model.module(torch.tensor([ids])).logits[0].double().softmax(-1)
    for target in token_statistics(model, ids, length):
        row = table[target.position - 1]
        order = row.argsort(descending=True).tolist()
        assert target.id == ids[target.position]
        assert target.probability == pytest.approx(float(row[target.id]), rel=1e-4)
        assert target.rank == order.index(target.id) + 1
        assert target.runner_up_id == next(i for i in order if i != target.id)
        assert target.runner_up_probability == pytest.approx(float(row[target.runner_up_id]), rel=1e-4)


def test_statistics_of_a_long_answer_are_the_same_in_pieces(tiny, monkeypatch):
    ids = list(range(5, 105))
    whole = token_statistics(tiny, ids, 4)
    monkeypatch.setattr("backend.models.generation._ROWS", 7)
    assert token_statistics(tiny, ids, 4) == whole
    assert [t.position for t in whole] == list(range(4, 100))


def test_one_token_answer_is_explained_too(tiny):
    (target,) = token_statistics(tiny, [5, 6], 1)
    assert target.position == 1 and 0 < target.probability < 1


@pytest.mark.parametrize(("ids", "length"), [([5, 6], 2), ([5, 6], 0), ([5], 1)])
def test_statistics_need_a_prompt_and_an_answer(tiny, ids, length):
    with pytest.raises(ValueError, match="at least one"):
        token_statistics(tiny, ids, length)


def test_broken_numbers_are_a_sentence(tiny):
    with torch.no_grad():
        tiny.module.lm_head.weight[7] = float("nan")
    with pytest.raises(ModelUnavailable, match="infinite or not numbers"):
        ask(tiny, max_new_tokens=2, continuation="x")


def test_sampling_follows_the_seed_and_leaves_the_random_state_alone(tiny):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    results = [ask(tiny, temperature=1.5, seed=seed, max_new_tokens=12).answer_ids for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1] != results[2]


def test_sampling_frequencies_follow_the_temperature(tiny):
    """The first token of many samples against the exact distribution: 400 draws, five standard errors."""
    ids = encode_prompt(tiny, PROMPT).ids
    with torch.no_grad():
        logits = tiny.module(torch.tensor([ids])).logits[0, -1]
    p = (logits / 0.5).softmax(-1)
    top = int(p.argmax())
    decoding = Decoding(max_new_tokens=1, temperature=0.5)
    hits = sum(generate_ids(tiny, ids, replace(decoding, seed=seed))[0] == top for seed in range(400))
    expected = float(p[top])
    assert abs(hits / 400 - expected) < 5 * math.sqrt(expected * (1 - expected) / 400)


def test_small_nucleus_is_greedy(tiny):
    greedy = ask(tiny, max_new_tokens=6).answer_ids
    assert ask(tiny, temperature=1.0, top_p=1e-6, seed=5, max_new_tokens=6).answer_ids == greedy


def test_settings_of_the_model_do_not_leak_in(tiny):
    expected = ask(tiny, max_new_tokens=10).answer_ids
    sampled = ask(tiny, temperature=1.0, seed=3, max_new_tokens=10).answer_ids
    smuggler = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=1,
        repetition_penalty=9.0,
        no_repeat_ngram_size=1,
        min_new_tokens=3,
        suppress_tokens=list(expected),
        eos_token_id=2,
    )
    tiny.module.generation_config = smuggler
    assert ask(tiny, max_new_tokens=10).answer_ids == expected
    assert ask(tiny, temperature=1.0, seed=3, max_new_tokens=10).answer_ids == sampled
    assert tiny.module.generation_config is smuggler


def test_all_ends_of_the_model_end_an_answer(tiny):
    long = ask(tiny, max_new_tokens=10)
    stop = long.answer_ids[3]
    first = long.answer_ids.index(stop)
    tiny.module.generation_config.eos_token_id = [2, stop]
    short = ask(tiny, max_new_tokens=10)
    assert short.answer_ids == long.answer_ids[: first + 1]
    assert not any("stopped at the limit" in note for note in short.notes)
    assert any("stopped at the limit of 10 tokens" in note for note in long.notes)


def test_model_that_ends_at_once_answers_with_its_end_token(tiny):
    first = ask(tiny, max_new_tokens=1).answer_ids[0]
    tiny.module.generation_config.eos_token_id = [first]
    result = ask(tiny, max_new_tokens=8)
    assert result.answer_ids == (first,)
    assert len(result.targets) == 1
    assert not any("limit" in note for note in result.notes)


def test_end_of_turn_is_a_special_token_of_the_answer(tiny):
    with torch.no_grad():
        tiny.module.lm_head.weight.zero_()
        tiny.module.lm_head.weight[2] = 1.0
        tiny.module.model.norm.weight.fill_(0.0)
    # All logits are equal now, and the first of equals wins: make the end token the only positive one.
    tiny.module.lm_head.register_forward_hook(lambda m, i, o: o.index_fill(-1, torch.tensor([2]), 50.0))
    result = ask(tiny, max_new_tokens=5)
    assert [(t.text, t.role, t.special) for t in result.passage.answer_tokens] == [("<|im_end|>", "answer", True)]
    assert any("nearly certain" in note for note in result.notes)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_cancel_takes_effect_within_one_token(tiny, step):
    calls = []

    def tick(done, total):
        calls.append((done, total))
        if done == step:
            raise Cancelled

    with pytest.raises(Cancelled):
        generate_ids(tiny, [5, 6, 7], Decoding(max_new_tokens=50), tick)
    assert calls == [(i, 50) for i in range(1, step + 1)]
    assert ask(tiny, max_new_tokens=3).answer_ids  # the model is as before


def test_given_continuation_is_read_and_not_generated(tiny, monkeypatch):
    monkeypatch.setattr(tiny.module, "generate", lambda *a, **k: pytest.fail("generated"))
    result = ask(tiny, continuation=" Paris")
    assert result.answer_ids == encode_text(tiny, " Paris")
    assert result.decoding is None
    assert [t.position for t in result.targets] == [
        result.passage.prompt_length + k for k in range(len(result.answer_ids))
    ]


def test_generated_and_given_answers_read_alike(tiny):
    generated = ask(tiny, max_new_tokens=6)
    assert token_statistics(tiny, generated.passage.ids, generated.passage.prompt_length) == generated.targets


def test_chat_is_answered(tiny):
    result = ask(tiny, Prompt(turns=(Turn("user", "Hi"),)), max_new_tokens=3)
    assert result.passage.rendered.endswith("<|im_start|>assistant\n")
    assert all(token.role == "answer" for token in result.passage.answer_tokens)


def test_notes_of_model_and_prompt_reach_the_answer(tiny):
    tiny.notes = ("Two stored weights are not used.",)
    notes = ask(tiny, Prompt("The capital is "), max_new_tokens=2).notes
    assert notes[0] == "Two stored weights are not used."
    assert any("ends with a space" in note for note in notes)


def boost(model, token_id):
    """Make one token the most likely one everywhere."""
    hook = lambda m, i, o: o.index_fill(-1, torch.tensor([token_id]), 100.0)  # noqa: E731
    return model.module.get_output_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, sentencepiece_tokenizer])
def test_forgotten_space_is_noted(tokenizer):
    model = tiny_model("llama", tokenizer=tokenizer())
    boost(model, encode_text(model, " Paris")[0])
    notes = ask(model, continuation="Paris").notes
    assert any("with a space at its start (first token: rank 1)" in note for note in notes)
    assert not any("space at its start" in note for note in ask(model, continuation=" Paris").notes)


def test_superfluous_space_is_noted(tiny):
    boost(tiny, encode_text(tiny, "Paris")[0])
    notes = ask(tiny, continuation=" Paris").notes
    assert any("without a space at its start (first token: rank 1)" in note for note in notes)


def test_near_certainty_suggests_a_foil(tiny):
    boost(tiny, encode_text(tiny, "x")[0])
    assert any("nearly certain" in note and "foil" in note for note in ask(tiny, continuation="x").notes)


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        ({"max_new_tokens": 0}, "at least one token"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "nucleus"),
        ({"top_p": 1.5}, "nucleus"),
    ],
)
def test_decoding_settings_out_of_range(tiny, decoding, words):
    with pytest.raises(BadRequest, match=words):
        ask(tiny, **decoding)


def test_empty_continuation_is_refused(tiny):
    with pytest.raises(BadRequest, match="empty"):
        ask(tiny, continuation="")


def test_answer_that_would_not_fit_is_refused_before_generating(tiny, monkeypatch):
    monkeypatch.setattr(tiny.module, "generate", lambda *a, **k: pytest.fail("generated"))
    with pytest.raises(PromptTooLong, match="the answer needs 300"):
        ask(tiny, max_new_tokens=300)


def test_limits_are_those_given(tiny):
    request = AnswerRequest(ModelRef("tiny"), PROMPT)
    with pytest.raises(PromptTooLong):
        answer(tiny, request, settings=Settings(max_prompt_tokens=2))


@pytest.mark.smollm
def test_smollm_knows_the_capital_of_france(smollm):
    result = ask(smollm, max_new_tokens=3)
    assert result.targets[0].text == " Paris"
    assert result.targets[0].rank == 1
    given = ask(smollm, continuation="Paris")
    assert any("with a space at its start (first token: rank 1)" in note for note in given.notes)
