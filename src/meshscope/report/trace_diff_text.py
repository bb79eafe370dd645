"""What changed from one set of traces to another, as text."""

from collections.abc import Sequence

from meshscope.analyze.compare.trace_diff import (
    AxisDifference,
    CountedDifference,
    PartDifference,
    TraceDifference,
)
from meshscope.core.kernel_names import shorten_kernel_name
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import Column, Screen, ScreenWriter, make_column
from meshscope.report.trace_table_text import NUM_ROWS, short_name

_TOTAL, _BESIDE = "total", "communication"
_LEAST_RATIO = 0.01
"""Of the whole: what changed less is not said in words."""
_Timed = PartDifference | CountedDifference | AxisDifference


def render_difference(
    difference: TraceDifference | Unavailable, screen: Screen, *, num_rows: int = NUM_ROWS
) -> str:
    """Parts first, then what they are made of; ends with a newline."""
    out = ScreenWriter(screen)
    if isinstance(difference, Unavailable):
        out.line(f"n/a: {form.clean_text(difference.reason)}")
        return out.finish()
    whose = "host" if difference.is_of_hosts else "device"
    unit = "step" if difference.is_per_step else "trace"
    out.headline(_say_whole(difference.parts, f"{whose}'s {unit}"), "bold")
    most = _find_most_changed(difference.parts)
    if most is not None:
        out.line(f"Most of the difference: {most.part} {_signed(most.change_ns)}.")
    out.line(
        f"Means of a {whose}'s {unit}; few were recorded, so a difference may be chance.", "dim"
    )
    before = _describe_side(difference.num_first_devices, whose, difference.first_names)
    now = _describe_side(difference.num_second_devices, whose, difference.second_names)
    if before != now:
        out.line(f"before {before}, now {now}", "yellow")
    parts = [row for row in difference.parts if row.first_ns or row.second_ns]
    out.table(
        [
            make_column("part", parts, lambda row: row.part, 10, is_right=False),
            *_time_columns(parts),
        ]
    )
    _write_axes(out, difference.communication, num_rows)
    _write_counted(out, "category", difference.categories, num_rows)
    _write_counted(out, "module", difference.modules, num_rows)
    _write_counted(out, "kernel", difference.kernels, num_rows)
    _write_counted(out, "operator", difference.operators, num_rows)
    return out.finish()


def _say_whole(parts: Sequence[PartDifference], what: str) -> str:
    total = next((row for row in parts if row.part == _TOTAL), None)
    if total is None or isinstance(total.ratio, Unavailable):
        return f"What changed, mean of a {what}"
    now, before = form.duration(total.second_ns), form.duration(total.first_ns)
    if abs(total.change_ns) < _LEAST_RATIO * total.first_ns:
        return f"A {what} takes as long as before ({now})."
    how = "more time" if total.change_ns > 0 else "less time"
    return f"A {what} takes {form.ratio(abs(total.ratio - 1))} {how}: {now}, {before} before."


def _find_most_changed(parts: Sequence[PartDifference]) -> PartDifference | None:
    """Of the parts that sum to the whole: what runs beside compute is in none of them."""
    whole_ns = max((row.first_ns for row in parts if row.part == _TOTAL), default=0.0)
    own = [row for row in parts if row.part not in (_TOTAL, _BESIDE)]
    most = max(own, key=lambda row: abs(row.change_ns), default=None)
    if most is None or abs(most.change_ns) < _LEAST_RATIO * whole_ns:
        return None
    return most


def _describe_side(count: int, what: str, names: Sequence[str]) -> str:
    said = f" ({', '.join(map(form.clean_text, names))})" if names else ""
    return f"{form.plural(count, what)}{said}"


def _time_columns(rows: Sequence[_Timed]) -> list[Column]:
    return [
        make_column("change", rows, lambda row: _signed(row.change_ns), 9),
        make_column("ratio", rows, _show_ratio, 6),
        make_column("before", rows, lambda row: form.duration(row.first_ns), 8),
        make_column("now", rows, lambda row: form.duration(row.second_ns), 8),
    ]


def _write_axes(out: ScreenWriter, found: Sequence[AxisDifference], num_rows: int) -> None:
    rows = found[:num_rows]
    out.rows(
        [
            make_column("axis", rows, lambda row: form.clean_text(row.axis), 10, is_right=False),
            make_column("kind", rows, lambda row: row.kind, 10, is_right=False),
            *_time_columns(rows),
            make_column("exposed", rows, lambda row: form.duration(row.first_exposed_ns), 5),
            make_column("exposed now", rows, lambda row: form.duration(row.second_exposed_ns), 5),
            make_column("count", rows, lambda row: f"{row.first_count:.4g}", 3),
            make_column("count now", rows, lambda row: f"{row.second_count:.4g}", 3),
        ]
    )


def _name(what: str, text: str) -> str:
    return short_name(shorten_kernel_name(text) if what == "kernel" else text)


def _write_counted(
    out: ScreenWriter, what: str, found: Sequence[CountedDifference], num_rows: int
) -> None:
    named = [row for row in found if row.name]
    rows = [row for row in named if row.change_ns][:num_rows]
    if rows:
        out.blank()
        out.table(
            [
                make_column(what, rows, lambda row: _name(what, row.name), 10, is_right=False),
                *_time_columns(rows),
                make_column("count", rows, lambda row: f"{row.first_count:.4g}", 4),
                make_column("count now", rows, lambda row: f"{row.second_count:.4g}", 4),
            ]
        )
    gone = [row for row in named if not row.second_count]
    new = [row for row in named if not row.first_count]
    if gone:
        ns = sum(row.first_ns for row in gone)
        out.line(f"only before: {form.plural(len(gone), what)}, {form.duration(ns)}")
    if new:
        ns = sum(row.second_ns for row in new)
        out.line(f"only now: {form.plural(len(new), what)}, {form.duration(ns)}")


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{form.duration(abs(ns))}" if ns else "0"


def _show_ratio(row: _Timed) -> str:
    return "new" if isinstance(row.ratio, Unavailable) else f"{row.ratio:.3g}"
