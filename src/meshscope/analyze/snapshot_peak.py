"""Replays a snapshot's events: how much was allocated when, and of what the peak was made.

Memory counts from `alloc` to `free_completed` (a block waits for other streams in between). Events
are often a ring buffer, so the run's beginning is missing: what was allocated at the first event is
what is there at the end, less what was allocated and plus what was freed since. A free without its
alloc belongs to a block from before; so does a block at the end that no event allocated.

Wrong where segments and events are of different moments, and where the buffer lost events in the
middle; `unexplained_bytes` says by how much the live blocks at the peak miss the replayed sum.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.store.snapshot_columns import ACTIONS, NO_STACK, STATES, Int64s, Snapshot

ALLOC, FREE = ACTIONS.index("alloc"), ACTIONS.index("free_completed")
INACTIVE = STATES.index("inactive")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """One device."""

    event_rows: Int64s
    """Rows of the snapshot's alloc and free_completed events, in order."""
    allocated_bytes: Int64s
    """After each of them."""
    stack: Int64s
    """Of each: the alloc's own, of a free that of what it frees."""
    delta_bytes: Int64s
    initial_bytes: int
    initial_by_stack: dict[int, int]
    """Blocks that were there before the first event."""
    final_bytes: int
    num_failures: int
    """Out-of-memory events."""

    @property
    def peak_place(self) -> int:
        """The event after which most was allocated; -1 if it was never more than at the start."""
        if not len(self.allocated_bytes):
            return -1
        place = int(np.argmax(self.allocated_bytes))
        return place if int(self.allocated_bytes[place]) > self.initial_bytes else -1

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated."""
        place = self.peak_place
        return self.initial_bytes if place < 0 else int(self.allocated_bytes[place])


def replay_device(snapshot: Snapshot, device: int) -> Replay | Unavailable:
    """Events of one device; Unavailable when it has neither blocks nor events."""
    live = find_live_blocks(snapshot, device)
    of_device = snapshot.event_device == device
    counted = (snapshot.event_action == ALLOC) | (snapshot.event_action == FREE)
    rows = np.flatnonzero(of_device & counted & (snapshot.event_bytes >= 0)).astype(np.int64)
    if not len(rows) and not len(live):
        return Unavailable(f"device {device} has neither blocks nor events")
    is_alloc = snapshot.event_action[rows] == ALLOC
    sizes = snapshot.event_bytes[rows]
    delta = np.where(is_alloc, sizes, -sizes)
    final = int(snapshot.block_bytes[live].sum())
    initial = max(final - int(delta.sum()), 0)
    stacks, before = _match(snapshot, rows, is_alloc, live)
    ooms = of_device & (snapshot.event_action == ACTIONS.index("oom"))
    return Replay(
        event_rows=rows,
        allocated_bytes=initial + np.cumsum(delta),
        stack=stacks,
        delta_bytes=delta,
        initial_bytes=initial,
        initial_by_stack=before,
        final_bytes=final,
        num_failures=int(ooms.sum()),
    )


def find_live_blocks(snapshot: Snapshot, device: int) -> Int64s:
    """Rows of a device's blocks that are in use at the end."""
    segment = snapshot.block_segment
    is_placed = (segment >= 0) & (segment < len(snapshot.segment_device))
    owner = np.full(len(segment), -1, dtype=np.int64)
    owner[is_placed] = snapshot.segment_device[segment[is_placed]]
    state = snapshot.block_state
    is_used = (state >= 0) & (state != INACTIVE) & (snapshot.block_bytes >= 0)
    return np.flatnonzero((owner == device) & is_used).astype(np.int64)


def _match(
    snapshot: Snapshot, rows: Int64s, is_alloc: npt.NDArray[np.bool_], live: Int64s
) -> tuple[Int64s, dict[int, int]]:
    """Stack of every event, and the bytes from before by stack."""
    stacks = snapshot.event_stack[rows].copy()
    addresses = snapshot.event_address[rows].tolist()
    sizes = snapshot.event_bytes[rows].tolist()
    open_rows: dict[int, int] = {}
    before: dict[int, int] = {}
    for place, (address, allocates) in enumerate(zip(addresses, is_alloc.tolist(), strict=True)):
        if allocates:
            open_rows[address] = place
            continue
        owner = open_rows.pop(address, None)
        if owner is not None:
            stacks[place] = stacks[owner]
        else:
            # Where it was made is not known: the event's own stack is that of the free.
            stacks[place] = NO_STACK
            before[NO_STACK] = before.get(NO_STACK, 0) + sizes[place]
    for row in live.tolist():
        if int(snapshot.block_address[row]) not in open_rows:
            stack = int(snapshot.block_stack[row])
            before[stack] = before.get(stack, 0) + int(snapshot.block_bytes[row])
    return stacks, before


def compose_peak(replay: Replay) -> dict[int, int]:
    """Bytes by stack at the peak."""
    found = dict(replay.initial_by_stack)
    end = replay.peak_place + 1
    stacks, places = np.unique(replay.stack[:end], return_inverse=True)
    sums = np.zeros(len(stacks), dtype=np.int64)
    np.add.at(sums, places, replay.delta_bytes[:end])
    for stack, num_bytes in zip(stacks.tolist(), sums.tolist(), strict=True):
        found[stack] = found.get(stack, 0) + num_bytes
    return {stack: num_bytes for stack, num_bytes in found.items() if num_bytes}
