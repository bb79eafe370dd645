"""Pipeline actions of all ranks on one clock: one microbatch through one stage."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from meshscope.analyze.job.operations import MAX_SPAN_NS, MAX_TIME_NS, find_rows
from meshscope.analyze.timeline.rank_phases import DeviceMarks
from meshscope.store.read.arrays import Int32s, Int64s, Uint8s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.schema import ACTION_KINDS, MISSING, ActionFlag

__all__ = ["ACTION_KINDS", "Actions", "read_actions"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actions:
    """One entry per action of the kept steps, sorted by rank and start."""

    rank: Int32s
    step: Int32s
    """Index in `Timeline.steps`."""
    kind: Uint8s
    """Index in `ACTION_KINDS`."""
    stage: Int32s
    chunk: Int32s
    microbatch: Int32s
    start_ns: Int64s
    """On the reference clock; the stream's times on a device."""
    end_ns: Int64s
    wait_start_ns: Int64s
    """When it began to wait for its input; -1 if it did not."""
    wait_ns: Int64s
    """-1 if it did not wait."""

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def join(cls, parts: "list[Actions]") -> Self:
        return cls(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts])
                for field in fields(cls)
            }
        )


def read_actions(
    recording: Recording,
    steps: Int64s,
    marks: DeviceMarks | None,
    to_reference: Callable[[Int64s], Int64s],
) -> Actions:
    """A rank's actions in the given steps, without damaged and aborted ones.

    With `marks`, times are those of the device's stream and actions without marks are left out.
    """
    columns = recording.read("actions")
    start = int64_column(columns, "begin_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    kind = columns["kind"].astype(np.uint8)
    index = find_rows(steps, int64_column(columns, "step"))
    is_good = (start >= 0) & (start < MAX_TIME_NS) & (duration >= 0) & (duration < MAX_SPAN_NS)
    is_good &= (index >= 0) & (kind < len(ACTION_KINDS))
    is_good &= (columns["flags"].astype(np.int64) & ActionFlag.ABORTED) == 0
    row = np.flatnonzero(is_good)
    row = row[np.argsort(start[row], kind="stable")]
    wait_start = int64_column(columns, "wait_begin_host_mono_ns")[row]
    wait = int64_column(columns, "wait_ns")[row]
    start, end = start[row], (start + duration)[row]
    wait = np.where((wait >= 0) & (wait_start >= 0) & (wait_start <= start), wait, MISSING)
    wait = np.minimum(wait, start - wait_start)
    if marks is not None:
        start, end, is_marked = _on_device(start, marks)
        on_device, wait_end, has_wait = _on_device(wait_start, marks)
        wait_start, wait = on_device, np.where(has_wait, wait_end - on_device, MISSING)
        row, start, end = row[is_marked], start[is_marked], end[is_marked]
        wait_start, wait = wait_start[is_marked], wait[is_marked]
    is_waiting = wait >= 0
    wait_end = to_reference(np.where(is_waiting, wait_start + wait, start))
    wait_start = to_reference(np.where(is_waiting, wait_start, start))
    return Actions(
        rank=np.full(len(row), recording.rank, dtype=np.int32),
        step=index[row].astype(np.int32),
        kind=kind[row],
        stage=columns["stage"][row].astype(np.int32),
        chunk=columns["chunk"][row].astype(np.int32),
        microbatch=np.clip(int64_column(columns, "microbatch")[row], -1, 1 << 30).astype(np.int32),
        start_ns=to_reference(start),
        end_ns=to_reference(end),
        wait_start_ns=np.where(is_waiting, wait_start, MISSING),
        wait_ns=np.where(is_waiting, wait_end - wait_start, MISSING),
    )


def _on_device(host_start_ns: Int64s, marks: DeviceMarks) -> tuple[Int64s, Int64s, np.ndarray]:
    """Start and end on the device of phases that the host began at these moments."""
    order = np.argsort(marks.host_start_ns, kind="stable")
    found = find_rows(marks.host_start_ns[order], host_start_ns)
    if not len(order):
        return host_start_ns, host_start_ns, found >= 0
    at = order[found]
    return marks.start_ns[at], marks.end_ns[at], found >= 0
