/* A board: one row per method, and optionally the answer to pick a target from.

   Hover looks, click locks, Esc unlocks; there is one selection at a time and hovering never overrides it. The lock
   lives here; only picks of a target go to Python, with the passage they were made on and a number of their own. */

const boards = new WeakMap();
let pickCount = 0;

export default function mount({ data, parentElement, setStateValue }) {
  let board = boards.get(parentElement);
  if (!board) {
    const root = parentElement.querySelector(".board");
    board = new TokenBoard(root);
    boards.set(parentElement, board);
  }
  board.update(data, (pick) => setStateValue("pick", pick));
  return () => {
    board.release();
    boards.delete(parentElement);
  };
}

class TokenBoard {
  constructor(root) {
    this.root = root;
    this.data = null;
    this.locked = null; // {row, token}: the row it was locked in, the first token of its cell
    this.shown = null; // {row, i}: the cell that the card describes
    this.intensity = 1;
    this.listeners = new AbortController();
    const on = (target, type, handler, options = {}) =>
      target.addEventListener(type, handler.bind(this), { ...options, signal: this.listeners.signal });
    on(root, "pointerover", this.onHover);
    on(root, "pointerleave", this.onLeave);
    on(root, "pointerdown", this.onDown);
    on(root, "click", this.onClick);
    on(root, "focusin", this.onFocus);
    on(root, "focusout", this.onBlur);
    on(root, "keydown", this.onKey);
    on(root, "input", this.onSlide);
    on(document, "keydown", this.onEscape);
    on(document, "pointerup", this.onUp);
    on(window, "scroll", this.place, { capture: true, passive: true });
    on(window, "resize", this.place);
  }

  release() {
    this.listeners.abort();
  }

  update(data, pick) {
    this.pick = pick;
    if (this.data?.version !== data.version) {
      const focus = this.focusedCell();
      const same = this.data?.passage === data.passage;
      const kept = same ? this.locked : null;
      const tried = same && this.answer && data.answer ? { span: this.tentative, anchor: this.anchor } : null;
      this.data = data;
      this.build();
      if (tried?.span) {
        this.anchor = tried.anchor; // a span that is being tried out outlives the page's own runs
        this.tentative = tried.span;
        this.showSelected(tried.span);
      }
      if (kept) this.lock(kept.row < this.rows.length ? kept.row : 0, this.cellOf(kept.row, kept.token), false);
      if (focus) this.rows[focus.row]?.elements[focus.i]?.focus({ preventScroll: true });
    }
    this.paint();
  }

  build() {
    const { data } = this;
    this.shown = this.locked = this.drag = this.tentative = null;
    this.rows = data.rows.map((row) => {
      const { article, elements } = buildHeatRow(row, data.layouts);
      return { row, article, elements, cells: data.layouts[row.layout] };
    });
    const parts = [];
    if (data.caption) parts.push(make("p", "caption", data.caption));
    if (data.answer) {
      const { section, elements, extend } = buildAnswer(data.answer);
      this.answer = { elements, extend, cells: data.answer.cells, answer: data.answer };
      this.rows.push(this.answer); // the last row
      this.anchor = data.answer.selected?.[0] ?? 0;
      const first = data.answer.cells.start.findIndex((start) => start >= data.answer.base + this.anchor);
      if (first > 0) this.stopAt(this.answer, first); // the keyboard begins where the choice is
      parts.push(section);
    } else {
      this.answer = null;
    }
    if (data.rows.length) {
      const tools = buildTools(true);
      Object.assign(this, tools);
      this.slider.value = Math.log(this.intensity) / Math.log(4);
      const grid = make("div", "rows");
      grid.append(...data.rows.map((_, i) => this.rows[i].article));
      parts.push(this.tools, grid);
    }
    this.card = make("div", "card");
    this.card.setAttribute("popover", "manual");
    this.card.append(make("div", "card-body"), button("close", "×", "Unlock"));
    this.live = make("p", "live");
    this.live.setAttribute("aria-live", "polite");
    this.colors = make("style");
    this.root.replaceChildren(this.colors, ...parts, this.card, this.live);
    this.rows.forEach((row, at) => row.elements.forEach((cell) => (cell.row = at)));
    this.showSelected(data.answer?.selected ?? null);
  }

  /* Colors follow the page's background, so this runs again whenever the theme may have changed. */
  paint() {
    if (!this.data.rows.length) return;
    const style = getComputedStyle(this.root);
    this.background = rgb(style.backgroundColor);
    this.palette = makePalette(this.data.palette, this.background, rgb(style.color), this.intensity);
    this.colors.textContent = paletteRules(this.palette);
    for (const bar of this.root.querySelectorAll(".bar")) {
      const stops = barColors(this.palette, bar.dataset.signed === "true", this.background);
      bar.style.backgroundImage = `linear-gradient(to right, ${stops})`;
    }
    this.reset.disabled = this.intensity === 1;
  }

  /* ------------------------------------------------------------------------------------------ cells */

  target(event) {
    const cell = event.target.closest?.(".cell");
    return cell ? { row: cell.row, i: Number(cell.dataset.i) } : null;
  }

  focusedCell() {
    const active = this.root.getRootNode().activeElement;
    return active?.classList?.contains("cell") && this.root.contains(active)
      ? { row: active.row, i: Number(active.dataset.i) }
      : null;
  }

  isAnswer(row) {
    return this.answer !== null && row === this.rows.length - 1;
  }

  /* The cell of a row that holds a token, or -1. */
  cellOf(row, token) {
    const cells = this.rows[row]?.cells;
    return cells ? cells.start.findIndex((start, i) => start <= token && token < cells.stop[i]) : -1;
  }

  show(at) {
    this.mark("linked", at);
    this.shown = at;
    if (!at) {
      if (this.card.matches(":popover-open")) this.card.hidePopover();
      return;
    }
    fillCard(this.card, describeCell(this, at));
    this.card.classList.toggle("locked", this.locked !== null);
    if (!this.card.matches(":popover-open")) this.card.showPopover();
    this.place();
  }

  /* Give a class to the cells of all rows that hold the same token. */
  mark(name, at) {
    for (const cell of this.root.querySelectorAll(`.${name}`)) cell.classList.remove(name);
    if (!at) return;
    const token = this.rows[at.row].cells.start[at.i];
    this.rows.forEach((row, r) => row.elements[r === at.row ? at.i : this.cellOf(r, token)]?.classList.add(name));
  }

  /* Put the card under its cell, or above it where there is no room; narrow pages dock it to the bottom (CSS). */
  place() {
    if (!this.shown) return;
    const cell = this.rows[this.shown.row].elements[this.shown.i];
    const rect = cell?.getClientRects()[0];
    if (!rect) return;
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const below = rect.bottom + 8 + height < window.innerHeight || rect.top < height + 16;
    const left = Math.max(8, Math.min(rect.left, window.innerWidth - width - 8));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${below ? rect.bottom + 8 : rect.top - height - 8}px`;
    this.card.classList.toggle("away", rect.bottom < 0 || rect.top > window.innerHeight);
  }

  lock(row, i, announce = true) {
    if (i < 0 || !this.rows[row]) return this.unlock();
    this.locked = { row, token: this.rows[row].cells.start[i] };
    this.mark("locked", { row, i });
    for (const other of this.root.querySelectorAll('.rows [aria-selected="true"]')) {
      other.setAttribute("aria-selected", "false");
    }
    this.rows[row].elements[i].setAttribute("aria-selected", "true");
    this.show({ row, i });
    if (announce) this.live.textContent = `Locked. ${this.card.querySelector(".card-body").innerText}`;
  }

  unlock() {
    if (!this.locked) return;
    this.locked = null;
    this.mark("locked", null);
    for (const cell of this.root.querySelectorAll('.rows [aria-selected="true"]')) {
      cell.setAttribute("aria-selected", "false");
    }
    this.live.textContent = "Unlocked.";
    this.show(null);
  }

  /* ------------------------------------------------------------------------------------------ picking */

  showSelected(span) {
    if (!this.answer) return;
    const { elements, cells, answer } = this.answer;
    elements.forEach((cell, i) => {
      const inside = span && cells.start[i] - answer.base < span[1] && cells.stop[i] - answer.base > span[0];
      cell.classList.toggle("picked", Boolean(inside));
      cell.setAttribute("aria-selected", String(Boolean(inside)));
    });
  }

  /* Answer tokens from the anchor to cell i, in either direction. */
  spanTo(i) {
    const { cells, answer } = this.answer;
    const from = this.cellOf(this.rows.length - 1, this.anchor + answer.base);
    const [first, last] = [Math.min(from, i), Math.max(from, i)];
    return [cells.start[first] - answer.base, cells.stop[last] - answer.base];
  }

  setAnchor(i) {
    this.anchor = this.answer.cells.start[i] - this.answer.answer.base;
  }

  tryOut(i) {
    this.tentative = this.spanTo(i);
    this.showSelected(this.tentative);
  }

  confirm(span) {
    this.tentative = null;
    this.setExtending(false);
    this.data.answer.selected = span;
    this.showSelected(span);
    pickCount += 1;
    this.pick({ passage: this.data.passage, start: span[0], stop: span[1], number: `${Date.now()}-${pickCount}` });
  }

  drop() {
    if (!this.tentative) return;
    this.tentative = null;
    this.anchor = this.data.answer.selected?.[0] ?? 0;
    this.showSelected(this.data.answer.selected);
  }

  setExtending(on) {
    this.answer.extend.setAttribute("aria-pressed", String(on));
  }

  get extending() {
    return this.answer.extend.getAttribute("aria-pressed") === "true";
  }

  /* ------------------------------------------------------------------------------------------ events */

  onHover(event) {
    const at = this.target(event);
    if (at && this.drag && this.isAnswer(at.row)) {
      this.drag.moved ||= at.i !== this.drag.i;
      if (this.drag.moved) this.tryOut(at.i);
      event.preventDefault();
    }
    if (event.pointerType === "touch" || this.locked) return;
    if (at) this.show(at);
    else if (!event.target.closest?.(".card")) this.show(null);
  }

  onLeave() {
    if (!this.locked) this.show(null);
  }

  onDown(event) {
    const at = this.target(event);
    if (!at || !this.isAnswer(at.row) || event.button) return;
    if (!event.shiftKey && !this.extending) this.setAnchor(at.i);
    // Fingers scroll; they pick spans with the Extend button.
    if (event.pointerType !== "touch" && !event.shiftKey) this.drag = { i: at.i, moved: false };
    if (event.shiftKey || event.pointerType === "mouse") event.preventDefault(); // no text selection
    this.rows[at.row].elements[at.i].focus({ preventScroll: true });
  }

  onUp() {
    const moved = this.drag?.moved;
    this.drag = null;
    if (moved && this.tentative) {
      this.confirm(this.tentative);
      this.justDragged = true; // the click that follows is part of the drag
      setTimeout(() => (this.justDragged = false));
    }
  }

  onClick(event) {
    if (event.target.closest(".close")) return this.unlock();
    if (event.target.closest(".extend")) return this.setExtending(!this.extending);
    if (event.target.closest(".reset")) return this.setIntensity(1);
    if (event.target.closest(".picture")) return this.savePicture();
    const at = this.target(event);
    if (at) this.choose(at, event.shiftKey);
  }

  choose({ row, i }, shift) {
    if (this.isAnswer(row)) {
      if (this.justDragged) return;
      if (!shift && !this.extending) this.setAnchor(i);
      this.confirm(this.spanTo(i));
      return;
    }
    const same = this.locked?.row === row && this.locked.token === this.rows[row].cells.start[i];
    if (same) this.unlock();
    else this.lock(row, i);
  }

  onFocus(event) {
    const at = this.target(event);
    if (!at) return;
    this.stopAt(this.rows[at.row], at.i);
    if (!this.locked && event.target.matches(":focus-visible")) this.show(at);
  }

  /* Make a cell the one of its row that the Tab key reaches. */
  stopAt(row, i) {
    row.elements[row.stop ?? 0].tabIndex = -1;
    row.stop = i;
    row.elements[i].tabIndex = 0;
  }

  onBlur(event) {
    if (!this.locked && !this.root.contains(event.relatedTarget)) this.show(null);
  }

  onEscape(event) {
    if (event.key !== "Escape") return;
    if (this.locked) this.unlock();
    else if (this.tentative) this.drop();
    else this.show(null);
  }

  onKey(event) {
    const at = this.target(event);
    if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.isAnswer(at.row) && this.tentative) this.confirm(this.tentative);
      else this.choose(at, event.shiftKey);
      return;
    }
    const next = this.neighbor(at, event.key);
    if (next === null) return;
    event.preventDefault();
    if (this.isAnswer(at.row) && event.shiftKey) {
      if (!this.tentative) this.setAnchor(at.i);
      this.tryOut(next);
    } else if (this.isAnswer(at.row)) {
      this.drop();
    }
    this.rows[at.row].elements[next].focus();
  }

  /* Cell that an arrow key leads to, or null for other keys. */
  neighbor({ row, i }, key) {
    const { elements, cells } = this.rows[row];
    const last = elements.length - 1;
    this.rows[row].rtl ??= readsRightToLeft(cells.text, (j) => OUTSIDE.has(cells.role[j]));
    const forward = this.rows[row].rtl[i] ? "ArrowLeft" : "ArrowRight";
    if (key === "ArrowLeft" || key === "ArrowRight") return Math.max(0, Math.min(last, i + (key === forward ? 1 : -1)));
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (key === "ArrowUp" || key === "ArrowDown") return lineNeighbor(elements, i, key === "ArrowDown" ? 1 : -1);
    return null;
  }

  onSlide(event) {
    if (event.target === this.slider) this.setIntensity(4 ** Number(this.slider.value));
  }

  setIntensity(value) {
    this.intensity = value;
    this.slider.value = Math.log(value) / Math.log(4);
    this.paint();
  }

  savePicture() {
    this.root.classList.add("printing");
    download(paintBoard(this.root, this.palette, this.background), "attriscope.png");
    this.root.classList.remove("printing");
  }
}
