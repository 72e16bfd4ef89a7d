"""What a person sees on the token saliency page, from the first deep link to the exported file."""

import json
import re
import time
import urllib.request

import pytest
from playwright.sync_api import expect

from scripts.drive import Watch, running_app, wait_ready
from tests.support.saliency_steps import LONG, answer_tokens, ask, heat_rows
from tests.support.tiny import save_tiny

pytestmark = [pytest.mark.browser, pytest.mark.smollm]

HOSTILE = [
    '<img src=x onerror="window.__xss=1"><script>window.__xss=1</script> is',
    "![pixel](http://example.com/p.png) **bold** [link](javascript:alert(1)) $x^2$ :material/home: is",
    "مرحبا بالعالم، नमस्ते दुनिया, 你好世界, 👩‍👩‍👧 e\u0301 is",
    "]]></textarea></script><svg/onload=window.__xss=1>\u202e reversed is",
]


def test_a_cold_deep_link_opens_the_right_page_with_the_menu(chromium, tmp_path):
    with running_app(tmp_path / "log", {"ATTRISCOPE_CACHE_DIR": str(tmp_path / "cache")}) as server:
        context = chromium.new_context()
        page = context.new_page()
        watch = Watch(server.url)
        watch.attach(context, page)
        answer = page.goto(f"{server.url}/saliency")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        expect(page.get_by_role("heading", name="Which tokens drove the answer?")).to_be_visible()
        expect(page.get_by_role("link", name="Home")).to_be_visible()
        expect(page.get_by_text("Page not found")).to_have_count(0)
        assert page.title() == "Token saliency · Attriscope"
        context.close()
        assert (watch.outside, watch.errors) == ([], [])


def test_ask_click_compare_export_and_open_offline(tab, chromium, tmp_path):
    page = tab("/saliency")
    ask(page, "The capital of France is", tokens=4)
    expect(answer_tokens(page).first).to_be_visible(timeout=LONG)
    expect(answer_tokens(page).first).to_contain_text("Paris")
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    expect(page.locator(".st-key-s_board")).to_contain_text("Gradient norm")
    expect(page.locator(".st-key-s_board")).to_contain_text(re.compile("What drove “.?·Paris.?”"))
    answer_tokens(page).nth(1).click()
    expect(page.locator(".st-key-s_board")).not_to_contain_text(re.compile("What drove “.?·Paris.?”"), timeout=LONG)
    expect(heat_rows(page).first.get_by_role("option").filter(has_text="France")).to_be_visible()

    page.get_by_role("button", name="Occlusion").click()
    expect(heat_rows(page)).to_have_count(3, timeout=LONG)
    page.get_by_role("button", name="Export and share").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    document = json.loads(download.value.path().read_text())
    assert [result["method"] for result in document["results"]] == ["gradient_norm", "input_x_gradient", "occlusion"]
    assert document["prompt"]["text"] == "The capital of France is"
    with page.expect_download() as download:
        page.get_by_role("button", name="Web page (HTML)").click()
    exported = tmp_path / "export.html"
    download.value.save_as(exported)
    expect(page.get_by_text("from backend.engine import Engine")).to_be_attached()

    context = chromium.new_context(offline=True)
    offline = context.new_page()
    watch = Watch("file://")
    watch.attach(context, offline)
    offline.goto(exported.as_uri())
    cell = offline.get_by_role("listbox").nth(2).get_by_role("option").filter(has_text="France")
    cell.hover()
    expect(offline.get_by_text("Input × gradient").first).to_be_visible()
    assert offline.get_by_role("listbox").count() >= 3
    assert (watch.outside, watch.errors) == ([], [])
    context.close()


def test_a_reload_and_a_shared_link_bring_the_result_back_without_the_prompt(tab):
    page = tab("/saliency")
    ask(page, "My secret prompt is about the color of the sky, which is", tokens=2)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    expect(page).to_have_url(re.compile(r"/saliency\?run=[0-9a-f]{64}$"))
    assert "secret" not in page.url
    page.reload()
    expect(heat_rows(page)).to_have_count(2)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(re.compile("secret prompt"))
    other = tab(page.url.split("127.0.0.1")[1].partition("/")[2].join(["/", ""]))
    expect(heat_rows(other)).to_have_count(2)
    other.get_by_role("button", name="Occlusion").click()  # a change of an opened result computes again
    run = other.get_by_role("button", name="Run", exact=True)
    expect(run.or_(heat_rows(other).nth(2))).to_be_visible(timeout=LONG)
    if run.is_visible():
        run.click()
    expect(heat_rows(other)).to_have_count(3, timeout=LONG)


def test_an_expired_or_invented_link_says_so(tab):
    for run in ("0" * 64, "../../etc/passwd", "<script>"):
        page = tab(f"/saliency?run={run}")
        expect(page.get_by_text("This link has expired")).to_be_visible()
        expect(page.get_by_role("button", name="Answer", exact=True)).to_be_visible()
    page = tab("/saliency?example=nothing-like-this")
    expect(page.get_by_text("There is no example of this name.")).to_be_visible()


@pytest.mark.parametrize("prompt", HOSTILE)
def test_hostile_prompts_are_plain_text(tab, prompt):
    page = tab("/saliency")
    ask(page, prompt, tokens=1)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    drawn = heat_rows(page).first.inner_text()
    words = [word for word in re.split(r"\s+", prompt) if word.isalpha()]
    for word in words:
        assert word in drawn
    assert page.evaluate("window.__xss") is None
    page.reload()
    expect(heat_rows(page)).to_have_count(2)


@pytest.mark.parametrize(
    ("prompt", "says"), [("   \n ", "nothing but white space"), ("x" * 100_000, "50,000"), ("word " * 9_000, "4,096")]
)
def test_bad_prompts_get_a_sentence_and_lose_nothing(tab, prompt, says):
    page = tab("/saliency")
    ask(page, prompt)
    expect(page.get_by_text("This did not work")).to_be_visible(timeout=LONG)
    expect(page.get_by_text(says).first).to_be_visible()
    assert page.get_by_label("Prompt", exact=True).input_value() == prompt


def test_a_prompt_that_is_too_long_is_cut_only_where_the_person_wants(tab):
    page = tab("/saliency")
    ask(page, "First words. " + "word " * 5_000 + "Last words are", tokens=1)
    page.get_by_role("radio", name="its end").click(timeout=LONG)
    page.get_by_role("button", name="Cut", exact=True).click()
    box = page.get_by_label("Prompt", exact=True)
    expect(box).to_have_value(re.compile(r"^(?!First words).*Last words are$", re.DOTALL), timeout=LONG)
    expect(page.get_by_text("characters were cut out")).to_be_visible()


def test_a_long_run_asks_first_shows_progress_and_stops_on_cancel(tab):
    page = tab("/saliency")
    ask(page, "The capital of France is " * 12 + "the city of", tokens=1)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    page.get_by_role("button", name="Method settings").click()
    for name in ("Gradient norm", "Input × gradient"):
        page.get_by_role("button", name=name, exact=True).click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Integrated gradients").click()
    expect(page.get_by_text(re.compile(r"This will take about \d+"))).to_be_visible(timeout=LONG)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text(re.compile(r"Explaining · \d+ of \d+"))).to_be_visible(timeout=LONG)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled.")).to_be_visible()
    page.wait_for_timeout(1500)
    expect(page.get_by_text("Cancelled.")).to_be_visible()  # stays cancelled until asked again
    page.get_by_role("button", name="Run again").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible(timeout=LONG)
    page.get_by_role("button", name="Cancel").click()


def test_two_sessions_in_parallel_get_their_own_results(tab):
    first, second = tab("/saliency"), tab("/saliency")
    ask(first, "The opposite of hot is", tokens=2)
    ask(second, "The largest planet is", tokens=2)
    expect(heat_rows(first)).to_have_count(2, timeout=LONG)
    expect(heat_rows(second)).to_have_count(2, timeout=LONG)
    expect(heat_rows(first).first).to_contain_text("hot")
    expect(heat_rows(second).first).to_contain_text("planet")


def test_two_browsers_on_different_models(tab, tmp_path):
    save_tiny(tmp_path / "tiny-gpt2", "gpt2")
    first, second = tab("/saliency"), tab("/saliency")
    model = second.get_by_role("combobox", name="Model")
    model.click()
    model.fill(str(tmp_path / "tiny-gpt2"))
    model.press("Enter")
    wait_ready(second)
    ask(first, "The color of grass is", tokens=1)
    ask(second, "The color of snow is", tokens=1)
    for page, words in ((first, "smollm2-135m-instruct"), (second, "tiny-gpt2")):
        expect(page.locator(".st-key-s_board")).to_contain_text(words, timeout=LONG)
        expect(heat_rows(page)).to_have_count(2, timeout=LONG)


def test_a_model_that_cannot_be_had_is_a_sentence(tab):
    page = tab("/saliency")
    model = page.get_by_role("combobox", name="Model")
    model.click()
    model.fill("nobody/has-this-model")
    model.press("Enter")
    wait_ready(page)
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(page.get_by_text("nobody/has-this-model has not been downloaded")).to_be_visible(timeout=LONG)
    assert page.get_by_label("Prompt", exact=True).input_value()


def load(app):
    with urllib.request.urlopen(f"{app.url}/healthz") as answer:
        return json.loads(answer.read())


def wait_idle(app, words):
    end = time.monotonic() + 15
    while load(app)["running"]:
        assert time.monotonic() < end, words
        time.sleep(0.2)


def test_a_run_stops_when_the_controls_ask_something_else(tab, app):
    page = tab("/saliency")
    ask(page, "Eleven twelve thirteen fourteen fifteen " * 20 + "sixteen", tokens=1)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    page.get_by_role("button", name="Integrated gradients").click()
    page.get_by_role("button", name="Run", exact=True).click(timeout=LONG)
    expect(page.get_by_text(re.compile(r"Explaining · \d+ of \d+"))).to_be_visible(timeout=LONG)
    assert load(app)["running"] == 1
    page.get_by_role("button", name="Integrated gradients").click()  # off again: the result for the rest is stored
    expect(heat_rows(page)).to_have_count(2)
    wait_idle(app, "the superseded job runs on")


def test_closing_the_tab_frees_the_job(tab, app):
    page = tab("/saliency")
    ask(page, "One two three four five six seven " * 20 + "eight", tokens=1)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    page.get_by_role("button", name="Integrated gradients").click()
    page.get_by_role("button", name="Run", exact=True).click(timeout=LONG)
    expect(page.get_by_text(re.compile(r"Explaining · \d+ of \d+"))).to_be_visible(timeout=LONG)
    assert load(app)["running"] == 1
    page.close()
    wait_idle(app, "the job runs on although nobody waits for it")


def test_the_page_can_be_used_by_keyboard_alone(tab):
    page = tab("/saliency")

    def tab_to(selector):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.locator(f"{selector}:focus").count():
                return
        raise AssertionError(f"the keyboard never reaches {selector}")

    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("Two plus two is")
    page.keyboard.press("Control+Enter")
    wait_ready(page)
    tab_to(".st-key-s_ask button")
    page.keyboard.press("Enter")
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    board = page.locator(".st-key-s_board")
    before = board.inner_text()
    chosen = [cell.get_attribute("aria-selected") for cell in answer_tokens(page).all()].index("true")
    tab_to(".st-key-s_answer [role=option]")  # the chosen token has the focus
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    other_cell = answer_tokens(page).nth(chosen + 2)
    expect(other_cell).to_have_attribute("aria-selected", "true")
    expect(board).not_to_have_text(before, timeout=LONG)
    word = other_cell.inner_text().strip()
    expect(board).to_contain_text(re.compile(f"What drove “[^”]*{re.escape(word)}.?”"), timeout=LONG)
    other = tab("/saliency?example=where-is-the-phone")
    expect(heat_rows(other)).to_have_count(3)
    heat_rows(other).first.get_by_role("option").first.focus()
    for _ in range(4):
        other.keyboard.press("ArrowRight")
    other.keyboard.press("Enter")
    locked = heat_rows(other).first.locator("[aria-selected=true]")
    expect(locked).to_have_count(1)
    other.keyboard.press("Escape")
    expect(locked).to_have_count(0)


def test_an_exported_file_opens_again_and_a_damaged_one_is_refused(tab, tmp_path):
    from backend.io.examples import FOLDER

    page = tab("/saliency")
    page.get_by_role("button", name="Open a file").click()
    page.locator("input[type=file]").set_input_files(FOLDER / "paris-rather-than-london.json")
    expect(heat_rows(page)).to_have_count(3)
    expect(page.get_by_label("Rather than (foil)", exact=True)).to_have_value(" London")
    damaged = tmp_path / "damaged.json"
    document = json.loads((FOLDER / "paris-rather-than-london.json").read_text())
    document["results"][0]["scores"][0].pop()
    damaged.write_text(json.dumps(document))
    other = tab("/saliency")
    other.get_by_role("button", name="Open a file").click()
    other.locator("input[type=file]").set_input_files(damaged)
    expect(other.get_by_text("The file is damaged or was edited")).to_be_visible()


def test_six_quick_changes_leave_one_result(tab):
    page = tab("/saliency")
    ask(page, "Monday, Tuesday, Wednesday,", tokens=6)
    expect(answer_tokens(page).nth(5)).to_be_visible(timeout=LONG)
    for index in (1, 2, 3, 4, 5, 2):
        answer_tokens(page).nth(index).click()
    chosen = answer_tokens(page).nth(2)
    expect(chosen).to_have_attribute("aria-selected", "true", timeout=LONG)
    word = chosen.inner_text().strip()
    expect(page.locator(".st-key-s_board")).to_contain_text(
        re.compile(f"What drove “[^”]*{re.escape(word)}.?”"), timeout=LONG
    )
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    expect(page.get_by_text("This did not work")).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_in_any_look(tab, width, scheme):
    for address in ("/", "/saliency?example=code-word-in-a-chat", "/saliency?example=other-scripts"):
        page = tab(address, width=width, color_scheme=scheme)
        wait_ready(page)
        if "example" in address:
            expect(heat_rows(page)).to_have_count(3)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0


def test_home_opens_the_examples_and_says_where_models_run(tab):
    page = tab("/")
    expect(page.get_by_role("heading", name="Attriscope")).to_be_visible()
    expect(page.get_by_text("Device:")).to_be_visible()
    page.get_by_role("button", name="Open").first.click()
    expect(heat_rows(page)).to_have_count(3)
    page.get_by_role("link", name="Home").click()
    expect(page.get_by_role("heading", name="Attriscope")).to_be_visible()
    page.get_by_role("link", name="Token saliency").click()
    expect(heat_rows(page)).to_have_count(3)  # settings and result survive a walk through the pages
