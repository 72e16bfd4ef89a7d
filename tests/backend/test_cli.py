"""The command line writes what the page exports, and says in a sentence what is wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from backend import cli
from backend.io import bundle
from tests.support.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return str(folder)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attriscope", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def test_saliency_writes_the_versioned_result(monkeypatch, folder, tmp_path, capsys):
    out, csv, html = tmp_path / "o.json", tmp_path / "o.csv", tmp_path / "o.html"
    code = run(
        monkeypatch, "saliency", "--model", folder, "--prompt", "The capital of France is", "--target", " Paris",
        "--foil", " Berlin", "--method", "uniform,gradient_norm,occlusion,integrated_gradients", "--param", "steps=8",
        "--json", out, "--csv", csv, "--html", html,
    )  # fmt: skip
    assert code == 0
    document = json.loads(out.read_text())
    assert document["schema_version"] == 1
    assert [r["method"] for r in document["results"]] == [
        "uniform", "gradient_norm", "occlusion", "integrated_gradients",
    ]  # fmt: skip
    assert document["results"][3]["params"]["steps"] == 8
    assert "".join(target["text"] for target in document["targets"]) == " Paris"
    assert "".join(token["text"] for token in document["foil"]) == " Berlin"
    explanation = bundle.decode(out.read_bytes())
    assert explanation.results[1].scores.shape == (len(explanation.targets), explanation.source_count)
    assert csv.read_text(encoding="utf-8-sig").startswith("method")
    assert html.read_text().startswith("<!")
    assert "gradient_norm" in capsys.readouterr().out


def test_without_a_target_the_whole_generated_answer_is_explained(monkeypatch, folder, tmp_path):
    out = tmp_path / "o.json"
    assert (
        run(monkeypatch, "saliency", "--model", folder, "--prompt", "Once upon", "--max-new-tokens", 3, "--json", out)
        == 0
    )
    document = json.loads(out.read_text())
    assert len(document["targets"]) == len(document["answer"]) <= 3
    assert document["decoding"]["max_new_tokens"] == 3


def test_a_target_within_a_given_answer_is_found_by_its_text(monkeypatch, folder, tmp_path):
    out = tmp_path / "o.json"
    base = ["saliency", "--model", folder, "--prompt", "The cat", "--method", "uniform", "--answer", " sat on the mat."]
    assert run(monkeypatch, *base, "--target", "mat", "--json", out) == 0
    document = json.loads(out.read_text())
    assert "mat" in "".join(target["text"] for target in document["targets"])
    assert len(document["targets"]) < len(document["answer"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x", "--answer", " a", "--target", "zebra"], "does not occur in the answer"),
        ([], "exactly one of --prompt and --prompt-file"),
        (["--prompt", "   "], "nothing but white space"),
        (["--prompt-file", "/nothing/here"], "Cannot read"),
        (["--prompt", "x", "--method", "gradnorm"], "no method named"),
        (["--prompt", "x", "--method", ","], "No method was named"),
        (["--prompt", "x", "--param", "steps"], "name=value"),
        (["--prompt", "x", "--param", "nonsense=1"], "has a parameter"),
        (["--prompt", "x", "--method", "uniform", "--param", "occlusion.operator=hide"], "not asked for"),
        (["--prompt", "x", "--method", "integrated_gradients", "--param", "steps=1000000"], "between"),
        (["--prompt", "x", "--system", "s"], "needs --chat"),
        (["--prompt", "x", "--level", "paragraph"], "must be one of"),
        (["--prompt", "x", "--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_get_a_sentence_and_status_two(monkeypatch, folder, capsys, arguments, says):
    assert run(monkeypatch, "saliency", "--model", folder, *arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert says in error
    assert "Traceback" not in error


def test_chat_prompts_use_the_models_template(monkeypatch, folder, tmp_path):
    out = tmp_path / "o.json"
    file = tmp_path / "question.txt"
    file.write_text("What is 你好?", encoding="utf-8")
    assert run(
        monkeypatch, "saliency", "--model", folder, "--chat", "--system", "Be brief.", "--prompt-file", file,
        "--method", "gradient_norm", "--max-new-tokens", 2, "--json", out,
    ) == 0  # fmt: skip
    document = json.loads(out.read_text())
    roles = {token["role"] for token in document["tokens"]}
    assert {"template", "system", "user"} <= roles
    user = "".join(token["text"] for token in document["tokens"] if token["role"] == "user")
    assert user == "What is 你好?"


def test_models_and_methods_are_listed(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, "models", "--json", tmp_path / "m.json") == 0
    document = json.loads((tmp_path / "m.json").read_text())
    assert document["models"][0] == {"id": "smollm2-135m-instruct", "embedded": True}
    assert document["device"] == "cpu"
    assert run(monkeypatch, "methods", "--json", tmp_path / "k.json") == 0
    names = [m["name"] for m in json.loads((tmp_path / "k.json").read_text())["methods"]]
    assert "occlusion" in names
    assert "integrated_gradients" in capsys.readouterr().out


@pytest.mark.smollm
def test_the_embedded_model_is_the_default(monkeypatch, smollm, tmp_path):
    out = tmp_path / "o.json"
    assert (
        run(
            monkeypatch,
            "saliency",
            "--prompt",
            "The capital of France is",
            "--target",
            " Paris",
            "--foil",  # what makes it Paris rather than London is the country
            " London",
            "-m",
            "occlusion",
            "--json",
            out,
        )
        == 0
    )
    explanation = bundle.decode(out.read_bytes())
    assert explanation.model.id == "smollm2-135m-instruct"
    assert explanation.targets[0].rank == 1
    assert explanation.targets[0].probability == pytest.approx(0.7725, abs=0.01)
    words = [token.text for token in explanation.sources]
    assert words[int(np.nanargmax(explanation.results[0].scores[0]))] == " France"


def test_help_needs_no_torch():
    code = "import sys; from backend import cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
