# ruff: noqa: RUF001 - punctuation of many scripts is the subject here
import re

import pytest

from backend.errors import BadRequest
from backend.saliency.units import level_rule, make_units, unit_text
from backend.types import Token


def tokens_of(*pieces, role="user"):
    """Tokens from texts; a tuple of texts is one group (pieces of one character)."""
    out = []
    for group, piece in enumerate(pieces):
        for text in piece if isinstance(piece, tuple) else (piece,):
            out.append(Token(id=len(out), text=text, role=role, group=group))
    return out


def cut(tokens, level):
    return [unit_text(tokens, unit) for unit in make_units(tokens, level)]


def split_like_a_tokenizer(text):
    return re.findall(r" ?\w+|[^\w\s]|\s", text)


def assert_partition(units, count):
    assert [i for start, stop in units for i in range(start, stop)] == list(range(count))
    assert all(stop > start for start, stop in units)


def test_tokens_merge_pieces_of_one_character():
    tokens = tokens_of("Hi", (" 👩", "", ""), "!")
    assert make_units(tokens, "token") == ((0, 1), (1, 4), (4, 5))
    assert cut(tokens, "token") == ["Hi", " 👩", "!"]


def test_pieces_of_a_joined_emoji_are_never_separated():
    family = ("👩", "\u200d", "👩", "\u200d", "", "👧")
    tokens = tokens_of("a", family, " b")
    for level in ("token", "word", "sentence"):
        units = make_units(tokens, level)
        assert_partition(units, len(tokens))
        assert not {start for start, _ in units} & set(range(2, 7))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["The", " quick", " fo", "x", "."], ["The", " quick", " fox."]),
        (["a", " ", " ", "b"], ["a", "  b"]),
        (["a ", "b ", "c"], ["a ", "b ", "c"]),
        (["end", "\n", "\n", "New", " line"], ["end", "\n\n", "New", " line"]),
        (["end", "  ", "\n", "  ", "x"], ["end", "  \n", "  x"]),
        (["end", ".\n", "Next"], ["end.\n", "Next"]),
        (["\n", "x"], ["\n", "x"]),
        (["我", "喜欢", "你", "。", "好"], ["我", "喜欢", "你。", "好"]),
        (["「", "你", "」", "abc", "漢"], ["「你」", "abc", "漢"]),
        (["GPT", "很", "好", "3", "4"], ["GPT", "很", "好", "34"]),
        (["今日", "は", "カ", "ー", "ド"], ["今日", "は", "カ", "ー", "ド"]),
        (["สวัส", "ด", "ี", " ค"], ["สวัส", "ดี", " ค"]),
        (["नम", "स्", "ते", " दुनि", "या", "।"], ["नमस्ते", " दुनिया।"]),
        (["مر", "حبا", " بال", "عالم", "؟"], ["مرحبا", " بالعالم؟"]),
        (["cafe", "\u0301", "s"], ["cafe\u0301s"]),
        (["don", "'t", " (see", ")", " x-y"], ["don't", " (see)", " x-y"]),
    ],
)
def test_words(pieces, words):
    assert cut(tokens_of(*pieces), "word") == words


@pytest.mark.parametrize("text", ["one two  three", "Ünïcode wörds, and – dashes!", "привет мир 42", "שלום עולם"])
def test_words_of_spaced_scripts_are_what_split_gives(text):
    words = cut(tokens_of(*split_like_a_tokenizer(text)), "word")
    assert [word.strip() for word in words] == text.split()


@pytest.mark.parametrize(
    ("pieces", "sentences"),
    [
        (["It", " is", " 3", ".", "14", "."], ["It is 3.14."]),
        (["Hi", "!", " You", "?", "  ", "Ok"], ["Hi!", " You?  ", "Ok"]),
        (["He", " said", ' "', "no", '."', " Then"], ['He said "no."', " Then"]),
        (["wait", "...", " what", "?!", " yes"], ["wait...", " what?!", " yes"]),
        (["a", "\n", "\n", "b", "\n"], ["a\n\n", "b\n"]),
        (["\n", " ", "b", ".", "\n", "c"], ["\n b.\n", "c"]),
        (["你", "好", "。", "再", "见", "！", "」", "走"], ["你好。", "再见！」", "走"]),
        (["كيف", " حالك", "؟", " جيد"], ["كيف حالك؟", " جيد"]),
        (["यह", " है", "।", " वह", " है", "।"], ["यह है।", " वह है।"]),
        (["Well", "…", " ok"], ["Well…", " ok"]),
        (["see", " e", ".g", ".", " this"], ["see e.g.", " this"]),
    ],
)
def test_sentences(pieces, sentences):
    assert cut(tokens_of(*pieces), "sentence") == sentences


def test_units_stop_at_role_borders_and_special_tokens():
    roles = [
        ("bos", True),
        ("template", False),
        ("user", False),
        ("user", False),
        ("template", True),
        ("answer", False),
    ]
    texts = ["<s>", "user:", "no", "space", "<e>", "x"]
    tokens = [
        Token(i, text, role, i, special) for i, (text, (role, special)) in enumerate(zip(texts, roles, strict=True))
    ]
    for level in ("word", "sentence"):
        assert cut(tokens, level) == ["<s>", "user:", "nospace", "<e>", "x"]


def test_two_special_tokens_in_a_row_stand_alone():
    tokens = [Token(0, "<a>", "template", 0, True), Token(1, "<b>", "template", 1, True)]
    assert make_units(tokens, "sentence") == ((0, 1), (1, 2))


def test_tokens_without_text_never_get_lost():
    tokens = tokens_of("", "a", "", " b", "")
    for level in ("token", "word", "sentence"):
        assert_partition(make_units(tokens, level), len(tokens))


@pytest.mark.parametrize("level", ["token", "word", "sentence"])
def test_every_level_covers_a_messy_text(level):
    text = "Ünïcode — 你好，世界。 مرحبا! \u200b\t\r\n नमस्ते…  (a.b) สวัสดี \ud800 \x00 👍🏽 end"
    tokens = tokens_of(*text)
    units = make_units(tokens, level)
    assert_partition(units, len(tokens))
    assert "".join(cut(tokens, level)) == text


def test_coarser_levels_nest():
    tokens = tokens_of(*split_like_a_tokenizer("First one. Second\none! 第三。 And (a fourth) 3.5?"))
    starts = {level: {start for start, _ in make_units(tokens, level)} for level in ("token", "word", "sentence")}
    assert starts["sentence"] <= starts["word"] <= starts["token"]


def test_no_tokens_no_units():
    assert make_units([], "word") == ()


def test_unknown_level_is_refused():
    with pytest.raises(BadRequest):
        make_units([], "chapter")


@pytest.mark.parametrize("level", ["token", "word", "sentence"])
def test_each_level_names_its_rule(level):
    assert level_rule(level).endswith(".")
