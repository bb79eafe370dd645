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
        _line("forward", analysis.forward_ns, duration),
        _line("backward", analysis.backward_ns, duration),
        _line("whole step", analysis.step_ns, duration),
        "",
        "shares of the step (median)",
        _line("communication, exposed", analysis.communication_ratio, ratio),
        *(_line(f"  over {axis}", share, ratio) for axis, share in axes),
        _line("waiting for data", analysis.input_ratio, ratio),
        _line("pipeline utilisation", analysis.pipeline_utilization_ratio, ratio),
        _line("  plain schedule allows", analysis.pipeline_plain_ratio, ratio),
        _line("tp efficiency", analysis.tp_efficiency_ratio, ratio),
        _line("dp efficiency", analysis.dp_efficiency_ratio, ratio),
        _line("MFU", analysis.mfu_ratio, ratio),
        "",
        "memory",
        _line("resident", stats.rss_bytes, memory),
        _line("tensors on the device", stats.allocated_bytes, memory),
        _line("peak of them", stats.peak_allocated_bytes, memory),
        _line("efficiency at the peak", analysis.memory_efficiency_ratio, ratio),
        _line("used of the limit", analysis.memory_used_ratio, ratio),
        "",
        *_bottlenecks(analysis),
    ]
    return "\n".join(lines)


def _throughput(stats: MonitorStats) -> list[str]:
    lines = ["throughput"]
    for size, one in stats.windows.items():
        name = f"last {one.num_steps} of {size}" if one.num_steps < size else f"last {size}"
        tokens = _show(one.tokens_per_s, partial(rate, unit="tokens"))
        if isinstance(one.tokens_per_s, Unavailable):
            tokens = f"tokens {tokens}"
        else:
            tokens += f"; {_show(one.device_tokens_per_s, partial(rate, unit='tokens'))} per device"
        steps = rate(1e9 / one.step_ns, "steps") if one.step_ns else "n/a"
        lines.append(f"  {name:<24}{steps}; {tokens}")
    return lines if stats.windows else [*lines, f"  {'all':<24}n/a: no step has finished"]


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


def _line(name: str, value: float | Unavailable, unit: Callable[[float], str]) -> str:
    return f"  {name:<24}{_show(value, unit)}"


def _show(value: float | Unavailable, unit: Callable[[float], str]) -> str:
    return f"n/a: {value.reason}" if isinstance(value, Unavailable) else unit(value)
