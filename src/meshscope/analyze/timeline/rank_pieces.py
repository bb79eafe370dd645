"""Cuts the periods of one rank into pieces, in integer nanoseconds that add up exactly.

A piece lies between two neighbouring borders of periods, steps, phases, hold-ups and actions. Its
kind is decided by hold-ups first, then by the wait for an action's input, then by a phase that is
called a wait; all other time is work. Equal neighbours are one piece.

The rest of a hold-up after the operation's end, until the rank noticed, counts as transfer: only
the operation kept it there.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind, Pieces
from meshscope.numerics.interval_layers import EMPTY_LAYER, Layer, make_layer
from meshscope.numerics.intervals import sort_distinct
from meshscope.store.read.arrays import Bools, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """Intervals in which operations held a rank up; they do not overlap."""

    layer: Layer
    """The value is the operation's row."""
    ready_ns: Int64s
    """Per interval: when every needed rank had arrived."""
    is_split: Bools
    """Per interval: wait and transfer can be separated."""
    only_idle: bool
    """Counts only where the device's stream is in no phase: it held the host up."""
    is_queued: bool = True
    """False: nothing waited for these operations; they ran while the rank had nothing else to do,
    which stays work, with the operation's row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """What is known about one rank's time, on the reference clock."""

    rank: int
    period_start_ns: Int64s
    """Per kept step."""
    step_start_ns: Int64s
    period_end_ns: Int64s
    phases: tuple[Layer, ...]
    """Outermost first; values are phase indices."""
    busy: Layer
    """Where a device's stream is in a phase; empty if the pieces are the host's."""
    holds: tuple[Hold, ...]
    """A moment belongs to the first that claims it."""
    actions: Layer = EMPTY_LAYER
    """The value is the action's row."""
    inputs: Layer = EMPTY_LAYER
    """Waits for actions' inputs; the value is the action's row."""
    wait_phase: int = -1
    """Index of the phase that is a wait; -1 if there is none."""
    comm_phase: int = -1
    """Index of the phase that is communication, if no operation was seen; else -1."""


def cut_pieces(track: Track) -> Pieces:
    periods = make_layer(
        track.period_start_ns, track.period_end_ns, np.arange(len(track.period_start_ns))
    )
    cuts = _find_cuts(track, periods)
    start, end = cuts[:-1], cuts[1:]
    step = periods.look_up(start)
    inside = step >= 0
    start, end, step = start[inside], end[inside], step[inside]
    kind, row = _find_holds(track, start)
    phase = _find_phases(track, start)
    waiting = track.inputs.look_up(start)
    is_free = kind == PieceKind.WORK
    kind[is_free & ((waiting >= 0) | (phase == track.wait_phase))] = PieceKind.WAIT
    kind[is_free & (phase == track.comm_phase)] = PieceKind.UNSPLIT
    action = np.where(waiting >= 0, waiting, track.actions.look_up(start))
    pieces = Pieces(
        rank=np.full(len(start), track.rank, dtype=np.int32),
        step=step.astype(np.int32),
        start_ns=start,
        end_ns=end,
        kind=kind,
        phase=phase.astype(np.int32),
        row=row,
        action=action,
        is_between=start < track.step_start_ns[step],
    )
    return _merge(pieces)


def _find_cuts(track: Track, periods: Layer) -> Int64s:
    layers = (periods, track.busy, track.actions, track.inputs, *track.phases)
    borders = [part for layer in layers for part in (layer.start_ns, layer.end_ns)]
    for hold in track.holds:
        borders += [hold.layer.start_ns, hold.ready_ns, hold.layer.end_ns]
    cuts = sort_distinct(np.concatenate([*borders, track.step_start_ns]))
    if not len(periods):
        return cuts[:0]
    inside: Int64s = cuts[(cuts >= periods.start_ns[0]) & (cuts <= periods.end_ns.max())]
    return inside


def _find_holds(track: Track, start: Int64s) -> tuple[np.ndarray, Int64s]:
    kind = np.full(len(start), PieceKind.WORK, dtype=np.uint8)
    row = np.full(len(start), -1, dtype=np.int64)
    is_busy = track.busy.find(start) >= 0
    for hold in track.holds:
        index = hold.layer.find(start)
        is_taken = (index >= 0) & (row < 0)
        if hold.only_idle:
            is_taken &= ~is_busy
        index = index[is_taken]
        row[is_taken] = hold.layer.value[index]
        if not hold.is_queued:
            continue
        is_before = start[is_taken] < hold.ready_ns[index]
        split = np.where(is_before, PieceKind.WAIT, PieceKind.TRANSFER)
        kind[is_taken] = np.where(hold.is_split[index], split, PieceKind.UNSPLIT)
    return kind, row


def _find_phases(track: Track, start: Int64s) -> Int64s:
    phase = np.zeros(len(start), dtype=np.int64)
    for layer in track.phases:
        found = layer.look_up(start)
        phase = np.where(found >= 0, found, phase)
    return phase


def _merge(pieces: Pieces) -> Pieces:
    """Joins neighbours that are alike in everything but their times."""
    if len(pieces) < 2:
        return pieces
    starts = np.ones(len(pieces), dtype=np.bool_)
    starts[1:] = pieces.start_ns[1:] != pieces.end_ns[:-1]
    for name in ("step", "kind", "phase", "row", "action", "is_between"):
        values = getattr(pieces, name)
        starts[1:] |= values[1:] != values[:-1]
    first = np.flatnonzero(starts)
    merged = pieces.select(first)
    last = np.append(first[1:], len(pieces)) - 1
    merged.end_ns[:] = pieces.end_ns[last]
    return merged
