"""A trace, or several, as text: each device's time first, then what it was spent on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshscope.analyze.device.trace_launches import SHORT_NS
from meshscope.analyze.device.trace_outline import TraceOutline
from meshscope.analyze.device.trace_summary import DeviceSummary, TraceSummary
from meshscope.analyze.device.trace_verdict import find_missing_ranks, judge
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_communication import AxisRow
from meshscope.ingest.traces.trace_steps import StepSource
from meshscope.ingest.traces.trace_time import DeviceTime
from meshscope.numerics.idle_gaps import IdleTime
from meshscope.report import format as form
from meshscope.report.screen import Screen, ScreenWriter, make_column
from meshscope.report.trace_ranks_text import (
    find_others_part,
    write_comparison,
    write_path,
    write_rank_table,
)
from meshscope.report.trace_table_text import (
    NUM_ROWS,
    name_columns,
    share,
    write_categories,
    write_kernels,
    write_modules,
    write_operators,
    write_rates,
)

if TYPE_CHECKING:  # what compares ranks is loaded for several traces only
    from meshscope.analyze.communication.rank_comparison import RankComparison
    from meshscope.simulate.critical_path import CriticalPath

NUM_STEPS = 8
_MAX_LEFT_OUT = 3
MAX_DEVICES = 8
"""Devices of one trace that are shown."""


def render_traces(
    shown: Sequence[TraceSummary],
    comparison: "RankComparison | Unavailable",
    screen: Screen,
    *,
    layout: Layout | Unavailable | None = None,
    path: "CriticalPath | Unavailable | None" = None,
    num_rows: int = NUM_ROWS,
    outlines: Sequence[TraceOutline] = (),
    left_out: Sequence[str] = (),
) -> str:
    """The whole text; ends with a newline. `outlines` are those of all traces, where only some are
    `shown` in full."""
    out = ScreenWriter(screen)
    if isinstance(layout, Layout):
        degrees = {str(axis): layout.degree(axis) for axis in Axis}
        out.headline(f"Layout {form.layout(layout.describe(), degrees)}", "bold")
    num_traces = max(len(outlines), len(shown))
    # What concerns all traces stands behind the first verdict, not before it.
    notes = find_missing_ranks(outlines or shown) if num_traces > 1 else []
    notes += _shorten_left_out(left_out)
    for place, summary in enumerate(shown):
        if place:
            out.blank()
        _write_trace(out, summary, comparison, num_rows, () if place else notes)
    if num_traces == 1:
        _write_alone(out, shown[0])
    if len(shown) < num_traces:
        write_rank_table(out, outlines)
    if num_traces > 1:
        write_comparison(out, comparison, num_rows)
    if path is not None:
        write_path(out, path, num_rows)
    return out.finish()


def _shorten_left_out(left_out: Sequence[str]) -> list[str]:
    found = [f"left out: {text}" for text in left_out[:_MAX_LEFT_OUT]]
    if len(left_out) > _MAX_LEFT_OUT:
        found.append(f"left out: {form.count(len(left_out) - _MAX_LEFT_OUT)} more files")
    return found


def _write_alone(out: ScreenWriter, summary: TraceSummary) -> None:
    """One rank cannot tell what it waited for."""
    devices = summary.devices
    communicates = any(one.communication for one in devices) or summary.host.communication
    if isinstance(summary.world_size, int) and summary.world_size > 1 and communicates:
        out.blank()
        out.line(
            "To split communication into waiting for other ranks and transfer, give the traces of "
            "all ranks.",
            "dim",
        )


def _write_trace(
    out: ScreenWriter,
    summary: TraceSummary,
    comparison: "RankComparison | Unavailable",
    num_rows: int,
    notes: Sequence[str],
) -> None:
    out.headline(_describe(summary), "bold")
    verdict = judge(summary, find_others_part(summary.rank, comparison))
    if not isinstance(verdict, Unavailable):
        out.line(form.clean_text(verdict.text), "bold")
        if verdict.advice:
            out.line(form.clean_text(verdict.advice))
    out.line(_recognised(summary), "dim")
    if summary.step_source is not StepSource.PROFILER:
        out.line(f"steps: {summary.step_source.words}", "yellow")
    for warning in summary.warnings:
        out.line(f"warning: {form.clean_text(warning)}", "yellow")
    for note in notes:
        out.line(form.clean_text(note), "yellow")
    if not summary.devices:
        _write_host(out, summary, num_rows)
    for device in summary.devices[:MAX_DEVICES]:
        _write_device(out, device, num_rows)
    _write_memory(out, summary)
    if len(summary.devices) > MAX_DEVICES:
        left = form.plural(len(summary.devices) - MAX_DEVICES, "device")
        out.blank()
        out.line(f"and {left} more; --json has all", "dim")


def _write_memory(out: ScreenWriter, summary: TraceSummary) -> None:
    """What allocators had given out, each on a line."""
    if not summary.memory:
        return
    out.blank()
    for use in summary.memory[:MAX_DEVICES]:
        where = "the host" if use.device_type == "cpu" else f"{use.device_type} {use.device}"
        step = "" if use.peak_step is None else f", in step {use.peak_step}"
        reserved = (
            ""
            if isinstance(use.peak_reserved_bytes, Unavailable) or not use.peak_reserved_bytes
            else f"; at most {form.memory(use.peak_reserved_bytes)} reserved"
        )
        out.line(
            f"Memory of {where}: at most {form.memory(use.peak_bytes)} allocated{step}{reserved}; "
            f"{form.memory(use.first_bytes)} at first, {form.memory(use.last_bytes)} at last; "
            f"{form.plural(use.num_events, 'event')}"
        )


def _describe(summary: TraceSummary) -> str:
    rank = "" if isinstance(summary.rank, Unavailable) else f" · rank {summary.rank}"
    world = "" if isinstance(summary.world_size, Unavailable) else f" of {summary.world_size}"
    return f"{form.clean_path(summary.source)}{rank}{world}"


def _recognised(summary: TraceSummary) -> str:
    found = summary.recognition
    return (
        f"recognised {form.plural(found.num_kernels, 'kernel')}, "
        f"{form.plural(found.num_collectives, 'collective')} "
        f"in {form.plural(summary.counts.num_events, 'event')}{_host_calls(summary)}"
    )


def _host_calls(summary: TraceSummary) -> str:
    found = len(summary.host.collectives)
    return f"; {form.plural(found, 'collective')} of the host" if found else ""


def _write_host(out: ScreenWriter, summary: TraceSummary, num_rows: int) -> None:
    host = summary.host
    out.section("Host", f"no device in this trace · {form.duration(host.total_ns)}")
    if not host.total_ns:
        out.line("n/a: the trace has no operator and no annotation as torch.profiler writes them")
        return
    time = host.time
    parts = [
        ("operators", time.operator_ns, ""),
        ("exposed communication", time.exposed_ns, f"of {form.duration(time.communication_ns)}"),
        ("data loading", time.loading_ns, ""),
        ("optimizer", time.optimizer_ns, ""),
        ("other", time.other_ns, "Python, and work that was not recorded"),
    ]
    _write_parts(out, parts, time.total_ns)
    steps = host.steps[:NUM_STEPS]
    if steps:
        out.blank()
        out.table(
            [
                make_column("step", steps, lambda row: str(row.step), 9),
                *(
                    make_column(title, [form.duration(ns) for ns in times], str, importance)
                    for title, times, importance in (
                        ("total", [row.time.total_ns for row in steps], 8),
                        ("operators", [row.time.operator_ns for row in steps], 7),
                        ("exposed", [row.time.exposed_ns for row in steps], 7),
                        ("loading", [row.time.loading_ns for row in steps], 5),
                        ("optimizer", [row.time.optimizer_ns for row in steps], 5),
                        ("other", [row.time.other_ns for row in steps], 4),
                    )
                ),
            ]
        )
        _write_left(out, len(host.steps) - len(steps), "step")
    write_axes(out, host.communication, num_rows)
    rows = host.operators[:num_rows]
    out.rows(
        [
            *name_columns(out, "operator", rows),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 7),
            make_column("self", rows, lambda row: form.duration(row.self_ns), 8),
            make_column("total", rows, lambda row: form.duration(row.total_ns), 5),
            make_column("calls", rows, lambda row: form.count(row.count), 6),
        ]
    )


def _write_parts(out: ScreenWriter, parts: list[tuple[str, int, str]], total_ns: int) -> None:
    out.table(
        [
            make_column("part", parts, lambda row: row[0], 9, is_right=False),
            make_column("share", parts, lambda row: share(row[1], total_ns), 8),
            make_column("time", parts, lambda row: form.duration(row[1]), 9),
            make_column("", parts, lambda row: row[2], 5, is_right=False),
        ]
    )


def _write_left(out: ScreenWriter, left: int, what: str) -> None:
    if left > 0:
        out.line(f"and {form.plural(left, what)} more; --json has all", "dim")


def write_axes(out: ScreenWriter, rows: Sequence[AxisRow], num_rows: int) -> None:
    """Communication by axis and kind."""
    shown = rows[:num_rows]
    out.rows(
        [
            make_column("axis", shown, lambda row: form.clean_text(row.axis), 9, is_right=False),
            make_column("kind", shown, lambda row: row.kind, 9, is_right=False),
            make_column("exposed", shown, lambda row: form.duration(row.exposed_ns), 8),
            make_column("time", shown, lambda row: form.duration(row.communication_ns), 7),
            make_column("count", shown, lambda row: form.count(row.count), 6),
            make_column("bytes", shown, _show_bytes, 5),
        ]
    )
    _write_left(out, len(rows) - len(shown), "kind")


def _show_bytes(row: AxisRow) -> str:
    if isinstance(row.size_bytes, Unavailable):
        return "n/a"
    return f"{'≥ ' if row.num_unsized else ''}{form.memory(row.size_bytes)}"


def _describe_exposed(time: DeviceTime) -> str:
    beside = time.exposed_beside_copy_ns
    copies = f"; {form.duration(beside)} beside copies" if beside else ""
    return f"of {form.duration(time.communication_ns)}{copies}"


def _write_device(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    time = device.breakdown.time
    name = form.clean_text(device.breakdown.name)
    out.section(f"Device {device.breakdown.device} {name}".rstrip(), form.duration(time.total_ns))
    parts = [
        ("compute", time.compute_ns, ""),
        ("exposed communication", time.exposed_ns, _describe_exposed(time)),
        ("exposed copies", time.exposed_copy_ns, f"of {form.duration(time.copy_ns)}"),
        ("idle", time.idle_ns, ""),
    ]
    _write_parts(out, parts, time.total_ns)
    if device.symmetric_ns:
        symmetric = form.duration(device.symmetric_ns)
        out.line(f"compute: {symmetric} of it communicates over symmetric memory")
    if device.idle.total_ns:
        out.line(f"idle: {_describe_idle(device.idle)}")
    write_axes(out, device.communication, num_rows)
    _write_steps(out, device)
    _write_launches(out, device)
    write_categories(out, device)
    write_kernels(out, device, num_rows)
    write_operators(out, device, num_rows)
    write_rates(out, device, num_rows)
    write_modules(out, device, num_rows)


def _idle_parts(idle: IdleTime) -> list[tuple[str, int]]:
    return [
        ("host", idle.host_ns),
        ("host synchronising", idle.synchronising_ns),
        ("host in collectives", idle.communicating_ns),
        ("launch", idle.launch_ns),
        ("dependency", idle.dependency_ns),
        ("cause unknown", idle.unknown_ns),
    ]


def _describe_idle(idle: IdleTime) -> str:
    return ", ".join(f"{name} {form.duration(ns)}" for name, ns in _idle_parts(idle) if ns)


def _largest_cause(idle: IdleTime) -> str:
    """The cause of most of it, with its share."""
    name, ns = max(_idle_parts(idle), key=lambda part: part[1])
    return f"{name} {share(ns, idle.total_ns)}" if ns else ""


def _write_steps(out: ScreenWriter, device: DeviceSummary) -> None:
    rows = device.breakdown.steps[:NUM_STEPS]
    if not rows:
        return
    out.blank()

    def times(pick: str) -> list[str]:
        return [form.duration(getattr(row.period, pick)) for row in rows]

    out.table(
        [
            make_column("step", rows, lambda row: str(row.step), 9),
            *(
                make_column(title, times(field), str, importance)
                for title, field, importance in (
                    ("period", "total_ns", 8),
                    ("compute", "compute_ns", 7),
                    ("communication", "communication_ns", 5),
                    ("exposed", "exposed_ns", 6),
                    ("copies", "exposed_copy_ns", 3),
                    ("idle", "idle_ns", 7),
                )
            ),
            make_column(
                "mostly",
                device.steps[:NUM_STEPS],
                lambda row: _largest_cause(row.idle),
                4,
                is_right=False,
            ),
        ]
    )
    _write_left(out, len(device.breakdown.steps) - len(rows), "step")


def _write_launches(out: ScreenWriter, device: DeviceSummary) -> None:
    found = device.launches
    if isinstance(found, Unavailable):
        text = f"n/a: {found.reason}"
    else:
        text = (
            f"{form.plural(found.num_calls, 'call')} launched {form.count(found.num_launches)} "
            f"kernels, copies and fills; from call to start {form.duration(found.median_delay_ns)} "
            f"(median; p5 {form.duration(found.p5_delay_ns)}, "
            f"p95 {form.duration(found.p95_delay_ns)})"
        )
    out.blank()
    facts = [("Launches", text)]
    if not isinstance(found, Unavailable):
        facts.append(
            (
                "Queue",
                f"{form.count(found.median_depth)} launched and waiting (median over time; "
                f"p5 {form.count(found.p5_depth)}, at most {form.count(found.max_depth)}); "
                f"empty {form.ratio(found.empty_ratio)} of the time",
            )
        )
        facts.append(
            (
                "Short",
                f"{form.ratio(found.short_ratio)} of them take at most "
                f"{form.duration(SHORT_NS)}: {form.ratio(found.short_time_ratio)} of device time; "
                f"median length {form.duration(found.median_duration_ns)}",
            )
        )
        if found.num_graph_kernels:
            facts.append(
                (
                    "CUDA graphs",
                    f"{form.ratio(found.graph_time_ratio)} of device time, "
                    f"{form.count(found.num_graph_kernels)} kernels, copies and fills: replayed "
                    f"from graphs by {form.plural(found.num_graph_launches, 'call')}; the trace "
                    "does not have their operators",
                )
            )
    out.facts(facts)
