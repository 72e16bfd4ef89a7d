"""Explanations as files for people and other programs: a self-contained web page, a table, a Python call.

The JSON form is ``bundle``'s; pictures are drawn in the browser. Texts come from users and models: here they are
escaped for HTML, kept from being formulas in spreadsheets, and made encodable where they hold lone surrogates.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import html
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from backend.io.board import ASSETS, OBJECTIVE_NAMES, board_script, board_style, build_board, passes_text
from backend.io.board_types import Board, encodable, plain_line
from backend.saliency.reading import traits_of
from backend.saliency.units import level_rule, unit_text
from backend.types import Explanation, SaliencyRequest, Token, visible

CSV_ENCODING = "utf-8-sig"
"""Encoding for CSV files: with the mark that spreadsheets need to recognize UTF-8. ``to_csv`` itself adds none."""

_MOST_NUMBERS = 200_000  # beyond this many scores the page holds the span as a whole, not each target as well
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_CSV_HEADER = (
    "method",
    "target_position",
    "target_id",
    "target_text",
    "source_start",
    "source_stop",
    "source_ids",
    "source_text",
    "source_role",
    "score",
)

# ---------------------------------------------------------------------------------------------------- HTML


def to_html(explanation: Explanation) -> str:
    """Return a page that draws the explanation without the application and without a network.

    The page carries the same script and style as the application. Its policy lets the browser run that one script and
    load nothing.
    """
    boards, spans = _boards(explanation)
    data = json.dumps({"boards": boards, "spans": spans}, ensure_ascii=True, separators=(",", ":"))
    for char in "<>&":  # in a data block only these could end or open markup; the rest is ASCII already
        data = data.replace(char, f"\\u{ord(char):04x}")
    script = board_script() + "\n" + (ASSETS / "export_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    style = (ASSETS / "export_page.css").read_text(encoding="utf-8") + board_style()
    title = f"What drove {_quote(explanation)}?"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{_escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Token saliency</h1>
<noscript><p>The colored tokens need JavaScript; the tables below do not.</p></noscript>
<div id="mount"><div class="board"></div></div>
{_tables(explanation)}
</main>
<script type="application/json" id="boards">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _boards(explanation: Explanation) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the board of the whole span, then those of single targets, and the answer span of each."""
    count = len(explanation.targets)
    numbers = count * sum(result.scores.size for result in explanation.results if result.scores is not None)
    choices: list[tuple[int, ...]] = [tuple(range(count))]
    if 1 < count and numbers <= _MOST_NUMBERS:
        choices += [(row,) for row in range(count)]
    results = [dataclasses.replace(result, from_cache=False) for result in explanation.results]
    boards: list[Board] = [
        build_board(explanation, results, level=explanation.level, rows=rows, pick=len(choices) > 1) for rows in choices
    ]
    base = explanation.passage.prompt_length
    positions = [target.position - base for target in explanation.targets]
    spans = [(positions[rows[0]], positions[rows[-1]] + 1) for rows in choices]
    return [board.to_json() for board in boards], spans


def _quote(explanation: Explanation) -> str:
    return f"“{plain_line(visible(''.join(target.text for target in explanation.targets)))}”"


def _escape(text: object) -> str:
    """Escape for HTML; whatever could hide or reorder text is spelled out, line breaks and tabs stay."""
    lines = (("\t".join(plain_line(part) for part in line.split("\t"))) for line in str(text).split("\n"))
    return html.escape("\n".join(lines))


def _tables(explanation: Explanation) -> str:
    model = explanation.model
    decoding = explanation.decoding
    origin = [
        ("Model", model.id),
        ("Revision", model.revision or "unknown"),
        ("Architecture", f"{model.architecture}, {model.parameters:,} parameters, {model.attention} attention"),
        ("Device", "; ".join(part for part in (f"{model.device}, {model.dtype}", model.device_reason) if part)),
        ("Explained", OBJECTIVE_NAMES[explanation.objective]),
        ("Units", f"{explanation.level}. {level_rule(explanation.level)}"),
        ("Foil", "".join(token.text for token in explanation.foil) or "none"),
        ("Answer", "given" if decoding is None else ", ".join(f"{k} {v}" for k, v in vars_of(decoding).items())),
        ("Seed", explanation.seed),
        ("Computed", explanation.created),
        ("Versions", ", ".join(f"{name} {version}" for name, version in explanation.versions.items())),
        *(("Note", note) for note in explanation.notes),
    ]
    targets = [
        (t.position, t.id, visible(t.text), f"{t.probability:.4g}", t.rank, visible(t.runner_up_text),
         f"{t.runner_up_probability:.4g}")
        for t in explanation.targets
    ]  # fmt: skip
    columns = 5 if any(result.refusal for result in explanation.results) else 4
    methods = [
        (
            traits_of(result).label,
            ", ".join(f"{name}={value}" for name, value in result.params.items()) or "none",
            f"{result.seconds:.3g} s",
            passes_text(result.passes),
            result.refusal,
        )[:columns]
        for result in explanation.results
    ]
    checks = [
        (traits_of(result).label, check.name.replace("_", " "), _number(check.value), check.verdict, check.text)
        for result in explanation.results
        for check in result.checks
    ]
    parts = [
        _table("Origin", (), origin),
        _table("Targets", ("Position", "Id", "Token", "Probability", "Rank", "Runner-up", "Its probability"), targets),
        _table("Methods", ("Method", "Parameters", "Time", "Passes", "Refused because")[:columns], methods),
        _table("Checks", ("Method", "Check", "Value", "Verdict", "Meaning"), checks) if checks else "",
        f"<details><summary>The rendered prompt, exactly as tokenized</summary>"
        f'<pre dir="auto">{_escape(explanation.passage.rendered)}</pre></details>',
    ]
    return "\n".join(part for part in parts if part)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = f"<thead><tr>{''.join(f'<th>{_escape(name)}</th>' for name in header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td><bdi>{_escape(value)}</bdi></td>' for value in row)}</tr>" for row in rows)
    return f'<h2>{_escape(title)}</h2><div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def vars_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, names made readable."""
    return {field.name.replace("_", " "): getattr(record, field.name) for field in dataclasses.fields(record)}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------- CSV


def to_csv(explanation: Explanation) -> str:
    """Return all raw scores, one line per method, target and source; RFC 4180, CRLF.

    Sources are tokens, or the units that the method measured; ``source_start`` and ``source_stop`` are token
    positions. The score of a source that was not measured is empty. A text that a spreadsheet would take for a formula
    begins with an apostrophe.
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(_CSV_HEADER)
    sources = explanation.sources
    single = tuple((i, i + 1) for i in range(len(sources)))
    for result in explanation.results:
        if result.scores is None:
            continue
        columns = [_source_columns(sources, unit) for unit in result.units or single]
        for target, scores in zip(explanation.targets, result.scores.tolist(), strict=True):
            begin = (_cell(result.method), target.position, target.id, _cell(target.text))
            for i, (source, score) in enumerate(zip(columns, scores, strict=True)):
                known = math.isfinite(score) and (result.measured is None or bool(result.measured[i]))
                writer.writerow((*begin, *source, f"{score:.9g}" if known else ""))
    return out.getvalue()


def _source_columns(tokens: Sequence[Token], unit: tuple[int, int]) -> tuple[object, ...]:
    part = tokens[slice(*unit)]
    ids = " ".join(str(token.id) for token in part)
    return (*unit, ids, _cell(unit_text(tokens, unit)), part[0].role)


def _cell(text: str) -> str:
    shown = encodable(text).replace("\x00", "␀")  # many readers stop at NUL
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


# ---------------------------------------------------------------------------------------------------- Python


def to_python_call(request: SaliencyRequest) -> str:
    """Return a Python program that asks the same question."""
    names = sorted({type(record).__name__ for record in _records(request)})
    return (
        "from backend.engine import Engine\n"
        f"from backend.types import {', '.join(names)}\n"
        "\n"
        f"request = {_code(request, 0)}\n"
        "explanation = Engine().run(request)\n"
        "for result in explanation.results:\n"
        "    print(result.method, result.scores, result.refusal)\n"
    )


def _records(value: Any) -> Iterable[Any]:
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from _records(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _records(item)


def _code(value: Any, depth: int) -> str:
    """Write a value as source code; ``repr`` escapes what cannot be printed. Fields at their default are left out."""
    inner, outer = "    " * (depth + 1), "    " * depth
    if dataclasses.is_dataclass(value):
        lines = [
            f"{inner}{field.name}={_code(getattr(value, field.name), depth + 1)},\n"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        name = type(value).__name__
        return f"{name}(\n{''.join(lines)}{outer})" if lines else f"{name}()"
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        return f"(\n{''.join(f'{inner}{_code(item, depth + 1)},{chr(10)}' for item in value)}{outer})"
    if isinstance(value, tuple):
        items = ", ".join(_code(item, depth) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)
