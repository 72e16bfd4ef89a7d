"""The same scores on the CPU and on CUDA, in float32, to a looser tolerance; and what bfloat16 does to a ranking."""

import numpy as np
import pytest
import torch

from backend.registry import list_methods
from backend.saliency.agreement import spearman
from backend.types import no_tick
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.toys import question_of

pytestmark = pytest.mark.gpu

IDS = torch.randint(3, 300, (44,), generator=torch.Generator().manual_seed(1)).tolist()
each_method = pytest.mark.parametrize("method", list_methods(), ids=lambda m: m.name)


def scores(method, family, device, dtype=torch.float32):
    model = tiny_model(family)
    model.module.to(device, dtype)
    question = question_of(model, IDS, 40, (1, 3), foil=[5, 6, 7])
    return method.run(model, question, method.params(), no_tick)


@each_method
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_scores_agree(method, family, device):
    cpu, cuda = scores(method, family, "cpu"), scores(method, family, device)
    np.testing.assert_allclose(cuda.values, cpu.values, atol=1e-3 * np.abs(cpu.values).max(), rtol=0)
    assert cuda.passes.backward == cpu.passes.backward


@each_method
def test_bfloat16_keeps_the_ranking(method, device):
    exact, short = scores(method, "llama", "cpu"), scores(method, "llama", device, torch.bfloat16)
    if method.family == "baseline":
        assert np.array_equal(exact.values, short.values)
    elif method.name != "integrated_gradients":  # its sum over a rough path amplifies rounding
        assert spearman(exact.values[0, :41], short.values[0, :41]) > 0.8


@each_method
def test_memory_is_given_back(method, device):
    scores(method, "llama", device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    scores(method, "llama", device)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
