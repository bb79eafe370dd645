"""The profiler's summary as text. Sizes are in MiB (2^20 bytes), times in ms; n/a is not known."""

from collections.abc import Mapping, Sequence

from meshscope.capture.communication.ledger import Ledger
from meshscope.capture.communication.stats import OperationStats

MIB = 1 << 20
MAX_NAME = 60
_COLUMNS = (
    "count", "failed", "MiB", "total ms", "mean ms", "min ms", "p50 ms", "p95 ms", "p99 ms",
    "max ms", "alg MiB/s", "bus MiB/s",
)  # fmt: skip


def render_summary(ledger: Ledger, elapsed_ns: int, num_own_errors: int) -> str:
    """What was counted, what was left out, then a table per axis and one per operation."""
    total = ledger.total()
    lines = [
        f"communication: {total.count:,} operations, {total.total_bytes / MIB:,.2f} MiB, "
        f"{total.total_duration_ns / 1e6:,.3f} ms in them, {total.num_failed:,} failed; "
        f"over {elapsed_ns / 1e9:,.1f} s",
        *_what_was_left_out(ledger, total, num_own_errors),
    ]
    for title, rows in (("axis", ledger.by_axis()), ("operation", ledger.by_operation())):
        if rows:
            named = {name or f"(no {title})": stats for name, stats in rows.items()}
            lines += ["", *_render_table(title, named)]
    return "\n".join(lines)


def _what_was_left_out(ledger: Ledger, total: OperationStats, num_own_errors: int) -> list[str]:
    lines = []
    if ledger.num_sampled_out:
        lines.append(
            f"sampled: {total.num_observed:,} looked at, {ledger.num_sampled_out:,} left out; "
            "counts, MiB and times are estimates for all"
        )
    if ledger.num_below_minimum or ledger.num_evicted:
        lines.append(
            f"not kept as events, but counted: {ledger.num_below_minimum:,} below the minimum "
            f"duration, {ledger.num_evicted:,} evicted from the ring"
        )
    if total.percentile_error_ratio:
        lines.append(f"percentiles are within {total.percentile_error_ratio:.0%}")
    if num_own_errors:
        lines.append(f"errors of the profiler itself: {num_own_errors:,}; see the log")
    return lines


def _render_table(title: str, rows: Mapping[str, OperationStats]) -> list[str]:
    """Aligned lines, one row per name, in the order given."""
    cells: list[tuple[str, ...]] = [(title, *_COLUMNS)]
    cells += [(_printable(name), *_row(stats)) for name, stats in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [_format_line(row, widths) for row in cells]


def _format_line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers = row
    right = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *right])


def _row(stats: OperationStats) -> tuple[str, ...]:
    times_ns = (
        stats.total_duration_ns, stats.mean_ns, stats.min_ns, stats.p50_ns, stats.p95_ns,
        stats.p99_ns, stats.max_ns,
    )  # fmt: skip
    return (
        f"{stats.count:,}",
        f"{stats.num_failed:,}",
        f"{stats.total_bytes / MIB:,.2f}",
        *(_shown(time_ns, 1e6, 3) for time_ns in times_ns),
        _shown(stats.algbw_bytes_per_s, MIB, 1),
        _shown(stats.busbw_bytes_per_s, MIB, 1),
    )


def _shown(value: float | None, unit: float, digits: int) -> str:
    return "n/a" if value is None else f"{value / unit:,.{digits}f}"


def _printable(text: str) -> str:
    return "".join(mark if mark.isprintable() else "?" for mark in text)[:MAX_NAME]
