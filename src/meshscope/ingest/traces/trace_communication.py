"""A device's communication by axis and kind, in parts that sum to the whole.

Where several collectives run at once a moment counts for the one that began first, so that
`communication_ns` and `exposed_ns` of all rows sum to the device's own. `total_ns` is the plain sum
of lengths: it counts such moments more than once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_collectives import TraceCollective
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Int64s, find_true


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """All collectives of one kind along one axis."""

    axis: str
    kind: str
    count: int
    total_ns: int
    """Sum of lengths."""
    communication_ns: int
    """Without what an earlier collective already counts."""
    exposed_ns: int
    """Of that, without compute beside it."""
    size_bytes: int | Unavailable
    """Of those whose size is known."""
    num_unsized: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveColumns:
    """Collectives of one device in order of begin, as columns."""

    begin_ns: Int64s
    end_ns: Int64s
    row: Int64s
    """Place in the trace's events."""
    key: Int64s
    """Place in `keys`."""
    keys: tuple[tuple[str, str], ...]
    """Axis and kind."""
    size_bytes: Int64s
    """-1: not known."""

    def __len__(self) -> int:
        return len(self.row)


def as_columns(collectives: Sequence[TraceCollective]) -> CollectiveColumns:
    """Axis, kind and size of each."""
    places: dict[tuple[str, str], int] = {}
    key = [places.setdefault((one.axis, one.kind), len(places)) for one in collectives]
    begin = np.array([one.begin_ns for one in collectives], dtype=np.int64)
    length = np.array([one.duration_ns for one in collectives], dtype=np.int64)
    sizes = (one.size_bytes for one in collectives)
    return CollectiveColumns(
        begin_ns=begin,
        end_ns=begin + length,
        row=np.array([one.row for one in collectives], dtype=np.int64),
        key=np.array(key, dtype=np.int64),
        keys=tuple(places),
        size_bytes=np.array(
            [-1 if isinstance(size, Unavailable) else size for size in sizes], dtype=np.int64
        ),
    )


def take_turns(begin_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Int64s]:
    """Stretches in order of begin, cut so that none covers what an earlier one does."""
    if not len(begin_ns):
        return begin_ns, end_ns
    covered = np.maximum.accumulate(end_ns)
    begin = np.maximum(begin_ns, np.append(begin_ns[:1], covered[:-1]))
    return begin, np.maximum(end_ns, begin)


def tabulate_axes(
    columns: CollectiveColumns,
    compute: Intervals,
    picked: npt.NDArray[np.bool_] | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[AxisRow, ...]:
    """Rows with the most exposed first; of the picked ones, beside that compute.

    With a window, of each only what is in it; it is counted where it begins.
    """
    places = np.arange(len(columns)) if picked is None else find_true(picked)
    if not len(places):
        return ()
    begin, end = columns.begin_ns[places], columns.end_ns[places]
    is_counted = np.ones(len(places), dtype=np.bool_)
    if window is not None:
        is_counted = (begin >= window[0]) & (begin < window[1])
        begin, end = np.clip(begin, *window), np.clip(end, *window)
    first, last = take_turns(begin, end)
    key, size = columns.key[places], columns.size_bytes[places]

    def add_up(values: Int64s) -> list[int]:
        sums = np.zeros(len(columns.keys), dtype=np.int64)
        np.add.at(sums, key, values)
        listed: list[int] = sums.tolist()
        return listed

    total, own = add_up(end - begin), add_up(last - first)
    exposed = add_up(last - first - compute.within(first, last))
    num_bytes = add_up(np.where(is_counted, np.maximum(size, 0), 0))
    num_unsized = add_up((is_counted & (size < 0)).astype(np.int64))
    count = add_up(is_counted.astype(np.int64))
    rows = [
        AxisRow(
            axis=axis,
            kind=kind,
            count=count[at],
            total_ns=total[at],
            communication_ns=own[at],
            exposed_ns=exposed[at],
            size_bytes=(
                num_bytes[at]
                if num_unsized[at] < count[at]
                else Unavailable("the trace does not say how much was sent")
            ),
            num_unsized=num_unsized[at],
        )
        for at, (axis, kind) in enumerate(columns.keys)
        if count[at] or own[at]
    ]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_ns, -row.communication_ns)))
