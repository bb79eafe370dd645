"""Real pages in a real browser. `make test-browser` has what they need; others skip them.

Every page that a test opens is watched: an error on its console, an exception, or a request that
leaves the file makes the test fail.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser_pages import ROOT, Browser, Opener, find_browser, sync_playwright


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = ""
    if sync_playwright is None:
        why = "playwright is not installed: make test-browser"
    elif find_browser() is None:
        why = "no browser: install chromium (Debian: apt-get install chromium)"
    for item in items:
        if why and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of recorded runs and their pages; BROWSER_RUNS names one to keep."""
    kept = os.environ.get("BROWSER_RUNS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("pages")
    folder.mkdir(parents=True, exist_ok=True)
    python = os.environ.get("RECORDING_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    recorder = [python, str(Path(__file__).with_name("record.py")), str(folder)]
    done = subprocess.run(recorder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root, Chromium has no sandbox; pages here are our own files.
        found = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox"], timeout=60_000
        )
        yield found
        found.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    opener = Opener(browser)
    yield opener
    opener.close()
