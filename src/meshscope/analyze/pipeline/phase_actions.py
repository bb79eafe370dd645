"""Pipeline actions from phases, for programs that recorded no actions.

A rank of a pipeline with one stage runs `forward` and `backward` once for each microbatch. So the
n-th forward of a step is F of microbatch n, and the n-th backward B of microbatch n: the order of
GPipe and 1F1B. Steps in which a rank has unequal numbers of the two are left out. Stages are
counted along the chain. An action waits for its input from the first recv that held the rank up
since the previous action.

Wrong where a rank holds several stages, runs backwards in another order than forwards (times stay
right, microbatches do not), or nests its own phases into these.
"""

from dataclasses import fields

import numpy as np

from meshscope.analyze.pipeline.message_chains import Chains
from meshscope.analyze.timeline.actions import ACTION_KINDS, Actions
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.rank_phases import fit_mark_offsets
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int32s, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.schema import BUILTIN_NAMES, SpanFlag

_FORWARD, _BACKWARD = BUILTIN_NAMES["forward"], BUILTIN_NAMES["backward"]
_F, _B = ACTION_KINDS.index("F"), ACTION_KINDS.index("B")


def actions_from_phases(
    timeline: Timeline, attempt: Attempt, chains: Chains
) -> Actions | Unavailable:
    """Actions of the kept steps of all ranks in a chain."""
    if attempt.is_from_traces:
        return Unavailable("traces have no pipeline actions: a phase is not one microbatch's")
    position_of = {rank: index for chain in chains for index, rank in enumerate(chain)}
    parts = []
    for index, rank in enumerate(timeline.ranks):
        recording = attempt.ranks.get(rank)
        if recording is not None and rank in position_of:
            parts.append(_read_rank(timeline, index, recording, position_of[rank]))
    found = [part for part in parts if len(part)]
    if not found:
        return Unavailable("no pipeline actions were recorded, and no forward and backward phases")
    return Actions(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in found])
            for field in fields(Actions)
        }
    )


def _read_rank(timeline: Timeline, index: int, recording: Recording, stage: int) -> Actions:
    spans = recording.read("spans")
    name = spans["name_id"].astype(np.int64)
    is_wanted = np.isin(name, (_FORWARD, _BACKWARD)) & (spans["thread"] == 0)
    flags = spans["flags"].astype(np.int64)
    is_wanted &= (flags & (SpanFlag.DETAIL | SpanFlag.ABORTED)) == 0
    rank = timeline.ranks[index]
    start_ns = int64_column(spans, "start_host_mono_ns")
    end_ns = start_ns + int64_column(spans, "duration_ns")
    if timeline.on_device[index]:
        start_ns, end_ns, is_marked = _find_device_times(recording, start_ns)
        is_wanted &= is_marked
    start = _to_reference(timeline, rank, start_ns)
    end = _to_reference(timeline, rank, end_ns)
    # The outermost of nested phases is the action.
    is_wanted &= spans["depth"] == 0
    rows = np.flatnonzero(is_wanted)
    rows = rows[np.argsort(start[rows], kind="stable")]
    step = np.searchsorted(timeline.period_end_ns[index], start[rows], side="right")
    is_kept = step < len(timeline.steps)
    rows, step = rows[is_kept], step[is_kept]
    is_kept = start[rows] >= timeline.period_start_ns[index][step]
    rows, step = rows[is_kept], step[is_kept]
    kind = np.where(name[rows] == _FORWARD, _F, _B)
    count = len(rows)
    wait_start = _find_waits(timeline, rank, start[rows], end[rows])
    return Actions(
        rank=np.full(count, rank, dtype=np.int32),
        step=step.astype(np.int32),
        kind=kind.astype(np.uint8),
        stage=np.full(count, stage, dtype=np.int32),
        chunk=np.zeros(count, dtype=np.int32),
        microbatch=_count_within(step, kind),
        start_ns=start[rows],
        end_ns=end[rows],
        wait_start_ns=wait_start,
        wait_ns=np.where(wait_start >= 0, start[rows] - wait_start, -1),
    )


def _find_device_times(recording: Recording, host_ns: Int64s) -> tuple[Int64s, Int64s, Bools]:
    """When the device's stream was in each phase, by when the host began it, and whether that is
    known: the host is steps ahead of it. Only where a kernel sample tells the device's clock."""
    offsets = fit_mark_offsets(recording)
    if offsets is None:
        return host_ns, host_ns, np.zeros(len(host_ns), dtype=np.bool_)
    marks = recording.read("device_spans")
    issued_ns = int64_column(marks, "host_start_host_mono_ns")
    order = np.argsort(issued_ns, kind="stable")
    issued_ns = issued_ns[order]
    row = np.minimum(np.searchsorted(issued_ns, host_ns), max(len(order) - 1, 0))
    is_known = issued_ns[row] == host_ns if len(order) else np.zeros(len(host_ns), dtype=np.bool_)
    row = order[row] if len(order) else row
    start_ns = int64_column(marks, "start_device_ns")[row] + offsets.find(host_ns)
    return start_ns, start_ns + int64_column(marks, "duration_ns")[row], is_known


def _find_waits(timeline: Timeline, rank: int, start: Int64s, end: Int64s) -> Int64s:
    """When a recv first held the rank up between two actions; -1 if none did."""
    none = np.full(len(start), -1, dtype=np.int64)
    if timeline.communication is None or not len(start):
        return none
    pieces, kinds = timeline.pieces, timeline.communication.operations.rows.kind
    low, high = np.searchsorted(pieces.rank, [rank, rank + 1])
    is_held = (pieces.kind[low:high] != PieceKind.WORK) & (pieces.row[low:high] >= 0)
    rows = low + np.flatnonzero(is_held)
    # A send that holds the rank up waits for its receiver, not for the input.
    held_ns = pieces.start_ns[rows[kinds[pieces.row[rows]] == Kind.RECV]]

    before = np.concatenate([[np.iinfo(np.int64).min], end[:-1]])
    index = np.searchsorted(held_ns, before, side="left")
    found = np.append(held_ns, np.iinfo(np.int64).max)[index]
    return np.where(found < start, found, none)


def _to_reference(timeline: Timeline, rank: int, times: Int64s) -> Int64s:
    if timeline.communication is None:
        return times
    return timeline.communication.alignment.to_reference(rank, times)


def _count_within(step: Int64s, kind: Int64s) -> Int32s:
    """The number of each action among those of its step and kind, from 0."""
    microbatch = np.zeros(len(step), dtype=np.int32)
    for one in (_F, _B):
        rows = np.flatnonzero(kind == one)
        first = np.searchsorted(step[rows], step[rows], side="left")
        microbatch[rows] = np.arange(len(rows)) - first
    return microbatch
