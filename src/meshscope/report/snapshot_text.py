"""A memory snapshot as text: the sentence, the peak, its course, fragmentation."""

from meshscope.analyze.snapshot_summary import DeviceSnapshot, Fragmentation, SnapshotSummary
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import Screen, ScreenWriter, make_column

WIDTH = 60


def render_snapshot(summary: SnapshotSummary, screen: Screen, *, num_rows: int) -> str:
    """The whole text; ends with a newline."""
    out = ScreenWriter(screen)
    out.headline(form.clean_text(summary.file), "bold")
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
        ]
    )
    if device.unexplained_bytes:
        out.line(f"not explained by known blocks: {_memory(device.unexplained_bytes)}")
    stacks = device.stacks[:num_rows]
    out.blank()
    out.table(
        [
            make_column("allocated at", stacks, lambda row: _name(row.place), 9, is_right=False),
            make_column("bytes", stacks, lambda row: _memory(row.num_bytes), 9),
            make_column("for", stacks, lambda row: row.category, 6, is_right=False),
            make_column("module", stacks, lambda row: _name(row.module), 5, is_right=False),
        ]
    )
    _write_fragmentation(out, device.fragmentation)


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
