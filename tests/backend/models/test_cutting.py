"""Cutting a prompt at a chosen place: what stays, what goes, and that nothing else changes."""

import pytest

from backend.errors import BadRequest
from backend.models.cutting import cut_prompt
from backend.models.passage import encode_prompt
from backend.settings import Settings
from backend.types import Prompt, Turn

TEXT = "".join(f"word{i} " for i in range(60)).strip()
LIMITS = Settings(max_prompt_tokens=80)


def put_together(cut, keep, original):
    """Insert what was dropped again."""
    return cut.prompt.text[: cut.position] + cut.dropped + cut.prompt.text[cut.position :] == original


@pytest.mark.parametrize("keep", ["start", "end", "ends"])
def test_cut_prompt_fits_and_says_what_went(tiny, keep):
    cut = cut_prompt(tiny, Prompt(TEXT), keep, limits=LIMITS)
    passage = encode_prompt(tiny, cut.prompt, LIMITS)
    assert passage.prompt_length == cut.tokens <= 80
    assert put_together(cut, keep, TEXT)
    assert len(cut.dropped) < len(TEXT)


def test_the_kept_side_is_kept(tiny):
    start = cut_prompt(tiny, Prompt(TEXT), "start", limits=LIMITS)
    end = cut_prompt(tiny, Prompt(TEXT), "end", limits=LIMITS)
    ends = cut_prompt(tiny, Prompt(TEXT), "ends", limits=LIMITS)
    assert TEXT.startswith(start.prompt.text) and start.position == len(start.prompt.text)
    assert TEXT.endswith(end.prompt.text) and end.position == 0
    assert ends.prompt.text.startswith("word0") and ends.prompt.text.endswith("word59")


def test_as_much_as_possible_is_kept(tiny):
    cut = cut_prompt(tiny, Prompt(TEXT), "start", limits=LIMITS)
    longer = Prompt(TEXT[: len(cut.prompt.text) + 1])
    with pytest.raises(BadRequest, match="at most 80"):
        encode_prompt(tiny, longer, LIMITS)


@pytest.mark.parametrize("at", [0, 50, 300, len(TEXT)])
def test_gap_lies_at_the_chosen_place(tiny, at):
    cut = cut_prompt(tiny, Prompt(TEXT), "ends", at=at, limits=LIMITS)
    assert cut.position <= at <= cut.position + len(cut.dropped)
    assert put_together(cut, "ends", TEXT)


@pytest.mark.parametrize("at", [-1, len(TEXT) + 1])
def test_place_outside_the_text(tiny, at):
    with pytest.raises(BadRequest, match="outside the text"):
        cut_prompt(tiny, Prompt(TEXT), "ends", at=at, limits=LIMITS)


def test_prompt_that_fits_is_left_alone(tiny):
    cut = cut_prompt(tiny, Prompt("short"), limits=LIMITS)
    assert cut.prompt == Prompt("short") and cut.dropped == ""


def test_room_for_the_answer_counts(tiny):
    roomy = cut_prompt(tiny, Prompt(TEXT * 3), limits=Settings(), room=200)
    assert roomy.tokens <= 256 - 200
    encode_prompt(tiny, roomy.prompt, room=200)


def test_too_many_characters_are_cut_as_well(tiny):
    cut = cut_prompt(tiny, Prompt("x" * 2000), limits=Settings(max_prompt_chars=100))
    assert len(cut.prompt.text) == 100


def test_no_character_is_cut_in_two(tiny):
    family = "👩‍👩‍👧‍👦"
    cut = cut_prompt(tiny, Prompt(family * 20), "start", limits=Settings(max_prompt_tokens=60))
    assert cut.prompt.text and len(cut.prompt.text) % len(family) == 0


def test_longest_turn_of_a_chat_is_cut(tiny):
    turns = (Turn("system", "Be brief."), Turn("user", TEXT), Turn("assistant", "Yes."), Turn("user", "Why?"))
    cut = cut_prompt(tiny, Prompt(turns=turns), "end", limits=Settings(max_prompt_tokens=150))
    assert [turn.content for turn in cut.prompt.turns][0::2] == ["Be brief.", "Yes."]
    assert TEXT.endswith(cut.prompt.turns[1].content)
    assert encode_prompt(tiny, cut.prompt, Settings(max_prompt_tokens=150)).prompt_length == cut.tokens


def test_nothing_left_is_a_sentence(tiny):
    turns = (Turn("user", "a" * 10),)
    with pytest.raises(BadRequest, match="Nothing of this text would be left"):
        cut_prompt(tiny, Prompt(turns=turns), limits=Settings(max_prompt_tokens=5))


def test_bad_characters_are_still_refused(tiny):
    with pytest.raises(BadRequest, match="NUL"):
        cut_prompt(tiny, Prompt("a\0" * 100), limits=LIMITS)
