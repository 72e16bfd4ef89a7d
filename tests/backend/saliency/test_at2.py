"""AT2: scores against the library's attention weights, refusals, files, and learning on a planted copying head."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from backend.errors import BadRequest, Cancelled, NotApplicable
from backend.models.language import LanguageModel
from backend.saliency import at2, at2_training, at2_weights
from backend.saliency.at2_fitting import Example, Settings, choose_steps, correlation, fit
from backend.saliency.at2_texts import KINDS, make_text
from backend.saliency.at2_training import ablate, log_odds, train
from backend.types import ModelInfo, ModelRef, no_tick
from scripts import train_at2
from tests.support.learned import RECORD, equal_weights, fitted
from tests.support.tiny import save_tiny, tiny_model
from tests.support.toys import ToyConfig, question_of

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(4)).tolist()
THETA = [[0.4, -0.1, 0.0, 0.1], [0.05, 0.05, -0.2, 0.1]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(at2_weights, "get_settings", lambda: SimpleNamespace(cache_dir=tmp_path))


def run(question):
    return at2.run(question.model, question, at2.Params(), no_tick)


def test_scores_are_the_weighed_attention_of_the_predicting_positions():
    model = tiny_model("qwen3")
    at2_weights.write(fitted(model, THETA), at2_weights.cached_path(at2_weights.identity_of(model)))
    scores = run(question_of(model, IDS, 21, (0, 2)))
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model.module(torch.tensor([IDS[:22]]), output_attentions=True, use_cache=False).attentions
    wanted = sum(THETA[layer][head] * maps[layer][0, head] for layer in range(2) for head in range(4))
    np.testing.assert_allclose(scores.values, wanted[[20, 21]], atol=1e-5)
    text = next(check.text for check in scores.checks if check.name == "held_out_correlation")
    assert "correlation 0.60; equal weights reach 0.30, random ones 0.00" in text and "8 texts" in text


def test_weights_that_gain_nothing_are_warned_of():
    model = tiny_model("llama")
    poor = fitted(model, THETA, replace(RECORD, correlation=0.31, by_kind={"list": 0.31}))
    at2_weights.write(poor, at2_weights.cached_path(poor.identity))
    check = next(c for c in run(question_of(model, IDS, 21)).checks if c.name == "held_out_correlation")
    assert check.verdict == "warn" and "hardly better" in check.text and "list 0.31" in check.text


def test_a_model_without_weights_is_refused_with_the_way_to_get_them():
    with pytest.raises(NotApplicable, match="learned once per model") as refusal:
        run(question_of(tiny_model("llama"), IDS, 21))
    assert "python -m scripts.train_at2 --model tiny-llama" in refusal.value.hint


def test_another_revision_or_vocabulary_is_refused(monkeypatch, tmp_path):
    model = tiny_model("llama")
    monkeypatch.setattr(at2_weights, "SHIPPED", tmp_path / "shipped")
    other = replace(at2_weights.identity_of(model), revision="1" * 16)
    at2_weights.write(replace(fitted(model, THETA), identity=other), tmp_path / "shipped" / "tiny-llama.json")
    with pytest.raises(NotApplicable, match="another version"):
        run(question_of(model, IDS, 21))
    at2_weights.write(fitted(model, THETA), tmp_path / "shipped" / "tiny-llama.json")
    assert np.abs(run(question_of(model, IDS, 21)).values).sum() > 0
    model.tokenizer.add_tokens(["something new"])
    with pytest.raises(NotApplicable, match="another version"):
        run(question_of(model, IDS, 21))


def test_weights_of_another_shape_are_refused():
    model = tiny_model("llama")
    with equal_weights(model, layers=3), pytest.raises(NotApplicable, match="3 layers of 4 heads; this model has 2"):
        run(question_of(model, IDS, 21))


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "theta": [[1, 2], [3]]}'])
def test_a_damaged_file_is_named(content):
    model = tiny_model("llama")
    path = at2_weights.cached_path(at2_weights.identity_of(model))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(NotApplicable, match=r"tiny-llama-.*\.json .* is damaged"):
        run(question_of(model, IDS, 21))


def test_files_hold_what_was_written_and_names_differ_by_identity():
    model = tiny_model("llama")
    made = fitted(model, THETA, replace(RECORD, by_kind={"list": 0.5}, versions={"torch": "2"}, data="sentences"))
    path = at2_weights.cached_path(made.identity)
    at2_weights.write(made, path)
    assert at2_weights.read(path) == made
    names = {replace(made.identity, **{name: "x"}).file_name for name in ("model", "revision", "tokenizer")} | {
        made.identity.file_name
    }
    assert len(names) == 4
    assert at2_weights.Identity("/data/My Model", "", "").file_name.startswith("data-my-model-")


# ------------------------------------------------------------------------------------------------ learning


class FixedAttention(nn.Module):
    """Two heads. In the copying layer the first looks at ids from 50 on; all other heads look where a table says."""

    def __init__(self, copies, seed):
        super().__init__()
        self.copies = copies
        table = torch.randn(2, 60, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("table", 2 * table)

    def forward(self, ids, mask):
        scores = self.table[:, ids].transpose(0, 1)[:, :, None].expand(-1, -1, ids.shape[1], -1).clone()
        if self.copies:
            scores[:, 0] = 4.0 * (ids >= 50)[:, None]
        weights = (scores + mask).softmax(-1)
        return torch.zeros(*ids.shape, 1), weights


class Copier(PreTrainedModel):
    """Says whatever the copying head looks at; the other three heads have no effect."""

    config_class = ToyConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding.from_pretrained(torch.eye(60))
        self.layers = nn.ModuleList([FixedAttention(False, 1), FixedAttention(True, 2)])

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, attention_mask=None):
        n = input_ids.shape[1]
        mask = torch.full((n, n), -1e4).triu(1)[None, None] if attention_mask is None else attention_mask
        seen = self.embed(input_ids)
        weights = [layer(input_ids, mask)[1] for layer in self.layers]
        return SimpleNamespace(logits=8 * weights[1][:, 0] @ seen)


@pytest.fixture(scope="module")
def copier():
    config = ToyConfig(vocab_size=60, hidden_size=60, num_hidden_layers=2)
    config._attn_implementation = "sdpa"
    info = ModelInfo(id="copier", revision="0", dtype="float32", device="cpu", parameters=1)
    return LanguageModel(ModelRef("copier"), info, Copier(config).eval().requires_grad_(False), None, 0)


def planted(model, number):
    """Twenty tokens, one of which the copying head looks at; it is the answer."""
    random = np.random.default_rng(number)
    ids = random.integers(0, 50, 20)
    place = random.integers(19)
    ids[place] = random.integers(50, 60)
    return question_of(model, [*ids.tolist(), int(ids[place])], 20)


def test_the_weights_find_a_planted_copying_head(copier):
    settings = Settings(masks=24)
    examples = [
        ablate(question, np.arange(20) < 19, "needle", number, settings, lambda: None)
        for number in range(40)
        for question in [planted(copier, number)]
    ]
    theta = fit(examples[:32], settings)
    size = theta.abs().flatten().sort(descending=True).values
    assert theta.abs().flatten().argmax() == 2 and theta[1, 0] > 0  # second layer, first head
    assert size[0] > 3 * size[1]
    assert float(theta.abs().sum()) == pytest.approx(1)
    held = examples[32:]
    assert correlation(held, theta) > correlation(held, torch.ones(2, 2, dtype=torch.float64)) + 0.1


def test_a_fit_to_few_texts_stops_early():
    random = np.random.default_rng(0)
    truth = random.normal(size=(4, 10))

    def texts(count, noise):
        for _ in range(count):
            features = random.normal(size=(8, 4, 10)).astype(np.float32)
            yield Example("list", features, (features * truth).sum((1, 2)) + noise * random.normal(size=8))

    settings = Settings(steps=300, rate=1e-2)
    clear, noisy = list(texts(60, 0.1)), list(texts(6, 12.0))
    assert choose_steps(noisy, settings) < choose_steps(clear, settings)
    theta = fit(clear, settings)
    assert np.corrcoef(theta.flatten(), truth.flatten())[0, 1] > 0.95
    stopped = fit(clear, settings, 1)
    assert (stopped - 1 / 40).abs().max() < 0.02 and not torch.equal(stopped, theta)


def test_features_are_the_attention_to_what_stayed_minus_that_to_what_went(copier):
    question, settings = planted(copier, 0), Settings(masks=5, seed=3)
    free = np.arange(20) % 2 == 0
    example = ablate(question, free, "needle", 7, settings, lambda: None)
    removed = (np.random.default_rng([3, 7]).random((5, 20)) >= 0.5) & free
    ids = torch.tensor([question.ids])
    mask = torch.full((20, 20), -1e4).triu(1)[None, None]
    for m in range(5):
        for layer, part in enumerate(copier.module.layers):
            last = part(ids, mask)[1][0, :, -1]
            wanted = [sum(last[h, i] * (-1 if removed[m, i] else 1) for i in range(20) if free[i]) for h in range(2)]
            np.testing.assert_allclose(example.features[m, layer], wanted, atol=1e-6)
        hidden = mask.clone()
        hidden[..., removed[m]] = -1e4
        hidden[0, 0].fill_diagonal_(0)
        logits = copier.module(ids, hidden).logits[0, -1].double()
        p = logits.softmax(-1)[question.strands[0].tokens[0]]
        assert example.effects[m] == pytest.approx(float((p / (1 - p)).log()), abs=1e-4)


def test_log_odds_at_both_ends():
    p = np.array([1e-9, 0.2, 0.999])
    np.testing.assert_allclose(log_odds(np.log(p)), np.log(p / (1 - p)), rtol=1e-6)
    assert np.isfinite(log_odds(np.array([0.0, -1e-20, -800.0]))).all()


def small(**more):
    return Settings(**{"prompts": 25, "masks": 4, "sentences": 1, "answer": 2, "steps": 50, **more})


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=1024)
    before = model.module(torch.tensor([IDS])).logits

    def stop(done, total):
        if done == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        train(model, small(), tmp_path / "run", stop)
    assert len(list((tmp_path / "run").glob("*.npz"))) == 3
    measured = []
    real = at2_training.measure
    monkeypatch.setattr(at2_training, "measure", lambda *args: measured.append(args[2]) or real(*args))
    resumed = train(model, small(), tmp_path / "run", no_tick)
    assert measured == list(range(3, 25))
    again = train(model, small(), tmp_path / "run", no_tick)
    assert measured == list(range(3, 25)) and again.theta == resumed.theta
    assert torch.equal(model.module(torch.tensor([IDS])).logits, before)

    assert resumed.identity == at2_weights.identity_of(model)
    assert np.abs(resumed.theta).sum() == pytest.approx(1)
    assert (resumed.record.prompts, resumed.record.held_out) == (20, 5)
    assert set(resumed.record.by_kind) == set(KINDS)
    with pytest.raises(BadRequest, match="other settings"):
        train(model, small(masks=5), tmp_path / "run", no_tick)
    with pytest.raises(BadRequest, match="too few"):
        train(model, small(prompts=20), tmp_path / "run", no_tick)


@pytest.mark.parametrize("chat", [True, False])
def test_texts_follow_from_their_number_and_end_with_their_question(chat):
    texts = [make_text(number, 0, chat) for number in range(60)]
    assert texts == [make_text(number, 0, chat) for number in range(60)]
    assert texts != [make_text(number, 1, chat) for number in range(60)]
    assert [text.kind for text in texts[:5]] == list(KINDS)
    assert len({text.prompt for text in texts}) == 60
    for text in texts:
        last = text.prompt.turns[-1].content if text.prompt.is_chat else text.prompt.text
        assert text.question and last.endswith(text.question)
        assert chat or not text.prompt.is_chat


def test_the_script_names_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_at2", "--model", str(tmp_path / "nothing"), "--work", str(tmp_path)])
    with pytest.raises(SystemExit, match="nothing"):
        train_at2.main()


def test_the_script_stops_after_its_minutes_and_writes_weights_when_it_goes_on(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "tiny", max_position_embeddings=1024)
    sizes = {"prompts": 25, "masks": 2, "sentences": 1, "answer": 2, "steps": 20}
    given = ["train_at2", "--model", str(tmp_path / "tiny"), "--work", str(tmp_path), "--out", str(tmp_path / "w.json")]
    given += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", [*given, "--minutes", "0"])
    with pytest.raises(SystemExit, match="run the same command again"):
        train_at2.main()
    monkeypatch.setattr("sys.argv", given)
    train_at2.main()
    fitted_here = at2_weights.read(tmp_path / "w.json")
    assert fitted_here.identity.model == str(tmp_path / "tiny") and len(fitted_here.theta) == 2
    assert "equal weights" in capsys.readouterr().out


@pytest.mark.smollm
def test_the_shipped_weights_belong_to_the_embedded_model(smollm):
    path = at2_weights.SHIPPED / "smollm2-135m-instruct.json"
    shipped = at2_weights.read(path)
    assert shipped.identity == at2_weights.identity_of(smollm)
    assert at2_weights.find(smollm) == shipped
    assert np.array(shipped.theta).shape == (30, 9)
    assert np.abs(shipped.theta).sum() == pytest.approx(1, abs=1e-3)
    assert path.stat().st_size < 20_000
    record = json.loads(path.read_text())["record"]
    assert record["correlation"] > record["equal_weights"] + 0.05 > record["random_weights"]
    assert record["held_out"] >= 10 and record["data"]
