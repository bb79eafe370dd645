"""A trace, or several, as text: each device's time first, then what it was spent on."""

from collections.abc import Sequence

from rich.text import Text

from meshscope.analyze.trace_diff import TraceDifference
from meshscope.analyze.trace_ranks import RankComparison
from meshscope.analyze.trace_summary import DeviceSummary, TraceSummary
from meshscope.analyze.trace_time import DeviceTime
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import Screen, ScreenWriter, make_column

NUM_ROWS = 10
NUM_STEPS = 8
NAME_WIDTH = 56


def render_traces(
    summaries: Sequence[TraceSummary],
    comparison: RankComparison | Unavailable,
    screen: Screen,
    *,
    num_rows: int = NUM_ROWS,
) -> str:
    """The whole text; ends with a newline."""
    out = ScreenWriter(screen)
    for place, summary in enumerate(summaries):
        if place:
            out.blank()
        _write_trace(out, summary, num_rows)
    if len(summaries) > 1:
        _write_comparison(out, comparison, num_rows)
    return out.finish()


def render_difference(
    difference: TraceDifference | Unavailable, screen: Screen, *, num_rows: int = NUM_ROWS
) -> str:
    """What changed from one set of traces to another; ends with a newline."""
    out = ScreenWriter(screen)
    if isinstance(difference, Unavailable):
        out.line(f"n/a: {form.clean_text(difference.reason)}")
        return out.finish()
    unit = "a device's step" if difference.is_per_step else "a device's trace"
    out.headline(f"What changed, mean of {unit}", "bold")
    parts = difference.parts
    out.table(
        [
            make_column("part", parts, lambda row: row.part, 9, is_right=False),
            make_column("before", parts, lambda row: form.duration(row.first_ns), 8),
            make_column("now", parts, lambda row: form.duration(row.second_ns), 8),
            make_column("change", parts, lambda row: _signed(row.change_ns), 9),
        ]
    )
    kernels = [row for row in difference.kernels if row.change_ns][:num_rows]
    if kernels:
        out.blank()
        out.table(
            [
                make_column("kernel", kernels, lambda row: _name(row.name), 9, is_right=False),
                make_column("change", kernels, lambda row: _signed(row.change_ns), 9),
                make_column("before", kernels, lambda row: form.duration(row.first_ns), 7),
                make_column("now", kernels, lambda row: form.duration(row.second_ns), 7),
                make_column("count before", kernels, lambda row: f"{row.first_count:g}", 4),
                make_column("count now", kernels, lambda row: f"{row.second_count:g}", 4),
            ]
        )
    return out.finish()


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{form.duration(abs(ns))}" if ns else "0"


def _write_trace(out: ScreenWriter, summary: TraceSummary, num_rows: int) -> None:
    out.headline(_describe(summary), "bold")
    out.line(_recognised(summary))
    for warning in summary.warnings:
        out.line(f"warning: {form.clean_text(warning)}", "yellow")
    if not summary.devices:
        _write_host(out, summary)
    for device in summary.devices:
        _write_device(out, device, num_rows)


def _describe(summary: TraceSummary) -> str:
    rank = "" if isinstance(summary.rank, Unavailable) else f" · rank {summary.rank}"
    world = "" if isinstance(summary.world_size, Unavailable) else f" of {summary.world_size}"
    return f"{form.clean_text(summary.source)}{rank}{world}"


def _recognised(summary: TraceSummary) -> str:
    found = summary.recognition
    return (
        f"recognised {form.plural(found.num_kernels, 'kernel')}, "
        f"{form.plural(found.num_collectives, 'collective')} "
        f"in {form.plural(summary.counts.num_events, 'event')}"
    )


def _write_host(out: ScreenWriter, summary: TraceSummary) -> None:
    host = summary.host
    out.section("Host", "no device in this trace")
    out.facts(
        [
            ("Operators", _part(host.operator_ns, host.total_ns)),
            ("Collectives", _part(host.communication_ns, host.total_ns)),
            ("Steps", ", ".join(f"{n}: {form.duration(ns)}" for n, ns in host.steps[:NUM_STEPS])),
        ]
    )


def _part(ns: int, whole_ns: int) -> str:
    share = f" ({form.ratio(ns / whole_ns)})" if whole_ns else ""
    return f"{form.duration(ns)}{share}"


def _write_device(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    time = device.breakdown.time
    name = form.clean_text(device.breakdown.name)
    out.section(f"Device {device.breakdown.device} {name}".rstrip(), form.duration(time.total_ns))
    parts = [
        ("compute", time.compute_ns, _symmetric_note(device)),
        ("exposed communication", time.exposed_ns, f"of {form.duration(time.communication_ns)}"),
        ("exposed copies", time.exposed_copy_ns, f"of {form.duration(time.copy_ns)}"),
        ("idle", time.idle_ns, ""),
    ]
    out.table(
        [
            make_column("part", parts, lambda row: row[0], 9, is_right=False),
            make_column("share", parts, lambda row: _share(row[1], time.total_ns), 8),
            make_column("time", parts, lambda row: form.duration(row[1]), 9),
            make_column("", parts, lambda row: row[2], 5, is_right=False),
        ]
    )
    if device.idle.total_ns:
        out.line(f"idle: {_describe_idle(device)}")
    _write_steps(out, device)
    _write_launches(out, device)
    _write_kernels(out, device, num_rows)
    _write_operators(out, device, num_rows)
    _write_rates(out, device, num_rows)
    _write_modules(out, device, num_rows)


def _symmetric_note(device: DeviceSummary) -> str:
    if not device.symmetric_ns:
        return ""
    return f"{form.duration(device.symmetric_ns)} of it communicates over symmetric memory"


def _share(ns: int, whole_ns: int) -> str:
    return form.ratio(ns / whole_ns) if whole_ns else ""


def _describe_idle(device: DeviceSummary) -> str:
    idle = device.idle
    parts = [
        ("host", idle.host_ns),
        ("host synchronising", idle.synchronising_ns),
        ("host in collectives", idle.communicating_ns),
        ("launch", idle.launch_ns),
        ("dependency", idle.dependency_ns),
        ("cause unknown", idle.unknown_ns),
    ]
    return ", ".join(f"{name} {form.duration(ns)}" for name, ns in parts if ns)


def _write_steps(out: ScreenWriter, device: DeviceSummary) -> None:
    rows = device.breakdown.steps[:NUM_STEPS]
    if not rows:
        return
    out.blank()

    def times(pick: str) -> list[str]:
        return [form.duration(_pick(row.time, pick)) for row in rows]

    out.table(
        [
            make_column("step", rows, lambda row: str(row.step), 9),
            *(
                make_column(title, times(field), str, importance)
                for title, field, importance in (
                    ("total", "total_ns", 8),
                    ("compute", "compute_ns", 7),
                    ("communication", "communication_ns", 5),
                    ("exposed", "exposed_ns", 6),
                    ("copies", "exposed_copy_ns", 3),
                    ("idle", "idle_ns", 7),
                )
            ),
        ]
    )
    left = len(device.breakdown.steps) - len(rows)
    if left:
        out.line(f"and {form.plural(left, 'step')} more; --json has all", "dim")


def _pick(time: DeviceTime, field: str) -> int:
    return int(getattr(time, field))


def _write_launches(out: ScreenWriter, device: DeviceSummary) -> None:
    found = device.launches
    if isinstance(found, Unavailable):
        text = f"n/a: {found.reason}"
    else:
        graphs = f"; {form.count(found.num_graph_kernels)} from graphs"
        text = (
            f"{form.count(found.num_launches)}, from call to begin "
            f"{form.duration(found.median_delay_ns)} (p5 {form.duration(found.p5_delay_ns)}, "
            f"p95 {form.duration(found.p95_delay_ns)})"
            f"{graphs if found.num_graph_kernels else ''}"
        )
    out.blank()
    out.facts([("Launches", text)])


def _write_kernels(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = device.kernels[:num_rows]
    out.blank()
    out.table(
        [
            make_column("kernel", rows, lambda row: _name(row.name), 9, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("time", rows, lambda row: form.duration(row.total_ns), 8),
            make_column("count", rows, lambda row: form.count(row.count), 6),
            make_column("mean", rows, lambda row: form.duration(row.mean_ns), 5),
            make_column("max", rows, lambda row: form.duration(row.max_ns), 3),
        ]
    )


def _name(text: str) -> str:
    cleaned = form.clean_text(" ".join(text.split()))
    return cleaned if len(cleaned) <= NAME_WIDTH else f"{cleaned[: NAME_WIDTH - 1]}…"


def _write_operators(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = [row for row in device.operators if row.name][:num_rows]
    if not rows:
        return
    out.blank()
    out.table(
        [
            make_column("operator", rows, lambda row: _name(row.name), 9, is_right=False),
            make_column("shapes", rows, lambda row: _name(row.shapes)[:32], 4, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 8),
            make_column("host", rows, lambda row: form.duration(row.host_ns), 5),
            make_column("calls", rows, lambda row: form.count(row.count), 6),
        ]
    )


def _write_rates(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = device.rates[:num_rows]
    if not rows:
        return
    out.blank()
    out.table(
        [
            make_column("arithmetic", rows, lambda row: _name(row.name), 9, is_right=False),
            make_column("shapes", rows, lambda row: _name(row.shapes)[:40], 4, is_right=False),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 6),
            make_column("rate", rows, lambda row: f"{row.flops_per_s / 1e12:.3g} TFLOP/s", 8),
            make_column(
                "of peak",
                rows,
                lambda row: (
                    "n/a" if isinstance(row.peak_ratio, Unavailable) else form.ratio(row.peak_ratio)
                ),
                7,
            ),
        ]
    )


def _write_modules(out: ScreenWriter, device: DeviceSummary, num_rows: int) -> None:
    rows = [row for row in device.modules if row.path][:num_rows]
    if not rows:
        return
    out.blank()
    out.table(
        [
            make_column("module", rows, lambda row: _tail(row.path), 9, is_right=False),
            make_column("share", rows, lambda row: form.ratio(row.share_ratio), 8),
            make_column("device", rows, lambda row: form.duration(row.device_ns), 8),
            make_column("launches", rows, lambda row: form.count(row.num_events), 5),
        ]
    )


def _tail(path: str) -> str:
    cleaned = form.clean_text(path)
    return cleaned if len(cleaned) <= NAME_WIDTH else f"…{cleaned[-NAME_WIDTH + 1 :]}"


def _write_comparison(
    out: ScreenWriter, comparison: RankComparison | Unavailable, num_rows: int
) -> None:
    out.section("Across ranks")
    if isinstance(comparison, Unavailable):
        out.line(f"n/a: {form.clean_text(comparison.reason)}")
        return
    if isinstance(comparison.clocks, Unavailable):
        out.line(f"clocks: n/a: {form.clean_text(comparison.clocks.reason)}")
    else:
        offsets = ", ".join(
            f"rank {clock.rank} {clock.offset_ns / 1e3:+.1f} ± {clock.uncertainty_ns / 1e3:.1f} µs"
            for clock in comparison.clocks[1:]
        )
        out.facts([("Clocks", Text(f"against rank {comparison.clocks[0].rank}: {offsets}"))])
    matched = f"{form.count(len(comparison.matched))} collectives matched"
    out.line(f"{matched}, {form.count(comparison.num_unmatched)} kernels not")
    for late in comparison.late[:num_rows]:
        out.line(
            f"rank {late.rank} came last {form.count(late.num_last)} times; the others waited "
            f"{form.duration(late.caused_wait_ns)}"
        )
