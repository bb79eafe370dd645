"""Trace windows as text: a row per window, with the steps and the file that shows them."""

import shlex
from collections.abc import Sequence

from rich.text import Text

from meshscope.report import format as form
from meshscope.report.screen import Column, ScreenWriter
from meshscope.report.traces_document import TraceFacts
from meshscope.report.values import Absent

MAX_ROWS = 16
MAX_PATH_CHARACTERS = 120


def write_traces(
    out: ScreenWriter, traces: Sequence[TraceFacts], num_profiled: int, run_path: str
) -> None:
    """The section; nothing where no window was taken."""
    if not traces:
        return
    ranks = form.plural(len({trace.rank for trace in traces}), "rank")
    windows = form.plural(len(traces), "window")
    left_out = f"; {form.plural(num_profiled, 'profiled step')} left out of statistics"
    out.section("Traces", f"{windows} on {ranks}{left_out}")
    shown = traces[:MAX_ROWS]
    out.table(
        [
            _column("steps", [_describe_steps(trace) for trace in shown], 5),
            _column("rank", [str(trace.rank) for trace in shown], 2),
            _column("size", [form.or_dash(trace.num_bytes, form.memory) for trace in shown], 1),
            _column("below traces/", [_describe_file(trace) for trace in shown], 6, is_right=False),
            _column("because of", [_clean(trace.reason) for trace in shown], 4, is_right=False),
        ]
    )
    if len(traces) > len(shown):
        out.line(f"and {len(traces) - len(shown)} more (see --json)", "dim")
    if any(isinstance(trace.path, str) for trace in traces):
        folder = shlex.quote(f"{run_path}/traces")
        out.line(f"to read them: meshscope trace {form.clean_path(folder)}", "dim")


def _column(title: str, cells: list[str], importance: int, *, is_right: bool = True) -> Column:
    texts = [Text(cell) for cell in cells]
    return Column(title=title, cells=texts, importance=importance, is_right=is_right)


def _describe_steps(trace: TraceFacts) -> str:
    first, last = trace.first_step, trace.last_step
    if isinstance(first, Absent) or isinstance(last, Absent):
        return "-"
    return str(first) if first == last else f"{first}-{last}"


def _describe_file(trace: TraceFacts) -> str:
    path = trace.path
    if isinstance(path, Absent):
        return f"n/a: {_clean(path.unavailable)}"
    return _clean(path.removeprefix("traces/"))


def _clean(text: str) -> str:
    return form.clean_text(text, MAX_PATH_CHARACTERS)
