"""Prompts and answers as tokens: characters in every script, roles, control tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from backend.errors import BadRequest
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.types import Prompt, Turn
from tests.support.tiny import byte_tokenizer, sentencepiece_tokenizer, tiny_model

SCRIPTS = {
    "spaces": "  two  spaces, a tab\t, lines\n\n\r\nand an end  ",
    "html": "<b onclick='x()'>bold</b> & &amp; <script>alert(1)</script>",
    "markdown": "# Title\n\n**bold** _it_ `code` [a](b) $x^2$ :smile:",
    "latex": r"\frac{a}{b} \\ $$\int_0^1 x\,dx$$ % end",
    "emoji": "👩‍👩‍👧‍👦 👍🏽 🇫🇷🇩🇪 ❤️ end",
    "arabic": "مرحبا بالعالم، كيف حالُكَ؟",
    "devanagari": "नमस्ते दुनिया क्ष्म",
    "chinese": "你好\uff0c世界。日本語もある。",
    "combining": "e\u0301a\u0308\u0304 Z\u0351\u036b\u0343algo n\u0303",
    "thai": "สวัสดีชาวโลก",
    "odd": "\ufffd \u200b zero \u2028 line \x7f \U0010ffff",
}

TOKENIZERS = {
    "byte level": byte_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "unigram": lambda: sentencepiece_tokenizer("unigram"),
}
CHAT = Prompt(turns=(Turn("system", "Be brief."), Turn("user", "Hi there")))


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request):
    tokenizer = TOKENIZERS[request.param]()
    return tiny_model("llama", tokenizer=tokenizer, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def bytewise():
    """A model whose vocabulary is the 256 bytes: every character beyond ASCII is several tokens."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    return tiny_model("llama", tokenizer=fast, max_position_embeddings=4096)


def own_text(passage):
    """The characters of all tokens that the tokenizer did not put in front."""
    return "".join(token.text for token in passage.prompt_tokens if token.role != "bos")


def units(tokens):
    """The display units: the texts of tokens with the same group, joined."""
    shown = {}
    for token in tokens:
        shown[token.group] = shown.get(token.group, "") + token.text
    return list(shown.values())


# ---------------------------------------------------------------------------------------------------- characters


@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_spell_the_prompt(model, script):
    passage = encode_prompt(model, Prompt(SCRIPTS[script]))
    assert passage.rendered == SCRIPTS[script]
    assert own_text(passage) == SCRIPTS[script]


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip))
def test_tokens_spell_any_prompt(model, text):
    try:
        passage = encode_prompt(model, Prompt(text))
    except BadRequest as error:
        assert "makes no token" in error.message
        return
    assert own_text(passage) == text


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁\ufffd"), min_size=1))
def test_a_given_continuation_is_appended_to_the_letter(model, text):
    prompt = encode_prompt(model, Prompt("The capital"))
    whole = append_answer(model, prompt, encode_text(model, text))
    assert "".join(token.text for token in whole.answer_tokens) == text


@pytest.mark.parametrize("script", SCRIPTS)
def test_groups_are_numbered_without_gaps(model, script):
    passage = encode_prompt(model, Prompt(SCRIPTS[script]))
    whole = append_answer(model, passage, encode_text(model, SCRIPTS[script]))
    groups = [token.group for token in whole.tokens]
    assert sorted(set(groups)) == list(range(groups[-1] + 1))
    assert groups == sorted(groups)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a👩‍👩‍👧‍👦b", ["a", "👩‍👩‍👧‍👦", "b"]),
        ("👍🏽👍", ["👍🏽", "👍"]),
        ("🇫🇷🇩🇪", ["🇫🇷", "🇩🇪"]),
        ("né", ["n", "é"]),
        ("ne\u0301e", ["n", "e\u0301", "e"]),
        ("世界", ["世", "界"]),
        ("م\u064eر", ["م\u064e", "ر"]),
        ("हिन्दी", ["हि", "न्दी"]),
        ("a b", ["a", " ", "b"]),
    ],
)
def test_pieces_of_one_character_are_one_unit(bytewise, text, expected):
    assert units(encode_prompt(bytewise, Prompt(text)).tokens) == expected
    answer = append_answer(bytewise, encode_prompt(bytewise, Prompt("x")), encode_text(bytewise, text))
    assert units(answer.answer_tokens) == expected


def test_first_piece_carries_the_character(bytewise):
    tokens = encode_prompt(bytewise, Prompt("x世")).tokens
    assert [token.text for token in tokens] == ["x", "世", "", ""]
    assert [token.group for token in tokens] == [0, 1, 1, 1]


def test_unit_never_reaches_from_prompt_to_answer(bytewise):
    passage = encode_prompt(bytewise, Prompt("e"))
    whole = append_answer(bytewise, passage, encode_text(bytewise, "\u0301"))
    assert units(whole.tokens) == ["e", "\u0301"]


def test_unit_never_reaches_from_template_to_message(tiny):
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "\u0301x"),)))
    assert own_text(passage) == passage.rendered
    first = next(token for token in passage.tokens if token.role == "user")
    before = passage.tokens[: passage.tokens.index(first)]
    assert before and all(token.group < first.group for token in before)
    assert {token.role for token in passage.tokens if token.group == first.group} == {"user"}


def test_bytes_that_make_no_character_are_shown_as_escapes(bytewise):
    prompt = encode_prompt(bytewise, Prompt("x"))
    good = encode_text(bytewise, "é")
    cases = {
        (good[0],): ["\\xc3"],  # an answer that stopped in the middle of a character
        (good[1],): ["\\xa9"],
        (good[0], *encode_text(bytewise, "a")): ["\\xc3", "a"],
        (*good, good[0], bytewise.tokenizer.eos_token_id): ["é", "", "\\xc3", "<|end|>"],
        encode_text(bytewise, "\ufffd"): ["\\ufffd", "", ""],  # the model wrote the replacement character itself
        (good[0], *encode_text(bytewise, "世")): ["\\xc3", "世", "", ""],
    }
    for ids, expected in cases.items():
        tokens = append_answer(bytewise, prompt, ids).answer_tokens
        assert [token.text for token in tokens] == expected
        assert tokens[-1].special is (tokens[-1].text == "<|end|>")


def test_answer_keeps_its_leading_space(model):
    prompt = encode_prompt(model, Prompt("The"))
    for text in (" Paris", "Paris", "  Paris", "\nParis", "\n\n Paris"):
        tokens = append_answer(model, prompt, encode_text(model, text)).answer_tokens
        assert "".join(token.text for token in tokens) == text


def test_answer_ids_are_kept_even_if_encoding_their_text_gives_others(bytewise, tiny):
    split = [*encode_text(tiny, "P"), *encode_text(tiny, "a"), *encode_text(tiny, "r"), *encode_text(tiny, "is")]
    passage = append_answer(tiny, encode_prompt(tiny, Prompt("x")), split)
    assert [token.id for token in passage.answer_tokens] == split
    assert list(encode_text(tiny, "Paris")) != split


# ---------------------------------------------------------------------------------------------------- roles


def roles(passage):
    """Role of each run of tokens with its text."""
    runs = []
    for token in passage.tokens:
        if runs and runs[-1][0] == token.role:
            runs[-1][1] += token.text
        else:
            runs.append([token.role, token.text])
    return [tuple(run) for run in runs]


def test_plain_prompt_is_the_users(tiny):
    assert roles(encode_prompt(tiny, Prompt("What is it?"))) == [("user", "What is it?")]


def test_chat_is_cut_into_its_messages(tiny):
    turns = (
        Turn("system", "Be brief."),
        Turn("user", "Hi"),
        Turn("assistant", "Hello!"),
        Turn("user", "Why?"),
    )
    passage = encode_prompt(tiny, Prompt(turns=turns))
    assert roles(passage) == [
        ("template", "<|im_start|>system\n"),
        ("system", "Be brief."),
        ("template", "<|im_end|>\n<|im_start|>user\n"),
        ("user", "Hi"),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
        ("document", "Hello!"),
        ("template", "<|im_end|>\n<|im_start|>user\n"),
        ("user", "Why?"),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert passage.rendered == "".join(text for _, text in roles(passage))
    assert passage.notes == ()


@pytest.mark.parametrize("content", ["user", "system", "assistant", "\nuser\n", "im_end", "|", "a"])
def test_message_that_repeats_words_of_the_template_is_found(tiny, content):
    turns = (Turn("system", content), Turn("user", content))
    found = [run for run in roles(encode_prompt(tiny, Prompt(turns=turns))) if run[0] != "template"]
    assert found == [("system", content.strip()), ("user", content.strip())]


def test_trimmed_message_is_found(tiny):
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "  \n hello \n\n"),)))
    assert ("user", "hello") in roles(passage)


def test_empty_system_turn_switches_a_default_system_message_off(tiny):
    passage = encode_prompt(tiny, Prompt(turns=(Turn("system", ""), Turn("user", "Hi"))))
    assert passage.rendered.startswith("<|im_start|>system\n<|im_end|>")
    assert {token.role for token in passage.tokens} == {"template", "user"}


def test_template_that_changes_messages_is_noted(tiny):
    tiny.tokenizer.chat_template = "<|im_start|>{{ messages[0]['content'] | upper }}<|im_end|>"
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "hello"),)))
    assert roles(passage) == [("template", "<|im_start|>"), ("user", "HELLO"), ("template", "<|im_end|>")]
    assert "could not be located" in passage.notes[0]


def test_template_whose_frame_depends_on_the_message_is_searched(tiny):
    tiny.tokenizer.chat_template = "{{ messages[0]['content'] | length }}: {{ messages[0]['content'] }}!"
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "hello"),)))
    assert roles(passage) == [("template", "5: "), ("user", "hello"), ("template", "!")]


def test_template_with_a_date_gives_the_same_ids_every_day(tiny):
    tiny.tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "hello"),)))
    assert passage.rendered == "26 Jul 2024 hello"
    assert "2024-07-26" in passage.notes[0]


def test_special_tokens_are_marked_and_alone(tiny):
    passage = encode_prompt(tiny, CHAT)
    special = [token for token in passage.tokens if token.special]
    assert [token.text for token in special] == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    groups = [token.group for token in passage.tokens]
    assert all(groups.count(token.group) == 1 for token in special)


def test_control_tokens_that_a_person_types_are_noted(tiny):
    passage = encode_prompt(tiny, Prompt(turns=(Turn("user", "say <|im_end|> now"),)))
    assert "spells control tokens" in passage.notes[0]
    assert ("user", "say <|im_end|> now") in roles(passage)
    assert encode_prompt(tiny, CHAT).notes == ()


def test_trailing_space_is_noted(tiny):
    assert "ends with a space" in encode_prompt(tiny, Prompt("The capital is ")).notes[0]


# ---------------------------------------------------------------------------------------------------- BOS


@pytest.fixture
def with_bos():
    return tiny_model("llama", tokenizer=sentencepiece_tokenizer())


def test_bos_of_the_tokenizer_stands_in_front(with_bos):
    passage = encode_prompt(with_bos, Prompt("The"))
    assert [(t.text, t.role, t.special) for t in passage.tokens] == [("<s>", "bos", True), ("The", "user", False)]
    assert passage.rendered == "The"


def test_bos_that_the_person_typed_is_not_doubled(with_bos):
    passage = encode_prompt(with_bos, Prompt("<s>The"))
    assert [token.id for token in passage.tokens].count(with_bos.tokenizer.bos_token_id) == 1
    assert passage.tokens[0].role == "bos"


def test_bos_of_the_template_is_the_only_one(with_bos):
    with_bos.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    passage = encode_prompt(with_bos, CHAT)
    assert [token.id for token in passage.tokens].count(with_bos.tokenizer.bos_token_id) == 1
    assert passage.tokens[0].role == "bos"
    assert "".join(token.text for token in passage.tokens) == passage.rendered == "<s>[Be brief.][Hi there]"


@pytest.mark.parametrize("text", ["<s><s>The"])
def test_two_bos_are_refused(with_bos, text):
    with pytest.raises(BadRequest, match="starts with <s> twice"):
        encode_prompt(with_bos, Prompt(text))


def test_template_with_two_bos_is_refused(with_bos):
    with_bos.tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}{{ messages[-1]['content'] }}"
    with pytest.raises(BadRequest, match="twice"):
        encode_prompt(with_bos, CHAT)


# ---------------------------------------------------------------------------------------------------- real tokenizer


@pytest.mark.smollm
@pytest.mark.parametrize("script", SCRIPTS)
def test_smollm_spells_every_script(smollm, script):
    text = SCRIPTS[script]
    passage = encode_prompt(smollm, Prompt(turns=(Turn("user", text),)))
    assert "".join(token.text for token in passage.tokens) == passage.rendered
    # A token across the border, e.g. of the line break before a message and its first space, is the message's.
    assert "".join(token.text for token in passage.tokens if token.role == "user").removeprefix("\n") == text
    whole = append_answer(smollm, encode_prompt(smollm, Prompt("x")), encode_text(smollm, text))
    shown = "".join(token.text for token in whole.answer_tokens)
    assert shown == text.replace("\ufffd", "\\ufffd")


@pytest.mark.smollm
def test_smollm_pieces_of_an_emoji_are_one_unit(smollm):
    assert units(encode_prompt(smollm, Prompt("a 👩‍👩‍👧‍👦 b")).tokens) == ["a", " 👩‍👩‍👧‍👦", " b"]


@pytest.mark.smollm
def test_smollm_default_system_message_is_template(smollm):
    passage = encode_prompt(smollm, Prompt(turns=(Turn("user", "Hi"),)))
    runs = roles(passage)
    assert runs[0] == ("bos", "<|im_start|>")
    assert runs[1][0] == "template" and "named SmolLM" in runs[1][1]
    assert runs[2] == ("user", "Hi")
