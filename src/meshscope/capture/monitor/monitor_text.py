"""The monitor's report as text. Units stand beside every number; n/a has its reason."""

from meshscope.capture.monitor.monitor_results import Bottleneck, MonitorAnalysis, MonitorStats
from meshscope.core.unavailable import Unavailable


def render_monitor(stats: MonitorStats, analysis: MonitorAnalysis, place: str) -> str:
    """Throughput, times, ratios, memory, and what is wrong with what to try."""
    lines = [
        f"monitor: {place}, {stats.num_steps:,} steps since reset",
        "",
        *_throughput(stats),
        "",
        f"times per step ({analysis.clock} clock, mean of the newest {analysis.num_steps:,})",
        _line("forward", _ms(analysis.forward_ns)),
        _line("backward", _ms(analysis.backward_ns)),
        _line("whole step", _ms(analysis.step_ns)),
        "",
        "shares of the step (median)",
        _line("communication, exposed", _percent(analysis.communication_ratio)),
        *(
            _line(f"  over {axis}", _percent(share))
            for axis, share in analysis.communication_ratio_by_axis.items()
        ),
        _line("waiting for data", _percent(analysis.input_ratio)),
        _line("pipeline utilisation", _percent(analysis.pipeline_utilization_ratio)),
        _line("  plain schedule allows", _percent(analysis.pipeline_plain_ratio)),
        _line("tp efficiency", _percent(analysis.tp_efficiency_ratio)),
        _line("dp efficiency", _percent(analysis.dp_efficiency_ratio)),
        _line("MFU", _percent(analysis.mfu_ratio)),
        "",
        "memory",
        _line("resident", _gib(stats.rss_bytes)),
        _line("tensors on the device", _gib(stats.allocated_bytes)),
        _line("peak of them", _gib(stats.peak_allocated_bytes)),
        _line("efficiency at the peak", _percent(analysis.memory_efficiency_ratio)),
        _line("used of the limit", _percent(analysis.memory_used_ratio)),
        "",
        *_bottlenecks(analysis),
    ]
    return "\n".join(lines)


def _throughput(stats: MonitorStats) -> list[str]:
    lines = ["throughput"]
    for size, rate in stats.windows.items():
        name = f"last {rate.num_steps} of {size}" if rate.num_steps < size else f"last {size}"
        job, device = _rate(rate.tokens_per_s), _rate(rate.device_tokens_per_s)
        steps = f"{1e9 / rate.step_ns:,.3g} steps/s" if rate.step_ns else "n/a"
        if isinstance(rate.tokens_per_s, Unavailable):
            lines.append(_line(name, f"{steps}; tokens {job}"))
        else:
            lines.append(_line(name, f"{steps}; {job}; {device} per device"))
    return lines if stats.windows else [*lines, _line("all", "n/a: no step has finished")]


def _bottlenecks(analysis: MonitorAnalysis) -> list[str]:
    if not analysis.has_verdict:
        return [f"bottlenecks: no verdict after {analysis.num_steps:,} steps"]
    if not analysis.bottlenecks:
        return ["bottlenecks: none found"]
    lines = ["bottlenecks"]
    for one in analysis.bottlenecks:
        lines += [f"  {one.severity.label.upper()} {one.category}: {one.description}", _fix(one)]
    return lines


def _fix(one: Bottleneck) -> str:
    return f"    try: {one.suggested_fix}"


def _line(name: str, value: str) -> str:
    return f"  {name:<24}{value}"


def _ms(value: float | Unavailable) -> str:
    return _missing(value) if isinstance(value, Unavailable) else f"{value / 1e6:,.3f} ms"


def _percent(value: float | Unavailable) -> str:
    return _missing(value) if isinstance(value, Unavailable) else f"{value:.1%}"


def _gib(value: int | Unavailable) -> str:
    return _missing(value) if isinstance(value, Unavailable) else f"{value / 2**30:,.3f} GiB"


def _rate(value: float | Unavailable) -> str:
    return _missing(value) if isinstance(value, Unavailable) else f"{value:,.1f} tokens/s"


def _missing(value: Unavailable) -> str:
    return f"n/a: {value.reason}"
