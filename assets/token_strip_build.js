/* Elements of a board. Everything from the data goes in through textContent; nothing here reacts to anybody. */

const ROLE_NAMES = {
  bos: "BOS",
  template: "template",
  system: "system",
  user: "user",
  document: "document",
  query: "query",
  answer: "answer so far",
  pad: "padding",
};
const OUTSIDE = new Set(["bos", "template", "pad"]);
const TONES = { info: "", warn: "△ ", fail: "▲ " };
const CHUNK = 160; // cells that the browser lays out or skips together

function make(tag, className = "", text = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return element;
}

function button(className, text, label) {
  const element = make("button", className, text);
  element.type = "button";
  element.setAttribute("aria-label", label);
  return element;
}

/* The cells of one layout as a list of elements in chunks; `classes(i)` and `label(i)` say how cell i looks and reads. */
function buildStrip(cells, name, classes, label) {
  const strip = make("div", "strip");
  strip.setAttribute("role", "listbox");
  strip.setAttribute("aria-label", name);
  const elements = cells.text.map((text, i) => {
    const cell = make("span", "cell");
    const extra = classes(i);
    if (extra) cell.classList.add(...extra.split(" "));
    fillCell(cell, text);
    cell.dataset.i = i;
    cell.tabIndex = i ? -1 : 0; // one stop per row; arrows move within it
    cell.setAttribute("role", "option");
    cell.setAttribute("aria-selected", "false");
    cell.setAttribute("aria-label", label(i));
    return cell;
  });
  let chunk = null;
  elements.forEach((cell, i) => {
    const count = chunk ? chunk.childElementCount : 0;
    // A new chunk starts a new line, so chunks end at line breaks where the text has some.
    if (!chunk || count >= 4 * CHUNK || (count >= CHUNK && cells.text[i - 1].endsWith("\n"))) {
      chunk = make("div", elements.length > 4 * CHUNK ? "chunk lazy" : "chunk");
      chunk.setAttribute("role", "presentation");
      strip.append(chunk);
    }
    chunk.append(cell);
  });
  return { strip, elements };
}

function fillCell(cell, text) {
  const runs = visibleRuns(text);
  if (runs.length === 2 && runs[0].text === "\u200b·") {
    cell.classList.add("led"); // the usual space before a word: the dot comes from the style sheet
    runs.shift();
  }
  if (runs.length === 1 && !runs[0].marked) {
    cell.textContent = runs[0].text;
  } else {
    cell.append(...runs.map((run) => (run.marked ? make("span", "mark", run.text) : run.text)));
  }
}

function cellClasses(row, cells, i) {
  const classes = [];
  if (OUTSIDE.has(cells.role[i])) classes.push("outside");
  else if (row.colors[i] !== null) classes.push(colorClass(row.colors[i], row.signed));
  if (cells.state[i] !== "source") classes.push(cells.state[i]);
  if (isUnmeasured(row, cells, i)) classes.push("unmeasured");
  return classes.filter(Boolean).join(" ");
}

/* A cell before the last target without a score was left out on purpose. */
function isUnmeasured(row, cells, i) {
  return row.values[i] === null && cells.state[i] === "source";
}

function valueText(row, cells, i) {
  if (row.values[i] !== null) return number(row.values[i]) + (Math.abs(row.values[i]) < row.noise ? ", below noise" : "");
  if (cells.state[i] === "target") return "the target";
  return cells.state[i] === "later" ? "after the target" : "not measured";
}

function cellLabel(row, cells, i) {
  const parts = [visibleText(cells.text[i]), ROLE_NAMES[cells.role[i]], valueText(row, cells, i)];
  if (row.values[i] !== null && row.shares[i] !== null) parts.push(`share ${percent(row.shares[i])}`);
  if (row.ranks[i] !== null) parts.push(`rank ${row.ranks[i]} of ${row.ranked}`);
  if (OUTSIDE.has(cells.role[i])) parts.push("outside the color scale");
  return parts.join(", ");
}

function buildHeatRow(row, layouts) {
  const article = make("section", "row");
  const head = make("header");
  head.append(make("h3", "", row.label), make("span", "facts", row.facts.join(" · ")));
  article.append(head);
  if (row.refusal) {
    article.append(make("p", "note fail", row.refusal));
    return { article, elements: [] };
  }
  const cells = layouts[row.layout];
  article.append(make("p", "words", row.reading));
  if (row.scale_rule && row.colors.some((color) => color !== null)) article.append(buildLegend(row));
  const { strip, elements } = buildStrip(
    cells,
    `${row.label}, ${cells.text.length} cells`,
    (i) => cellClasses(row, cells, i),
    (i) => cellLabel(row, cells, i),
  );
  strip.setAttribute("aria-description", "Arrow keys move, Enter locks, Escape unlocks.");
  article.append(strip);
  if (row.segments.length) article.append(buildSegments(row));
  if (row.rule) article.append(make("p", "note", row.rule));
  for (const note of row.notes) article.append(make("p", `note ${note.tone}`, `${TONES[note.tone]}${note.text}`));
  return { article, elements };
}

function buildLegend(row) {
  const legend = make("div", "legend");
  const bar = make("span", "bar");
  bar.dataset.signed = row.signed;
  legend.append(make("span", "", row.low), bar, make("span", "", row.high));
  legend.title = row.scale_rule;
  return legend;
}

function buildSegments(row) {
  const box = make("div", "segments");
  const bar = make("div", "segment-bar");
  const list = make("p", "words");
  list.append(make("span", "segment", `${row.share_name[0].toUpperCase()}${row.share_name.slice(1)}:`));
  for (const [role, share] of row.segments) {
    const color = `seg-${role}${OUTSIDE.has(role) ? " outside" : ""}`;
    const part = make("span", color);
    part.style.flexGrow = share;
    bar.append(part);
    const item = make("span", "segment");
    item.append(make("span", `swatch ${color}`), `${ROLE_NAMES[role]} ${percent(share)}`);
    list.append(item);
  }
  bar.setAttribute("aria-hidden", "true");
  box.append(bar, list);
  return box;
}

function buildAnswer(answer) {
  const section = make("section", "answer");
  const head = make("header");
  const extend = button("extend", "Extend", "Extend the span to the next token that is chosen");
  extend.setAttribute("aria-pressed", "false");
  head.append(make("h3", "", answer.label), make("span", "hint", "click a token to explain it, shift-click or drag for a span"), extend);
  const { strip, elements } = buildStrip(
    answer.cells,
    answer.label,
    () => "",
    (i) => answerLabel(answer, i),
  );
  strip.setAttribute("aria-multiselectable", "true");
  strip.setAttribute("aria-description", "Arrow keys move, with Shift they extend the span, Enter picks it.");
  section.append(head, strip);
  return { section, elements, extend };
}

function answerFact(answer, i) {
  return answer.facts[answer.cells.start[i] - answer.base];
}

function answerLabel(answer, i) {
  const fact = answerFact(answer, i);
  const text = visibleText(answer.cells.text[i]);
  return fact ? `${text}, probability ${percent(fact.probability)}, rank ${fact.rank}` : text;
}

function buildTools(withPicture) {
  const tools = make("div", "tools");
  const label = make("label", "", "Intensity");
  const slider = make("input");
  Object.assign(slider, { type: "range", min: "-1", max: "1", step: "0.05", value: "0" });
  slider.setAttribute("aria-label", "Color intensity");
  label.append(slider);
  const reset = button("reset", "Reset", "Reset the color intensity");
  reset.disabled = true;
  tools.append(make("span", "hint", "hover to look, click to lock, Esc unlocks"), label, reset);
  const picture = button("picture", "Save PNG", "Save the board as a PNG picture");
  if (withPicture) tools.append(picture);
  return { tools, slider, reset, picture };
}

/* What the card says of one cell: its characters, then one line per method. */
function fillCard(card, { text, facts, lines }) {
  const title = make("p", "card-text", `“${visibleText(text)}”`);
  title.dir = "auto";
  const body = [title, make("p", "card-facts", facts)];
  if (lines.length) {
    const table = make("table");
    for (const line of lines) {
      const tr = make("tr", line.current ? "current" : "");
      const name = make("th", "", line.label);
      name.scope = "row";
      if (line.unit) name.append(make("span", "unit", ` in “${line.unit}”`));
      tr.append(name, make("td", "", line.value), make("td", "", line.share), make("td", "", line.rank));
      table.append(tr);
    }
    body.push(table);
  }
  card.querySelector(".card-body").replaceChildren(...body);
}

/* The words of the card for one cell, with the values of the same token in every row. */
function describeCell(board, { row, i }) {
  const { cells } = board.rows[row];
  const ids = cells.ids[i];
  const where = cells.stop[i] - cells.start[i] > 1 ? `tokens ${cells.start[i]}–${cells.stop[i] - 1}` : `token ${cells.start[i]}`;
  const idText = `${ids.length > 1 ? "ids" : "id"} ${ids.slice(0, 8).join(", ")}${ids.length > 8 ? " …" : ""}`;
  const facts = [ROLE_NAMES[cells.role[i]], idText, where];
  const answer = board.data.answer;
  const fact = answer?.facts[cells.start[i] - answer.base];
  if (fact) {
    facts.push(`probability ${percent(fact.probability)}, rank ${fact.rank}`);
    facts.push(`otherwise “${visibleText(fact.other)}” ${percent(fact.other_probability)}`);
  }
  const lines = board.data.rows
    .map((heat, r) => ({ heat, r, j: r === row ? i : board.cellOf(r, cells.start[i]) }))
    .filter(({ heat, j }) => !heat.refusal && j >= 0)
    .map(({ heat, r, j }) => {
      const own = board.rows[r].cells;
      return {
        label: heat.label,
        current: r === row,
        unit: sameSpan(own, j, cells, i) ? "" : visibleText(own.text[j]).slice(0, 40),
        value: valueText(heat, own, j),
        share: heat.shares[j] === null ? "" : percent(heat.shares[j]),
        rank: heat.ranks[j] === null ? "" : `rank ${heat.ranks[j]} of ${heat.ranked}`,
      };
    });
  return { text: cells.text[i], facts: facts.join(" · "), lines };
}

function sameSpan(a, i, b, j) {
  return a.start[i] === b.start[j] && a.stop[i] === b.stop[j];
}
