"""How long a person waits for a page: first paint after server start, and a stored result on screen.

``python -m benchmarks.page_speed``. The second number is taken from a fresh server and a fresh browser tab, so that
the result comes from disk: a link to an explanation until its heat rows are drawn; then a click on an example within
the page. Both are taken after the server's warm-up (imports, embedded model) has ended.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from backend.engine import Engine
from backend.io.examples import list_examples, load_example
from backend.settings import Settings
from scripts.drive import launch, running_app, wait_ready


def first_paint(browser: Browser, folder: Path) -> float:
    """Seconds from a healthy server to the home page's title on screen, in a fresh browser context."""
    with running_app(folder / "paint.log", {"ATTRISCOPE_CACHE_DIR": str(folder / "cache")}) as server:
        page = browser.new_context().new_page()
        begin = time.perf_counter()
        page.goto(server.url, wait_until="commit")
        page.get_by_role("heading", name="Attriscope").wait_for()
        seconds = time.perf_counter() - begin
        page.context.close()
    return seconds


def settle(url: str) -> None:
    """Wait until no job runs: the warm-up has ended."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 2.5:  # the warm-up begins a moment after the first page
        with urllib.request.urlopen(f"{url}/healthz", timeout=10) as answer:  # noqa: S310 - loopback
            state = json.loads(answer.read())
        if state["running"] or state["waiting"]:
            quiet_since = time.monotonic()
        time.sleep(0.1)


def stored_result(browser: Browser, folder: Path, key: str) -> tuple[float, float]:
    """Seconds until a stored result is drawn: from a cold tab by link, and after a click within the page."""
    with running_app(folder / "stored.log", {"ATTRISCOPE_CACHE_DIR": str(folder / "cache")}) as server:
        page = browser.new_context().new_page()
        page.goto(f"{server.url}/saliency")  # loads scripts and styles into the browser's cache
        wait_ready(page)
        settle(server.url)
        begin = time.perf_counter()
        page.goto(f"{server.url}/saliency?run={key}", wait_until="commit")
        page.locator(".st-key-s_board").get_by_role("option").first.wait_for()
        by_link = time.perf_counter() - begin
        wait_ready(page)
        page.get_by_role("button", name="Examples").click()
        button = page.get_by_role("button", name=list_examples()[-1].title)
        button.wait_for()
        wanted = load_example(list_examples()[-1].name).targets[0].text.strip()
        begin = time.perf_counter()
        button.click()
        page.locator(".st-key-s_board").get_by_text(f"{wanted}", exact=False).first.wait_for()
        by_click = time.perf_counter() - begin
        page.context.close()
    return by_link, by_click


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        engine = Engine(Settings(cache_dir=folder / "cache"))
        key = engine.save(load_example(list_examples()[0].name))
        engine.close()
        browser = launch(playwright)
        paints = [first_paint(browser, folder) for _ in range(options.repeats)]
        stored = [stored_result(browser, folder, key) for _ in range(options.repeats)]
        browser.close()
    rows = {
        "first paint after server start-up": (statistics.median(paints), 2.0),
        "stored result by link, cold tab": (statistics.median(s for s, _ in stored), None),
        "stored result within the page": (statistics.median(s for _, s in stored), 0.5),
    }
    print(f"{datetime.now(UTC):%Y-%m-%d} · {platform.machine()} · Python {platform.python_version()}")
    for label, (seconds, bar) in rows.items():
        verdict = "" if bar is None else f"bar {bar} s: {'PASS' if seconds <= bar else 'MISS'}"
        print(f"{label:40s} {seconds:6.2f} s   {verdict}")
    if options.json:
        options.json.write_text(json.dumps({label: seconds for label, (seconds, _) in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
