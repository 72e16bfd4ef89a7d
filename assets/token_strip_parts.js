/* Characters, colors and geometry of a board. Plain functions without state; the drawing is in token_strip.js. */

const BIDI_CONTROLS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/u;
const IGNORABLE = /\p{Default_Ignorable_Code_Point}/u;
const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const LEVELS = 24; // steps of color between zero and full

function spelledOut(char) {
  return `[U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`;
}

/* How one character is shown, or null if it is shown as it is. Nothing invisible stays invisible, and nothing may
   change the direction of its neighbors. */
function mark(char, joins) {
  const code = char.codePointAt(0);
  if (char === "\n") return "↵\n";
  if (char === "\t") return "⇥";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  if (BIDI_CONTROLS.test(char) || (code >= 0x80 && code < 0xa0)) return spelledOut(char);
  if (/[\u2028\u2029]/.test(char)) return `${spelledOut(char)}\n`;
  if (/\p{Zs}/u.test(char)) return "\u200b·"; // the zero-width space lets the line break there
  if (IGNORABLE.test(char) && !joins) return spelledOut(char);
  return null;
}

/* Cut a text into runs of {text, marked}: marked runs stand for characters that cannot be seen. */
function visibleRuns(text) {
  // Joiners, variation selectors and the tags of flags belong to visible characters; alone they would hide.
  const tagged = text.includes("\u{1f3f4}");
  const visible = [...text].some((char) => !IGNORABLE.test(char) && !/\s/.test(char));
  const runs = [];
  for (const char of text) {
    const tag = char.codePointAt(0) >= 0xe0000;
    const shown = mark(char, visible && (!tag || tagged));
    const marked = shown !== null;
    if (!runs.length || runs.at(-1).marked !== marked) runs.push({ text: "", marked });
    runs.at(-1).text += shown ?? char;
  }
  return runs.length ? runs : [{ text: "▯", marked: true }];
}

function visibleText(text) {
  return visibleRuns(text)
    .map((run) => run.text)
    .join("")
    .replace(/[\u200b\n]/g, "");
}

/* Whether the line of each cell reads right to left: decided by its first letter, as the browser does; `skipped(i)`
   cells have no say. */
function readsRightToLeft(texts, skipped) {
  const out = new Array(texts.length).fill(false);
  let start = 0;
  let decided = null;
  texts.forEach((text, i) => {
    const letter = decided === null && !skipped(i) ? text.match(/\p{L}/u) : null;
    if (letter) decided = RTL.test(letter[0]);
    if (text.includes("\n") || i === texts.length - 1) {
      out.fill(decided === true, start, i + 1);
      start = i + 1;
      decided = null;
    }
  });
  return out;
}

function number(value, digits = 4) {
  const text = value === 0 ? "0" : value.toPrecision(digits);
  return text.replace(/^-/, "−").replace(/e-/, "e−");
}

function percent(share) {
  const value = share * 100;
  if (value === 0) return "0 %";
  return value < 0.1 ? "under 0.1 %" : `${value.toFixed(1)} %`;
}

/* ------------------------------------------------------------------------------------------------- colors */

function rgb(color) {
  if (color.startsWith("#")) return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function luminance(color) {
  const [r, g, b] = color.map((part) => {
    const c = part / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

/* Colors of every level for one page background: {name: [[background, text], ...]}, level 1 first. */
function makePalette(hues, background, text, intensity) {
  const dark = luminance(background) < 0.3;
  const palette = {};
  for (const [name, hue] of Object.entries(hues[dark ? "dark" : "light"])) {
    const full = rgb(hue);
    palette[name] = Array.from({ length: LEVELS }, (_, k) => {
      const strength = ((k + 1) / LEVELS) ** (1 / intensity);
      const mixed = background.map((part, i) => Math.round(part + (full[i] - part) * strength));
      const inks = [[0, 0, 0], [255, 255, 255]].sort((a, b) => contrast(b, mixed) - contrast(a, mixed));
      const ink = contrast(text, mixed) >= 4.5 ? text : inks[0];
      return [`rgb(${mixed})`, `rgb(${ink})`];
    });
  }
  return palette;
}

function paletteRules(palette) {
  const rules = [];
  for (const [name, colors] of Object.entries(palette)) {
    colors.forEach(([back, ink], k) => rules.push(`.cell.${name}-${k + 1}{background-color:${back};color:${ink}}`));
  }
  return rules.join("\n");
}

/* Class of a score on the scale; empty where there is no color. */
function colorClass(color, signed) {
  const level = color === null ? 0 : Math.round(Math.abs(color) * LEVELS);
  if (!level) return "";
  return `${signed ? (color < 0 ? "against" : "for") : "more"}-${level}`;
}

/* Colors of a legend bar from its low to its high end. */
function barColors(palette, signed, background) {
  const zero = `rgb(${background})`;
  const side = (name) => palette[name].map(([back]) => back);
  return signed ? [...side("against").reverse(), zero, ...side("for")] : [zero, ...side("more")];
}

/* ----------------------------------------------------------------------------------------------- geometry */

/* Nearest cell, by horizontal center, of the line above or below. */
function lineNeighbor(elements, i, step) {
  const center = (rect) => (rect.left + rect.right) / 2;
  const here = elements[i].getClientRects()[0];
  let best = i;
  let line = null;
  for (let j = i + step; j >= 0 && j < elements.length; j += step) {
    const rect = elements[j].getClientRects()[0];
    if (!rect || Math.abs(rect.top - here.top) < 4) continue;
    line ??= rect.top;
    if (Math.abs(rect.top - line) >= 4) break;
    if (best === i || Math.abs(center(rect) - center(here)) < Math.abs(center(elements[best].getClientRects()[0]) - center(here))) {
      best = j;
    }
  }
  return best;
}
