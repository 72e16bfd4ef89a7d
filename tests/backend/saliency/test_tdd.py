"""TDD against one pass per text, its sums, its foils, and what sharing passes costs."""

import numpy as np
import pytest
import torch

from backend.registry import get_method
from backend.saliency import choices
from backend.types import no_tick
from tests.support.tiny import tiny_model
from tests.support.toys import question_of, toy_model

IDS = torch.randint(3, 300, (26,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPT = 22
DIRECTIONS = ("forward", "backward", "bidirectional")
# targets after one of which the model is not sure, so that D is far from 1
FAMILIES = ("llama", "gpt2", "mistral", "gemma3")


def run(question, direction="bidirectional"):
    method = get_method("tdd")
    return method.run(question.model, question, method.params(direction=direction), no_tick)


def check_of(scores, name):
    return next((check for check in scores.checks if check.name == name), None)


def logits_of(model, ids):
    with torch.no_grad():
        return model.module(input_ids=torch.tensor([ids])).logits[0].double().numpy()


def softmax_of_two(logits, target, foil):
    pair = np.exp(np.array([logits[target], logits[foil]]) - max(logits[target], logits[foil]))
    return (pair[0] - pair[1]) / pair.sum()


def naive(model, ids, target, foil, bos=False):
    """Scores from the left and from the right, one text at a time, in the words of the definition."""
    n = len(ids)
    along = [softmax_of_two(z, target, foil) for z in logits_of(model, ids)]
    left = [along[i] - (along[i - 1] if i else 0) for i in range(n)]
    texts = [ids[i:] if not bos or i == 0 else [ids[0], *ids[i:]] for i in range(n)]
    back = [softmax_of_two(logits_of(model, text)[-1], target, foil) for text in texts] + [0.0]
    right = [back[i] - back[i + 1] for i in range(n)]
    return {"forward": left, "backward": right, "bidirectional": (np.array(left) + right) / 2}, along[-1]


def runner_up(model, ids, target):
    logits = logits_of(model, ids)[-1]
    logits[target] = -np.inf
    return int(logits.argmax())


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_direction_equals_one_pass_per_text(family, bos):
    model = tiny_model(family, initializer_range=0.08)
    roles = ["bos" if bos else "user"] + ["user"] * (PROMPT - 1) + ["answer"] * 4
    question = question_of(model, IDS, PROMPT, (0, 3), roles=roles)
    found = {direction: run(question, direction).values for direction in DIRECTIONS}
    for row in range(3):
        past, target = IDS[: PROMPT + row], IDS[PROMPT + row]
        wanted, _ = naive(model, past, target, runner_up(model, past, target), bos)
        for direction in DIRECTIONS:
            np.testing.assert_allclose(found[direction][row, : len(past)], wanted[direction], atol=2e-5)
            assert (found[direction][row, len(past) :] == 0).all()
        assert np.abs(wanted["forward"]).max() > 0.01 and np.abs(wanted["backward"]).max() > 0.01
    if bos:
        assert (found["backward"][:, 0] == 0).all()  # BOS stands in front of every text, so it adds nothing


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scores_add_up_to_the_choice_after_the_whole_text(direction):
    model = tiny_model("llama", initializer_range=0.08)
    question = question_of(model, IDS, PROMPT, (0, 3))
    scores = run(question, direction)
    for row in range(3):
        past, target = IDS[: PROMPT + row], IDS[PROMPT + row]
        whole = softmax_of_two(logits_of(model, past)[-1], target, runner_up(model, past, target))
        assert scores.values[row].sum(dtype=np.float64) == pytest.approx(whole, abs=1e-5)
        assert 0.001 < abs(whole) < 0.99
    assert check_of(scores, "telescoping_sum").verdict == "ok"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exchanging_target_and_foil_turns_every_sign(direction):
    model = tiny_model("llama", initializer_range=0.08)
    one = run(question_of(model, [*IDS[:PROMPT], 40], PROMPT, foil=[50]), direction)
    other = run(question_of(model, [*IDS[:PROMPT], 50], PROMPT, foil=[40]), direction)
    assert np.array_equal(one.values, -other.values) and np.abs(one.values).max() > 0.01


def test_only_the_choice_counts_not_the_scalar_that_was_asked():
    model = tiny_model("llama")
    found = [run(question_of(model, IDS, PROMPT, (0, 2), objective=o)).values for o in ("log_prob", "logit", "prob")]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_the_foil_is_named():
    model = tiny_model("llama")
    plain = run(question_of(model, IDS, PROMPT))
    assert check_of(plain, "foil").text.startswith("The target is compared with “")
    assert "runner-up" in check_of(plain, "foil").text and check_of(plain, "foil_not_used") is None
    asked = check_of(run(question_of(model, IDS, PROMPT, foil=[70])), "foil").text
    assert "the foil “" in asked and "runner-up" not in asked
    span = check_of(run(question_of(model, IDS, PROMPT, (0, 2), foil=[70])), "foil").text
    assert "first target" in span and "runner-up" in span
    without_tokenizer = check_of(run(question_of(toy_model(), [3, 7, 1, 9], 3)), "foil").text
    assert without_tokenizer.startswith("The target is compared with token ")


def test_a_foil_of_several_tokens_or_equal_to_the_target_is_not_used():
    model = tiny_model("llama")
    wanted = run(question_of(model, IDS, PROMPT, (0, 2)))
    for foil in ([70, 71], [IDS[PROMPT]]):
        found = run(question_of(model, IDS, PROMPT, (0, 2), foil=foil))
        assert np.array_equal(found.values, wanted.values)
        assert check_of(found, "foil_not_used").verdict == "warn"


def test_a_clear_choice_is_warned_of():
    model = toy_model("copy")
    scores = run(question_of(model, [3, 7, 1, 9, 4, 2, 4], 6))  # logits 8 apart
    check = check_of(scores, "clear_choice")
    assert check.verdict == "warn" and check.value == pytest.approx(np.tanh(4), abs=1e-6)
    close = run(question_of(toy_model("linear", scale=0.05), [3, 7, 1, 9, 4, 2, 4], 6))
    assert check_of(close, "clear_choice") is None


def test_from_the_left_the_last_token_gets_what_from_the_right_its_source_gets():
    model = toy_model("copy")  # says the token two before the one to come
    question = question_of(model, [3, 7, 1, 9, 4, 2, 4], 6)
    d = np.tanh(4)
    np.testing.assert_allclose(run(question, "forward").values[0], [0, 0, 0, 0, 0, d], atol=1e-6)
    np.testing.assert_allclose(run(question, "backward").values[0], [0, 0, 0, 0, d, 0], atol=1e-6)


@pytest.mark.parametrize("length", [40, 64, 128, 500])
def test_little_is_padding(length):
    ids = [i % 12 for i in range(length + 1)]
    scores = run(question_of(toy_model(), ids, length), "backward")
    needed = sum(range(1, length + 1)) / length
    assert needed <= scores.passes.forward <= 1.15 * needed
    expected = get_method("tdd").cost(get_method("tdd").params(direction="backward"), _Work(length))
    assert expected.forward == pytest.approx(scores.passes.forward, rel=0.1)


class _Work:
    def __init__(self, length):
        self.length = length


def test_one_text_per_pass_gives_the_same_scores(monkeypatch):
    model = tiny_model("gpt2")
    together = run(question_of(model, IDS, PROMPT, (0, 3)))
    monkeypatch.setattr(choices, "TOKENS_AT_ONCE", {"cpu": 1})
    alone = run(question_of(model, IDS, PROMPT, (0, 3)))
    np.testing.assert_allclose(together.values, alone.values, atol=1e-5)
    n = PROMPT + 2
    assert alone.passes.forward == pytest.approx(1 + (n + 1) / 2)


def test_logits_of_long_texts_come_in_parts(monkeypatch):
    model = tiny_model("llama")
    whole = run(question_of(model, IDS, PROMPT), "forward")
    assert whole.passes.forward == 1
    monkeypatch.setattr(choices, "_LOGITS_AT_ONCE", 10 * model.vocabulary_rows)
    parts = run(question_of(model, IDS, PROMPT), "forward")
    np.testing.assert_allclose(parts.values, whole.values, atol=1e-5)
    assert parts.passes.forward == 3


def test_a_model_that_answers_differently_in_company_is_found():
    model = tiny_model("llama", initializer_range=0.08)

    def disturb(module, args, kwargs, output):
        output.logits = output.logits * (1 + 0.2 * (len(kwargs["input_ids"]) - 1))
        return output

    hook = model.module.register_forward_hook(disturb, with_kwargs=True)
    check = check_of(run(question_of(model, IDS, PROMPT), "backward"), "telescoping_sum")
    hook.remove()
    assert check.verdict == "fail" and "share a pass" in check.text


def test_no_signal_is_stated():
    model = toy_model()
    with torch.no_grad():
        model.module.weight.zero_()
    assert check_of(run(question_of(model, [3, 7, 1, 9], 3)), "no_signal").verdict == "fail"
