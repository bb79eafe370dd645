"""The dashboard while a run is recorded: new steps arrive, and go on after the server was away."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from browser_pages import ROOT, settle, text_of

pytestmark = pytest.mark.timeout(240)

STEP = re.compile(r"live, step ([\d,]+)")
CONFIG = """
name = "live"
num_steps = 100000
device = "cpu"
[model]
preset = "llama-tiny"
[parallel]
dp = 2
[batch]
microbatch_size = 1
"""


@pytest.fixture
def recorded(tmp_path):
    """A folder in which two ranks train until the test is over, slowly."""
    python = os.environ.get("RECORDING_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    config = tmp_path / "live.toml"
    config.write_text(CONFIG, encoding="utf-8")
    run = tmp_path / "runs" / "live"
    fault = "slow rank=1 phase=forward ms=150"
    command = [python, "-m", "meshscope", "train", str(config), "-o", str(run), "--fault", fault]
    job = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 90
    while not (run / "rank00001").exists():
        assert job.poll() is None
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.2)
    yield run.parent
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


class Server:
    """`meshscope serve` as a process of its own, on a port that stays the same."""

    def __init__(self, folder):
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = None

    def start(self):
        command = [sys.executable, "-m", "meshscope", "serve", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError("the server did not start")

    def stop(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


@pytest.fixture
def server(recorded):
    one = Server(recorded)
    one.start()
    yield one
    one.stop()


def live_step(page):
    """The step that the pill names; None while it does not."""
    found = STEP.search(text_of(page, "header.top"))
    return int(found[1].replace(",", "")) if found else None


def wait_until(page, is_so, what, seconds=90):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: {text_of(page, 'header.top')}"
        page.wait_for_timeout(250)


def wait_beyond(page, step):
    """The step it says then."""
    wait_until(page, lambda: (live_step(page) or -1) > step, f"no step after {step}")
    return live_step(page)


def test_live_steps_arrive_and_survive_a_restart_of_the_server(server, opened):
    page = opened(f"http://127.0.0.1:{server.port}/", is_served=True)
    row = page.locator("table.runs tbody tr").first
    row.wait_for()
    assert "live" in row.inner_text()
    row.get_by_role("link").first.click()
    page.wait_for_selector("#verdict", timeout=90_000)
    first = wait_beyond(page, 0)
    second = wait_beyond(page, first + 5)
    settle(page)
    assert second > first
    # The server goes away, and comes back: nothing is cleared meanwhile.
    opened.forgive("Failed to load resource")
    server.stop()
    wait_until(page, lambda: "connection lost" in text_of(page, "header.top"), "not noticed")
    assert page.locator("section.card").count() > 1
    server.start()
    third = wait_beyond(page, second + 3)
    assert third > second
    assert "connection lost" not in text_of(page, "header.top")


def test_a_served_run_is_the_page_of_its_file(pages, opened):
    """The same sections and the same verdict, from the API."""
    one = Server(pages)
    one.start()
    try:
        page = opened(f"http://127.0.0.1:{one.port}/", is_served=True)
        page.get_by_role("link", name="slow", exact=True).click()
        page.wait_for_selector("#heat canvas", timeout=90_000)
        settle(page)
        offline = opened(pages / "slow.html")
        assert text_of(page, "#verdict h2") == text_of(offline, "#verdict h2")
        assert text_of(page, "#budget table") == text_of(offline, "#budget table")
        sections = "[...document.querySelectorAll('section.card')].map((one) => one.id)"
        assert page.evaluate(sections) == offline.evaluate(sections)
        step = page.evaluate("() => document.querySelectorAll('#timeline canvas').length")
        assert step > 0
    finally:
        one.stop()
