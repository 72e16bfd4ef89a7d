"""The embedded model answers needles, and its maps are measured as the specification's own trials were."""

import pytest

from backend.evaluation.bench import Options, run_bench
from backend.evaluation.bench_table import RowsFile, document
from backend.evaluation.faithfulness import faithfulness
from backend.evaluation.needle import NeedleSpec, ask_secret, plant
from backend.evaluation.sanity import sanity
from backend.saliency.explain import explain
from backend.types import MethodSpec, SaliencyRequest, no_tick

pytestmark = pytest.mark.smollm


@pytest.mark.parametrize(("chat", "words", "least"), [(False, 1, 7), (False, 2, 5), (True, 1, 2)])
def test_it_answers_needles_at_128_tokens(smollm, chat, words, least):
    passed = [
        ask_secret(smollm, plant(smollm, NeedleSpec(128, depth, case, chat, words))).passed
        for depth in (10, 50, 90)
        for case in range(3)
    ]
    assert sum(passed) >= least  # in a chat it likes to open the answer with a quotation mark


@pytest.mark.parametrize("length", [128, 256, 1024, 4096])
def test_lengths_are_exact(smollm, length):
    for chat in (False, True):
        needle = plant(smollm, NeedleSpec(length, 30, 0, chat))
        assert needle.passage.prompt_length == length
        assert abs(needle.depth_reached - 30) < 6


def test_uniform_is_the_zero_line_and_the_gradient_finds_more(smollm, tmp_path):
    file = RowsFile(tmp_path / "rows.jsonl")
    assert run_bench(
        smollm, Options(("uniform", "gradient_norm"), quick=True), file, no_tick, lambda text: None, lambda: False
    )
    uniform, gradient = document(file.read())["summary"]
    assert uniform["lift"] == 1.0
    assert 1.2 < gradient["lift"] < 3.0
    assert 0.5 < gradient["mass"] < 0.95
    assert gradient["needle_mass"] > uniform["needle_mass"]
    assert gradient["recall_at_k"] > gradient["chance"]
    assert gradient["flags"] == []


def test_faithfulness_and_sanity_on_a_needle(smollm):
    needle = plant(smollm, NeedleSpec(128, 50, 0))
    methods = tuple(MethodSpec.of(name) for name in ("uniform", "gradient_norm"))
    request = SaliencyRequest(smollm.ref, needle.prompt, needle.answer_ids, needle.target, methods)
    explanation = explain(smollm, needle.passage, request, no_tick)
    found = faithfulness(smollm, explanation, no_tick)
    gradient = found.methods[1]
    assert gradient.deletion_gap > 0 and gradient.insertion_gap > 0
    uniform_checks, gradient_checks = (
        {check.name: check for check in one.checks} for one in sanity(smollm, needle.passage, request, no_tick)
    )
    assert uniform_checks["randomized_weights"].verdict == "info"
    assert gradient_checks["plain_logits_unchanged"].value == 0.0
    assert gradient_checks["randomized_weights"].value < 1.0
