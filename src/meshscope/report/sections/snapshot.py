"""A memory snapshot: the sentence, the peak, its course, fragmentation."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.analyze.memory.snapshot_summary import DeviceSnapshot, Fragmentation, SnapshotSummary
from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
)

DOCUMENT = ("meshscope-snapshot", 1)
WIDTH = 60
_NUM_MARKS = 25
"""Marks of a category's course."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDocument:
    """What a memory snapshot holds, in exact bytes."""

    snapshot: SnapshotSummary


def make_snapshot_section(summary: SnapshotSummary, *, num_rows: int) -> Section:
    parts: list[Part] = [Headline(form.clean_path(summary.file))]
    parts += [
        Line(f"warning: {form.clean_text(warning)}", Tone.NOTICE) for warning in summary.warnings
    ]
    if not summary.devices:
        parts.append(Line("no device has blocks or events"))
    for device in summary.devices:
        parts += [Blank(), *_list_device(device, num_rows)]
    return Section(key="snapshot", title="", parts=tuple(parts))


def _list_device(device: DeviceSnapshot, num_rows: int) -> Iterator[Part]:
    yield Line(form.clean_text(device.sentence, 400))
    if device.num_failures:
        yield Line(f"{form.plural(device.num_failures, 'allocation')} failed", Tone.ALARM)
    course = [float(moment.allocated_bytes) for moment in device.course]
    if course:
        marks = form.sparkline(course[:: max(1, len(course) // 50)])
        yield Line(f"allocated over {form.plural(device.num_events, 'event')}: {marks}")
    rows = list(device.categories_bytes.items())
    yield Table(
        (
            make_column("at the peak", rows, lambda row: row[0], 9, is_right=False),
            make_column("bytes", rows, lambda row: form.memory(row[1]), 9),
            make_column("share", rows, lambda row: form.part(row[1], device.peak_bytes), 5),
            make_column("over time", rows, lambda row: _course(device, row[0]), 4, is_right=False),
        )
    )
    if device.unexplained_bytes:
        yield Line(f"not explained by known blocks: {form.memory(device.unexplained_bytes)}")
    yield Blank()
    yield _tabulate_sites(device, num_rows)
    yield from _list_modules(device, num_rows)
    yield Blank()
    yield from _list_fragmentation(device.fragmentation)
    yield Line(f"most reserved: {form.memory(device.reserved_peak_bytes)}")


def _course(device: DeviceSnapshot, category: str) -> str:
    """From its smallest to its largest value."""
    values = [float(moment.categories_bytes.get(category, 0)) for moment in device.course]
    return form.sparkline(values[:: max(1, len(values) // _NUM_MARKS)])


def _tabulate_sites(device: DeviceSnapshot, num_rows: int) -> Table:
    """Stacks with the same call site, purpose and module in one row."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for stack in device.stacks:
        key = (stack.place, stack.category, stack.module)
        num_bytes, num_stacks = sums.get(key, (0, 0))
        sums[key] = (num_bytes + stack.num_bytes, num_stacks + 1)
    rows = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))[:num_rows]
    return Table(
        (
            make_column("allocated at", rows, lambda row: _name(row[0][0]), 9, is_right=False),
            make_column("bytes", rows, lambda row: form.memory(row[1][0]), 9),
            make_column("stacks", rows, lambda row: str(row[1][1]), 6),
            make_column("for", rows, lambda row: row[0][1], 6, is_right=False),
            make_column("module", rows, lambda row: _name(row[0][2]), 5, is_right=False),
        )
    )


def _list_modules(device: DeviceSnapshot, num_rows: int) -> Iterator[Part]:
    rows = [row for row in device.modules_bytes.items() if row[0]][:num_rows]
    if rows:
        yield Blank()
        yield Table(
            (
                make_column("module", rows, lambda row: _name(row[0]), 9, is_right=False),
                make_column("bytes", rows, lambda row: form.memory(row[1]), 9),
                make_column("share", rows, lambda row: form.part(row[1], device.peak_bytes), 5),
            )
        )


def _list_fragmentation(fragmentation: Fragmentation | Unavailable) -> Iterator[Part]:
    found = known(fragmentation)
    if found is None:
        yield Line(f"fragmentation: {form.or_reason(fragmentation, str)}")
        return
    ratio = form.or_dash(found.fragmentation_ratio, form.ratio)
    yield Line(
        f"reserved {form.memory(found.reserved_bytes)} in "
        f"{form.plural(found.num_segments, 'segment')}, in use {form.memory(found.in_use_bytes)}, "
        f"free {form.memory(found.free_bytes)}: "
        f"{form.memory(found.free_in_used_segments_bytes)} of that between blocks in use, the "
        f"largest piece {form.memory(found.largest_free_bytes)} (fragmentation {ratio})"
    )
    rounding = known(found.rounding_bytes)
    if rounding is not None:
        yield Line(f"rounding up of requests: {form.memory(max(rounding, 0))}")


def _name(text: str) -> str:
    return form.clean_text(text, WIDTH) or "n/a"
