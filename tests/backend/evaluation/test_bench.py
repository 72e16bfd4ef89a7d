"""The benchmark on a model that reads: its attributions are known, so the rows are too."""

import json
import sys

import pytest

from backend import cli
from backend.errors import BadRequest, Cancelled
from backend.evaluation import bench, bench_plan
from backend.evaluation.bench import Options, run_bench
from backend.evaluation.bench_plan import Grid
from backend.evaluation.bench_table import RowsFile, document
from backend.types import no_tick
from tests.support.reading_toy import reading_model
from tests.support.tiny import save_tiny, tiny_model
from tests.support.toys import Ticks

METHODS = ("uniform", "gradient_norm", "input_x_gradient", "occlusion")


@pytest.fixture(scope="module")
def reader():
    return reading_model(strength=8.0)


@pytest.fixture
def small(monkeypatch):
    """Two depths and two needles, whatever the clock says; tokens as units, since this tokenizer makes so many."""
    monkeypatch.setattr(bench, "level_at", lambda length: "token")
    monkeypatch.setattr(bench, "QUICK_GRIDS", (Grid((20, 80), (0,), 2),))


def measure(model, path, options, expired=lambda: False, tick=no_tick):
    file = RowsFile(path)
    finished = run_bench(model, options, file, tick, lambda text: None, expired)
    return finished, document(file.read())


QUICK = Options(METHODS, (320,), quick=True)


def test_rows_say_what_is_known_of_the_model(reader, small, tmp_path):
    finished, found = measure(reader, tmp_path / "r.jsonl", QUICK)
    assert finished
    assert found["about"]["model"] == "toy-reader" and found["about"]["versions"]["torch"]
    assert len(found["rows"]) == 8
    assert {(row["depth"], row["seed"], row["needles"]) for row in found["rows"]} == {(20, 0, 2), (80, 0, 2)}
    summed = {one["method"]: one for one in found["summary"]}
    assert list(summed) == list(METHODS)
    assert summed["uniform"]["lift"] == 1.0 and summed["uniform"]["needle_lift"] == 1.0
    assert summed["uniform"]["flags"][0] == "lift"
    for name in ("input_x_gradient", "occlusion"):  # the answer's own token is all that counts
        assert summed[name]["share"] == "positive"
        assert summed[name]["mass"] == summed[name]["needle_mass"] == pytest.approx(1.0, abs=1e-4)
        assert summed[name]["secret_rank"] == 1.0
        assert summed[name]["pass_rate"] == 1.0
        assert "lift" not in summed[name]["flags"]
    # in a linear model every token has the same gradient
    assert summed["gradient_norm"]["lift"] == pytest.approx(1.0, abs=1e-4)
    assert summed["occlusion"]["bos_share"] is not None  # without BOS the first token is measured like others
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["rows"][0]["params"] == {}


def test_a_run_goes_on_where_it_stopped(reader, small, tmp_path):
    path = tmp_path / "r.jsonl"
    counts, finished = [], False
    while not finished:
        finished, found = measure(reader, path, QUICK, expired=lambda: True)
        counts.append(len(found["rows"]))
    assert counts == list(range(1, 9))
    before = path.read_bytes()
    assert measure(reader, path, QUICK)[0]
    assert path.read_bytes() == before
    whole = measure(reader, tmp_path / "whole.jsonl", QUICK)[1]
    clock = ("seconds",)
    strip = [[{k: v for k, v in row.items() if k not in clock} for row in table["rows"]] for table in (found, whole)]
    assert strip[0] == strip[1]


def test_methods_that_come_later_join_the_file(reader, small, tmp_path):
    path = tmp_path / "r.jsonl"
    measure(reader, path, Options(METHODS[:2], (320,), quick=True))
    _, found = measure(reader, path, QUICK)
    assert [one["method"] for one in found["summary"]] == list(METHODS)
    assert len(found["plan"]) == 4


def test_rows_of_another_kind_of_run_are_refused(reader, small, tmp_path):
    measure(reader, tmp_path / "r.jsonl", Options(("uniform",), (320,), quick=True))
    with pytest.raises(BadRequest, match="chat was False"):
        measure(reader, tmp_path / "r.jsonl", Options(("uniform",), (320,), quick=True, chat=True))


def test_chats_are_measured_too(reader, small, tmp_path):
    _, found = measure(reader, tmp_path / "r.jsonl", Options(("input_x_gradient",), (360,), quick=True, chat=True))
    assert found["about"]["chat"] is True
    assert found["summary"][0]["secret_rank"] == 1.0
    assert found["summary"][0]["template_share"] == pytest.approx(0.0, abs=1e-4)


def test_a_model_that_cannot_read_gives_rows_without_numbers(small, tmp_path):
    model = tiny_model("llama", max_position_embeddings=1024)
    finished, found = measure(model, tmp_path / "r.jsonl", Options(("uniform",), (400,), quick=True))
    assert finished
    for row in found["rows"]:
        assert (row["needles"], row["tried"], row["mass"]) == (0, 8, None)
        assert row["refusal"] == "The model answered none of 8 needles."
    assert found["summary"][0]["pass_rate"] == 0.0


def test_lengths_beyond_the_model_are_left_out(tmp_path, small):
    model = tiny_model("llama", max_position_embeddings=512)
    _, found = measure(model, tmp_path / "r.jsonl", Options(("uniform",), (400, 800), quick=True))
    assert {row["length"] for row in found["rows"]} == {400}
    with pytest.raises(BadRequest, match="at most 512"):
        measure(model, tmp_path / "s.jsonl", Options(("uniform",), (800,), quick=True))


def test_progress_and_cancel(reader, small, tmp_path):
    ticks = Ticks()
    measure(reader, tmp_path / "r.jsonl", QUICK, tick=ticks)
    done = [d for d, _ in ticks.calls]
    assert done == sorted(done) and ticks.calls[-1] == (16, 16)
    stopping = Ticks(stop_at=len(ticks.calls) // 2)
    with pytest.raises(Cancelled):
        measure(reader, tmp_path / "s.jsonl", QUICK, tick=stopping)
    assert measure(reader, tmp_path / "s.jsonl", QUICK)[0]


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attriscope", "bench", "saliency", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=1024)


def test_the_command_writes_the_table_and_pauses(monkeypatch, folder, tmp_path, capsys, small):
    out = tmp_path / "t.json"
    base = ("--quick", "--model", folder, "--methods", "uniform", "--lengths", "400", "--json", out)
    assert command(monkeypatch, *base, "--pause-after", 0) == 3
    assert "goes on from there" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["rows"]) == 1
    assert command(monkeypatch, *base) == 0
    table = json.loads(out.read_text())
    assert table["schema_version"] == 1 and len(table["rows"]) == 2
    assert table["summary"][0]["method"] == "uniform"
    assert (tmp_path / "t.rows.jsonl").exists()
    assert "uniform" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "gradnorm"], "no method named"),
        (["--lengths", "many"], "--lengths takes numbers"),
        (["--lengths", "30"], "alone take"),
        (["--json", "/nothing/here/t.json", "--rows", "/nothing/here/r"], "Cannot write"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch, folder, tmp_path, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "--quick", "--model", folder, *arguments) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_the_full_run_has_three_seeds_and_all_depths():
    rich = bench_plan.FULL_GRIDS[0]
    assert rich.depths == (10, 30, 50, 70, 90) and len(rich.seeds) == 3
    assert all(len(grid.seeds) == 3 for grid in bench_plan.FULL_GRIDS)
