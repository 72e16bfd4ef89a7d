"""Interventions on attention: no change changes nothing, a hidden token is one that is not there, answers anew."""

import math

import pytest
import torch

from backend.errors import BadRequest, Cancelled, NotApplicable
from backend.models.generation import generate_ids
from backend.models.passage import append_answer, encode_prompt
from backend.saliency.intervention import intervene
from backend.saliency.masks import additive, visible_keys
from backend.saliency.passes import logits_at
from backend.types import Decoding, InterventionRequest, ModelRef, Prompt
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import Ticks

PROMPT = Prompt("The key is in the kitchen and the phone is in the garden")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


def passage_with(model, answer=(7, 8, 9)):
    return append_answer(model, encode_prompt(model, PROMPT), answer)


def ask(model, passage, **more):
    ids = passage.ids[passage.prompt_length :]
    more.setdefault("at", 0)
    return intervene(model, passage, InterventionRequest(ModelRef("x"), PROMPT, ids, **more))


def probabilities(logits):
    return logits[0, 0].softmax(-1)


def test_no_change_changes_nothing(model):
    passage = passage_with(model)
    found = ask(model, passage, biases=((2, 0.0),), at=1)
    assert found.distance < 1e-5
    own = found.candidates[found.target]
    assert own.id == passage.ids[passage.prompt_length + 1]
    assert own.after == pytest.approx(own.before, abs=1e-6)


def test_a_hidden_token_is_one_that_is_not_there_with_the_others_where_they_were():
    model = tiny_model("llama")
    passage = passage_with(model)
    length = passage.prompt_length
    found = ask(model, passage, hidden=(3,))
    kept = [i for i in range(length) if i != 3]
    ids = torch.tensor([[passage.ids[i] for i in kept]])
    # with a mask of ours, since the library reads a gap in the positions as the border of another text
    causal = additive(visible_keys(model, length - 1), 0, length - 1, None, torch.float32)
    with torch.no_grad():
        logits = logits_at(model, ids, [length - 2], position_ids=torch.tensor([kept]), mask=causal)
    for candidate in found.candidates:
        assert candidate.after == pytest.approx(float(probabilities(logits)[candidate.id]), abs=1e-5)
    assert found.distance > 0


def test_the_same_bias_on_every_key_changes_nothing(model):
    passage = passage_with(model)
    everywhere = tuple((i, 3.0) for i in range(passage.prompt_length))
    assert ask(model, passage, biases=everywhere).distance < 1e-4


def test_a_strong_negative_bias_is_like_hiding(model):
    passage = passage_with(model)
    weak = ask(model, passage, biases=((4, -20.0),))
    none = ask(model, passage, hidden=(4,))
    before = ask(model, passage)
    assert none.distance > 1e-6 and before.distance == 0
    after = {c.id: c.after for c in none.candidates}
    for candidate in weak.candidates:
        if candidate.id in after:
            # only token 4 itself differs: hidden, it still sees itself; pushed down, hardly
            assert candidate.after == pytest.approx(after[candidate.id], rel=0.2)


def test_a_removed_token_makes_a_shorter_text(model):
    passage = passage_with(model)
    ids = [*passage.ids[:2], *passage.ids[5 : passage.prompt_length]]
    found = ask(model, passage, removed=(2, 3, 4))
    with torch.no_grad():
        expected = probabilities(logits_at(model, torch.tensor([ids]), [len(ids) - 1]))
    for candidate in found.candidates:
        assert candidate.after == pytest.approx(float(expected[candidate.id]), abs=1e-6)


def test_a_new_answer_without_a_change_is_the_greedy_answer(model):
    passage = encode_prompt(model, PROMPT)
    greedy = generate_ids(model, passage.ids, Decoding(max_new_tokens=6))
    passage = append_answer(model, passage, greedy)
    found = ask(model, passage, biases=((1, 0.0),), new_tokens=6)
    assert tuple(token.id for token in found.answer) == greedy
    assert found.first_change is None


def test_a_new_answer_under_a_bias_needs_no_cache_to_be_the_same(model):
    passage = passage_with(model)
    found = ask(model, passage, biases=((2, 4.0), (6, -4.0)), new_tokens=5)
    ids, length = list(passage.ids[: passage.prompt_length]), passage.prompt_length
    push = torch.zeros(length + 5)
    push[2], push[6] = 4.0, -4.0
    for _ in range(5):
        mask = additive(visible_keys(model, len(ids)), 0, len(ids), None, torch.float32)
        add = push[: len(ids)]
        mask = mask + add if isinstance(mask, torch.Tensor) else {name: one + add for name, one in mask.items()}
        with torch.no_grad():
            ids.append(int(logits_at(model, torch.tensor([ids]), [len(ids) - 1], mask=mask)[0, 0].argmax()))
    new = [token.id for token in found.answer]
    assert new == ids[length : length + len(new)]
    assert len(new) == 5 or new[-1] == model.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"hidden": (999,)}, "numbered from 0"),
        ({"biases": ((0, math.nan),)}, "must lie between"),
        ({"biases": ((0, 1e9),)}, "must lie between"),
        ({"removed": tuple(range(999))}, "numbered from 0"),
        ({"at": 3}, "there is none at 3"),
    ],
)
def test_impossible_interventions_are_refused(more, says):
    model = tiny_model("gpt2")
    with pytest.raises(BadRequest, match=says):
        ask(model, passage_with(model), **more)


def test_something_must_be_left():
    model = tiny_model("gpt2")
    passage = passage_with(model)
    with pytest.raises(BadRequest, match="Nothing of the prompt"):
        ask(model, passage, removed=tuple(range(passage.prompt_length)))


def test_a_model_that_takes_no_mask_is_refused(monkeypatch):
    model = tiny_model("gpt2")
    monkeypatch.setattr("backend.saliency.intervention.visible_keys", lambda model, length: None)
    with pytest.raises(NotApplicable):
        ask(model, passage_with(model), hidden=(1,))


def test_cancelling_takes_effect_between_tokens():
    model = tiny_model("gpt2")
    passage = passage_with(model)
    ids = passage.ids[passage.prompt_length :]
    ticks = Ticks(stop_at=5)
    with pytest.raises(Cancelled):
        intervene(model, passage, InterventionRequest(ModelRef("x"), PROMPT, ids, 0, new_tokens=50), ticks)
    assert len(ticks.calls) == 5
