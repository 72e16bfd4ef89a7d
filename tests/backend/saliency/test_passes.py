"""One pass: logits at chosen positions, the head in float32, batches, and what happens when memory runs out."""

import numpy as np
import pytest
import torch

from backend.errors import NotApplicable
from backend.registry import get_method
from backend.saliency import gradients
from backend.saliency.embeddings import baseline_vector, embed, replaced_embedding
from backend.saliency.gradients import activation_bytes, in_batches, row_gradients
from backend.saliency.passes import logits_at
from backend.types import no_tick
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import question_of, toy_model

IDS = [11, 22, 33, 44, 55, 66, 77, 88, 99]


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
def test_logits_at_positions_are_those_of_the_whole_pass(family):
    model = toy_model(vocabulary=120) if family == "toy" else tiny_model(family)
    ids = torch.tensor([IDS, IDS[::-1]])
    with torch.no_grad():
        found = logits_at(model, ids, [1, 4, 8])
        whole = model.module(input_ids=ids).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole[:, [1, 4, 8]], atol=1e-5, rtol=1e-5)


def test_the_head_of_a_bfloat16_model_runs_in_float32():
    model = tiny_model("llama")
    model.module.to(torch.bfloat16)
    hidden = []
    model.module.lm_head.register_forward_pre_hook(lambda m, args: hidden.append(args[0].detach()))
    with torch.no_grad():
        found = logits_at(model, torch.tensor([IDS]), [8])
        coarse = model.module(input_ids=torch.tensor([IDS]), logits_to_keep=1).logits
    wanted = hidden[0].float() @ model.module.lm_head.weight.float().T
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(found, coarse.float()) and len(model.module.lm_head._forward_hooks) == 0


def test_gradients_through_that_head_are_right():
    model, exact = tiny_model("llama"), tiny_model("llama")
    model.module.to(torch.bfloat16)
    exact.module.load_state_dict(model.module.state_dict())  # the same rounded weights, in float32
    rounded = next(iter(row_gradients(question_of(model, IDS, 8)))).gradients[0]
    wanted = next(iter(row_gradients(question_of(exact, IDS, 8)))).gradients[0]
    cosine = torch.nn.functional.cosine_similarity(rounded.flatten(), wanted.flatten(), dim=0)
    assert rounded.dtype == torch.float32 and cosine > 0.99


def test_path_points_alone_equal_path_points_together(monkeypatch):
    question = question_of(tiny_model("llama"), IDS, 6, (0, 2), foil=[5, 6, 7])
    method = get_method("integrated_gradients")
    together = method.run(question.model, question, method.params(), no_tick).values
    monkeypatch.setattr(gradients, "TOKENS_AT_ONCE", {"cpu": 1})
    assert gradients.inputs_at_once(question, 64) == 1
    alone = method.run(question.model, question, method.params(), no_tick).values
    np.testing.assert_allclose(together, alone, atol=1e-5 * np.abs(alone).max())


def test_a_full_memory_makes_batches_small(monkeypatch):
    question = question_of(tiny_model("llama"), IDS, 6)
    per_token = activation_bytes(question.model)
    monkeypatch.setattr(gradients, "free_bytes", lambda device: int(4 * 13 * len(question.ids) * per_token))
    assert gradients.inputs_at_once(question, 64) == 13  # a quarter of what is free
    monkeypatch.setattr(gradients, "free_bytes", lambda device: 0)
    assert gradients.inputs_at_once(question, 64) == 1


def test_activation_bytes_grow_with_the_model():
    small, large = tiny_model("llama"), tiny_model("llama", num_hidden_layers=8)
    assert 2.5 < activation_bytes(large) / activation_bytes(small) < 4.5


def test_batches_shrink_when_memory_runs_out_and_repeat_what_was_lost():
    runs = []

    def run(start, stop):
        if stop - start > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        runs.append((start, stop))

    in_batches(10, 8, run)
    assert runs == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]

    def never(start, stop):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        in_batches(10, 8, never)

    def broken(start, stop):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        in_batches(10, 8, broken)


def test_a_model_that_embeds_twice_is_refused():
    model = tiny_model("llama")
    with pytest.raises(NotApplicable, match="2 times"), replaced_embedding(model, lambda output: output):
        model.embedding(torch.tensor([[1]]))
        model.embedding(torch.tensor([[1]]))
    assert len(model.embedding._forward_hooks) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_baselines_are_outputs_of_the_embedding_module(family):
    model = tiny_model(family)  # Gemma multiplies embeddings by the root of the width
    every = embed(model, range(model.vocabulary_rows))
    torch.testing.assert_close(baseline_vector(model, "mean"), every.mean(0), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(baseline_vector(model, "eos"), every[model.tokenizer.eos_token_id])
    space = model.tokenizer.encode(" ", add_special_tokens=False)
    torch.testing.assert_close(baseline_vector(model, "space"), every[space[0]])
    assert not baseline_vector(model, "zero").any()
    with pytest.raises(NotApplicable, match="no PAD token"):
        baseline_vector(model, "pad")
