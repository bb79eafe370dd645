"""Sums of communication time by axis, kind, rank and step. The parts always sum.

Times are summed over ranks. For every sum

    span = wait + transfer + unsplit
    span = exposed_wait + exposed_transfer + exposed_unsplit + overlapped

`unsplit` are operations that were not found on all ranks. `exposed_late` is extra: a rank was held
up before the operation began or after it ended. `overlapped` held no rank up: it was hidden behind
computation, or behind another operation that was waited for at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshscope.analyze.job.arrivals import RowTimes
from meshscope.analyze.job.exposed import Exposed
from meshscope.analyze.job.operations import OperationRows, number_values
from meshscope.core.operations import Kind
from meshscope.store.read.arrays import Bools, Int64s

_EXACT_BELOW = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSum:
    """Operations and their time, over some ranks."""

    num_operations: int
    """A collective counts once however many ranks took part; a send and its recv are two."""
    num_rank_operations: int
    """Operations times the ranks that recorded them."""
    num_inexact_ends: int
    """Those whose end is only an upper bound: their transfer is overstated."""
    size_bytes: int
    """Each operation is counted once."""
    span_ns: int
    """From arrival to end."""
    wait_ns: int
    """For ranks that arrived later."""
    transfer_ns: int
    queued_ns: int
    """The part of the transfer behind an earlier operation of the same group."""
    unsplit_ns: int
    exposed_wait_ns: int
    exposed_transfer_ns: int
    exposed_unsplit_ns: int
    exposed_late_ns: int
    overlapped_ns: int

    @property
    def exposed_ns(self) -> int:
        within = self.exposed_wait_ns + self.exposed_transfer_ns + self.exposed_unsplit_ns
        return within + self.exposed_late_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisKindSum:
    """Operations of one kind along one axis."""

    axis: str
    kind: Kind
    total: CommunicationSum


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSum:
    """All operations along one axis."""

    axis: str
    total: CommunicationSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSum:
    """All operations of one rank."""

    rank: int
    total: CommunicationSum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """Communication by step.

    Exposed time belongs to the step in which a rank was held up, everything else to the step in
    which the operation was called. Tables have a row per rank, as in `ranks`, and a column per
    step, as in `step`.
    """

    ranks: tuple[int, ...]
    step: Int64s
    """Ascending; -1 is outside of steps."""
    num_operations: Int64s
    size_bytes: Int64s
    """By step, each collective counted once."""
    wait_ns: Int64s
    transfer_ns: Int64s
    overlapped_ns: Int64s
    """By step, over all ranks."""
    exposed_wait_ns: Int64s
    exposed_transfer_ns: Int64s
    exposed_unsplit_ns: Int64s
    exposed_late_ns: Int64s
    """Tables by rank and step."""

    @property
    def exposed_ns(self) -> Int64s:
        within = self.exposed_wait_ns + self.exposed_transfer_ns + self.exposed_unsplit_ns
        return within + self.exposed_late_ns


def collect_parts(
    rows: OperationRows, row_times: RowTimes, exposed: Exposed, is_first: Bools
) -> dict[str, Int64s]:
    """The columns of `CommunicationSum` for every row, and `rank_size_bytes`, by rank.

    `is_first` marks one row of every operation.
    """
    size = len(rows)
    wait = _sum_cells(exposed.row, exposed.wait_ns, size)
    transfer = _sum_cells(exposed.row, exposed.transfer_ns, size)
    unsplit = _sum_cells(exposed.row, exposed.unsplit_ns, size)
    # Two threads may wait for one operation, and a program's own timing may be longer than it.
    unsplit = np.minimum(unsplit, row_times.span_ns - wait - transfer)
    late = _sum_cells(exposed.row, exposed.late_ns + exposed.unsplit_ns, size) - unsplit
    span = row_times.span_ns
    return {
        "num_operations": is_first.astype(np.int64),
        "num_rank_operations": np.ones(size, dtype=np.int64),
        "num_inexact_ends": (rows.has_end & ~rows.has_exact_end).astype(np.int64),
        "size_bytes": np.where(is_first, np.maximum(rows.size_bytes, 0), 0),
        "rank_size_bytes": np.maximum(rows.size_bytes, 0),
        "span_ns": span,
        "wait_ns": row_times.wait_ns,
        "transfer_ns": row_times.transfer_ns,
        "queued_ns": row_times.queued_ns,
        "unsplit_ns": np.where(row_times.is_split, 0, span),
        "exposed_wait_ns": wait,
        "exposed_transfer_ns": transfer,
        "exposed_unsplit_ns": unsplit,
        "exposed_late_ns": late,
        "overlapped_ns": span - wait - transfer - unsplit,
    }


def add_sums(sums: Sequence[CommunicationSum]) -> CommunicationSum:
    names = [field.name for field in fields(CommunicationSum)]
    return CommunicationSum(**{name: sum(getattr(one, name) for one in sums) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PartTable:
    """Every column summed by rank, axis and kind; the last rank holds what is left out."""

    axes: Sequence[str]
    ranks: Sequence[int]
    columns: Mapping[str, Int64s]

    def by_axis_and_kind(self) -> tuple[AxisKindSum, ...]:
        """Sums over ranks, the longest exposed first."""
        sums = {name: column[:-1].sum(axis=0) for name, column in self.columns.items()}
        found = [
            AxisKindSum(axis=axis, kind=Kind(kind), total=_pick(sums, (index, kind)))
            for index, axis in enumerate(self.axes)
            for kind in Kind
            if sums["num_rank_operations"][index, kind]
        ]
        return tuple(sorted(found, key=lambda one: (-one.total.exposed_ns, one.axis, one.kind)))

    def by_rank(self) -> tuple[RankSum, ...]:
        """Sums over axes and kinds; an operation counts in full on every rank, size included."""
        sums = {name: column[:-1].sum(axis=(1, 2)) for name, column in self.columns.items()}
        sums["num_operations"] = sums["num_rank_operations"]
        sums["size_bytes"] = sums["rank_size_bytes"]
        return tuple(
            RankSum(rank=rank, total=_pick(sums, (index,))) for index, rank in enumerate(self.ranks)
        )


def _pick(sums: Mapping[str, Int64s], index: tuple[int, ...]) -> CommunicationSum:
    return CommunicationSum(
        **{field.name: int(sums[field.name][index]) for field in fields(CommunicationSum)}
    )


def tabulate_parts(
    parts: Mapping[str, Int64s],
    is_included: Bools,
    rows: OperationRows,
    axis: Int64s,
    *,
    axes: Sequence[str],
    ranks: Sequence[int],
) -> _PartTable:
    """`axis` is each row's index in `axes`."""
    num_kinds = max(Kind) + 1
    shape = (len(ranks) + 1, len(axes), num_kinds)
    index = np.zeros(max(ranks, default=0) + 1, dtype=np.int64)
    index[list(ranks)] = np.arange(len(ranks))
    line = np.where(is_included, index[rows.rank], len(ranks))
    cell = (line * len(axes) + axis) * num_kinds + rows.kind
    size = shape[0] * shape[1] * shape[2]
    return _PartTable(
        axes=axes,
        ranks=ranks,
        columns={
            name: _sum_cells(cell, column, size).reshape(shape) for name, column in parts.items()
        },
    )


def sum_by_axis(sums: Sequence[AxisKindSum]) -> tuple[AxisSum, ...]:
    axes = dict.fromkeys(one.axis for one in sums)
    found = [
        AxisSum(axis=axis, total=add_sums([one.total for one in sums if one.axis == axis]))
        for axis in axes
    ]
    return tuple(sorted(found, key=lambda one: (-one.total.exposed_ns, one.axis)))


def sum_by_step(
    parts: Mapping[str, Int64s],
    is_included: Bools,
    rows: OperationRows,
    exposed: Exposed,
    ranks: Sequence[int],
) -> StepSums:
    """Sums by step, and exposed time by rank and step."""
    kept = np.flatnonzero(is_included[exposed.row])
    called = rows.step.astype(np.int64)[is_included]
    held_up = exposed.step[kept].astype(np.int64)
    steps, column = number_values(np.concatenate([called, held_up]))
    index = np.zeros(max(ranks, default=0) + 1, dtype=np.int64)
    index[list(ranks)] = np.arange(len(ranks))
    cell = index[exposed.rank[kept]] * len(steps) + column[len(called) :]
    shape = (len(ranks), len(steps))

    def line(name: str) -> Int64s:
        values = parts[name][is_included]
        return _sum_cells(column[: len(called)], values, len(steps))

    def table(values: Int64s) -> Int64s:
        return _sum_cells(cell, values[kept], shape[0] * shape[1]).reshape(shape)

    return StepSums(
        ranks=tuple(ranks),
        step=steps,
        num_operations=line("num_operations"),
        size_bytes=line("size_bytes"),
        wait_ns=line("wait_ns"),
        transfer_ns=line("transfer_ns"),
        overlapped_ns=line("overlapped_ns"),
        exposed_wait_ns=table(exposed.wait_ns),
        exposed_transfer_ns=table(exposed.transfer_ns),
        exposed_unsplit_ns=table(exposed.unsplit_ns),
        exposed_late_ns=table(exposed.late_ns),
    )


def _sum_cells(cell: Int64s, values: Int64s, num_cells: int) -> Int64s:
    """Exact integer sums per cell."""
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    if largest * len(values) < _EXACT_BELOW:
        return np.bincount(cell, weights=values, minlength=num_cells).astype(np.int64)
    weights = values.astype(np.float64)
    if float(np.abs(weights).sum()) < _EXACT_BELOW:
        return np.bincount(cell, weights=weights, minlength=num_cells).astype(np.int64)
    sums = np.zeros(num_cells, dtype=np.int64)
    np.add.at(sums, cell, values)
    return sums
