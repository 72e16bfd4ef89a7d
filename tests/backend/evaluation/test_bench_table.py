"""Rows that survive a crash, means by hand, flags, grids that fit the time, and the badge."""

import orjson
import pytest

from backend.errors import BadRequest
from backend.evaluation.badge import badge, shipped_table
from backend.evaluation.bench_plan import SETTINGS, Grid, choose_grids, level_at, setting_of
from backend.evaluation.bench_table import (
    METRICS,
    RowsFile,
    document,
    flags,
    mean_row,
    require_same_run,
    summary,
)
from backend.registry import list_methods, make_params


def row(method="a", length=128, seed=0, needles=1, **numbers):
    base = {
        "kind": "row", "method": method, "length": length, "depth": 50, "seed": seed, "needles": needles,
        "tried": needles + 1, "share": "positive", "level": "token", "params": {}, "refusal": "",
    }  # fmt: skip
    return base | dict.fromkeys(METRICS) | numbers


def test_lines_come_back_and_a_torn_one_is_left_out(tmp_path):
    file = RowsFile(tmp_path / "rows.jsonl")
    assert file.read() == []
    file.append({"kind": "about", "model": "m"})
    file.append(row())
    with file.path.open("ab") as raw:
        raw.write(b'{"kind": "row", "meth')
    assert [record["kind"] for record in file.read()] == ["about", "row"]
    file.append(row(seed=1))
    assert [record["kind"] for record in file.read()] == ["about", "row", "row"]
    assert file.read()[-1]["seed"] == 1


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(BadRequest, match="Cannot write"):
        RowsFile(tmp_path).append({})
    with pytest.raises(BadRequest, match="Cannot read"):
        RowsFile(tmp_path).read()


def test_rows_of_another_run_are_not_mixed():
    about = {"model": "m", "revision": "1", "quick": True}
    require_same_run(about, dict(about))
    with pytest.raises(BadRequest, match="revision was '1'"):
        require_same_run(about, {**about, "revision": "2"})


def test_means_by_hand():
    found = mean_row([{"mass": 0.5, "lift": 2.0}, {"mass": 0.25, "lift": None}])
    assert (found["mass"], found["lift"], found["recall_at_k"]) == (0.375, 2.0, None)
    rows = [
        row(needles=1, seed=0, mass=1.0, needle_mass=0.2, recall_at_k=0.5, lift=3.0, chance=0.1),
        row(needles=3, seed=1, mass=0.5, needle_mass=0.4, recall_at_k=0.5, lift=1.0, chance=0.1),
        row(needles=0, seed=2),
        row("b", mass=0.1),
    ]
    first, second = summary(rows)
    assert (first["method"], first["needles"], second["method"]) == ("a", 4, "b")
    assert first["pass_rate"] == 4 / 7
    assert first["mass"] == (1.0 + 3 * 0.5) / 4
    assert first["lift"] == 1.5
    assert first["needle_mass_seed_std"] == pytest.approx(0.1)
    assert first["recall_at_k_seed_std"] == 0.0
    assert second["recall_at_k"] is None and second["needle_mass_seed_std"] is None


def test_the_mean_of_equal_numbers_is_that_number():
    rows = [row(seed=seed, needles=seed + 1, lift=1.0, chance=1 / 3, recall_at_k=0.1) for seed in range(7)]
    assert summary(rows)[0]["lift"] == 1.0
    assert summary(rows)[0]["chance"] == 1 / 3


@pytest.mark.parametrize(
    ("lift", "recall", "wanted"),
    [(1.0, 0.2, ["lift"]), (1.01, 0.1, ["recall"]), (0.5, 0.05, ["lift", "recall"]), (2.0, 0.2, []), (None, None, [])],
)
def test_flags(lift, recall, wanted):
    assert flags({"lift": lift, "recall_at_k": recall, "chance": 0.1}) == wanted


def test_the_document_has_its_parts():
    found = document([{"kind": "about", "model": "m"}, {"kind": "plan", "method": "a"}, row(mass=1.0)])
    assert found["about"] == {"model": "m"} and found["plan"] == [{"method": "a"}]
    assert "kind" not in found["rows"][0]
    assert {"method", "length", "depth", "seed", "needles", "mass", "lift", "needle_mass", "recall_at_k",
            "secret_rank", "bos_share", "seconds"} <= set(found["rows"][0])  # fmt: skip
    assert found["summary"][0]["mass"] == 1.0
    orjson.dumps(found)


RICH, MIDDLE, POOR = Grid((1, 2), (0, 1), 2), Grid((1, 2), (0, 1), 1), Grid((1,), (0,), 1)  # 8, 4, 1 needles


def test_cheap_methods_take_the_rich_grid_and_leave_their_rest_to_others():
    found = choose_grids({("cheap", 128): 1.0, ("dear", 128): 20.0}, 100.0, (RICH, MIDDLE, POOR))
    assert found == {("cheap", 128): RICH, ("dear", 128): MIDDLE}  # 8 + 80 seconds


def test_short_prompts_always_take_part_and_long_ones_only_where_they_fit():
    seconds = {("a", 512): 500.0, ("a", 1024): 50.0, ("b", 1024): 200.0}
    found = choose_grids(seconds, 700.0, (RICH, MIDDLE, POOR))
    assert found[("a", 512)] == POOR
    assert found[("a", 1024)] == POOR
    assert ("b", 1024) not in found


def test_the_plan_fits_the_time():
    for budget in (50.0, 300.0, 2000.0):
        seconds = {(f"m{i}", length): 0.1 * 2**i * length / 128 for i in range(8) for length in (128, 256)}
        found = choose_grids(seconds, budget, (RICH, MIDDLE, POOR))
        least = sum(seconds.values()) * POOR.size
        assert sum(seconds[pair] * grid.size for pair, grid in found.items()) <= max(budget, least) + 1e-9
        assert set(found) == set(seconds)


@pytest.mark.parametrize("quick", [True, False])
def test_settings_are_valid_parameters(quick):
    known = {method.name: method for method in list_methods()}
    for name in SETTINGS:
        if name in known:
            make_params(known[name], setting_of(name, quick))
    assert setting_of("uniform", quick) == {}


def test_long_prompts_lose_words_instead_of_tokens():
    assert [level_at(length) for length in (128, 256, 257, 1024)] == ["token", "token", "word", "word"]


TABLE = {
    "about": {"model": "m", "revision": "r"},
    "summary": [
        {"method": "a", "length": 128, "recall_at_k": 0.5, "chance": 0.1, "needles": 9, "flags": []},
        {"method": "a", "length": 512, "recall_at_k": 0.714, "chance": 0.02, "needles": 15, "flags": []},
        {"method": "b", "length": 1024, "recall_at_k": 0.01, "chance": 0.02, "needles": 3, "flags": ["lift", "recall"]},
        {"method": "c", "length": 128, "recall_at_k": None, "chance": None, "needles": 0, "flags": []},
    ],
}


def test_the_badge_reads_the_nearest_length():
    found = badge("m", "r", "a", 700, TABLE)
    assert found.text == "needle recall@k 0.71 at 512 tokens, measured on this model"
    assert (found.warning, found.needles) == ("", 15)
    assert badge("m", "r", "a", 60, TABLE).length == 128


def test_the_badge_warns_of_methods_that_find_nothing():
    found = badge("m", "r", "b", 60, TABLE)
    assert found.warning == (
        "On planted needles of 1,024 tokens, it puts no more on what the answer needs than a uniform map and it finds "
        "the needle no better than chance."
    )


@pytest.mark.parametrize("asked", [("x", "r", "a"), ("m", "x", "a"), ("m", "r", "c"), ("m", "r", "d")])
def test_no_badge_for_what_was_not_measured(asked):
    assert badge(*asked, 100, TABLE) is None
    assert badge(*asked, 100, None) is None


def test_the_shipped_table_is_a_document_or_nothing():
    found = shipped_table()
    assert found is None or found["kind"] == "saliency_benchmark"
