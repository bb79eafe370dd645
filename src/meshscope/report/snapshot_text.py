"""A memory snapshot as text: the sentence, the peak, its course, fragmentation."""

from meshscope.analyze.memory.snapshot_summary import DeviceSnapshot, Fragmentation, SnapshotSummary
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import Screen, ScreenWriter, make_column

WIDTH = 60
NUM_MARKS = 25
"""Of a category's course."""


def render_snapshot(summary: SnapshotSummary, screen: Screen, *, num_rows: int) -> str:
    """The whole text; ends with a newline."""
    out = ScreenWriter(screen)
    out.headline(form.clean_path(summary.file), "bold")
    for warning in summary.warnings:
        out.line(f"warning: {form.clean_text(warning)}", "yellow")
    if not summary.devices:
        out.line("no device has blocks or events")
    for device in summary.devices:
        out.blank()
        _write_device(out, device, num_rows)
    return out.finish()


def _write_device(out: ScreenWriter, device: DeviceSnapshot, num_rows: int) -> None:
    out.line(form.clean_text(device.sentence, 400))
    if device.num_failures:
        out.line(f"{form.plural(device.num_failures, 'allocation')} failed", "red")
    course = [float(moment.allocated_bytes) for moment in device.course]
    if course:
        line = form.sparkline(course[:: max(1, len(course) // 50)])
        out.line(f"allocated over {form.plural(device.num_events, 'event')}: {line}")
    categories = list(device.categories_bytes.items())
    out.table(
        [
            make_column("at the peak", categories, lambda row: row[0], 9, is_right=False),
            make_column("bytes", categories, lambda row: _memory(row[1]), 9),
            make_column("share", categories, lambda row: _share(row[1], device.peak_bytes), 5),
            make_column(
                "over time", categories, lambda row: _course(device, row[0]), 4, is_right=False
            ),
        ]
    )
    if device.unexplained_bytes:
        out.line(f"not explained by known blocks: {_memory(device.unexplained_bytes)}")
    _write_sites(out, device, num_rows)
    _write_modules(out, device, num_rows)
    _write_fragmentation(out, device.fragmentation)
    out.line(f"most reserved: {form.memory(device.reserved_peak_bytes)}")


def _course(device: DeviceSnapshot, category: str) -> str:
    """From its least to its most."""
    values = [float(moment.categories_bytes.get(category, 0)) for moment in device.course]
    return form.sparkline(values[:: max(1, len(values) // NUM_MARKS)])


def _write_sites(out: ScreenWriter, device: DeviceSnapshot, num_rows: int) -> None:
    """Stacks with the same place, purpose and module in one row."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for stack in device.stacks:
        key = (stack.place, stack.category, stack.module)
        num_bytes, num_stacks = sums.get(key, (0, 0))
        sums[key] = (num_bytes + stack.num_bytes, num_stacks + 1)
    rows = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))[:num_rows]
    out.blank()
    out.table(
        [
            make_column("allocated at", rows, lambda row: _name(row[0][0]), 9, is_right=False),
            make_column("bytes", rows, lambda row: _memory(row[1][0]), 9),
            make_column("stacks", rows, lambda row: str(row[1][1]), 6),
            make_column("for", rows, lambda row: row[0][1], 6, is_right=False),
            make_column("module", rows, lambda row: _name(row[0][2]), 5, is_right=False),
        ]
    )


def _write_modules(out: ScreenWriter, device: DeviceSnapshot, num_rows: int) -> None:
    rows = [row for row in device.modules_bytes.items() if row[0]][:num_rows]
    if not rows:
        return
    out.blank()
    out.table(
        [
            make_column("module", rows, lambda row: _name(row[0]), 9, is_right=False),
            make_column("bytes", rows, lambda row: _memory(row[1]), 9),
            make_column("share", rows, lambda row: _share(row[1], device.peak_bytes), 5),
        ]
    )


def _write_fragmentation(out: ScreenWriter, found: Fragmentation | Unavailable) -> None:
    out.blank()
    if isinstance(found, Unavailable):
        out.line(f"fragmentation: n/a: {form.clean_text(found.reason)}")
        return
    ratio = found.fragmentation_ratio
    shown = "n/a" if isinstance(ratio, Unavailable) else form.ratio(ratio)
    out.line(
        f"reserved {form.memory(found.reserved_bytes)} in "
        f"{form.plural(found.num_segments, 'segment')}, in use {form.memory(found.in_use_bytes)}, "
        f"free {form.memory(found.free_bytes)}: "
        f"{form.memory(found.free_in_used_segments_bytes)} of that between blocks in use, the "
        f"largest piece {form.memory(found.largest_free_bytes)} (fragmentation {shown})"
    )
    if not isinstance(found.rounding_bytes, Unavailable):
        out.line(f"rounding up of requests: {form.memory(max(found.rounding_bytes, 0))}")


def _memory(num_bytes: int) -> str:
    return f"-{form.memory(-num_bytes)}" if num_bytes < 0 else form.memory(num_bytes)


def _share(num_bytes: int, whole: int) -> str:
    return form.ratio(num_bytes / whole) if whole else "n/a"


def _name(text: str) -> str:
    return form.clean_text(text, WIDTH) or "n/a"
