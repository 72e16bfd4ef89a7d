"""``attriscope bench``: the tables of how far methods can be trusted, headless."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from backend.errors import BadRequest
from backend.evaluation.bench_table import RowsFile, document
from backend.settings import get_settings
from backend.types import EMBEDDED_MODEL, ModelRef

app = typer.Typer(no_args_is_help=True, help="Measure methods against planted answers.")
say = Console(stderr=True, highlight=False)
out = Console(highlight=False)

_COLUMNS = (
    ("mass", "{:.2f}"), ("lift", "{:.2f}"), ("needle_mass", "{:.2f}"), ("recall_at_k", "{:.2f}"), ("chance", "{:.2f}"),
    ("secret_rank", "{:.1f}"), ("bos_share", "{:.2f}"), ("seconds", "{:.2f}"),
)  # fmt: skip


@app.callback()
def bench() -> None:
    """Measure methods against planted answers."""


@app.command()
def saliency(
    quick: Annotated[bool, typer.Option("--quick", help="128 tokens, reduced settings, under ten minutes.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the table to this file.")] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="Keep finished rows in this file; a second call goes on from there. Default: beside --json."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas; all by default.")] = "",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "",
    model: Annotated[str, typer.Option(help="Embedded model, hub id, local folder or .gguf file.")] = EMBEDDED_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Plant needles in chats, by the model's template.")] = False,
    words: Annotated[int, typer.Option(min=1, max=5, help="Words of the secret; each is a target token.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time that the plan may take; decides how many needles there are.")
    ] = None,
    pause_after: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after the row that passes this many minutes.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
) -> None:
    """Plant needles and measure what each saliency method makes of them.

    The full run takes hours: finished rows are kept, and the same command goes on where it stopped.
    """
    from backend.evaluation.bench import Options, run_bench
    from backend.models.hub import ModelHub

    options = Options(
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        lengths=_numbers(lengths),
        quick=quick,
        chat=chat,
        words=words,
        minutes=minutes,
    )
    file = RowsFile(rows or (json.with_suffix(".rows.jsonl") if json else Path("saliency.rows.jsonl")))
    began = time.monotonic()

    def expired() -> bool:
        return pause_after is not None and time.monotonic() - began > 60 * pause_after

    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=say
    ) as bar:
        task = bar.add_task("Loading the model", total=None)
        with ModelHub(get_settings()).lease(ModelRef(model, revision, device, dtype)) as loaded:
            finished = run_bench(
                loaded,
                options,
                file,
                tick=lambda done, total: bar.update(task, completed=done, total=total),
                stage=lambda text: bar.update(task, description=text),
                expired=expired,
            )
    table = document(file.read())
    _show(table)
    if json is not None:
        try:
            json.write_bytes(orjson.dumps(table, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise BadRequest(f"Cannot write {json}: {error.strerror}.") from error
        say.print(Text(f"wrote {json}"))
    if not finished:
        say.print(Text(f"Not finished: the rows so far are in {file.path}; the same command goes on from there."))
        raise typer.Exit(3)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadRequest(f"--lengths takes numbers separated by commas, not {text!r}.") from error


def _show(document: dict[str, Any]) -> None:
    about = document["about"]
    out.print(Text(f"{about['model']} ({about['revision'][:12]}), {about['device']}, {about['dtype']}"))
    heads = ["method", "tokens", "needles", *(name for name, _ in _COLUMNS), ""]
    lines = [heads]
    for one in document["summary"]:
        numbers = ["–" if one[name] is None else form.format(one[name]) for name, form in _COLUMNS]
        note = one["refusal"] or " ".join(f"no {flag}" for flag in one["flags"])
        lines.append([one["method"], str(one["length"]), str(one["needles"]), *numbers, note])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    for line in lines:  # not a drawn table: it must survive a pipe and a narrow terminal
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:-1], widths[1:], strict=True))]
        out.print(Text("  ".join([*cells, line[-1]]).rstrip()), soft_wrap=True)
