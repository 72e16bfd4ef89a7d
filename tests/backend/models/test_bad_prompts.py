"""Prompts, answers and continuations that cannot be read, or are too long: each has its own sentence."""

import pytest

from backend.errors import BadRequest, ModelUnavailable, NotApplicable, PromptTooLong
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.settings import Settings
from backend.types import Prompt, Turn
from tests.support.tiny import byte_tokenizer, tiny_model

CHAT = Prompt(turns=(Turn("system", "Be brief."), Turn("user", "Hi there")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "The prompt is empty"),
        (" \n\t ", "nothing but white space"),
        ("a\0b", "NUL character at position 2"),
        ("ab\ud83d", r"half a character \(U\+D83D\) at position 3"),
        ("\udc00", r"U\+DC00"),
    ],
)
def test_prompts_that_cannot_be_read(tiny, text, words):
    with pytest.raises(BadRequest, match=words) as caught:
        encode_prompt(tiny, Prompt(text))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ((Turn("user", ""),), "Turn 1 is empty"),
        ((Turn("system", " "), Turn("user", "x")), "Turn 1 holds nothing but white space"),
        ((Turn("user", "x"), Turn("assistant", "a\0"), Turn("user", "y")), "Turn 2 holds a NUL"),
        ((Turn("user", "x"), Turn("assistant", "y")), "last turn must be the user's"),
        ((Turn("wizard", "x"),), "chat role named 'wizard'"),
    ],
)
def test_chats_that_cannot_be_read(tiny, turns, words):
    with pytest.raises(BadRequest, match=words):
        encode_prompt(tiny, Prompt(turns=turns))


def test_template_that_refuses_the_turns_says_why(tiny):
    tiny.tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(BadRequest, match="refuses these turns: no system role here"):
        encode_prompt(tiny, CHAT)


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] ", "{{ messages[7].content.x }}", "{{ 1 + 'a' }}"])
def test_broken_template_is_a_sentence(tiny, template):
    tiny.tokenizer.chat_template = template
    with pytest.raises(BadRequest, match="refuses these turns"):
        encode_prompt(tiny, CHAT)


def test_model_without_template_offers_the_plain_prompt():
    model = tiny_model("gpt2", tokenizer=byte_tokenizer(chat=False))
    with pytest.raises(NotApplicable, match="no chat template") as caught:
        encode_prompt(model, CHAT)
    assert "plain prompt" in caught.value.hint


def test_too_many_characters_are_refused_before_tokenizing(tiny, monkeypatch):
    monkeypatch.setattr("backend.models.passage.encode", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(PromptTooLong, match="100,000 characters; at most 50,000") as caught:
        encode_prompt(tiny, Prompt("a" * 100_000), Settings())
    assert caught.value.limit == 50_000 and caught.value.tokens == 0


def test_characters_of_all_turns_count(tiny):
    turns = (Turn("system", "a" * 30), Turn("user", "b" * 30))
    with pytest.raises(PromptTooLong, match="60 characters"):
        encode_prompt(tiny, Prompt(turns=turns), Settings(max_prompt_chars=50))


def test_too_many_tokens_carry_the_counts(tiny):
    with pytest.raises(PromptTooLong, match="at most 20 are allowed") as caught:
        encode_prompt(tiny, Prompt("x y z " * 20), Settings(max_prompt_tokens=20))
    assert caught.value.limit == 20 and caught.value.tokens > 20


def test_context_must_hold_prompt_and_answer(tiny):
    prompt = Prompt("x " * 100)
    length = encode_prompt(tiny, prompt).prompt_length
    encode_prompt(tiny, prompt, room=256 - length)
    with pytest.raises(PromptTooLong, match="reads at most 256") as caught:
        encode_prompt(tiny, prompt, room=257 - length)
    assert caught.value.tokens == length and caught.value.limit == length - 1


def test_answer_beyond_the_context_is_refused(tiny):
    passage = encode_prompt(tiny, Prompt("x"))
    append_answer(tiny, passage, [5] * 255)
    with pytest.raises(PromptTooLong):
        append_answer(tiny, passage, [5] * 256)


def test_ids_without_embedding_are_refused():
    model = tiny_model("llama", vocab_size=300)
    with pytest.raises(ModelUnavailable, match="only 300 tokens"):
        encode_prompt(model, Prompt("The capital of France"))
    with pytest.raises(ModelUnavailable, match="only 300 tokens"):
        encode_text(model, "The capital of France")


@pytest.mark.parametrize(("ids", "words"), [([], "answer is empty"), ([5, 400], "holds the id 400"), ([-1], "id -1")])
def test_answers_that_are_none(tiny, ids, words):
    with pytest.raises(BadRequest, match=words):
        append_answer(tiny, encode_prompt(tiny, Prompt("x")), ids)


@pytest.mark.parametrize(("text", "words"), [("", "empty"), ("a\0", "NUL"), ("\ud800", "half a character")])
def test_continuations_that_are_none(tiny, text, words):
    with pytest.raises(BadRequest, match=words):
        encode_text(tiny, text)
