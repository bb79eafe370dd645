"""Trace windows: a row per window, with the steps and the file that shows them."""

import shlex
from collections.abc import Sequence

from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Part, Section, Table, Tone, make_column
from meshscope.store.read.trace_windows import NO_TRACE, TraceWindow, windows_of

MAX_ROWS = 16
_MAX_PATH_CHARACTERS = 120


def show_traces(report: Report, detail: Detail) -> Section | None:
    windows = windows_of(report.attempt)
    if not windows:
        return None
    return _describe_traces(windows, report.study.steps.num_profiled, report.facts.path)


def _describe_traces(windows: Sequence[TraceWindow], num_profiled: int, run_path: str) -> Section:
    shown = windows[:MAX_ROWS]
    parts: list[Part] = [
        Table(
            (
                make_column("steps", shown, _describe_steps, 5),
                make_column("rank", shown, lambda window: str(window.rank), 2),
                make_column("size", shown, _describe_size, 1),
                make_column("below traces/", shown, _describe_file, 6, is_right=False),
                make_column("because of", shown, lambda w: _clean(w.reason), 4, is_right=False),
            )
        )
    ]
    if len(windows) > len(shown):
        parts.append(Line(f"and {len(windows) - len(shown)} more (see --json)", Tone.QUIET))
    if any(window.path is not None for window in windows):
        folder = form.clean_path(shlex.quote(f"{run_path}/traces"))
        parts.append(Line(f"to read them: meshscope trace {folder}", Tone.QUIET))
    ranks = form.plural(len({window.rank for window in windows}), "rank")
    left_out = f"; {form.plural(num_profiled, 'profiled step')} left out of statistics"
    note = f"{form.plural(len(windows), 'window')} on {ranks}{left_out}"
    return Section(key="traces", title="Traces", note=note, parts=tuple(parts))


def _describe_steps(window: TraceWindow) -> str:
    first, last = window.first_step, window.last_step
    if first is None or last is None:
        return "-"
    return str(first) if first == last else f"{first}-{last}"


def _describe_size(window: TraceWindow) -> str:
    return "n/a" if window.num_bytes is None else form.memory(window.num_bytes)


def _describe_file(window: TraceWindow) -> str:
    if window.path is None:
        return f"n/a: {_clean(window.problem or NO_TRACE)}"
    return _clean(window.path.removeprefix("traces/"))


def _clean(text: str) -> str:
    return form.clean_text(text, _MAX_PATH_CHARACTERS)
