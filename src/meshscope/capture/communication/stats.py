"""Statistics of communication operations: gathered in cells, asked for along any axis.

A `Cell` holds everything about the operations of one kind, name, rank, group and bucket of sizes.
A query for fewer of these combines cells, so an operation is counted in one place only,
and a group whose axis becomes known later brings its past along.

Sums are exact over the whole history. With sampling each operation stands for 1/rate of them:
counts, bytes and times are then unbiased estimates. Bandwidth is over operations that succeeded,
took time and had a size; a timeout has a duration but no bandwidth.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from meshscope.capture.communication.events import FAILED
from meshscope.core.operations import Outcome
from meshscope.core.quantiles import QuantileSketch


class CellKey(NamedTuple):
    """What the operations of a cell have in common."""

    kind: int
    name: str
    """Name of a custom operation; empty for a known kind."""
    rank: int | None
    """None: this process, whose rank may not be known yet."""
    group_id: int
    size_bucket: int | None
    """Lower end in bytes; None where sizes are counted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStats:
    """Some operations together. None stands for what they do not say."""

    count: int
    """Operations; with sampling an estimate."""
    num_observed: int
    """Operations that these numbers are computed from."""
    num_failed: int
    """Ended in an error or a timeout; never sampled, so exact."""
    total_bytes: int
    total_duration_ns: int
    min_ns: int | None
    mean_ns: float | None
    max_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None
    percentile_error_ratio: float
    """How far p50, p95 and p99 may be off, relative to themselves; 0 while they are exact."""
    algbw_bytes_per_s: float | None
    """Σ bytes / Σ time."""
    busbw_bytes_per_s: float | None
    """Σ bytes·factor / Σ time, over the operations whose factor is known."""

    def to_dict(self) -> dict[str, Any]:
        """All fields in JSON's types."""
        return asdict(self)


class Cell:
    """Sums and durations of operations that share a `CellKey`."""

    __slots__ = (
        "count",
        "durations",
        "num_failed",
        "num_observed",
        "ok_bytes",
        "ok_ns",
        "total_bytes",
    )

    def __init__(self) -> None:
        self.count: float = 0
        self.num_observed = 0
        self.num_failed = 0
        self.total_bytes: float = 0
        self.ok_bytes: float = 0
        """Bytes of those that have a bandwidth, and `ok_ns` their time."""
        self.ok_ns: float = 0
        self.durations = QuantileSketch()

    def add(self, durations_ns: list[int], size_bytes: int, outcome: int, weight: float) -> None:
        """Operations of one size and outcome; a negative duration is one that is not known."""
        number = len(durations_ns)
        self.count += number * weight
        self.num_observed += number
        self.total_bytes += number * size_bytes * weight
        if min(durations_ns) < 0:
            durations_ns = [duration for duration in durations_ns if duration >= 0]
        self.durations.add_all(durations_ns, weight)
        if outcome in FAILED:
            self.num_failed += number
        elif outcome == Outcome.OK and size_bytes > 0:
            num_with_time = len(durations_ns) - durations_ns.count(0)
            self.ok_bytes += num_with_time * size_bytes * weight
            self.ok_ns += sum(durations_ns) * weight

    def merge(self, other: "Cell") -> None:
        """Takes in all that `other` holds."""
        self.count += other.count
        self.num_observed += other.num_observed
        self.num_failed += other.num_failed
        self.total_bytes += other.total_bytes
        self.ok_bytes += other.ok_bytes
        self.ok_ns += other.ok_ns
        self.durations.merge(other.durations)

    def to_dict(self) -> dict[str, Any]:
        """Everything in JSON's types."""
        return {
            "count": self.count,
            "num_observed": self.num_observed,
            "num_failed": self.num_failed,
            "total_bytes": self.total_bytes,
            "ok_bytes": self.ok_bytes,
            "ok_ns": self.ok_ns,
            "durations": self.durations.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Cell":
        """What `to_dict` gave; ValueError, TypeError or KeyError when it is not that."""
        cell = cls()
        cell.count = 0 + fields["count"]
        cell.num_observed = int(fields["num_observed"])
        cell.num_failed = int(fields["num_failed"])
        cell.total_bytes = 0 + fields["total_bytes"]
        cell.ok_bytes = 0 + fields["ok_bytes"]
        cell.ok_ns = 0 + fields["ok_ns"]
        cell.durations = QuantileSketch.from_dict(fields["durations"])
        return cell


def combine(cells: Iterable[tuple[Cell, float | None]]) -> OperationStats:
    """Statistics over cells, each with its factor from algorithm to bus bandwidth if known."""
    total = Cell()
    bus_bytes: float = 0
    bus_ns: float = 0
    for cell, factor in cells:
        total.merge(cell)
        if factor is not None:
            bus_bytes += cell.ok_bytes * factor
            bus_ns += cell.ok_ns
    durations = total.durations
    return OperationStats(
        count=round(total.count),
        num_observed=total.num_observed,
        num_failed=total.num_failed,
        total_bytes=round(total.total_bytes),
        total_duration_ns=round(durations.sum),
        min_ns=_rounded(durations.min),
        mean_ns=durations.sum / durations.count if durations.count else None,
        max_ns=_rounded(durations.max),
        p50_ns=_rounded(durations.quantile(0.50)),
        p95_ns=_rounded(durations.quantile(0.95)),
        p99_ns=_rounded(durations.quantile(0.99)),
        percentile_error_ratio=durations.relative_error,
        algbw_bytes_per_s=total.ok_bytes / total.ok_ns * 1e9 if total.ok_ns else None,
        busbw_bytes_per_s=bus_bytes / bus_ns * 1e9 if bus_ns else None,
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
