"""Needle prompts: exact length, exact token sets, an answer that stands nowhere else, and the gate."""

import random
from dataclasses import replace

import pytest
import torch

from backend.errors import BadRequest, NotApplicable, PromptTooLong
from backend.evaluation.distractors import SECRETS, sentences
from backend.evaluation.needle import NeedleSpec, ask_secret, plant
from backend.evaluation.needle_text import fill
from tests.support.reading_toy import reading_model
from tests.support.tiny import sentencepiece_tokenizer, tiny_model


@pytest.fixture(scope="module")
def reader():
    return reading_model()


def text_of(needle, positions):
    return "".join(needle.passage.tokens[i].text for i in positions)


def test_sentences_are_many_different_and_beside_the_point():
    found = sentences(random.Random(0), 700)
    assert len(set(found)) == len(found) == 700
    assert found == sentences(random.Random(0), 700) != sentences(random.Random(1), 700)
    lengths = [len(sentence.split()) for sentence in found]
    assert min(lengths) <= 4 and max(lengths) >= 20
    for sentence in found:
        assert sentence[0].isupper() and sentence.endswith(".")
        assert "secret" not in sentence and "gate" not in sentence.split()
        assert not [word for word in SECRETS if word in sentence.casefold()]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize(("length", "depth"), [(320, 10), (320, 50), (401, 90), (900, 0), (900, 100), (1001, 30)])
def test_length_and_sets_are_exact(reader, length, depth, words, chat):
    needle = plant(reader, NeedleSpec(length, depth, 3, chat, words))
    sets, tokens = needle.sets, needle.passage.tokens
    assert needle.passage.prompt_length == length
    parts = (sets.bos, sets.template, sets.system, sets.distractor, sets.needle, sets.query)
    assert sorted(i for part in parts for i in part) == list(range(length))
    assert sets.counted == tuple(i for i in range(length) if i not in (*sets.bos, *sets.template))
    # the first token stands in for BOS, which this tokenizer does not write
    assert sets.bos == (0,)
    first = "" if chat else tokens[0].text
    assert first + text_of(needle, sets.system) == ("Read the text and answer with one word from it."
        if words == 1 else "Read the text and answer with the exact words from it.")  # fmt: skip
    assert text_of(needle, sets.needle).strip() == f"The secret word of the {needle.entity} gate is {needle.secret}."
    lead = f" The secret word of the {needle.entity} gate is"
    question = f" What is the secret word of the {needle.entity} gate? Your answer is:"
    assert text_of(needle, sets.query) == (question if chat else question + lead)
    assert text_of(needle, sets.answer_word) == " " + needle.secret
    assert text_of(needle, sets.entity).strip() == needle.entity
    assert all(tokens[i].role == "template" for i in sets.template)
    assert (sets.template != ()) == chat
    # what stands before the needle is the wanted part of the distractor, as nearly as sentences allow
    before = sum(i < sets.needle[0] for i in sets.distractor)
    assert needle.depth_reached == pytest.approx(100 * before / len(sets.distractor), abs=1)
    assert abs(before - depth / 100 * len(sets.distractor)) < 60


@pytest.mark.parametrize("words", [1, 3])
def test_the_answer_stands_nowhere_else(reader, words):
    for case in range(20):
        needle = plant(reader, NeedleSpec(400, 50, case, words=words))
        start, stop = needle.target
        secret = needle.answer_ids[start:stop]
        assert len(secret) == words == len(needle.sets.answer_word)
        ids = needle.passage.ids[: needle.passage.prompt_length]
        assert [i for i, token in enumerate(ids) if token in secret] == list(needle.sets.answer_word)
        for word in needle.secret.split():
            assert needle.prompt.text.count(word) == 1


def test_the_same_spec_makes_the_same_prompt_and_another_case_another(reader):
    first, again, other = (plant(reader, NeedleSpec(400, 50, case)) for case in (0, 0, 1))
    assert first.prompt == again.prompt and first.sets == again.sets
    assert first.prompt != other.prompt
    assert first.entity != other.entity


def test_a_chat_leads_in_to_the_secret(reader):
    needle = plant(reader, NeedleSpec(400, 50, 0, chat=True))
    assert [turn.role for turn in needle.prompt.turns] == ["system", "user"]
    answer = needle.passage.answer_tokens
    assert "".join(token.text for token in answer) == f"The secret word of the {needle.entity} gate is {needle.secret}"
    assert needle.target == (len(answer) - 1, len(answer))
    assert needle.sets.lead == tuple(range(400, 400 + len(answer) - 1))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("words", [1, 2])
def test_the_gate_says_what_the_model_says(reader, chat, words):
    needle = plant(reader, NeedleSpec(400, 50, 0, chat, words))
    ids, start = list(needle.passage.ids), needle.passage.prompt_length + needle.target[0]
    for position in range(start, len(ids)):  # greedy decoding, token by token
        logits = reader.module(torch.tensor([ids[:position]])).logits[0, -1]
        if logits.argmax() != ids[position]:
            break
    else:
        position = len(ids)
    gate = ask_secret(reader, needle)
    assert gate.passed == (position == len(ids))
    assert gate.passed == (words == 1)  # this model says the same word again and again
    if words == 1:
        assert gate.said == " " + needle.secret
        assert gate.probability == pytest.approx(1.0, abs=1e-6)


def test_a_model_that_cannot_read_does_not_pass(tiny):
    passed = [ask_secret(tiny_reading(), plant(tiny_reading(), NeedleSpec(400, 50, case))).passed for case in range(5)]
    assert not any(passed)


def tiny_reading():
    return tiny_model("llama", max_position_embeddings=1024)


def test_a_small_vocabulary_gives_its_own_words():
    needle = plant(tiny_reading(), NeedleSpec(500, 50, 0))
    assert needle.secret not in SECRETS
    assert len(needle.sets.answer_word) == 1
    assert needle.prompt.text.casefold().count(needle.secret.casefold()) == 1


def test_a_tokenizer_with_bos_and_a_space_before_the_text():
    model = tiny_model("llama", tokenizer=sentencepiece_tokenizer(), max_position_embeddings=4096)
    needle = plant(model, NeedleSpec(1200, 50, 0))
    assert needle.passage.tokens[0].role == "bos" and needle.sets.bos == (0,)
    assert needle.passage.prompt_length == 1200
    assert text_of(needle, needle.sets.system).strip() == "Read the text and answer with one word from it."
    assert text_of(needle, needle.sets.needle).strip().endswith(f"gate is {needle.secret}.")


def test_what_cannot_be_planted_is_said(reader):
    with pytest.raises(BadRequest, match="alone take"):
        plant(reader, NeedleSpec(40, 50, 0))
    with pytest.raises(BadRequest, match="between 0 and 100"):
        plant(reader, NeedleSpec(400, 101, 0))
    with pytest.raises(NotApplicable, match="no chat template"):
        plant(reading_model(chat=False), NeedleSpec(400, 50, 0, chat=True))
    with pytest.raises(PromptTooLong):
        plant(replace(reader, info=replace(reader.info, context_length=300)), NeedleSpec(400, 50, 0))


def test_filling_hits_every_size():
    rng = random.Random(0)
    sizes = [rng.randint(4, 30) for _ in range(300)]
    for room in range(60, 400, 7):
        for depth in (10, 50, 90):
            before, after = fill(sizes, room, depth, random.Random(room))
            assert not set(before) & set(after)
            got = sum(sizes[i] for i in before)
            assert got + sum(sizes[i] for i in after) == room
            assert abs(got - room * depth / 100) <= 4
    assert fill([10, 10], 15, 50, rng) is None
    assert fill([10, 10], 20, 50, rng) in (([0], [1]), ([1], [0]))
