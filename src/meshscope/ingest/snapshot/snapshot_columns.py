"""A memory snapshot of torch's CUDA allocator as columns: segments, blocks, events, stacks."""

from dataclasses import dataclass
from pathlib import Path

from meshscope.store.read.arrays import Int8s, Int16s, Int32s, Int64s

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "user_defined",
)
STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")
NO_STACK = 0


@dataclass(frozen=True, slots=True)
class Frame:
    name: str
    filename: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A snapshot of all devices. Numbers that were missing are -1."""

    path: Path
    segment_device: Int64s
    segment_total_bytes: Int64s
    block_segment: Int64s
    """Row of the segment it is in."""
    block_address: Int64s
    block_bytes: Int64s
    block_requested_bytes: Int64s
    block_state: Int64s
    """Place in STATES; -1 for another one."""
    block_stack: Int64s
    event_device: Int16s
    event_action: Int8s
    """Place in ACTIONS; -1 for another one."""
    event_address: Int64s
    event_bytes: Int64s
    event_time_us: Int64s
    event_stack: Int32s
    stack_begin: Int64s
    """Where each stack begins in `stack_frames`, and the end of the last; the first is empty."""
    stack_frames: Int32s
    """Indices into `frames`, innermost first."""
    frames: list[Frame]
    num_odd: int
    """Entries left out."""
    warnings: tuple[str, ...]

    @property
    def num_stacks(self) -> int:
        """Different stacks, with the empty one."""
        return len(self.stack_begin) - 1

    def stack(self, number: int) -> list[Frame]:
        """The frames of one stack, innermost first."""
        begin, end = int(self.stack_begin[number]), int(self.stack_begin[number + 1])
        return [self.frames[index] for index in self.stack_frames[begin:end].tolist()]
