"""The token strip in Chromium: on a page of its own under the real security headers, and in the exported file."""

import io
import re

import pytest
from PIL import Image

from backend.io.board import build_board
from backend.io.export import to_html
from scripts.drive import ROOT, Watch, running_app, wait_ready
from tests.support.board_cases import HOSTILE, demo, hostile, scripts

pytestmark = pytest.mark.browser

# Lowest contrast of text to its background in a board, with the text. All computed colors are opaque or transparent.
CONTRASTS = """
root => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => c / 255 <= .04045 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const page = parts(getComputedStyle(root).backgroundColor);
  const seen = [...root.querySelectorAll('.cell, p, h3, .facts, .legend span')].filter(e => e.getClientRects().length);
  return seen.map(e => {
    const style = getComputedStyle(e);
    const own = parts(style.backgroundColor);
    const both = [light(rgb(style.color)), light(own.length === 4 && !own[3] ? page : own)].sort((x, y) => y - x);
    return [(both[0] + .05) / (both[1] + .05), e.textContent, style.color, style.backgroundColor];
  }).sort((x, y) => x[0] - y[0])[0];

  // color-mix() computes to color(srgb r g b) with parts from 0 to 1
  function rgb(color) { return color.startsWith('color') ? parts(color).map(c => 255 * c) : parts(color); }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("strip") / "app.log"
    with running_app(log, {"PYTHONPATH": str(ROOT)}, ROOT / "tests" / "support" / "strip_app.py") as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture
def watched(chromium):
    """Make browser contexts; at the end nothing was fetched from elsewhere, logged as an error, or run."""
    opened = []

    def make(origin, width=1280, **more):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **more)
        context.set_default_timeout(15_000)
        page = context.new_page()
        watch = Watch(origin)
        watch.attach(context, page)
        opened.append((context, page, watch))
        return page

    yield make
    for context, page, watch in opened:
        assert page.evaluate("window.__xss") is None
        context.close()
        assert watch.outside == []
        assert watch.errors == []


@pytest.fixture
def show(server, watched):
    def open_case(case="demo", level="token", **more):
        page = watched(server.url, **more)
        page.goto(f"{server.url}/?case={case}&level={level}")
        page.wait_for_selector(".row .cell")
        wait_ready(page)
        return page

    return open_case


@pytest.fixture
def exported(watched, tmp_path):
    def open_file(explanation, **more):
        path = tmp_path / "export.html"
        path.write_text(to_html(explanation), encoding="utf-8")
        page = watched("file://", **more)
        page.context.set_offline(True)
        page.goto(path.as_uri())
        page.wait_for_selector(".row .cell")
        return page

    return open_file


def heat(page, row, text):
    return page.locator(".row").nth(row).locator(".cell").filter(has_text=re.compile(f"^{re.escape(text)}$")).first


def answer(page, text):
    return page.locator(".answer .cell").filter(has_text=re.compile(f"^{re.escape(text)}$")).first


def card(page):
    return page.locator(".card:popover-open")


def index_of(board, text):
    return next(i for i, cell in enumerate(board.layouts[0]) if cell.text == text)


def wait_for_pick(page, span):
    page.get_by_text(f"picked {span}", exact=True).wait_for()


def test_hover_shows_the_values_of_every_method(show):
    page = show()
    board = build_board(demo())
    at = index_of(board, " Lyon")
    cell = board.layouts[0][at]
    heat(page, 0, "Lyon").hover()
    text = card(page).inner_text()
    assert "“·Lyon”" in text
    assert f"id {cell.ids[0]} · token {cell.start}" in text
    for row in board.rows:
        assert row.label in text
        value = "0" if not row.values[at] else f"{abs(row.values[at]):.4g}"
        assert value.rstrip("0") in text
        if row.ranks[at]:
            assert f"rank {row.ranks[at]} of {row.ranked}" in text
    assert page.locator(".row .linked").count() == 4
    page.mouse.move(5, 5)
    card(page).wait_for(state="detached")


def test_click_locks_and_hovering_never_overrides(show):
    page = show()
    heat(page, 1, "Lyon").click()
    assert page.locator(".row .locked").count() == 4
    locked = card(page).inner_text()
    heat(page, 0, "river").hover()
    assert card(page).inner_text() == locked
    heat(page, 0, "Paul").click()  # one selection at a time
    assert page.locator(".row .locked").count() == 4
    assert "Paul" in card(page).inner_text()
    assert "Locked" in page.locator(".live").last.inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".row .locked").count() == 0
    assert card(page).count() == 0
    assert page.get_by_text("hover to look, click to lock, Esc unlocks").is_visible()


def test_a_second_click_and_the_close_button_unlock(show):
    page = show()
    heat(page, 0, "Lyon").click()
    heat(page, 0, "Lyon").click()
    assert page.locator(".locked").count() == 0
    heat(page, 0, "Lyon").click()
    page.get_by_role("button", name="Unlock").click()
    assert page.locator(".locked").count() == 0


def test_a_lock_outlives_a_change_of_scale(show):
    page = show()
    heat(page, 1, "Lyon").click()
    before = page.locator(".legend").first.get_attribute("title")
    page.get_by_text("Shared scale").click()
    page.wait_for_function("before => document.querySelector('[data-testid=stApp]') && "
                           "[...document.querySelectorAll('*')].some(e => e.shadowRoot?.querySelector('.legend') && "
                           "e.shadowRoot.querySelector('.legend').title !== before)", arg=before)  # fmt: skip
    assert page.locator(".row .locked").count() == 4
    assert "Lyon" in card(page).inner_text()


def test_click_shift_click_and_drag_pick_targets(show):
    page = show()
    answer(page, "Lyon").click()
    wait_for_pick(page, (4, 5))
    assert page.locator(".picked").all_inner_texts() == ["Lyon"]
    answer(page, "because").click(modifiers=["Shift"])
    wait_for_pick(page, (4, 7))
    answer(page, "works").hover()
    page.mouse.down()
    answer(page, "buys").hover()
    page.mouse.up()
    wait_for_pick(page, (1, 9))
    assert page.locator(".picked").all_inner_texts() == "buys|it|in|Lyon|,|because|she|works".split("|")


def test_keyboard_alone_picks_locks_and_unlocks(show):
    page = show()
    page.get_by_role("listbox", name="Answer").get_by_role("option").first.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    wait_for_pick(page, (2, 3))
    for key in ("Shift+ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert page.locator(".picked").count() == 3
    page.keyboard.press("Escape")
    assert page.locator(".picked").count() == 1  # tried out, not picked
    for key in ("Home", "Shift+ArrowRight", "Enter"):
        page.keyboard.press(key)
    wait_for_pick(page, (0, 2))
    row = page.get_by_role("listbox", name=re.compile("Gradient norm"))
    for _ in range(6):
        page.keyboard.press("Tab")
        if row.locator(":focus").count():
            break
    assert row.locator(":focus").count() == 1
    assert card(page).count() == 1
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert row.locator(".locked").inner_text() == "a"  # below the first cell stands "are"
    page.keyboard.press("Escape")
    assert page.locator(".locked").count() == 0


def test_rows_have_one_tab_stop_and_words_for_screen_readers(show):
    page = show()
    assert [row.locator(".cell[tabindex='0']").count() for row in page.locator(".row").all()] == [1] * 4
    board = build_board(demo())
    at = index_of(board, " Lyon")
    label = heat(page, 0, "Lyon").get_attribute("aria-label")
    assert label.startswith("·Lyon, user, ")
    assert f"rank {board.rows[0].ranks[at]} of {board.rows[0].ranked}" in label
    assert "outside the color scale" in heat(page, 0, "<|im_start|>").get_attribute("aria-label")
    assert "not measured" in heat(page, 2, "<|im_end|>").get_attribute("aria-label")


def test_fingers_lock_and_pick_spans(show):
    page = show(width=390, has_touch=True, is_mobile=True)
    heat(page, 0, "Lyon").tap()
    assert page.locator(".row .locked").count() == 4
    box = card(page).bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.get_by_role("button", name="Unlock").tap()
    answer(page, "buys").tap()
    wait_for_pick(page, (1, 2))
    page.get_by_role("button", name="Extend the span").tap()
    answer(page, "in").tap()
    wait_for_pick(page, (1, 4))


@pytest.mark.parametrize("case", ["demo", "scripts", "hostile", "span"])
def test_a_phone_needs_no_sideways_scrolling(show, case):
    page = show(case, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for row in page.locator(".row").all():
        assert row.evaluate("e => e.scrollWidth <= e.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_at_any_intensity(show, scheme):
    page = show(color_scheme=scheme)
    board = page.locator(".board").last
    slider = page.get_by_role("slider", name="Color intensity")
    for key in (None, "Home", "End"):
        if key:
            slider.press(key)
        ratio, *where = board.evaluate(CONTRASTS)
        assert ratio >= 4.5, where


def test_intensity_changes_colors_and_resets(show):
    page = show()
    cell = heat(page, 0, "Lyon")
    color = "e => getComputedStyle(e).backgroundColor"
    before = cell.evaluate(color)
    page.get_by_role("slider", name="Color intensity").press("End")
    assert cell.evaluate(color) != before
    page.get_by_role("button", name="Reset the color intensity").click()
    assert cell.evaluate(color) == before


def test_hostile_text_appears_literally(show):
    page = show("hostile")
    texts = page.locator(".row").first.locator(".cell").all_text_contents()
    shown = "".join(texts).replace("\u200b", "")
    for text in HOSTILE:
        if text.isascii() and text.isprintable():
            assert text.strip().replace(" ", "·") in shown
    assert "[U+202E]" in shown
    assert "[U+D800]" in shown
    assert "\u202e" not in page.locator(".board").last.evaluate("e => e.textContent")
    assert page.locator(".board img, .board b, .board a, .board script").count() == 0
    for cell in page.locator(".row").first.locator(".cell").all()[:6]:
        cell.hover()
    assert page.locator(".card img, .card b, .card script").count() == 0


def test_right_to_left_text_reads_right_to_left(show):
    page = show("scripts")
    cells = page.locator(".row").first.locator(".cell")
    texts = cells.all_text_contents()
    hello, world = cells.nth(texts.index("مر")), cells.nth(texts.index("عالم"))
    assert world.bounding_box()["x"] < hello.bounding_box()["x"]
    hello.focus()
    page.keyboard.press("ArrowLeft")  # forward, in this line
    assert page.locator(".row .cell:focus").inner_text() == "حبا"
    inside = cells.nth(texts.index("של"))
    after = cells.nth(texts.index("ום"))
    assert after.bounding_box()["x"] < inside.bounding_box()["x"]  # Hebrew within an English line
    inside.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".row .cell:focus").inner_text() == "ום"


def test_pieces_of_a_character_are_one_cell(show):
    page = show("scripts")
    cells = page.locator(".row").first.locator(".cell").all_text_contents()
    assert "👩\u200d👩\u200d👧" in cells
    assert "👍🏽" in cells
    assert "\ufffd" not in "".join(cells)


def test_thousands_of_cells_stay_usable(show):
    page = show("large")
    assert page.locator(".row").first.locator(".cell").count() == 4098
    assert page.locator(".row").first.locator(".chunk.lazy").count() > 5
    first = page.locator(".row").first.locator(".cell")
    first.nth(30).click()
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    assert page.locator(".cell:focus").get_attribute("data-i") == "4097"
    page.keyboard.press("Enter")
    assert page.locator(".row .locked").count() == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_shows_what_the_page_shows(show, scheme):
    page = show(color_scheme=scheme)
    colors = [
        page.locator(".row")
        .nth(row)
        .locator(f".cell[class*='{name}-24']")
        .first.evaluate("e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)")
        for row, name in ((0, "more"), (1, "against"), (2, "for"))
    ]
    box = page.locator(".rows").bounding_box()
    with page.expect_download() as started:
        page.get_by_role("button", name="Save the board as a PNG picture").click()
    data = started.value.path().read_bytes()
    Image.open(io.BytesIO(data)).verify()
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    assert started.value.suggested_filename == "attriscope.png"
    assert picture.width == pytest.approx(2 * (box["width"] + 32), abs=4)
    assert picture.height > 2 * box["height"]
    found = {color for _, color in picture.getcolors(picture.width * picture.height)}
    assert {tuple(color) for color in colors} <= found
    assert page.locator(".board.printing").count() == 0


def test_the_exported_page_works_offline(exported):
    page = exported(demo((3, 6)))
    heat(page, 0, "Lyon").hover()
    assert "Input × gradient" in card(page).inner_text()
    heat(page, 0, "Lyon").click()
    assert page.locator(".row .locked").count() == 4
    page.keyboard.press("Escape")
    assert page.locator(".row .locked").count() == 0
    assert page.locator(".row").first.locator(".target").count() == 3
    answer(page, "Lyon").click()
    assert page.locator(".row").first.locator(".target").all_inner_texts() == ["Lyon"]
    answer(page, "because").click(modifiers=["Shift"])  # beyond what was explained: the whole span again
    assert page.locator(".row").first.locator(".target").count() == 3
    with page.expect_download() as started:
        page.get_by_role("button", name="Save the board as a PNG picture").click()
    Image.open(started.value.path()).verify()


@pytest.mark.parametrize("make", [hostile, scripts])
def test_the_exported_page_runs_nothing_from_texts(exported, make):
    page = exported(make(), width=390)
    assert page.locator("main img, main b, main a, main iframe").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_exported_page_follows_the_color_scheme(exported):
    page = exported(demo(), color_scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    cell = heat(page, 0, "Lyon")
    before = page.evaluate(back), cell.evaluate("e => getComputedStyle(e).backgroundColor")
    page.emulate_media(color_scheme="dark")
    after = page.evaluate(back), cell.evaluate("e => getComputedStyle(e).backgroundColor")
    assert before[0] != after[0]
    assert before[1] != after[1]
    ratio, *where = page.locator(".board").evaluate(CONTRASTS)
    assert ratio >= 4.5, where


def test_the_heatmap_shows_labels_literally(show):
    page = show("hostile_span")
    page.wait_for_selector(".js-plotly-plot .xtick text")
    labels = page.locator(".js-plotly-plot .xtick text, .js-plotly-plot .ytick text").all_text_contents()
    labels = [label.strip("\u200b") for label in labels]
    assert any("<img" in label for label in labels)
    assert "·$x$" in labels
    assert page.locator(".js-plotly-plot a, .js-plotly-plot image:not([*|href^='data:'])").count() == 0
