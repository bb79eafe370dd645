"""All ranks' time on one clock, without gaps: who worked, who waited, and what was transferred.

    steps → operations → matches → clocks → arrivals → hold-ups → pieces, rank by rank

WORK is what a rank is itself responsible for: where ranks wait for each other, a slow rank shows
more WORK than its peers, and all others show WAIT. The pieces of a rank and a step sum to the
step's period exactly.

If a rank's phases were marked on an accelerator's stream, its pieces are the stream's. Device spans
are put on the host's clock; between them the stream idles, which is WORK in the host's phase if
that is data, compile, checkpoint, eval or logging, and in no phase otherwise (a host or launch
gap). Steps without marks are left out and counted; the recorder marks only some short steps.

Wrong where clocks of hosts are not tied together (`ClockAlignment.problems`): durations hold,
waits do not. Wrong where an operation was not seen: waiting in it is WORK, and in a phase that the
program calls communication UNSPLIT.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.job import Job, load_job
from meshscope.analyze.job.operations import PhaseBook
from meshscope.analyze.rank.lost_records import mark_incomplete
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.timeline.actions import ACTION_KINDS, Actions, read_actions
from meshscope.analyze.timeline.pieces import PieceKind, Pieces
from meshscope.analyze.timeline.rank_pieces import Track, cut_pieces
from meshscope.analyze.timeline.rank_reading import (
    COMM_PHASE,
    RankReading,
    apply_device_times,
    layer_actions,
    make_track,
    read_rank,
)
from meshscope.analyze.timeline.step_kinds import StepKinds, sort_steps
from meshscope.analyze.timeline.timeline_holds import find_holds
from meshscope.analyze.timeline.timeline_steps import KeptSteps, StepTable, keep_steps
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.run import Attempt

__all__ = [
    "ACTION_KINDS",
    "Actions",
    "PieceKind",
    "Pieces",
    "StepChoice",
    "Timeline",
    "build_timeline",
    "cut_timeline",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    ranks: tuple[int, ...]
    """Ascending."""
    layout: Layout | Unavailable
    steps: Int64s
    """Numbers of the kept steps: finished on every rank, after warm-up; ascending."""
    starts_window: Bools
    """Per step: the step before was not kept, so nothing may be chained across."""
    num_left_out: int
    """Steady steps that were not kept, to stay within memory."""
    num_profiled: int
    """Steady steps left out because a trace window disturbed them."""
    num_unwatched: int
    """Steady steps left out because some rank did not record their communication."""
    num_unmarked: int
    """Steady steps left out because a rank that has device marks has none for them."""
    num_incomplete: int
    """Steady steps left out because some of a rank's records of them are lost."""
    kinds: StepKinds
    """What the kept steps stand for among all that were read."""
    period_start_ns: Int64s
    """[rank index, step index]: the end of the step before, on the reference clock."""
    period_end_ns: Int64s
    """[rank index, step index]: the step's own end."""
    step_start_ns: Int64s
    """[rank index, step index]: the step's own start."""
    host_period_ns: Int64s
    """[rank index, step index]: the period on the host's clock; `period_end_ns` less
    `period_start_ns` where `on_device` is false."""
    on_device: Bools
    """Per rank: the pieces are the device stream's, on the host's clock."""
    phases: tuple[str, ...]
    """Names; the first is empty and stands for no phase."""
    pieces: Pieces
    actions: Actions | None
    """None where no pipeline action was recorded."""
    alignment: ClockAlignment
    communication: Job | None
    """None where no operation was recorded."""


@or_unavailable
def build_timeline(
    attempt: Attempt, *, warmup_steps: int | None = None, steps: StepChoice | None = None
) -> Timeline:
    """The timeline of an attempt's steady steps, or of as many of them as `steps` allows."""
    kept = need(keep_steps(attempt, warmup_steps=warmup_steps, choice=steps or StepChoice()))
    return need(cut_timeline(kept, load_job(kept.attempt)))


@or_unavailable
def cut_timeline(kept: KeptSteps, job: Job) -> Timeline:
    """The timeline of the kept steps; `job` has their operations."""
    book = PhaseBook()
    readings = [
        read_rank(kept.attempt.ranks[rank], own, book)
        for rank, own in zip(kept.ranks, kept.by_rank, strict=True)
    ]
    complete = _leave_out_incomplete(kept)
    if not len(complete.steps):
        raise Missing("records of every step are lost: what ranks did is not known")
    table, is_marked = apply_device_times(complete, readings)
    if not len(table.steps):
        raise Missing("no step has device marks on all ranks that were marked at all")
    tracks, actions = _make_tracks(kept.attempt, readings, table, book, job)
    period_start = np.array([track.period_start_ns for track in tracks])
    period_end = np.array([track.period_end_ns for track in tracks])
    return Timeline(
        ranks=kept.ranks,
        layout=kept.attempt.layout,
        steps=table.steps,
        starts_window=_find_borders(period_start, period_end),
        num_left_out=kept.num_left_out,
        num_profiled=kept.num_profiled,
        num_unwatched=len(kept.unwatched),
        num_unmarked=int(np.count_nonzero(~is_marked)),
        num_incomplete=len(kept.table.steps) - len(complete.steps),
        kinds=sort_steps(kept.finished, table.steps, kept.is_profiled, readings, book),
        period_start_ns=period_start,
        period_end_ns=period_end,
        step_start_ns=np.array([track.step_start_ns for track in tracks]),
        host_period_ns=_measure_host_periods(
            kept.table, table.steps, period_end - period_start, readings
        ),
        on_device=np.array([reading.marks is not None for reading in readings]),
        phases=tuple(book.names),
        pieces=Pieces.join([cut_pieces(track) for track in tracks]),
        actions=actions,
        alignment=job.alignment,
        communication=job if len(job.operations) else None,
    )


def _leave_out_incomplete(kept: KeptSteps) -> StepTable:
    """Only steps of which every rank has its phases and operations."""
    lost = [
        own.step[mark_incomplete(kept.attempt.ranks[rank], own)]
        for rank, own in zip(kept.ranks, kept.by_rank, strict=True)
    ]
    is_lost = np.isin(kept.table.steps, np.concatenate(lost))
    return kept.table.select(~is_lost) if is_lost.any() else kept.table


def _make_tracks(
    attempt: Attempt,
    readings: Sequence[RankReading],
    table: StepTable,
    book: PhaseBook,
    job: Job,
) -> tuple[list[Track], Actions | None]:
    holds = find_holds(job, [one.rank for one in readings if one.marks is not None])
    tracks, actions, num_actions = [], [], 0
    for index, reading in enumerate(readings):
        to_reference = partial(job.alignment.to_reference, reading.rank)
        own_holds = tuple(holds.get(reading.rank, ()))
        track = make_track(reading, table, index, book, own_holds, to_reference)
        if not len(job.operations):
            track = replace(track, comm_phase=book.find(COMM_PHASE))
        recording = attempt.ranks[reading.rank]
        if recording.has_table("actions"):
            found = read_actions(recording, table.steps, reading.marks, to_reference)
            layers = layer_actions(found, num_actions)
            track = replace(track, actions=layers[0], inputs=layers[1])
            actions.append(found)
            num_actions += len(found)
        tracks.append(track)
    return tracks, Actions.join(actions) if num_actions else None


def _measure_host_periods(
    host: StepTable, steps: Int64s, period_ns: Int64s, readings: Sequence[RankReading]
) -> Int64s:
    """The pieces' periods, but the host's where the pieces are a device's."""
    kept = np.searchsorted(host.steps, steps)
    on_host = (host.end_ns - host.before_ns)[:, kept]
    on_device = np.array([reading.marks is not None for reading in readings])
    return np.where(on_device[:, None], on_host, period_ns)


def _find_borders(period_start_ns: Int64s, period_end_ns: Int64s) -> Bools:
    """Steps that do not begin where the one before them ended, on some rank."""
    borders = np.ones(period_start_ns.shape[1], dtype=np.bool_)
    borders[1:] = (period_start_ns[:, 1:] != period_end_ns[:, :-1]).any(axis=0)
    return borders
