"""Folders and GGUF files become models; everything that would explain nonsense is refused with its own sentence."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, ByT5Tokenizer

from backend.errors import ModelUnavailable, OutOfMemory
from backend.models import loading
from backend.models.loading import load, plan_loading
from backend.models.placement import choose_placement
from backend.settings import Settings
from backend.types import ModelRef
from tests.support.gguf_file import write_gguf
from tests.support.tiny import FAMILIES, save_tiny, tiny_module

CPU = choose_placement(ModelRef(device="cpu"), Settings())


def open_folder(path, ref=None):
    ref = ref or ModelRef(str(path), device="cpu")
    return load(plan_loading(path, choose_placement(ref, Settings())), ref)


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model", "llama")


# ---------------------------------------------------------------------------------------------------- it loads


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_family_loads_as_the_library_loads_it(family, tmp_path):
    path = save_tiny(tmp_path, family)
    model = open_folder(path)
    ids = torch.tensor([[7, 8, 9, 10]])
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    assert torch.equal(model.module(ids).logits, expected)
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())


def test_description_of_a_loaded_model(folder):
    info = open_folder(folder).info
    assert info.id == str(folder)
    assert (info.dtype, info.device, info.architecture) == ("float32", "cpu", "LlamaForCausalLM")
    assert info.parameters == sum(p.numel() for p in tiny_module("llama").parameters())
    assert info.context_length == 256
    assert info.has_chat_template
    assert "request" in info.device_reason
    assert len(info.revision) == 16


def test_attention_kernel_is_sdpa_except_where_it_would_be_wrong(folder, tmp_path):
    assert open_folder(folder).info.attention == "sdpa"
    assert open_folder(save_tiny(tmp_path / "soft_capped", "gemma2")).info.attention == "eager"


def test_memory_is_counted_and_planned(folder):
    model = open_folder(folder)
    weights = 4 * model.info.parameters
    assert weights <= model.nbytes <= weights + 4096  # and the rotary tables
    assert plan_loading(folder, CPU).nbytes == weights


def test_dtype_of_the_request_wins(folder):
    model = open_folder(folder, ModelRef(str(folder), device="cpu", dtype="bfloat16"))
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert model.info.dtype == "bfloat16"


def test_revision_follows_the_content_and_not_the_place(tmp_path):
    first = save_tiny(tmp_path / "a", seed=1)
    copy = shutil.copytree(first, tmp_path / "b")
    other = save_tiny(tmp_path / "c", seed=2)
    sizes = [(p / "model.safetensors").stat().st_size for p in (first, other)]
    assert sizes[0] == sizes[1]  # so that only the content tells them apart
    edited = shutil.copytree(first, tmp_path / "d")
    change_config(edited, rms_norm_eps=0.5)
    revisions = [open_folder(path).info.revision for path in (first, copy, other, edited)]
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 3


def test_sharded_folder_loads(tmp_path):
    path = save_tiny(tmp_path, "llama", shard="60KB")
    assert len(plan_loading(path, CPU).files) >= 3
    whole = open_folder(save_tiny(tmp_path / "whole", "llama"))
    ids = torch.tensor([[7, 8, 9]])
    assert torch.equal(open_folder(path).module(ids).logits, whole.module(ids).logits)


def test_gguf_file_loads_with_the_right_logits(tmp_path):
    source = write_gguf(tmp_path / "tiny.gguf")
    model = open_folder(tmp_path / "tiny.gguf")
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    assert torch.allclose(model.module(ids).logits, source.module(ids).logits, atol=1e-5)
    assert model.tokenizer("The capital").input_ids == source.tokenizer("The capital").input_ids
    assert model.info.parameters == source.info.parameters


def test_model_with_code_of_its_own_but_a_known_architecture_loads_the_known_one(folder):
    change_config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (folder / "evil.py").write_text("raise SystemExit('ran code from a model folder')")
    assert open_folder(folder).info.architecture == "LlamaForCausalLM"


def test_truncation_saved_in_a_tokenizer_cuts_nothing(folder):
    from backend.models.passage import encode_prompt
    from backend.types import Prompt

    file = folder / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = None
    file.write_text(json.dumps(saved))
    text = "The capital of France is Paris. " * 3 + "End"
    passage = encode_prompt(open_folder(folder), Prompt(text))
    assert "".join(token.text for token in passage.tokens) == text


# ---------------------------------------------------------------------------------------------------- wrong models


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is an encoder, "),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "RobertaForMaskedLM is an encoder, "),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "is an encoder-decoder"),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            "ViTForImageClassification is a vision",
        ),
        ({"model_type": "whale", "architectures": ["WhaleLM"]}, "WhaleLM is not a causal language model"),
        (
            {"model_type": "whale", "architectures": ["WhaleLM"], "auto_map": {"AutoModelForCausalLM": "whale.Whale"}},
            "WhaleLM brings its own program code",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification has no language-model head"),
    ],
)
def test_wrong_architecture_is_refused_without_reading_weights(folder, changes, words):
    change_config(folder, **changes)
    (folder / "model.safetensors").write_bytes(b"not even weights")
    with pytest.raises(ModelUnavailable, match=words):
        plan_loading(folder, CPU)


def test_real_encoder_is_refused(tmp_path):
    tiny = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    BertForMaskedLM(tiny).save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailable, match="BertForMaskedLM is an encoder"):
        plan_loading(tmp_path, CPU)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("bert", "is an encoder,"), ("t5", "encoder-decoder"), ("whale", "architecture 'whale' cannot be read")],
)
def test_gguf_of_another_architecture(tmp_path, architecture, words):
    write_gguf(tmp_path / "m.gguf", architecture)
    with pytest.raises(ModelUnavailable, match=words):
        plan_loading(tmp_path / "m.gguf", CPU)


# ---------------------------------------------------------------------------------------------------- damaged files


def test_folder_that_is_gone(tmp_path):
    with pytest.raises(ModelUnavailable, match="does not exist"):
        plan_loading(tmp_path / "gone", CPU)


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        plan_loading(folder, CPU)


@pytest.mark.parametrize("content", ["{", "[1]", "", "\xff"])
def test_damaged_config(folder, content):
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelUnavailable, match=r"config\.json is damaged"):
        plan_loading(folder, CPU)


def test_no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelUnavailable, match="no tokenizer files"):
        plan_loading(folder, CPU)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}', ""])
def test_damaged_tokenizer(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnavailable, match="tokenizer cannot be read"):
        open_folder(folder)


def test_no_fast_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(folder)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="no fast tokenizer"):
        open_folder(folder)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="no weights"):
        plan_loading(folder, CPU)


def test_only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match=r"only pytorch_model\.bin, which can run code"):
        plan_loading(folder, CPU)


def test_folder_of_gguf_files(folder):
    (folder / "model.safetensors").rename(folder / "model.Q4.gguf")
    with pytest.raises(ModelUnavailable, match="holds GGUF files") as caught:
        plan_loading(folder, CPU)
    assert "model.Q4.gguf" in caught.value.hint


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_weights_cut_short(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is damaged or cut short"):
        plan_loading(folder, CPU)


@pytest.mark.parametrize(
    "content", [b"x" * 500, b"\x10" + b"\0" * 7 + b"[1,2,3]         ", b"\x02" + b"\0" * 7 + b"{}x"]
)
def test_weights_that_are_none(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnavailable, match="is damaged or cut short"):
        plan_loading(folder, CPU)


def test_missing_shard(tmp_path):
    path = save_tiny(tmp_path, shard="60KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelUnavailable, match=f"{shard.name} is named in .* but missing"):
        plan_loading(path, CPU)


@pytest.mark.parametrize("name", ["../../etc/passwd", "evil.bin", "sub/model.safetensors"])
def test_index_that_names_other_files(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelUnavailable, match="which is no safetensors file beside it"):
        plan_loading(folder, CPU)


def test_damaged_index(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelUnavailable, match=r"index\.json, is damaged"):
        plan_loading(folder, CPU)


@pytest.mark.parametrize("keep", [0, 3, 100, -5000])
def test_gguf_cut_short(tmp_path, keep):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelUnavailable, match=r"m\.gguf is damaged"):
        plan_loading(file, CPU)


# ---------------------------------------------------------------------------------------------------- wrong weights


def test_missing_head_is_not_replaced_by_random_numbers(folder):
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(ModelUnavailable, match=r"missing, e\.g\. lm_head\.weight; they would be random"):
        open_folder(folder)


def test_weights_of_another_shape(folder):
    change_config(folder, intermediate_size=128)
    with pytest.raises(ModelUnavailable, match="do not fit together"):
        open_folder(folder)


def test_unused_weights_are_noted(folder):
    change_config(folder, num_hidden_layers=1)
    (note,) = open_folder(folder).notes
    assert "stored weights are not used" in note and "model.layers.1" in note


def test_clean_folder_has_no_notes(folder):
    assert open_folder(folder).notes == ()


def test_two_embeddings_where_the_configuration_says_one(folder):
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ModelUnavailable, match="one matrix, but the weights hold two"):
        open_folder(folder)


def test_tied_embedding_shares_memory(tmp_path):
    model = open_folder(save_tiny(tmp_path, "llama", tie_word_embeddings=True))
    head, table = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    assert head.weight.data_ptr() == table.weight.data_ptr()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(folder, value):
    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    change_weights(folder, spoil)
    with pytest.raises(ModelUnavailable, match=r"model\.layers\.1\.mlp\.up_proj\.weight hold numbers"):
        open_folder(folder)


def test_overflow_in_float16_names_the_remedy(folder):
    def enlarge(weights):
        weights["model.norm.weight"][0] = 1e6

    change_weights(folder, enlarge)
    with pytest.raises(ModelUnavailable) as caught:
        open_folder(folder, ModelRef(str(folder), device="cpu", dtype="float16"))
    assert "bfloat16" in caught.value.hint


def test_quantized_weights_without_their_package(folder):
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelUnavailable, match="package that is not installed"):
        open_folder(folder)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_a_sentence_and_the_next_load_works(folder, monkeypatch, error):
    def fail(plan):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_load_module", fail)
        with pytest.raises(OutOfMemory, match=r"needs about 0\.0 GB") as caught:
            open_folder(folder)
    assert "smaller model" in caught.value.hint
    assert caught.value.__context__ is None  # a kept traceback would pin the half-loaded tensors
    assert open_folder(folder).info.parameters > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_takes_the_model_in_bfloat16_and_gives_its_memory_back(family, tmp_path):
    path = save_tiny(tmp_path, family)
    model = open_folder(path, ModelRef(str(path), device="cuda"))
    assert (model.info.device, model.info.dtype) == ("cuda:0", "bfloat16")
    ids = torch.tensor([[7, 8, 9, 10]])
    expected = open_folder(path).module(ids).logits
    got = model.module(ids.cuda()).logits.float().cpu()
    assert torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.99
    held = torch.cuda.memory_allocated()
    nbytes = model.nbytes
    del model
    gc.collect()
    assert held - torch.cuda.memory_allocated() >= nbytes
