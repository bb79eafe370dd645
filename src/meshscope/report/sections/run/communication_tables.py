"""Tables of the section on communication."""

from collections.abc import Sequence

from meshscope.analyze.communication.bandwidth import (
    BandwidthRow,
    FitRefused,
    LatencyFit,
    MessageFlow,
)
from meshscope.analyze.communication.communication import SlowOperation
from meshscope.analyze.communication.last_arrivers import LastArriver
from meshscope.analyze.job.clocks import Clock
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.run.communication import (
    AxisKindTimes,
    AxisTimes,
    CommunicationFacts,
    RankTimes,
    Timed,
)
from meshscope.report.section import Column, make_column
from meshscope.store.read.rank_ranges import abbreviate_ranks

MAX_NAME = 24
_MIB = 1 << 20


def mean_ns(row: Timed, num_ranks: int, *names: str) -> float:
    """The sum of some times, per step and rank; per rank if no step is known."""
    if isinstance(row.per_rank_step, Unavailable):
        return float(sum(getattr(row.total, name) for name in names) / max(num_ranks, 1))
    return float(sum(getattr(row.per_rank_step, name) for name in names))


def _show_exposed_ratio(row: Timed) -> str:
    return form.or_dash(
        row.per_rank_step, lambda means: form.or_dash(means.exposed_ratio, form.ratio)
    )


def _time_columns(
    rows: Sequence[Timed], names: Column, num_ranks: int, *, shows_queue: bool = False
) -> list[Column]:
    """Names, then the times of operations."""

    def times(title: str, importance: int, *parts: str) -> Column:
        return make_column(
            title, rows, lambda row: form.duration(mean_ns(row, num_ranks, *parts)), importance
        )

    columns = [
        names,
        make_column("count", rows, lambda row: form.count(row.total.num_operations), 20),
        make_column("data", rows, lambda row: form.memory(row.total.size_bytes), 25),
        times("wait", 80, "wait_ns"),
        times("transfer", 75, "transfer_ns"),
    ]
    if shows_queue and any(row.total.queued_ns for row in rows):
        columns.append(times("of it queued", 10, "queued_ns"))
    if any(row.total.unsplit_ns for row in rows):
        columns.append(times("not split", 40, "unsplit_ns"))
    columns.append(times("exposed", 95, "exposed_ns"))
    ratios = make_column("of step", rows, _show_exposed_ratio, 90)
    if any(cell.text != "n/a" for cell in ratios.cells):
        columns.append(ratios)
    columns.append(times("= wait", 70, "exposed_wait_ns"))
    columns.append(times("+ transfer", 65, "exposed_transfer_ns"))
    if any(row.total.exposed_unsplit_ns + row.total.exposed_late_ns for row in rows):
        columns.append(times("+ other", 60, "exposed_unsplit_ns", "exposed_late_ns"))
    columns.append(times("overlapped", 30, "overlapped_ns"))
    return columns


def axis_columns(facts: CommunicationFacts, limit: int | None = None) -> list[Column]:
    """One row per axis, and one for all if there are several."""
    rows: list[Timed] = [*facts.axes[:limit]]
    rows += [facts] if len(facts.axes) > 1 else []
    names = make_column("axis", rows, _name_axis_row, 99, is_right=False)
    return _time_columns(rows, names, len(facts.ranks))


def _name_axis_row(row: Timed) -> str:
    return form.clean_text(row.axis, MAX_NAME) if isinstance(row, AxisTimes) else "all axes"


def kind_columns(facts: CommunicationFacts) -> list[Column]:
    names = make_column("axis and kind", facts.kinds, name_kind, 99, is_right=False)
    return _time_columns(facts.kinds, names, len(facts.ranks), shows_queue=True)


def rank_columns(rows: Sequence[RankTimes]) -> list[Column]:
    return _time_columns(rows, make_column("rank", rows, lambda row: str(row.rank), 99), 1)


def name_kind(row: AxisKindTimes | BandwidthRow | LatencyFit | FitRefused) -> str:
    """`dp all_reduce`."""
    return f"{form.clean_text(row.axis, MAX_NAME)} {row.kind.label}"


def arrival_columns(rows: Sequence[LastArriver]) -> list[Column]:
    return [
        make_column("last to arrive", rows, lambda r: f"rank {r.rank}", 99, is_right=False),
        make_column("axis", rows, lambda r: form.clean_text(r.axis, MAX_NAME), 98, is_right=False),
        make_column("times", rows, lambda r: _part(r.num_last, r.num_operations), 80),
        make_column("by chance", rows, lambda r: form.expected(r.expected_last), 60),
        make_column("worst in steps", rows, lambda r: _part(r.num_steps_worst, r.num_steps), 50),
        make_column("cost", rows, lambda r: form.duration(r.cost_ns), 95),
        make_column("others waited", rows, lambda r: form.duration(r.caused_wait_ns), 70),
        make_column("phase", rows, lambda r: form.or_dash(r.phase, _short), 55, is_right=False),
        make_column("", rows, lambda r: "beyond chance" if r.is_beyond_chance else "", 90,
                    is_right=False),
    ]  # fmt: skip


def _part(part: int, whole: int) -> str:
    return f"{form.count(part)} of {form.count(whole)}"


def _short(name: str) -> str:
    return form.clean_text(name, MAX_NAME)


def slow_columns(rows: Sequence[SlowOperation]) -> list[Column]:
    return [
        make_column(
            "slowest operations",
            rows,
            lambda r: f"{r.kind.label} #{r.sequence}",
            99,
            is_right=False,
        ),
        make_column("axis", rows, lambda r: _short(r.group.axis), 85, is_right=False),
        make_column("ranks", rows, lambda r: abbreviate_ranks(r.group.ranks), 40, is_right=False),
        make_column("size", rows, lambda r: form.or_dash(r.size_bytes, form.memory), 60),
        make_column("step", rows, lambda r: form.or_dash(r.step, str), 80),
        make_column("phase", rows, lambda r: form.or_dash(r.phase, _short), 55, is_right=False),
        make_column("all ranks", rows, lambda r: form.duration(r.total_ns), 95),
        make_column("of it wait", rows, lambda r: form.duration(r.wait_ns), 70),
        make_column("longest transfer", rows, lambda r: form.duration(r.max_transfer_ns), 30),
        make_column("last", rows, _name_last, 90, is_right=False),
    ]


def _name_last(row: SlowOperation) -> str:
    gap = form.or_dash(row.gap_ns, lambda ns: f" +{form.duration(ns)}")
    return form.or_dash(row.last_rank, lambda rank: f"rank {rank}{gap}")


def bandwidth_columns(rows: Sequence[BandwidthRow], title: str) -> list[Column]:
    """One row per axis, kind and range of sizes."""
    columns = [
        make_column(title, rows, name_kind, 99, is_right=False),
        make_column("ranks", rows, lambda r: form.count(r.num_ranks), 50),
        make_column("size", rows, lambda r: form.memory(r.median_size_bytes), 90),
        make_column("count", rows, lambda r: form.count(r.num_operations), 40),
        make_column("transfer", rows, lambda r: form.duration(r.median_transfer_ns), 70),
    ]
    if any(row.uncertainty_ns != 0 for row in rows):
        columns.append(
            make_column(
                "uncertain by", rows, lambda r: form.or_dash(r.uncertainty_ns, form.duration), 60
            )
        )
    columns += [
        make_column(
            "algbw", rows, lambda r: form.or_dash(r.algorithm_bytes_per_s, form.bandwidth), 80
        ),
        make_column("busbw", rows, lambda r: form.or_dash(r.bus_bytes_per_s, form.bandwidth), 95),
    ]
    if any(row.is_across_hosts for row in rows):
        columns.append(
            make_column("", rows, lambda r: "across hosts" if r.is_across_hosts else "", 45,
                        is_right=False)
        )  # fmt: skip
    return columns


def fit_columns(rows: Sequence[LatencyFit]) -> list[Column]:
    """One row per axis and kind with a fit."""
    return [
        make_column("α + β · size", rows, name_kind, 99, is_right=False),
        make_column("ranks", rows, lambda r: form.count(r.num_ranks), 50),
        make_column("sizes", rows, lambda r: form.count(r.num_sizes), 40),
        make_column("size from", rows, lambda r: form.memory(r.min_size_bytes), 55),
        make_column("to", rows, lambda r: form.memory(r.max_size_bytes), 60),
        make_column("α", rows, lambda r: form.duration(r.latency_ns), 90),
        make_column("α from", rows, lambda r: form.duration(r.latency_low_ns), 30),
        make_column("to", rows, lambda r: form.duration(r.latency_high_ns), 30),
        make_column("β per MiB", rows, lambda r: _per_mib(r.ns_per_byte), 80),
        make_column("busbw", rows, lambda r: form.or_dash(r.bus_bytes_per_s, form.bandwidth), 95),
    ]


def _per_mib(ns_per_byte: float) -> str:
    return form.duration(ns_per_byte * _MIB)


def message_columns(rows: Sequence[MessageFlow]) -> list[Column]:
    return [
        make_column("messages", rows, lambda r: f"{r.source} → {r.target}", 99, is_right=False),
        make_column("count", rows, lambda r: form.count(r.num_messages), 80),
        make_column("data", rows, lambda r: form.memory(r.size_bytes), 90),
        make_column("mean wait", rows, lambda r: form.or_dash(r.mean_wait_ns, form.duration), 70),
        make_column(
            "mean latency", rows, lambda r: form.or_dash(r.mean_latency_ns, form.duration), 75
        ),
        make_column(
            "uncertain by", rows, lambda r: form.or_dash(r.uncertainty_ns, form.duration), 60
        ),
        make_column("across hosts", rows, lambda r: form.or_dash(r.is_across_hosts, _yes), 50),
    ]


def _yes(claim: bool) -> str:  # noqa: FBT001
    return "yes" if claim else "no"


def clock_columns(rows: Sequence[Clock]) -> list[Column]:
    return [
        make_column("clock of", rows, lambda r: form.or_dash(r.host, _short), 99, is_right=False),
        make_column("ranks", rows, lambda r: abbreviate_ranks(r.ranks), 70, is_right=False),
        make_column("offset", rows, lambda r: form.or_dash(r.offset_ns, form.duration), 90),
        make_column("drift", rows, lambda r: form.or_dash(r.drift_ppm, form.drift), 80),
        make_column(
            "uncertain by", rows, lambda r: form.or_dash(r.uncertainty_ns, form.duration), 95
        ),
        make_column("uneven by", rows, lambda r: form.duration(r.unevenness_ns), 40),
        make_column("operations", rows, lambda r: form.count(r.num_operations), 30),
        make_column("known from", rows, lambda r: r.method, 85, is_right=False),
    ]
