"""Replays a snapshot's events: how much was allocated when, and the composition of the peak.

Memory counts from `alloc` to `free_completed` (a block waits for other streams in between). Events
are often a ring buffer, so the start of the run is missing: the bytes allocated at the first event
are those at the end, minus allocations and plus frees since. A free without its alloc belongs to an
earlier block; so does a block at the end that no event allocated.

Wrong where segments and events are from different moments, and where the buffer lost events in the
middle; `unexplained_bytes` is the difference between the live blocks at the peak and the replay.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, NO_STACK, STATES, Snapshot
from meshscope.store.read.arrays import Int8s, Int32s, Int64s

ALLOC, FREE = ACTIONS.index("alloc"), ACTIONS.index("free_completed")
INACTIVE = STATES.index("inactive")
_NUM_PARTS = 16
"""Events are matched in this many parts by address, so that sorting needs little memory."""
CHUNK_EVENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotReplay:
    event_rows: Int64s | Int32s
    """Rows of the snapshot's alloc and free_completed events, in order."""
    allocated_bytes: Int64s
    """After each of them."""
    stack: Int32s
    """Stack of each alloc; a free has that of its block."""
    initial_bytes: int
    initial_by_stack: dict[int, int]
    """Bytes allocated before the first event."""
    final_bytes: int
    num_failures: int
    """Out-of-memory events."""

    @property
    def peak_index(self) -> int:
        """The event after which most was allocated; -1 if that was never more than at the start."""
        if not len(self.allocated_bytes):
            return -1
        index = int(np.argmax(self.allocated_bytes))
        return index if int(self.allocated_bytes[index]) > self.initial_bytes else -1

    @property
    def peak_bytes(self) -> int:
        index = self.peak_index
        return self.initial_bytes if index < 0 else int(self.allocated_bytes[index])

    def delta_bytes(self, start: int, end: int) -> Int64s:
        """What each of these events added."""
        before = self.initial_bytes if start == 0 else int(self.allocated_bytes[start - 1])
        return np.diff(self.allocated_bytes[start:end], prepend=before)


def replay_device(snapshot: Snapshot, device: int) -> SnapshotReplay | Unavailable:
    """Events of one device; Unavailable when it has neither blocks nor events."""
    live = find_live_blocks(snapshot, device)
    rows = _find_rows(snapshot, device)
    if not len(rows) and not len(live):
        return Unavailable(f"device {device} has neither blocks nor events")
    is_alloc = snapshot.event_action[rows] == ALLOC
    stacks, before = _match(snapshot, rows, is_alloc, live)
    allocated = snapshot.event_bytes[rows]  # a copy
    np.negative(allocated, out=allocated, where=~is_alloc)
    np.cumsum(allocated, out=allocated)
    final = int(snapshot.block_bytes[live].sum())
    change = int(allocated[-1]) if len(rows) else 0
    initial = max(final - change, 0)
    allocated += initial
    ooms = (snapshot.event_device == device) & (snapshot.event_action == ACTIONS.index("oom"))
    return SnapshotReplay(
        event_rows=rows,
        allocated_bytes=allocated,
        stack=stacks,
        initial_bytes=initial,
        initial_by_stack=before,
        final_bytes=final,
        num_failures=int(np.count_nonzero(ooms)),
    )


def _find_rows(snapshot: Snapshot, device: int) -> Int64s | Int32s:
    """Allocations and frees of a device with a size."""
    action = snapshot.event_action
    wanted = (action == ALLOC) | (action == FREE)
    wanted &= snapshot.event_device == device
    wanted &= snapshot.event_bytes >= 0
    num_rows = int(np.count_nonzero(wanted))
    is_small = len(wanted) <= np.iinfo(np.int32).max
    rows: Int64s | Int32s = (
        np.empty(num_rows, dtype=np.int32) if is_small else np.empty(num_rows, dtype=np.int64)
    )
    num_found = 0
    for start in range(0, len(wanted), CHUNK_EVENTS):
        found = np.flatnonzero(wanted[start : start + CHUNK_EVENTS])
        rows[num_found : num_found + len(found)] = start + found
        num_found += len(found)
    return rows


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
    snapshot: Snapshot,
    rows: Int64s | Int32s,
    is_alloc: npt.NDArray[np.bool_],
    live: Int64s,
) -> tuple[Int32s, dict[int, int]]:
    """Stack of every event, and the earlier bytes by stack.

    Events at one address are in order: a free belongs to the previous event if that is an
    allocation. An address whose last event is an allocation is open at the end.
    """
    stacks = snapshot.event_stack[rows]  # a copy
    part_of = _find_parts(snapshot, rows)
    live_address = snapshot.block_address[live]
    is_known = np.zeros(len(live), dtype=np.bool_)
    unknown_bytes = 0
    for part in range(_NUM_PARTS):
        indices = np.flatnonzero(part_of == part)
        if not len(indices):
            continue
        found = snapshot.event_address[rows[indices]]
        order = np.argsort(found, kind="stable")
        indices, found = indices[order], found[order]
        allocates = is_alloc[indices]
        is_same = found[1:] == found[:-1]
        is_owned = np.zeros(len(indices), dtype=np.bool_)
        is_owned[1:] = is_same & ~allocates[1:] & allocates[:-1]
        frees = np.flatnonzero(is_owned)
        stacks[indices[frees]] = stacks[indices[frees - 1]]
        # The stack of other allocations is not known: the event's own is that of the free.
        orphans = indices[~allocates & ~is_owned]
        stacks[orphans] = NO_STACK
        unknown_bytes += int(snapshot.event_bytes[rows[orphans]].sum())
        is_open = allocates.copy()
        is_open[:-1] &= ~is_same
        is_known |= np.isin(live_address, found[is_open])
    before = {NO_STACK: unknown_bytes} if unknown_bytes else {}
    older = live[~is_known]
    for stack, num_bytes in _sum_by(
        snapshot.block_stack[older], snapshot.block_bytes[older], snapshot.num_stacks
    ).items():
        before[stack] = before.get(stack, 0) + num_bytes
    return stacks, before


def _find_parts(snapshot: Snapshot, rows: Int64s | Int32s) -> Int8s:
    """The address part of each event."""
    part_of = np.empty(len(rows), dtype=np.int8)
    for start in range(0, len(rows), CHUNK_EVENTS):
        addresses = snapshot.event_address[rows[start : start + CHUNK_EVENTS]]
        # Blocks start at multiples of 512, large ones at multiples of 2 MiB.
        part_of[start : start + CHUNK_EVENTS] = ((addresses >> 9) ^ (addresses >> 21)) % _NUM_PARTS
    return part_of


def _sum_by(stacks: Int64s, sizes: Int64s, num_stacks: int) -> dict[int, int]:
    sums = np.zeros(num_stacks, dtype=np.int64)
    np.add.at(sums, stacks, sizes)
    used = np.unique(stacks)
    return dict(zip(used.tolist(), sums[used].tolist(), strict=True))


def compose_peak(replay: SnapshotReplay) -> dict[int, int]:
    """Bytes by stack at the peak."""
    end = replay.peak_index + 1
    num_stacks = int(replay.stack.max(initial=0)) + 1
    sums = np.zeros(max(num_stacks, *(s + 1 for s in (0, *replay.initial_by_stack))), np.int64)
    for stack, num_bytes in replay.initial_by_stack.items():
        sums[stack] += num_bytes
    for start in range(0, end, CHUNK_EVENTS):
        last = min(start + CHUNK_EVENTS, end)
        np.add.at(sums, replay.stack[start:last], replay.delta_bytes(start, last))
    used = np.flatnonzero(sums)
    return dict(zip(used.tolist(), sums[used].tolist(), strict=True))
