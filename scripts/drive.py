"""Start the application and drive it in headless Chromium: shared by browser tests, page benchmark and screenshots."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Request

ROOT = Path(__file__).resolve().parent.parent
READY = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def find_chromium() -> str:
    """Return the path of an installed Chromium.

    Raises:
        RuntimeError: If there is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError("No Chromium was found. Install it (Debian: apt-get install chromium).")


def launch(playwright: Playwright) -> Browser:
    """Start headless Chromium."""
    return playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_FLAGS)


@dataclass
class Server:
    """A running application: where it listens, and its log."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


def free_port() -> int:
    """Return a port of the loopback address that nobody uses at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_app(
    log: Path, environment: Mapping[str, str] | None = None, script: Path = ROOT / "app.py"
) -> Iterator[Server]:
    """Start the application, or another one, on a free port; stop it at the end.

    Raises:
        RuntimeError: If it does not answer within a minute.
    """
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - own command, no shell
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=output
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_healthy(server: Server) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=2) as answer:  # noqa: S310 - loopback
                if answer.read() == b"ok":
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise RuntimeError(f"The application did not start:\n{server.log.read_text()}")


@dataclass
class Watch:
    """What a browser page did that it should not: requests to other hosts, console errors, script run by data."""

    origin: str
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def attach(self, context: BrowserContext, page: Page) -> None:
        """Listen to a page of this context."""
        context.on("request", self._request)
        page.on("console", lambda message: self._console(message.type, message.text, message.location.get("url", "")))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, self.origin.replace("http", "ws"), "data:", "blob:", "file:")):
            self.outside.append(request.url)

    def _console(self, kind: str, text: str, url: str) -> None:
        # on a deep link Streamlit probes two addresses below the page's own before it finds the right ones
        probe = url.endswith(("/_stcore/health", "/_stcore/host-config")) and "404" in text
        if kind == "error" and not probe:
            self.errors.append(f"{text} ({url})")


def wait_ready(page: Page, *, timeout: float = 60_000) -> None:
    """Wait until the page's script has run and the connection stands."""
    page.wait_for_selector(READY, timeout=timeout)
