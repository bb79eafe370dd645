"""What the page costs: its size, its first paint, and what it does while somebody looks at it.

    .venv-browser/bin/python benchmarks/page_budget.py               # 1,024 ranks × 10,000 steps
    .venv-browser/bin/python benchmarks/page_budget.py --ranks 64 --steps 500 --no-save

`make .venv-browser/.installed` first. The run is that of synthetic_run.py: made up, one slow rank.
Its page is written by `meshscope report --html` in a process of its own, then opened in Debian's
Chromium, which draws in software here. First paint is the browser's own first-contentful-paint from
the start of the navigation, and the page draws nothing before the verdict, so it is the verdict's.
A redraw is the time inside of a view's drawing function; a hover and a brush are what the main
thread did for one (the browser's TaskDuration, layout and style included). 50,000 spans are the
timeline of a real 2×2×2 step, repeated; without a page of one (`--small`), they are not measured.
Each number is a median; every sample is in the results, with how busy the machine was.
"""

import argparse
import gzip
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from store_load import measure
from synthetic_run import Fault, Job
from synthetic_run import write_run as write_synthetic_run

from browser_pages import Page, find_browser, read_data, settle, sync_playwright
from meshscope.page.file import find_bundle

GOALS = {
    "page_bytes": 20_000_000,
    "script_gzip_bytes": 100_000,
    "first_paint_ms": 2000.0,
    "heat_redraw_ms": 30.0,
    "hover_ms": 8.0,
    "brush_to_numbers_ms": 150.0,
    "small_first_paint_ms": 300.0,
    "spans_redraw_ms": 100.0,
}
"""EYES §13: at most."""
NUM_OPENED = 5
NUM_HOVERED = 40
NUM_SPANS = 50_000
DATA = re.compile(r'(<script type="application/json" id="meshscope-data">)(.*?)(</script>)', re.S)


def write_run(folder: Path, num_ranks: int, num_steps: int) -> Path:
    job = Job(num_ranks=num_ranks, faults=(Fault(rank=num_ranks * 3 // 4 + 1),))
    write_synthetic_run(folder, job, num_steps)
    return folder


def write_page(run: Path, page: Path) -> dict[str, object]:
    code = "import sys; from meshscope.cli import main; print('run', flush=True); main()"
    command = [sys.executable, "-c", code, "report", str(run), "-o", str(page)]
    cpu_s, peak_rss_bytes, wall_s = measure(command)
    return {
        "page_bytes": page.stat().st_size,
        "write_cpu_s": round(cpu_s, 2),
        "write_wall_s": round(wall_s, 2),
        "write_peak_rss_bytes": peak_rss_bytes,
    }


def repeat_spans(small: Path, target: Path) -> int:
    """A page whose timelines are those of `small`, repeated until a step has 50,000 spans."""
    text = small.read_text(encoding="utf-8")
    data = read_data(small)
    timeline = max(data["timelines"], key=lambda one: len(one["pieces"]["rank"]))
    pieces = timeline["pieces"]
    times = -(-NUM_SPANS // len(pieces["rank"]))
    length = timeline["length_ns"]
    for name, column in pieces.items():
        repeated = []
        for number in range(times):
            shift = number * length if name == "start_ns" else 0
            repeated += [value + shift for value in column] if shift else column
        pieces[name] = repeated
    timeline["length_ns"] = times * length
    timeline["period_end_ns"] = [times * length] * len(timeline["ranks"])
    timeline["actions"] = None
    data["timelines"] = [{**timeline, "picked": ["median"]}]
    encoded = json.dumps(data).replace("<", "\\u003c")
    target.write_text(DATA.sub(lambda found: found[1] + encoded + found[3], text), "utf-8")
    return len(pieces["rank"])


class Watched:
    """A page in the browser, with the browser's own clocks."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("#verdict", timeout=60_000)
        self.client = self.context.new_cdp_session(self.page)
        self.client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def first_paint_ms(self) -> float:
        script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1"
        while (found := float(self.page.evaluate(script))) < 0:
            self.page.wait_for_timeout(20)
        return found

    def task_s(self) -> float:
        metrics = self.client.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    def drawn_ms(self, section: str) -> float:
        script = f"Number(document.querySelector('#{section} .canvas').dataset.drawMs)"
        return float(self.page.evaluate(script))

    def close(self) -> None:
        self.context.close()
        if self.errors:
            raise SystemExit(f"the page failed: {self.errors}")


def measure_page(browser: Any, path: Path) -> dict[str, object]:
    """First paints of several openings; then redraws, hovers and brushes of one."""
    paints = []
    for _ in range(NUM_OPENED):
        watched = Watched(browser, path)
        paints.append(watched.first_paint_ms())
        watched.close()
    watched = Watched(browser, path)
    page = watched.page
    settle(page)
    heap = page.evaluate("performance.memory?.usedJSHeapSize ?? null")
    found: dict[str, object] = {
        "first_paint_ms": round(statistics.median(paints), 1),
        "samples_first_paint_ms": [round(one, 1) for one in paints],
        "heap_bytes": heap,
        **measure_redraws(watched),
        **measure_hover(watched),
        **measure_brush(page),
    }
    watched.close()
    return found


def measure_redraws(watched: Watched) -> dict[str, object]:
    """The heat map, drawn again in another order and zoomed."""
    page = watched.page
    page.locator("#heat").scroll_into_view_if_needed()
    drawn = []
    for key in ("o", "o", "o", "o", "w", "w", "0") * 2:
        page.keyboard.press(key)
        settle(page)
        drawn.append(watched.drawn_ms("heat"))
    return {"heat_redraw_ms": round(statistics.median(drawn), 1), "samples_heat_redraw_ms": drawn}


def measure_hover(watched: Watched) -> dict[str, object]:
    page = watched.page
    box = page.locator("#heat .canvas").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    before = watched.task_s()
    for number in range(NUM_HOVERED):
        x = box["x"] + (0.3 + 0.5 * number / NUM_HOVERED) * box["width"]
        page.mouse.move(x, box["y"] + (0.5 + 0.3 * number / NUM_HOVERED) * box["height"])
    page.wait_for_timeout(100)
    return {"hover_ms": round(1000 * (watched.task_s() - before) / NUM_HOVERED, 2)}


def measure_brush(page: Page) -> dict[str, object]:
    """From the move of the pointer to the budget's new number."""
    page.keyboard.press("Escape")
    page.evaluate("scrollTo(0, 0)")
    settle(page)
    taken = page.evaluate(
        """async () => {
          const strip = document.querySelector(".strip .canvas");
          const box = strip.getBoundingClientRect();
          const sub = document.querySelector("#budget .sub");
          const send = (kind, x) => strip.dispatchEvent(new PointerEvent(kind, {
            clientX: box.left + x * box.width, clientY: box.top + 10, bubbles: true, button: 0,
            pointerId: 1, isPrimary: true }));
          const found = [];
          strip.setPointerCapture = () => {};
          send("pointerdown", 0.2);
          for (let i = 1; i <= 8; i++) {
            const begin = performance.now();
            const changed = new Promise((done) => {
              const watch = new MutationObserver(() => { watch.disconnect(); done(); });
              watch.observe(sub, { subtree: true, childList: true, characterData: true });
              setTimeout(done, 3000);
            });
            send("pointermove", 0.2 + 0.08 * i);
            await changed;
            found.push(performance.now() - begin);
            await new Promise((done) => setTimeout(done, 50));
          }
          send("pointerup", 0.84);
          return found;
        }"""
    )
    return {
        "brush_to_numbers_ms": round(statistics.median(taken), 1),
        "samples_brush_to_numbers_ms": [round(one, 1) for one in taken],
    }


def measure_spans(browser: Any, small: Path, folder: Path) -> dict[str, object]:
    """A small page's first paint, and its timeline with 50,000 spans."""
    paints = []
    for _ in range(NUM_OPENED):
        watched = Watched(browser, small)
        paints.append(watched.first_paint_ms())
        watched.close()
    count = repeat_spans(small, folder / "spans.html")
    watched = Watched(browser, folder / "spans.html")
    settle(watched.page)
    watched.page.locator("#timeline").scroll_into_view_if_needed()
    drawn = []
    for key in ("w", "s", "w", "d", "0", "t", "t"):
        watched.page.keyboard.press(key)
        settle(watched.page)
        drawn.append(watched.drawn_ms("timeline"))
    watched.close()
    return {
        "small_first_paint_ms": round(statistics.median(paints), 1),
        "num_spans": count,
        "spans_redraw_ms": round(statistics.median(drawn), 1),
        "samples_spans_redraw_ms": drawn,
    }


def judge(found: dict[str, object]) -> bool:
    """Prints each number beside its goal."""
    is_met = True
    for name, goal in GOALS.items():
        value = found.get(name)
        if value is None:
            print(f"{name:<24} not measured")
            continue
        is_good = float(str(value)) <= goal
        is_met = is_met and is_good
        print(f"{name:<24}{value:>12,}  goal ≤ {goal:,}: {'met' if is_good else 'MISSED'}")
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--run", type=Path, help="a run of that size which is there already")
    parser.add_argument("--small", type=Path, help="page of an 8-rank run, for 50,000 spans")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="page_budget_"))
    try:
        run = options.run or write_run(folder / "run", options.ranks, options.steps)
        script = (find_bundle() / "page.js").read_bytes()
        found: dict[str, object] = {
            "num_ranks": options.ranks,
            "num_steps": options.steps,
            "script_gzip_bytes": len(gzip.compress(script, 9)),
            **write_page(run, folder / "page.html"),
        }
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=find_browser(), args=["--no-sandbox"], timeout=60_000
            )
            version = browser.version
            found |= measure_page(browser, folder / "page.html")
            if options.small:
                found |= measure_spans(browser, options.small, folder)
            browser.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    is_met = judge(found)
    if not options.no_save:
        target = Path(__file__).parent / "results" / "page_budget.json"
        load = round(os.getloadavg()[0], 1)
        machine = {
            "cores": os.cpu_count(),
            "load_average_1min": load,
            "python": platform.python_version(),
        }
        machine |= {"browser": f"Chromium {version}, software rendering"}
        document = {"goal_is_met": is_met, "goals": GOALS, **found, "machine": machine}
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
