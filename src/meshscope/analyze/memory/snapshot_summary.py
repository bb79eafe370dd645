"""A memory snapshot in words: the peak by stack, module and category, its course, fragmentation.

Fragmentation: free bytes in segments that are partly in use cannot be returned to the device, and
serve only requests that fit. `fragmentation_ratio` is 1 minus the largest free block over all free
bytes: 0 if all free memory is one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.memory.snapshot_peak import (
    CHUNK_EVENTS,
    INACTIVE,
    SnapshotReplay,
    compose_peak,
    find_live_blocks,
    replay_device,
)
from meshscope.analyze.memory.snapshot_sites import CATEGORIES, Site, categorize_stacks, find_site
from meshscope.core.unavailable import Unavailable
from meshscope.core.unit_text import memory, ratio
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, Snapshot
from meshscope.store.read.arrays import Int8s, Int64s

_NUM_TIMES = 100
"""Moments kept of the course."""
_NUM_FRAMES = 12
"""Frames shown of a stack."""
_MAX_DEVICES = 256
"""torch writes no more; each costs a pass over the events."""
_SEGMENT_ACTIONS = tuple(
    ACTIONS.index(name)
    for name in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
)
"""In one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """What one stack allocated that was alive at the peak."""

    num_bytes: int
    category: str
    place: str
    module: str
    frames: tuple[str, ...]
    """Innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseMoment:
    """Allocated bytes by category after the fullest event of an interval."""

    event: int
    time_us: int | Unavailable
    allocated_bytes: int
    categories_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """One device at the moment of the snapshot."""

    num_segments: int
    reserved_bytes: int
    in_use_bytes: int
    free_bytes: int
    """Reserved and not in use."""
    free_in_used_segments_bytes: int
    """Cannot be returned to the device."""
    largest_free_bytes: int
    fragmentation_ratio: float | Unavailable
    rounding_bytes: int | Unavailable
    """In use beyond what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    device: int
    peak_bytes: int
    peak_event: int
    """Counted over allocations and frees; -1 if never more than before the first event."""
    num_events: int
    """Allocations and frees that were replayed."""
    actions: Mapping[str, int]
    """All recorded events, by what torch calls them."""
    num_failures: int
    """Out-of-memory events."""
    initial_bytes: int
    """Allocated before the first event."""
    final_bytes: int
    """Allocated when the snapshot was taken."""
    reserved_peak_bytes: int
    """The most the allocator held, by its segments and the events about them."""
    categories_bytes: Mapping[str, int]
    modules_bytes: Mapping[str, int]
    """At the peak, largest first; the empty name is what no `forward` made."""
    stacks: tuple[StackMemory, ...]
    """At the peak, largest first."""
    unexplained_bytes: int
    """The peak minus the blocks known to be alive at it."""
    course: tuple[CourseMoment, ...]
    fragmentation: Fragmentation | Unavailable
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """All devices of a snapshot."""

    file: str
    devices: tuple[DeviceSnapshot, ...]
    warnings: tuple[str, ...]


def summarize_snapshot(snapshot: Snapshot) -> SnapshotSummary:
    """Every device with blocks or events."""
    categories = categorize_stacks(snapshot)
    devices, found = [], _find_devices(snapshot)
    warnings = list(snapshot.warnings)
    if len(found) > _MAX_DEVICES:
        warnings.append(f"{len(found)} devices: those after the first {_MAX_DEVICES} are left out")
    for device in found[:_MAX_DEVICES]:
        replay = replay_device(snapshot, device)
        if not isinstance(replay, Unavailable):
            devices.append(_summarize_device(snapshot, device, replay, categories))
    return SnapshotSummary(
        file=snapshot.path.name, devices=tuple(devices), warnings=tuple(warnings)
    )


def _find_devices(snapshot: Snapshot) -> list[int]:
    counted = np.zeros(1 << 15, dtype=np.bool_)
    counted[snapshot.event_device[snapshot.event_device >= 0]] = True
    return [int(one) for one in np.union1d(snapshot.segment_device, np.flatnonzero(counted))]


def _summarize_device(
    snapshot: Snapshot, device: int, replay: SnapshotReplay, category_of: Int8s
) -> DeviceSnapshot:
    by_stack = compose_peak(replay)
    sites = {stack: find_site(snapshot.stack(stack)) for stack in by_stack}
    categories: dict[str, int] = {}
    modules: dict[str, int] = {}
    for stack, num_bytes in by_stack.items():
        site = sites[stack]
        categories[site.category] = categories.get(site.category, 0) + num_bytes
        modules[site.module] = modules.get(site.module, 0) + num_bytes
    ordered = _largest_first(categories)
    fragmentation = measure_fragmentation(snapshot, device)
    return DeviceSnapshot(
        device=device,
        peak_bytes=replay.peak_bytes,
        peak_event=replay.peak_index,
        num_events=len(replay.event_rows),
        actions=count_actions(snapshot, device),
        num_failures=replay.num_failures,
        initial_bytes=replay.initial_bytes,
        final_bytes=replay.final_bytes,
        reserved_peak_bytes=_find_reserved_peak(snapshot, device),
        categories_bytes=ordered,
        modules_bytes=_largest_first(modules),
        stacks=tuple(
            _describe_stack(snapshot, sites[stack], stack, num_bytes)
            for stack, num_bytes in sorted(by_stack.items(), key=lambda item: -item[1])
        ),
        unexplained_bytes=replay.peak_bytes - sum(by_stack.values()),
        course=_trace_course(snapshot, replay, category_of),
        fragmentation=fragmentation,
        sentence=_say(device, replay, ordered),
    )


def count_actions(snapshot: Snapshot, device: int) -> dict[str, int]:
    """Events of a device by action; those of no known kind are left out."""
    action = snapshot.event_action[snapshot.event_device == device]
    counts = np.bincount(action[action >= 0], minlength=len(ACTIONS)).tolist()
    return {name: count for name, count in zip(ACTIONS, counts, strict=True) if count}


def _find_reserved_peak(snapshot: Snapshot, device: int) -> int:
    """The most reserved, counted back from the segments at the end."""
    here = np.flatnonzero(snapshot.segment_device == device)
    final = int(np.maximum(snapshot.segment_total_bytes[here], 0).sum())
    action = snapshot.event_action
    is_segment = (action >= _SEGMENT_ACTIONS[0]) & (action <= _SEGMENT_ACTIONS[-1])
    rows = np.flatnonzero(is_segment & (snapshot.event_device == device))
    came = np.isin(action[rows], [ACTIONS.index("segment_alloc"), ACTIONS.index("segment_map")])
    sizes = np.maximum(snapshot.event_bytes[rows], 0)
    held = np.cumsum(np.where(came, sizes, -sizes))
    initial = max(final - int(held[-1]), 0) if len(rows) else final
    return initial + int(held.max(initial=0))


def _largest_first(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def _describe_stack(snapshot: Snapshot, site: Site, stack: int, num_bytes: int) -> StackMemory:
    frames = snapshot.stack(stack)[:_NUM_FRAMES]
    return StackMemory(
        num_bytes=num_bytes,
        category=site.category,
        place=site.place,
        module=site.module,
        frames=tuple(f"{frame.filename}:{frame.line} {frame.name}" for frame in frames),
    )


def _say(device: int, replay: SnapshotReplay, categories: Mapping[str, int]) -> str:
    """What filled the device, in one sentence."""
    most = [
        f"{name} {memory(num_bytes)} ({ratio(num_bytes / max(replay.peak_bytes, 1))})"
        for name, num_bytes in list(categories.items())[:3]
        if num_bytes > 0
    ]
    what = ", ".join(most) or "nothing that has a stack"
    return f"Device {device} had {memory(replay.peak_bytes)} allocated at its peak: {what}."


def _trace_course(
    snapshot: Snapshot, replay: SnapshotReplay, category_of: Int8s
) -> tuple[CourseMoment, ...]:
    """Up to _NUM_TIMES moments: the fullest of equal intervals of the events."""
    if not len(replay.event_rows):
        return ()
    indices = _find_fullest(replay)
    sums = _sum_categories(replay, category_of, indices)
    for stack, num_bytes in replay.initial_by_stack.items():
        sums[0, category_of[stack]] += num_bytes
    columns = np.cumsum(sums, axis=0).T.tolist()
    times = snapshot.event_time_us[replay.event_rows[indices]].tolist()
    return tuple(
        CourseMoment(
            event=event,
            time_us=time_us if time_us >= 0 else Unavailable("events have no time"),
            allocated_bytes=int(replay.allocated_bytes[event]),
            categories_bytes={
                name: column[index]
                for name, column in zip(CATEGORIES, columns, strict=True)
                if column[index]
            },
        )
        for index, (event, time_us) in enumerate(zip(indices.tolist(), times, strict=True))
    )


def _sum_categories(replay: SnapshotReplay, category_of: Int8s, indices: Int64s) -> Int64s:
    """What each category gained up to the first index, and from each to the next."""
    sums = np.zeros((len(indices), len(CATEGORIES)), dtype=np.int64)
    start = 0
    for number, event in enumerate(indices.tolist()):
        while start <= event:
            end = min(start + CHUNK_EVENTS, event + 1)
            categories = category_of[replay.stack[start:end]]
            np.add.at(sums[number], categories, replay.delta_bytes(start, end))
            start = end
    return sums


def _find_fullest(replay: SnapshotReplay) -> Int64s:
    num_events = len(replay.event_rows)
    edges = np.linspace(0, num_events, min(_NUM_TIMES, num_events) + 1).astype(np.int64)
    return np.array(
        [
            start + int(np.argmax(replay.allocated_bytes[start:end]))
            for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ],
        dtype=np.int64,
    )


def measure_fragmentation(snapshot: Snapshot, device: int) -> Fragmentation | Unavailable:
    """From the segments; Unavailable when the device has none."""
    segments = np.flatnonzero(snapshot.segment_device == device)
    if not len(segments):
        return Unavailable("the snapshot has no segments of this device")
    reserved = int(np.maximum(snapshot.segment_total_bytes[segments], 0).sum())
    used = find_live_blocks(snapshot, device)
    in_use = int(snapshot.block_bytes[used].sum())
    is_here = np.isin(snapshot.block_segment, segments)
    free_rows = np.flatnonzero(is_here & (snapshot.block_state == INACTIVE))
    in_partly_used = np.isin(snapshot.block_segment[free_rows], snapshot.block_segment[used])
    free = np.maximum(snapshot.block_bytes[free_rows], 0)
    total, largest = int(free.sum()), int(free.max(initial=0))
    asked = snapshot.block_requested_bytes[used]
    return Fragmentation(
        num_segments=len(segments),
        reserved_bytes=reserved,
        in_use_bytes=in_use,
        free_bytes=total,
        free_in_used_segments_bytes=int(free[in_partly_used].sum()),
        largest_free_bytes=largest,
        fragmentation_ratio=1 - largest / total if total else Unavailable("nothing is free"),
        rounding_bytes=in_use - int(asked.sum())
        if len(asked) and int(asked.min()) >= 0
        else Unavailable("requested sizes are not in the snapshot"),
    )
