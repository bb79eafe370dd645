"""What a device's time was spent on, as tables: categories, kernels, operators, rates, modules."""

import re
from collections.abc import Sequence

from meshscope.analyze.device.trace_modules import ModuleClassRow
from meshscope.analyze.device.trace_roofline import OperatorRate
from meshscope.analyze.device.trace_summary import DeviceSummary
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_host import HostOperatorRow
from meshscope.ingest.traces.trace_tables import OperatorRow
from meshscope.report import format as form
from meshscope.report.screen import Column, ScreenWriter, make_column

_MAX_UNCOUNTED = 6
NUM_ROWS = 10
NAME_WIDTH = 56


def share(ns: int, whole_ns: int) -> str:
    return form.ratio(ns / whole_ns) if whole_ns else ""


def write_categories(out: ScreenWriter, device: DeviceSummary) -> None:
    rows = device.categories
    out.rows(
        [
            make_column("category", rows, lambda row: str(row.category), 9, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("time", rows, lambda row: form.duration(row.total_ns), 8),
            make_column("count", rows, lambda row: form.count(row.count), 6),
            make_column("mean", rows, lambda row: form.duration(row.mean_ns), 5),
        ]
    )


def write_kernels(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = device.kernels[:num_rows]
    width = max(out.room - 34, 24)  # share, time and count still fit beside it
    names = _tell_apart([row.short_name for row in rows], width)
    out.blank()
    out.table(
        [
            make_column("kernel", names, str, 9, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("time", rows, lambda row: form.duration(row.total_ns), 8),
            make_column("count", rows, lambda row: form.count(row.count), 6),
            make_column("mean", rows, lambda row: form.duration(row.mean_ns), 5),
            make_column("max", rows, lambda row: form.duration(row.max_ns), 3),
        ]
    )


def _tell_apart(names: Sequence[str], width: int) -> list[str]:
    """Cut in the middle, where they are alike; those that are still equal get a number."""
    found: list[str] = []
    for name in names:
        shown = cut_middle(form.clean_text(name), width)
        count = sum(one.startswith(shown) for one in found)
        found.append(f"{cut_middle(shown, width - 4)} #{count + 1}" if count else shown)
    return found


def cut_middle(text: str, width: int) -> str:
    """Begin and end are kept: names of one library differ at their ends."""
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def short_name(text: str, width: int = NAME_WIDTH) -> str:
    """Made safe, on one line, and cut."""
    cleaned = form.clean_text(" ".join(text.split()))
    return cleaned if len(cleaned) <= width else f"{cleaned[: width - 1]}…"


def name_columns(
    out: ScreenWriter, title: str, rows: Sequence[HostOperatorRow | OperatorRow | OperatorRate]
) -> list[Column]:
    """Name and shapes, as wide as other columns leave room: rows of one name differ in shapes."""
    has_shapes = any(row.shapes for row in rows)
    shapes_width = out.room * 3 // 10 if has_shapes else 0
    width = min(NAME_WIDTH, max(out.room - 38 - shapes_width, 26))
    names = [short_name(row.name, width) for row in rows]
    columns = [make_column(title, names, str, 9, is_right=False)]
    if has_shapes:
        shapes = [short_name(_short_shapes(row.shapes), shapes_width) for row in rows]
        importance = 7 if len(set(names)) < len(names) else 4
        columns.append(make_column("shapes", shapes, str, importance, is_right=False))
    return columns


def _short_shapes(text: str) -> str:
    """`[[8, 4], [4], []]` as `8×4 4`; scalars have no shape to show."""
    found = re.findall(r"\[([\d,\s]+)\]", text)
    return " ".join(re.sub(r"\s*,\s*", "×", one.strip()) for one in found)


def write_operators(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = [row for row in device.operators if row.name][:num_rows]
    out.rows(
        [
            *name_columns(out, "operator", rows),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 8),
            make_column("host", rows, lambda row: form.duration(row.host_ns), 5),
            make_column("calls", rows, lambda row: form.count(row.count), 6),
        ]
    )


def write_rates(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = device.rates[:num_rows]
    coverage = device.coverage
    if not rows:
        return
    out.blank()
    ratio = form.or_dash(coverage.ratio, form.ratio)
    launched = form.or_dash(coverage.launched_ratio, form.ratio)
    roofline = coverage.roofline_ratio
    at_peak = (
        f"no share of the roofline: {form.clean_text(roofline.reason)}"
        if isinstance(roofline, Unavailable)
        else f"that part runs at {form.ratio(roofline)} of the roofline"
    )
    out.line(
        f"Roofline: shapes give the cost of {ratio} of compute and copies, and of {launched} of "
        f"what operators in the trace launched; {at_peak}"
    )
    out.table(
        [
            *name_columns(out, "operator", rows),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 6),
            make_column("TFLOP/s", rows, _show_arithmetic, 7),
            make_column("GB/s", rows, lambda row: _show_rate(row.bytes_per_s / 1e9), 7),
            make_column("roofline", rows, _show_roofline, 8),
        ]
    )
    left = coverage.device_ns - coverage.counted_ns
    if coverage.uncounted and left > coverage.device_ns // 20:
        by_reason: dict[str, list[str]] = {}
        for one in coverage.uncounted[:_MAX_UNCOUNTED]:
            text = f"{form.clean_text(one.name, 40)} {share(one.device_ns, coverage.device_ns)}"
            by_reason.setdefault(one.reason, []).append(text)
        said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        out.line(f"not counted: {said}", "dim")


def _show_arithmetic(row: OperatorRate) -> str:
    return _show_rate(row.flops_per_s / 1e12) if row.flops else "-"


def _show_rate(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _show_roofline(row: OperatorRate) -> str:
    if isinstance(row.roofline_ratio, Unavailable):
        return "n/a"
    return f"{form.ratio(row.roofline_ratio)} {'memory' if row.bound == 'memory' else 'FLOP/s'}"


def write_modules(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = device.module_classes[: max(num_rows, NUM_ROWS)]
    out.rows(
        [
            make_column("module", rows, _name_module, 9, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 8),
            make_column("own", rows, lambda row: form.duration(row.own_ns), 5),
            make_column("backward", rows, lambda row: form.duration(row.backward_ns), 6),
            make_column("modules", rows, lambda row: form.count(row.num_modules), 4),
        ]
    )
    left = len(device.module_classes) - len(rows)
    if left > 0:
        out.line(f"and {form.count(left)} more; --json has all", "dim")


def _name_module(row: ModuleClassRow) -> str:
    return f"{'  ' * min(row.depth, 8)}{cut_middle(form.clean_text(row.name), 40)}"
