"""The collectives of a trace: what they moved, for which group, how long, and how much was exposed.

A kernel that carries a collective's arguments says them itself; else the host's record of the call
(`record_param_comms`) that launched it does. Sizes are in elements of a dtype, as the profiler has
them; a collective without them has a time and no bandwidth. Kernel time includes waiting for the
ranks that come late: only traces of several ranks can tell it from transfer.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.intervals import Stretches
from meshscope.analyze.trace_kernels import KernelClasses, Work
from meshscope.core.unavailable import Unavailable
from meshscope.store.trace_columns import Trace

Int64s = npt.NDArray[np.int64]

DTYPE_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Short": 2,
    "Int": 4,
    "Long": 8,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "ComplexFloat": 8,
}
_MAX_ELEMENTS = 1 << 48
_WORD = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCollective:
    """One communication kernel."""

    row: int
    kind: str
    begin_ns: int
    duration_ns: int
    exposed_ns: int
    """Part of it in which nothing computed on the device."""
    group: str
    """The process group's name in torch; "" when it is not known."""
    description: str
    ranks: tuple[int, ...]
    """Of the group, as far as the trace says."""
    group_size: int | Unavailable
    size_bytes: int | Unavailable
    """The whole array, counted once."""
    dtype: str


def list_collectives(
    trace: Trace,
    classes: KernelClasses,
    rows: Int64s,
    compute: Stretches,
    operator_of: Int64s,
) -> tuple[TraceCollective, ...]:
    """The communication kernels among `rows`, in order of begin."""
    events = trace.events
    picked = rows[classes.work[rows] == Work.COMMUNICATION]
    begin, end = events.begin_ns[picked], events.end_ns[picked]
    exposed = (end - begin) - compute.within(begin, end)
    facts = _Facts(trace)
    return tuple(
        facts.describe(row, int(operator_of[row]), classes, hidden)
        for row, hidden in zip(picked.tolist(), exposed.tolist(), strict=True)
    )


class _Facts:
    """Looks arguments up by event."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._text = {
            name: trace.text_argument(name)
            for name in (
                "Collective name",
                "dtype",
                "Process Group Name",
                "Process Group Description",
                "Process Group Ranks",
            )
        }
        self._number = {
            name: trace.int_argument(name)
            for name in ("In msg nelems", "Out msg nelems", "Group size")
        }

    def describe(
        self, row: int, operator: int, classes: KernelClasses, exposed_ns: int
    ) -> TraceCollective:
        source = row if self._text["Collective name"][row] >= 0 or operator < 0 else operator
        events = self._trace.events
        kind = classes.kinds[classes.kind[row]]
        return TraceCollective(
            row=row,
            kind=kind,
            begin_ns=int(events.begin_ns[row]),
            duration_ns=int(events.duration_ns[row]),
            exposed_ns=exposed_ns,
            group=self._string("Process Group Name", source),
            description=self._string("Process Group Description", source),
            ranks=parse_ranks(self._string("Process Group Ranks", source)),
            group_size=self._count("Group size", source),
            size_bytes=self._size(source),
            dtype=self._string("dtype", source),
        )

    def _string(self, name: str, row: int) -> str:
        place = int(self._text[name][row])
        return self._trace.strings[place] if place >= 0 else ""

    def _count(self, name: str, row: int) -> int | Unavailable:
        value = int(self._number[name][row])
        return value if value > 0 else Unavailable("the trace does not say")

    def _size(self, row: int) -> int | Unavailable:
        """The larger side is the whole array, gathered or to be scattered."""
        word = _WORD.match(self._string("dtype", row))
        width = DTYPE_BYTES.get(word[0] if word else "")
        elements = [int(self._number[name][row]) for name in ("In msg nelems", "Out msg nelems")]
        if width is None or max(elements) < 0 or max(elements) > _MAX_ELEMENTS:
            return Unavailable("the trace does not say how much was sent")
        return max(elements) * width


def parse_ranks(text: str) -> tuple[int, ...]:
    """`[0, 1, 2]`, or with `...` in long groups, of which nothing is then known."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return ()
    is_list = isinstance(found, list) and all(isinstance(rank, int) for rank in found)
    return tuple(found) if is_list else ()
