"""The monitor's report as text. Units stand beside every number; n/a has its reason."""

from collections.abc import Callable
from functools import partial

from meshscope.capture.monitor.monitor_results import MonitorAnalysis, MonitorStats
from meshscope.core.unavailable import Unavailable
from meshscope.core.unit_text import duration, memory, rate, ratio


def render_monitor(stats: MonitorStats, analysis: MonitorAnalysis, who: str) -> str:
    """Throughput, times, ratios, memory, and what is wrong with what to try."""
    axes = analysis.communication_ratio_by_axis.items()
    lines = [
        f"monitor: {who}, {stats.num_steps:,} steps since reset",
        "",
        *_throughput(stats),
        "",
        f"times per step ({analysis.clock} clock, mean of the newest {analysis.num_steps:,})",
        _format_line("forward", analysis.forward_ns, duration),
        _format_line("backward", analysis.backward_ns, duration),
        _format_line("whole step", analysis.step_ns, duration),
        "",
        f"totals since reset ({stats.clock} clock)",
        f"  {'passes':<24}{stats.num_forwards:,} forward, {stats.num_backwards:,} backward",
        _format_line("tokens of this rank", stats.num_tokens, "{:,}".format),
        *(_format_line(name, ns, duration) for name, ns in _list_sums(stats) if ns),
        _format_line("communication, exposed", stats.exposed_communication_ns, duration),
        _format_line("wall clock", stats.wall_ns, duration),
        "",
        "shares of the step (median)",
        _format_line("communication, exposed", analysis.communication_ratio, ratio),
        *(_format_line(f"  over {axis}", share, ratio) for axis, share in axes),
        _format_line("waiting for data", analysis.input_ratio, ratio),
        _format_line("pipeline utilisation", analysis.pipeline_utilization_ratio, ratio),
        _format_line("  plain schedule allows", analysis.pipeline_plain_ratio, ratio),
        _format_line("tp efficiency", analysis.tp_efficiency_ratio, ratio),
        _format_line("dp efficiency", analysis.dp_efficiency_ratio, ratio),
        _format_line("MFU", analysis.mfu_ratio, ratio),
        "",
        "memory",
        _format_line("resident", stats.rss_bytes, memory),
        _format_line("tensors on the device", stats.allocated_bytes, memory),
        _format_line("peak of them", stats.peak_allocated_bytes, memory),
        _format_line("efficiency at the peak", analysis.memory_efficiency_ratio, ratio),
        _format_line("used of the limit", analysis.memory_used_ratio, ratio),
        "",
        *_bottlenecks(analysis),
    ]
    return "\n".join(lines)


def _throughput(stats: MonitorStats) -> list[str]:
    lines = ["throughput"]
    for size, one in stats.windows.items():
        name = f"last {one.num_steps} of {size}" if one.num_steps < size else f"last {size}"
        tokens = _format_value(one.tokens_per_s, partial(rate, unit="tokens"))
        if isinstance(one.tokens_per_s, Unavailable):
            tokens = f"tokens {tokens}"
        else:
            per_device = _format_value(one.device_tokens_per_s, partial(rate, unit="tokens"))
            tokens += f"; {per_device} per device"
        steps = rate(1e9 / one.step_ns, "steps") if one.step_ns else "n/a"
        lines.append(f"  {name:<24}{steps}; {tokens}")
    return lines if stats.windows else [*lines, f"  {'all':<24}n/a: no step has finished"]


def _list_sums(stats: MonitorStats) -> list[tuple[str, int]]:
    return [
        ("forward", stats.forward_ns),
        ("backward", stats.backward_ns),
        ("optimizer", stats.optimizer_ns),
        ("data", stats.data_ns),
    ]


def _bottlenecks(analysis: MonitorAnalysis) -> list[str]:
    if not analysis.has_verdict:
        return [f"bottlenecks: no verdict after {analysis.num_steps:,} steps"]
    if not analysis.bottlenecks:
        return ["bottlenecks: none found"]
    lines = ["bottlenecks"]
    for one in analysis.bottlenecks:
        lines += [
            f"  {one.severity.word.upper()} {one.category}: {one.description}",
            f"    try: {one.suggested_fix}",
        ]
    return lines


def _format_line(name: str, value: float | Unavailable, unit: Callable[[float], str]) -> str:
    return f"  {name:<24}{_format_value(value, unit)}"


def _format_value(value: float | Unavailable, unit: Callable[[float], str]) -> str:
    return f"n/a: {value.reason}" if isinstance(value, Unavailable) else unit(value)
