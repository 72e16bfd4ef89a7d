"""What users of other saliency tools suffer (specification of token saliency, section 6), row by row.

Each row names the tests that keep it from happening here, or the reason why it cannot happen yet. The tests below
check that every named test exists, so that a renamed or deleted test is noticed.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

PAIN_POINTS = {
    "a chat-templated prompt is refused, because special tokens were stripped and added again": [
        "backend/models/test_passage.py::test_chat_is_cut_into_its_messages",
        "backend/saliency/test_explain.py::test_chat_prompts_keep_their_roles",
    ],
    "two BOS tokens; positions and answers shift": [
        "backend/models/test_passage.py::test_two_bos_are_refused",
        "backend/models/test_passage.py::test_template_with_two_bos_is_refused",
        "backend/models/test_passage.py::test_bos_that_the_person_typed_is_not_doubled",
    ],
    "the first target token is dropped as if it were BOS; one-token targets crash": [
        "backend/saliency/test_contract.py::test_all_kinds_of_targets",
        "backend/models/test_generation.py::test_one_token_answer_is_explained_too",
    ],
    "Chinese, accents, emoji appear as byte fragments": [
        "backend/models/test_passage.py::test_smollm_spells_every_script",
        "backend/saliency/test_units.py::test_tokens_merge_pieces_of_one_character",
        "browser/test_token_strip.py::test_pieces_of_a_character_are_one_cell",
    ],
    "end-of-turn token missing; alignment depends on whether the target was given or generated": [
        "backend/models/test_generation.py::test_end_of_turn_is_a_special_token_of_the_answer",
        "backend/models/test_generation.py::test_generated_and_given_answers_read_alike",
    ],
    "out of memory on long prompts; integrated gradients batches all steps": [
        "backend/saliency/test_passes.py::test_a_full_memory_makes_batches_small",
        "backend/saliency/test_passes.py::test_batches_shrink_when_memory_runs_out_and_repeat_what_was_lost",
        "backend/saliency/test_explain.py::test_memory_that_runs_out_becomes_a_sentence",
    ],
    "tensors on two devices under device_map": (
        "models are placed on one device; a model that does not fit is refused with numbers"
    ),
    "sdpa gives no attention weights; an empty tuple and one warning": [
        "backend/saliency/test_attention_rows.py::test_rows_are_those_of_the_library_and_nothing_is_left_behind",
        "backend/saliency/test_attention_rows.py::test_layers_without_weights_are_an_error",
    ],
    "fp16 overflow, NaN relevance": [
        "backend/models/test_loading.py::test_overflow_in_float16_names_the_remedy",
        "backend/saliency/test_contract.py::test_numbers_that_are_not_finite_are_refused",
    ],
    "nearly all relevance on the first token; no warning": [
        "backend/saliency/test_reading.py::test_own_scale_ignores_bos_and_clips_it",
        "backend/saliency/test_reading.py::test_bos_and_template_can_be_left_out_of_shares",
    ],
    "quantized models have no backward": [
        "backend/saliency/test_contract.py::test_a_model_without_a_backward_pass_is_refused",
    ],
    "left padding without positions changes answers": [
        "backend/saliency/test_ablation.py::test_one_variant_at_a_time_equals_many_at_once",
        "backend/saliency/test_passes.py::test_path_points_alone_equal_path_points_together",
    ],
    "inputs_embeds alone starts a reverse vocabulary search": [
        "backend/saliency/test_passes.py::test_a_model_that_embeds_twice_is_refused",
        "backend/saliency/test_contract.py::test_scores_have_their_form_and_the_model_stays_as_it_is",
    ],
    "soft cap and sliding window dropped quietly": [
        "backend/saliency/test_ablation.py::test_a_dropped_sliding_window_is_found_before_anything_is_scored",
        "backend/models/test_loading.py::test_attention_kernel_is_sdpa_except_where_it_would_be_wrong",
    ],
    "fused experts escape hooks": [
        "backend/saliency/test_attn_lrp.py::test_what_has_no_rule_is_refused_by_name_before_any_pass",
    ],
    "special ids beyond the vocabulary crash the device": [
        "backend/saliency/test_question.py::test_ids_beyond_the_vocabulary_never_reach_the_model",
    ],
    "tied weights load untied, logits scaled twice": [
        "backend/models/test_loading.py::test_two_embeddings_where_the_configuration_says_one",
        "backend/models/test_loading.py::test_tied_embedding_shares_memory",
    ],
    "word and sentence grouping wrong for some tokenizers": [
        "backend/saliency/test_units.py::test_words",
        "backend/saliency/test_units.py::test_sentences",
        "backend/saliency/test_units.py::test_every_level_covers_a_messy_text",
    ],
    "wrappers accept different inputs; missing attention mask": [
        "backend/saliency/test_contract.py::test_scores_have_their_form_and_the_model_stays_as_it_is",
    ],
    "lists of supported models frozen years ago; all-zero values; answers explained by themselves": [
        "backend/models/test_loading.py::test_family_loads_as_the_library_loads_it",
        "backend/saliency/test_exact_answers.py::test_no_signal_is_stated",
        "backend/saliency/test_reading.py::test_a_target_sees_only_what_stands_before_it",
    ],
    "the browser dies on long inputs": [
        "browser/test_token_strip.py::test_thousands_of_cells_stay_usable",
    ],
    "no way to open one's own result file": [
        "backend/io/test_bundle.py::test_an_explanation_survives_the_round_trip",
        "browser/test_saliency_page.py::test_an_exported_file_opens_again_and_a_damaged_one_is_refused",
    ],
}

NAMED = sorted({test for tests in PAIN_POINTS.values() if isinstance(tests, list) for test in tests})


def test_every_row_has_tests_or_a_reason():
    assert len(PAIN_POINTS) == 22
    assert all(PAIN_POINTS.values())


@pytest.mark.parametrize("test", NAMED)
def test_the_named_test_exists(test):
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
