"""Traces of a job's ranks as a run in memory, so that everything that reads runs reads them.

Every rank has a clock of its own, which `analyze.clocks` aligns by what ranks did together, unless
the names of traces tell that they are of one host. A rank may have several traces, of different
steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.traces.trace_alignment import align_steps, shift_steps
from meshscope.ingest.traces.trace_axes import coordinates_of, infer_layout, infer_pipeline
from meshscope.ingest.traces.trace_collectives import SYMMETRIC, TraceCollective
from meshscope.ingest.traces.trace_numbers import number_operations
from meshscope.ingest.traces.trace_rank_tables import RankTables
from meshscope.ingest.traces.trace_recording import (
    TraceRecording,
)
from meshscope.ingest.traces.trace_steps import StepSource
from meshscope.store.read.recording import TRACE_SOURCE
from meshscope.store.read.run import Run, group_attempts

MAX_SPANS = 60_000
"""Device spans of all ranks together; beyond, short gaps are not kept apart from work."""
LAYOUT_FROM_NAMES = "from the folders' names"
LAYOUT_FROM_MESSAGES = "from who sends to whom"
_LEAD_NS = 10 * 86_400 * 1_000_000_000
"""Clocks of the run begin this long before the first event of the first trace."""
_MAX_RANKS = 1 << 20
_NOTHING = "it has no operator, annotation or kernel with a start and a duration"
_MAX_LEFT_OUT = 8
"""Files that are named; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """A run made of traces."""

    run: Run
    """One attempt, its recordings in memory."""
    notes: tuple[str, ...]
    """What readers of the run should know."""


def make_run(
    recordings: Sequence[TraceRecording],
    path: Path,
    *,
    layout: Layout | None = None,
    left_out: Sequence[str] = (),
) -> TraceRun:
    """A run of the traces at `path`; TraceError where they are not of one job.

    `left_out` says which files could not be read, and why."""
    empty = [
        f"{one.source}: {_NOTHING}, as torch.profiler writes them"
        for one in recordings
        if not len(one.steps)
    ]
    recordings = [one for one in recordings if len(one.steps)]
    left_out = [*left_out, *empty]
    if not recordings:
        raise TraceError(f"{empty[0]}: nothing to make a run of")
    by_rank = _sort_by_rank(recordings)
    world_size = _find_world_size(recordings, by_rank)
    found, source = _find_layout(layout, by_rank, world_size)
    if isinstance(found, Layout) and found.world_size != world_size:
        raise TraceError(
            f"the layout {found.describe()} has {found.world_size} ranks, the traces are of a job "
            f"with {world_size}"
        )
    origin_ns = recordings[0].extent_ns[0] - _LEAD_NS
    notes = _find_notes(recordings, by_rank, world_size)
    notes += [f"left out: {text}" for text in left_out[:_MAX_LEFT_OUT]]
    if len(left_out) > _MAX_LEFT_OUT:
        notes.append(f"left out: {len(left_out) - _MAX_LEFT_OUT:,} more files")
    by_rank, num_assumed = _assume_all_ranks(by_rank, world_size)
    if num_assumed:
        notes.append(
            f"the traces name no group for {num_assumed} collectives of each rank: they count as "
            "collectives of all ranks"
        )
    by_rank = align_steps(by_rank)
    numbered = number_operations(by_rank)
    made = [
        RankTables(rank, world_size, found, source, origin_ns, own, notes).fill(numbered[rank])
        for rank, own in by_rank.items()
    ]
    run = Run(path=path, manifest={"source": TRACE_SOURCE}, attempts=group_attempts(made))
    notes += [f"{one.source}: {text}" for one in recordings for text in one.warnings]
    return TraceRun(run=run, notes=tuple(notes))


_ByRank = dict[int, list[TraceRecording]]


def _sort_by_rank(recordings: Sequence[TraceRecording]) -> _ByRank:
    found: _ByRank = {}
    is_alone = _are_of_one_process(recordings)
    for one in recordings:
        found.setdefault(_rank_of(one, is_only=is_alone), []).append(one)
    for rank, own in found.items():
        own.sort(key=lambda one: one.extent_ns)
        own[:] = _number_windows(own)
        seen: dict[int, str] = {}
        for one in own:
            for step in one.steps.number.tolist():
                if step in seen:
                    raise TraceError(
                        f"{seen[step]} and {one.source} are both of step {step} of rank {rank}; "
                        "give traces of one run, and one for a rank and step"
                    )
                seen[step] = one.source
    return dict(sorted(found.items()))


def _are_of_one_process(recordings: Sequence[TraceRecording]) -> bool:
    """One trace; or several that name neither rank nor job and communicate with nobody, whose
    marked steps are all different: what a schedule with several cycles leaves of one process."""
    if len(recordings) == 1:
        return True
    is_unnamed = all(
        isinstance(one.rank, Unavailable)
        and isinstance(one.world_size, Unavailable)
        and coordinates_of(one.source) is None
        and one.has_steps
        and not one.collectives
        for one in recordings
    )
    numbers = [step for one in recordings for step in one.steps.number.tolist()]
    return is_unnamed and len(set(numbers)) == len(numbers)


def _number_windows(own: list[TraceRecording]) -> list[TraceRecording]:
    """Steps that the profiler did not number go on where the window before ended."""
    if len(own) < 2 or any(one.has_steps for one in own):
        return own
    first = np.cumsum([0, *(len(one.steps) for one in own)])
    return [shift_steps(one, int(by)) for one, by in zip(own, first, strict=False)]


def _assume_all_ranks(by_rank: _ByRank, world_size: int) -> tuple[_ByRank, int]:
    """Collectives of devices whose traces tell no group at all are of all ranks, and how many.

    Only where all ranks have traces, of the same collectives in the same order in every step and of
    nothing else: with messages among them, who waited for whom would be half known.
    """
    found = [
        [(one.step, one.found) for recording in own for one in recording.collectives]
        for own in by_rank.values()
    ]
    orders = {tuple((step, one.kind, str(one.size_bytes)) for step, one in own) for own in found}
    is_told = any(one.groups or one.work is None for own in by_rank.values() for one in own)
    is_groupless = all(_is_groupless(one) for own in found for _, one in own)
    if is_told or not is_groupless or len(by_rank) < max(world_size, 2) or len(orders) > 1:
        return by_rank, 0
    everyone = tuple(range(world_size))
    named = {rank: [_name_members(one, everyone) for one in own] for rank, own in by_rank.items()}
    return named, len(found[0])


def _is_groupless(found: TraceCollective) -> bool:
    is_of_all = found.kind in SYMMETRIC or found.kind in ("broadcast", "reduce")
    return is_of_all and not (found.group or found.description or found.ranks)


def _name_members(recording: TraceRecording, ranks: tuple[int, ...]) -> TraceRecording:
    collectives = tuple(
        replace(one, found=replace(one.found, ranks=ranks)) for one in recording.collectives
    )
    return replace(recording, collectives=collectives)


def _rank_of(one: TraceRecording, *, is_only: bool) -> int:
    if not isinstance(one.rank, Unavailable):
        rank = one.rank
    elif (named := coordinates_of(one.source)) is not None:
        rank = named[0]
    elif is_only:
        rank = 0
    else:
        raise TraceError(
            f"{one.source} does not say its rank, and no folder above it is called rank{{g}}_…: "
            "leave it out, or put it into such a folder"
        )
    if not 0 <= rank < _MAX_RANKS:
        raise TraceError(f"{one.source} is of rank {rank}, which no job has")
    return rank


def _find_world_size(recordings: Sequence[TraceRecording], by_rank: _ByRank) -> int:
    stated = {one.world_size for one in recordings if isinstance(one.world_size, int)}
    if len(stated) > 1:
        raise TraceError(
            f"the traces are of jobs with {' and '.join(map(str, sorted(stated)))} ranks; give "
            "those of one job"
        )
    size = max(next(iter(stated), 0), max(by_rank) + 1)
    if size > _MAX_RANKS:
        raise TraceError(f"the traces name a job of {size} ranks, which is not plausible")
    return size


def _find_layout(
    declared: Layout | None, by_rank: _ByRank, world_size: int
) -> tuple[Layout | Unavailable, str]:
    """And where it comes from."""
    if declared is not None:
        return declared, "declared"
    named = _infer_layout(by_rank, world_size)
    if isinstance(named, Layout) or len(by_rank) < world_size:
        return named, LAYOUT_FROM_NAMES
    line = find_pipeline([trace for own in by_rank.values() for trace in own], world_size)
    if isinstance(line, Layout):
        return line, LAYOUT_FROM_MESSAGES
    return named, LAYOUT_FROM_NAMES


def find_pipeline(
    recordings: Sequence[TraceRecording], world_size: int | Unavailable
) -> Layout | Unavailable:
    """The pipeline that the messages of all ranks tell."""
    ranks = {one.rank for one in recordings}
    if isinstance(world_size, Unavailable) or len(ranks) < world_size:
        return Unavailable("not all ranks have a trace")
    found = [one.found for trace in recordings for one in trace.collectives]
    messages = {message for one in found for message in one.messages}
    return infer_pipeline(messages, {one.ranks for one in found}, world_size)


def _infer_layout(by_rank: _ByRank, world_size: int) -> Layout | Unavailable:
    coordinates = {}
    for rank, own in by_rank.items():
        named = coordinates_of(own[0].source)
        if named is not None and named[0] == rank and named[1]:
            coordinates[rank] = named[1]
    if not coordinates:
        return Unavailable("no folder says where its rank lies in the mesh")
    return infer_layout(coordinates, world_size)


def _find_notes(
    recordings: Sequence[TraceRecording], by_rank: _ByRank, world_size: int
) -> list[str]:
    sources = {one.steps.source for one in recordings} - {StepSource.PROFILER}
    notes = [f"steps are {source.words}" for source in sorted(sources)]
    if len(recordings) > 1 and _are_of_one_process(recordings):
        notes.append(
            f"the {len(recordings):,} traces name no rank: they count as windows of one process, "
            "because no step is in two of them"
        )
    if len(by_rank) < world_size:
        notes.append(
            f"traces of only {len(by_rank):,} of {world_size:,} ranks: a rank without a trace may "
            "have held up the others"
        )
    merged_ns = max((one.work.merged_gap_ns for one in recordings if one.work), default=0)
    if merged_ns:
        notes.append(f"device gaps of up to {merged_ns / 1e3:g} µs count as the work around them")
    num_outside = sum(one.num_outside for one in recordings)
    if num_outside:
        notes.append(f"{num_outside:,} device events outside of steps are left out")
    earlier_ns = max((one.earlier_ns for one in recordings), default=0)
    if earlier_ns:
        notes.append(
            f"the first step includes up to {earlier_ns / 1e6:.3g} ms of work that was launched "
            "before the traces began"
        )
    if any(one.other_devices for one in recordings):
        notes.append("a trace has several devices: only the one with the most events is analysed")
    return notes
