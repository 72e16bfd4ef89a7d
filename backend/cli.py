"""The console script ``attriscope``: the same powers as the pages, for people who work headless."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from backend import cli_bench
from backend.engine import Engine
from backend.errors import AppError, BadRequest
from backend.io import bundle
from backend.io.export import CSV_ENCODING, to_csv, to_html
from backend.models.identity import downloaded
from backend.registry import default_params, get_method, list_methods, make_params
from backend.settings import get_settings
from backend.types import (
    EMBEDDED_MODEL,
    Answer,
    AnswerRequest,
    Decoding,
    Explanation,
    MethodSpec,
    ModelRef,
    Prompt,
    SaliencyRequest,
    Scalar,
    Turn,
)

ROOT = Path(__file__).resolve().parent.parent

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Browse explanations of machine-learning models.")
app.add_typer(cli_bench.app, name="bench")
say = Console(stderr=True, highlight=False)
out = Console(highlight=False)

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the versioned JSON result to this file.")]


def main() -> None:
    """Run the command line; an error that a person can act on ends it with status 2 and one sentence."""
    try:
        app()
    except AppError as error:
        say.print(Text(f"attriscope: {error.message}", style="red"))
        if error.hint:
            say.print(Text(error.hint))
        sys.exit(2)


@app.command()
def run(
    port: Annotated[int, typer.Option(help="Port of the web page.")] = 8501,
    address: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 is this machine only.")] = "127.0.0.1",
) -> None:
    """Start the web application."""
    entry = ROOT / "app.py"
    if not entry.is_file():
        raise BadRequest("The application's pages are not beside its code.", "Install it with: make setup")
    command = [sys.executable, "-m", "streamlit", "run", str(entry)]
    command += ["--server.port", str(port), "--server.address", address]
    command += ["--server.maxUploadSize", str(get_settings().max_upload_mb)]
    try:
        raise typer.Exit(subprocess.run(command, cwd=ROOT, check=False).returncode)  # noqa: S603 - no shell, own path
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
def models(json: JsonOption = None) -> None:
    """Show the device, the limits and the models that need no download."""
    from backend.models.placement import choose_placement

    settings = get_settings()
    placement = choose_placement(ModelRef(), settings)
    known = [EMBEDDED_MODEL, *downloaded(settings)]
    document: dict[str, Any] = {
        "schema_version": 1,
        "kind": "models",
        "device": str(placement.device),
        "dtype": str(placement.dtype).removeprefix("torch."),
        "device_reason": placement.reason,
        "memory_budget_gb": settings.memory_budget_gb,
        "hub": "" if settings.offline else settings.hub_endpoint,
        "models": [{"id": name, "embedded": name == EMBEDDED_MODEL} for name in known],
    }
    if json is not None:
        _write(json, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    out.print(Text(f"device {document['device']}, {document['dtype']}: {placement.reason}"))
    for name in known:
        out.print(Text(f"  {name}" + ("  (embedded, the default)" if name == EMBEDDED_MODEL else "  (downloaded)")))


@app.command()
def methods(json: JsonOption = None) -> None:
    """List the saliency methods with their parameters and defaults."""
    table = Table("name", "signed", "parameters", "what it shows")
    for method in list_methods():
        defaults = ", ".join(f"{k}={v}" for k, v in default_params(method).items())
        table.add_row(method.name, "yes" if method.signed else "no", defaults, method.summary)
    out.print(table)
    if json is not None:
        document = [
            {"name": m.name, "signed": m.signed, "params": default_params(m), "summary": m.summary}
            for m in list_methods()
        ]
        _write(json, orjson.dumps({"schema_version": 1, "kind": "methods", "methods": document}))


@app.command()
def saliency(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this UTF-8 file.")] = None,
    model: Annotated[str, typer.Option(help="Embedded model, hub id, local folder or .gguf file.")] = EMBEDDED_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render the prompt with the model's chat template.")] = False,
    system: Annotated[str, typer.Option(help="System message; with --chat.")] = "",
    target: Annotated[
        str, typer.Option(help="Text to explain: the continuation itself, or a part of --answer if that is given.")
    ] = "",
    answer: Annotated[str, typer.Option(help="A given answer, instead of letting the model generate one.")] = "",
    foil: Annotated[str, typer.Option(help="Explain why the target rather than this text.")] = "",
    method: Annotated[
        str, typer.Option("--method", "-m", help="Names, separated by commas; see: attriscope methods")
    ] = "gradient_norm,input_x_gradient",
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", help="name=value, or method.name=value; repeatable.")
    ] = None,
    objective: Annotated[str, typer.Option(help="What is explained: log_prob, logit or prob.")] = "log_prob",
    level: Annotated[str, typer.Option(help="Unit that ablation removes: token, word or sentence.")] = "token",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=512, help="Longest generated answer, in tokens.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Nucleus mass for sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    json: JsonOption = None,
    csv: Annotated[Path | None, typer.Option(help="Write the scores as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
) -> None:
    """Show which prompt tokens drove an answer.

    Without --target and --answer the model answers first, and every token of its answer is explained.
    """
    ref = ModelRef(model, revision, device, dtype)
    asked = _prompt(prompt, prompt_file, chat, system)
    names = [name.strip() for name in method.split(",") if name.strip()]
    specs = tuple(_specs(names, param or []))
    scalar = _one_of(objective, "objective", ("log_prob", "logit", "prob"))
    unit = _one_of(level, "level", ("token", "word", "sentence"))
    engine = Engine()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=say
    ) as bar:
        task = bar.add_task("Starting", total=None)

        def tick(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        def stage(text: str) -> None:
            bar.update(task, description=text)

        decoding = Decoding(max_new_tokens, temperature, top_p, seed)
        continuation = answer or target or None
        said = engine.run(AnswerRequest(ref, asked, decoding, continuation), tick=tick, stage=stage)
        request = SaliencyRequest(
            model=ref,
            prompt=asked,
            answer_ids=said.answer_ids,
            target=_find(said, target) if answer and target else (0, len(said.answer_ids)),
            methods=specs,
            foil=foil,
            objective=scalar,
            level=unit,
            decoding=said.decoding,
            seed=seed,
        )
        explanation = engine.run(request, tick=tick, stage=stage)
    engine.close()
    _report(explanation, said.notes)
    if json is not None:
        _write(json, bundle.encode(explanation))
    if csv is not None:
        _write(csv, to_csv(explanation).encode(CSV_ENCODING))
    if html is not None:
        _write(html, to_html(explanation).encode())
    if all(result.refusal for result in explanation.results):
        raise typer.Exit(1)


def _prompt(prompt: str | None, file: Path | None, chat: bool, system: str) -> Prompt:
    if (prompt is None) == (file is None):
        raise BadRequest("Give exactly one of --prompt and --prompt-file.")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except OSError as error:
            raise BadRequest(f"Cannot read {file}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise BadRequest(f"{file} is not UTF-8 text.", "Save it as UTF-8.") from error
    text = prompt or ""
    if not chat:
        if system:
            raise BadRequest("--system needs --chat.")
        return Prompt(text)
    turns = (Turn("system", system),) if system else ()
    return Prompt(turns=(*turns, Turn("user", text)))


def _specs(names: list[str], params: list[str]) -> list[MethodSpec]:
    given: dict[str, dict[str, Scalar]] = {name: {} for name in names}
    if not given:
        raise BadRequest("No method was named.", "For example: --method gradient_norm,occlusion")
    for item in params:
        key, separator, value = item.partition("=")
        if not separator:
            raise BadRequest(f"--param takes name=value, not {item!r}.")
        wanted, dot, name = key.rpartition(".")
        if dot and wanted not in given:
            raise BadRequest(f"--param {item!r} names a method that is not asked for.")
        takers = [wanted] if dot else [m for m in names if name in default_params(get_method(m))]
        if not takers:
            raise BadRequest(f"None of the methods has a parameter {name!r}.", "See: attriscope methods")
        for taker in takers:
            given[taker][name] = value
    specs = []
    for method_name, values in given.items():
        method = get_method(method_name)
        checked = make_params(method, values)
        specs.append(MethodSpec.of(method.name, {key: getattr(checked, key) for key in values}))
    return specs


def _find(answer: Answer, text: str) -> tuple[int, int]:
    """Return the span of answer tokens that holds the first occurrence of ``text``."""
    whole = "".join(token.text for token in answer.passage.answer_tokens)
    start = whole.find(text)
    if start < 0:
        raise BadRequest(f"The target {text!r} does not occur in the answer {whole!r}.", "Copy it from the answer.")
    stop = start + len(text)
    first = last = None
    position = 0
    for index, token in enumerate(answer.passage.answer_tokens):
        end = position + len(token.text)
        if position < stop and end > start:
            first = index if first is None else first
            last = index
        elif first is not None and not token.text and last == index - 1:
            last = index  # a later piece of the target's last character
        position = end
    if first is None or last is None:
        raise BadRequest(f"The target {text!r} covers no token.")
    return first, last + 1


def _one_of(value: str, name: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise BadRequest(f"--{name} must be one of {', '.join(choices)}, not {value!r}.")
    return value


def _report(explanation: Explanation, notes: tuple[str, ...]) -> None:
    info = explanation.model
    out.print(Text(f"{info.id} ({info.revision[:12]}), {info.device}, {info.dtype}"))
    for target in explanation.targets:
        out.print(Text(f"  target {target.text!r}: p = {target.probability:.4f}, rank {target.rank}"))
    for note in dict.fromkeys((*notes, *explanation.notes)):
        out.print(Text(f"  note: {note}"))
    for result in explanation.results:
        title = f"{result.method}  {result.seconds:.2f} s, {result.passes.forward:g} forward"
        out.print(Text(f"{title}, {result.passes.backward:g} backward", style="bold"))
        if result.scores is None:
            out.print(Text(f"  refused: {result.refusal}"))
            continue
        sources = explanation.sources
        units = result.units or tuple((i, i + 1) for i in range(len(sources)))
        row = result.scores.sum(axis=0) if result.signed else result.scores.mean(axis=0)
        ranked = sorted((i for i in range(len(units)) if row[i] == row[i]), key=lambda i: -abs(row[i]))
        for i in ranked[:8]:
            text = "".join(token.text for token in sources[units[i][0] : units[i][1]])
            out.print(Text(f"  {row[i]:+10.4f}  {text!r}"))
        for check in result.checks:
            if check.verdict in ("warn", "fail"):
                out.print(Text(f"  {check.verdict}: {check.text}"))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"Cannot write {path}: {error.strerror}.") from error
    say.print(Text(f"wrote {path}"))
