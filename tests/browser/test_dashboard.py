"""`meshscope serve` in a real browser: the list of runs, a run that is recorded, a restart."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from browser_pages import ROOT, Browser

PYTHON = os.environ.get("RECORDING_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
NUM_RANKS = 8


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[int]:
    code = "from meshscope.cli import main; main()"
    command = [PYTHON, "-c", code, "serve", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r":(\d+)/", server.stdout.readline())
        assert found is not None
        yield int(found[1])
    finally:
        server.terminate()
        server.communicate(timeout=30)


@contextmanager
def record(folder: Path, name: str, *, seconds: float, first_steps: int = 30) -> Iterator[None]:
    """A run that is being written by the store's own writer, four steps a second."""
    command = [
        PYTHON, str(ROOT / "benchmarks" / "live_run.py"), str(folder / name),
        "--ranks", str(NUM_RANKS), "--slow-rank", "5", "--seconds", str(seconds),
        "--first-steps", str(first_steps),
    ]  # fmt: skip
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        yield
    finally:
        writer.kill()
        writer.communicate()


class Tab:
    """A page of the dashboard that may neither fail nor ask another host."""

    def __init__(self, browser: Browser, base: str) -> None:
        self.page = browser.new_page(viewport={"width": 1600, "height": 900})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", self._see)
        self._base = base
        self.is_server_gone = False

    def _hear(self, message) -> None:
        if message.type == "error" and not self.is_server_gone:
            self.errors.append(message.text)

    def _see(self, request) -> None:
        if not request.url.startswith((self._base, "data:", "blob:")):
            self.errors.append(f"asked {request.url}")

    def read_step(self) -> int:
        text = self.page.locator(".pill.live").first.inner_text(timeout=60_000)
        found = re.search(r"live, step (\d+), read [\d.]+ s ago", text)
        assert found is not None, text
        return int(found[1])


def test_runs_are_listed_searched_and_compared(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        with record(tmp_path, name, seconds=0, first_steps=20):
            pass
    (tmp_path / "<img src=x onerror=alert(1)>").mkdir()
    (tmp_path / "<img src=x onerror=alert(1)>" / "run.json").write_text("{}")
    with serve(tmp_path) as port:
        base = f"http://127.0.0.1:{port}/"
        tab = Tab(browser, base)
        page = tab.page
        page.goto(base)
        page.wait_for_selector("table.runs tbody tr", timeout=60_000)
        assert page.locator("table.runs tbody tr").count() == 3
        assert page.get_by_text("not a meshscope manifest").count() == 1
        assert page.locator("table.runs img").count() == 0
        page.keyboard.press("/")
        page.keyboard.type("name:second layout:tp8")
        assert page.locator("table.runs tbody tr").count() == 1
        assert "q=name" in page.url
        page.get_by_role("searchbox").fill("")
        page.keyboard.press("Escape")
        for _ in range(2):
            page.keyboard.press("j")
            page.keyboard.press(" ")
        page.keyboard.press("c")
        page.wait_for_url("**/compare?a=*&b=*", timeout=60_000)
        page.wait_for_selector("#verdict", timeout=60_000)
        assert tab.errors == []


@pytest.mark.slow
def test_a_live_run_updates_and_survives_a_restart_of_the_server(
    browser: Browser, tmp_path: Path
) -> None:
    with record(tmp_path, "live", seconds=600):
        with serve(tmp_path) as port:
            base = f"http://127.0.0.1:{port}/"
            tab = Tab(browser, base)
            page = tab.page
            page.goto(base)
            page.locator("a", has_text="live").first.click(timeout=60_000)
            page.wait_for_selector("#verdict", timeout=60_000)
            first = tab.read_step()
            page.wait_for_function(
                "step => Number(/step (\\d+)/.exec(document.querySelector('.pill.live')"
                "?.textContent)?.[1]) > step + 8",
                arg=first,
                timeout=60_000,
            )
            # With a selection nothing moves; what is new waits.
            page.goto(f"{page.url.partition('#')[0]}#s=5-9")
            page.get_by_text(re.compile(r"▸ \d+ new steps?")).wait_for(timeout=60_000)
            page.keyboard.press("Escape")
            assert tab.errors == []
            tab.is_server_gone = True
        page.get_by_text("connection lost").wait_for(timeout=60_000)
        assert page.locator("main.greyed").count() == 1
        assert page.locator("#verdict").count() == 1  # nothing is cleared
        with serve(tmp_path, port):
            page.locator(".pill.live").wait_for(timeout=90_000)
            assert tab.read_step() > first
            assert page.locator("main.greyed").count() == 0
        assert tab.errors == []
