"""A real server and a real Chromium; every page is watched for outside requests, console errors and run scripts."""

import pytest
from playwright.sync_api import expect, sync_playwright

from scripts.drive import Watch, launch, running_app

expect.set_options(timeout=30_000)  # a busy machine draws slowly; no test measures time


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as playwright:
        browser = launch(playwright)  # fails loudly where no Chromium is installed
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def app(tmp_path_factory, own_environment):
    folder = tmp_path_factory.mktemp("app")
    cache = folder / "cache"
    cache.mkdir()
    cache.joinpath("converted").symlink_to(own_environment / "converted")  # the model is reused, results are not
    environment = {"ATTRISCOPE_CACHE_DIR": str(cache), "ATTRISCOPE_OFFLINE": "true"}
    with running_app(folder / "app.log", environment) as server:
        yield server
        log = server.log.read_text()
        assert "Traceback" not in log, log


@pytest.fixture
def tab(chromium, app):
    """Open tabs of the app; each is a browser profile of its own. Checks at the end that none misbehaved."""
    watches, contexts = [], []

    def open_tab(address="/", *, width=1280, **more):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **more)
        page = context.new_page()
        watch = Watch(app.url)
        watch.attach(context, page)
        watches.append(watch)
        contexts.append(context)
        page.goto(app.url + address)
        return page

    yield open_tab
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.__xss") is None, "text was run as a script"
        context.close()
    for watch in watches:
        assert watch.outside == [], "the page asked another host"
        assert watch.errors == []
