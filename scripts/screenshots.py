"""Draw the screenshots of the README: every page, from the examples, in light mode at 1280 px.

``python -m scripts.screenshots [--all]``; ``--all`` adds 390 px and dark mode, into a folder that is not kept.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from backend.io.examples import list_examples
from scripts.drive import ROOT, launch, running_app, wait_ready


def shoot(browser: Browser, url: str, target: Path, width: int, scheme: str) -> None:
    """Save a picture of the page at ``url``, as long as its content."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    wait_ready(page)
    page.wait_for_timeout(800)  # fonts and the component's own drawing
    height = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": width, "height": min(int(height) + 80, 4000)})
    page.wait_for_timeout(400)
    page.screenshot(path=target)
    context.close()
    print(f"wrote {target}")


def main() -> None:
    """Start the app, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="also 390 px and dark mode, into build/screenshots")
    everything = parser.parse_args().all
    folder = ROOT / ("build/screenshots" if everything else "assets/screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    addresses = {
        "home": "/",
        "saliency": f"/saliency?example={list_examples()[0].name}",
        "benchmarks": "/benchmarks",
    }
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        environment = {"ATTRISCOPE_CACHE_DIR": name}
        with running_app(Path(name) / "app.log", environment) as server:
            browser = launch(playwright)
            looks = list(product((1280, 390), ("light", "dark"))) if everything else [(1280, "light")]
            for (page, address), (width, scheme) in product(addresses.items(), looks):
                suffix = f"-{width}-{scheme}" if everything else ""
                shoot(browser, server.url + address, folder / f"{page}{suffix}.png", width, scheme)
            browser.close()


if __name__ == "__main__":
    main()
