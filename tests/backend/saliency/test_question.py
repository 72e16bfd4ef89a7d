"""Targets, foils and the scalar S: against plain arithmetic on the model's logits, and every wrong question."""

import numpy as np
import pytest
import torch

from backend.errors import BadRequest, NotApplicable, PromptTooLong
from backend.saliency.gradients import row_gradients
from backend.saliency.question import ask
from tests.support.tiny import tiny_model
from tests.support.toys import passage_of, question_of, request_for

IDS = [11, 22, 33, 44, 55, 66, 77, 88, 99]
PROMPT = 5


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def log_p(model, ids):
    with torch.no_grad():
        return model.module(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def chain(model, before, span):
    """log p of each token of a span after a text, from one plain pass."""
    found = log_p(model, [*before, *span])
    return np.array([float(found[len(before) - 1 + k, token]) for k, token in enumerate(span)])


@pytest.mark.parametrize("target", [(0, 1), (0, 4), (1, 3), (3, 4)])
def test_rows_are_log_probabilities_of_the_span(model, target):
    question = question_of(model, IDS, PROMPT, target)
    before, span = IDS[: PROMPT + target[0]], IDS[PROMPT + target[0] : PROMPT + target[1]]
    np.testing.assert_allclose(question.plain.values, chain(model, before, span), atol=1e-5)
    np.testing.assert_allclose(question.plain.probabilities, np.exp(chain(model, before, span)), atol=1e-6)
    assert question.source_count == PROMPT + target[1] - 1
    assert question.targets == tuple(range(PROMPT + target[0], PROMPT + target[1]))


@pytest.mark.parametrize("foil", [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8, 9]])
@pytest.mark.parametrize("target", [(1, 2), (1, 3), (0, 4)])
def test_rows_sum_to_the_difference_of_the_span_log_probabilities(model, target, foil):
    question = question_of(model, IDS, PROMPT, target, foil=foil)
    before, span = IDS[: PROMPT + target[0]], IDS[PROMPT + target[0] : PROMPT + target[1]]
    said, other = chain(model, before, span), chain(model, before, foil)
    np.testing.assert_allclose(question.plain.values.sum(), said.sum() - other.sum(), atol=1e-5)
    shared = min(len(span), len(foil)) - (len(foil) > len(span))
    np.testing.assert_allclose(question.plain.values[:shared], (said[:shared] - other[:shared]), atol=1e-5)
    assert len(question.strands) == (1 if len(foil) == 1 else 2)


@pytest.mark.parametrize("objective", ["logit", "prob"])
def test_other_scalars(model, objective):
    question = question_of(model, IDS, PROMPT, (1, 2), foil=[5], objective=objective)
    with torch.no_grad():
        logits = model.module(input_ids=torch.tensor([IDS[: PROMPT + 1]])).logits[0, -1].double()
    of = logits if objective == "logit" else logits.softmax(-1)
    np.testing.assert_allclose(question.plain.values, [float(of[IDS[PROMPT + 1]] - of[5])], atol=1e-5)


def test_a_one_token_foil_is_the_same_in_logits_and_log_probabilities(model):
    found = [question_of(model, IDS, PROMPT, (1, 2), foil=[5], objective=o).plain.values for o in ("logit", "log_prob")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("foil", [[], [5], [5, 6, 7]])
def test_the_same_question_about_another_scalar_needs_no_other_pass(model, foil):
    passes = []
    hook = model.module.register_forward_hook(lambda *_: passes.append(1))
    asked = question_of(model, IDS, PROMPT, (1, 3), foil=foil)
    _ = asked.plain
    count = len(passes)
    for objective in ("logit", "prob", "log_prob"):
        other = asked.with_objective(objective)
        assert other.objective == objective and len(passes) == count
        wanted = question_of(model, IDS, PROMPT, (1, 3), foil=foil, objective=objective).plain
        del passes[count:]
        assert np.array_equal(other.plain.values, wanted.values)
        assert other.plain.tolerance == wanted.tolerance
    hook.remove()
    assert asked.objective == "log_prob"


def test_gradients_of_a_foil_span_are_those_of_both_sequences(model):
    question = question_of(model, IDS, PROMPT, (1, 3), foil=[5, 6, 7])

    def gradient(ids, reads):
        e = model.embedding(torch.tensor([ids])).detach().requires_grad_()
        found = model.module(inputs_embeds=e).logits[0].log_softmax(-1)
        return torch.autograd.grad(sum(found[at, token] for at, token in reads), e)[0][0]

    said = gradient(IDS[: PROMPT + 2], [(PROMPT + 1, IDS[PROMPT + 2])])
    foil = gradient([*IDS[: PROMPT + 1], 5, 6], [(PROMPT + 1, 6), (PROMPT + 2, 7)])
    wanted = said.clone()
    wanted[: PROMPT + 1] -= foil[: PROMPT + 1]
    rows = list(row_gradients(question))
    assert len(rows) == 2
    torch.testing.assert_close(rows[1].gradients[0], wanted, atol=1e-5, rtol=1e-4)
    assert not rows[0].gradients[0, PROMPT + 1 :].any()


@pytest.mark.parametrize("target", [(0, 0), (2, 1), (-1, 1), (3, 5), (9, 10)])
def test_a_target_that_is_not_in_the_answer_is_not_found(model, target):
    with pytest.raises(BadRequest, match="was not found: the answer has 4 tokens"):
        question_of(model, IDS, PROMPT, target)


def test_an_empty_answer_says_what_to_do_first(model):
    with pytest.raises(BadRequest, match="answer first"):
        ask(model, passage_of(IDS, len(IDS)), request_for(passage_of(IDS, len(IDS)), (0, 1)))


def test_something_must_stand_before_the_target(model):
    with pytest.raises(BadRequest, match="Nothing stands before"):
        question_of(model, IDS, 0, (0, 1))
    assert question_of(model, IDS, 0, (1, 2)).source_count == 1


def test_foils_that_make_no_sense(model):
    with pytest.raises(BadRequest, match="same as the target"):
        question_of(model, IDS, PROMPT, (1, 3), foil=IDS[PROMPT + 1 : PROMPT + 3])
    with pytest.raises(BadRequest, match="became no tokens"):
        passage = passage_of(IDS, PROMPT)
        ask(model, passage, request_for(passage, (0, 1), foil="x"), ())


@pytest.mark.parametrize("where", ["ids", "foil"])
def test_ids_beyond_the_vocabulary_never_reach_the_model(model, where):
    with pytest.raises(BadRequest, match="not in the model's vocabulary"):
        if where == "ids":
            question_of(model, [11, 5000, 33], 2)
        else:
            question_of(model, IDS, PROMPT, foil=[5000])


def test_a_foil_must_fit_into_the_context_too(model):
    fits = list(range(3, 258))
    assert question_of(model, fits, 254).source_count == 254
    with pytest.raises(PromptTooLong) as error:
        question_of(model, fits, 254, foil=[5, 6, 7])
    assert (error.value.tokens, error.value.limit) == (257, 256)


def test_a_model_that_returns_no_numbers_is_refused():
    model = tiny_model("llama")
    model.module.lm_head.register_forward_hook(lambda m, a, out: out * float("inf"))
    with pytest.raises(NotApplicable, match="not finite"):
        _ = question_of(model, IDS, PROMPT).plain


def test_units_follow_the_level_and_cover_the_sources(model):
    tokens = question_of(model, IDS, PROMPT, (1, 2))
    assert tokens.units is None and len(tokens.spans) == tokens.source_count == 6
    sentence = question_of(model, IDS, PROMPT, (1, 2), level="sentence")
    assert sentence.units == ((0, PROMPT), (PROMPT, PROMPT + 1))  # never across a border of roles
