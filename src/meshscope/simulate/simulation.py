"""All that `meshscope simulate` says about one recording, whatever its form."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline, build_timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable, need, or_unavailable
from meshscope.ingest.straggler.straggler_trace import load_straggler_trace
from meshscope.simulate.critical_path import (
    CriticalPath,
    PathKind,
    PathShare,
    find_critical_path,
)
from meshscope.simulate.edit_text import WantedEdit
from meshscope.simulate.edits import choose_rows, scale_work
from meshscope.simulate.recorded_slowdown import measure_run_slowdown
from meshscope.simulate.run_edits import PricedEdit, RunEdits
from meshscope.simulate.straggler.slowdown import Slowdown
from meshscope.simulate.straggler.straggler_replay import StragglerReplay, measure_slowdown
from meshscope.simulate.straggler.trace_edits import price_trace_edits
from meshscope.simulate.what_if import Edit, Fidelity, Gain, Replay, build_replay
from meshscope.store.read.run import Attempt

_NUM_PRICED_SHARES = 8
"""Largest shares of the critical path beside which the gain stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedShare:
    """A share of the critical path, and what a step saves without it."""

    share: PathShare
    gain_without: Gain | Unavailable | None
    """None where it was not priced: only the largest shares of work and transfers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPath:
    """The critical path over ranks."""

    path: CriticalPath
    shares: tuple[PricedShare, ...]
    """All shares of the path, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A recording, replayed."""

    name: str
    num_ranks: int
    num_steps: int
    num_left_out: int
    fidelity: Fidelity | Unavailable
    slowdown: Slowdown | Unavailable
    critical_path: PricedPath | None
    """None for a straggler trace, and where nothing could be replayed."""
    edits: tuple[PricedEdit, ...]


def simulate_trace(path: Path, wanted: Sequence[WantedEdit]) -> Simulation:
    """Replays a file in the open straggler-trace format."""
    trace = load_straggler_trace(path)
    replay = StragglerReplay.make(trace)
    return Simulation(
        name=path.name,
        num_ranks=trace.num_workers,
        num_steps=len(trace.steps),
        num_left_out=trace.num_left_out,
        fidelity=replay.fidelity(),
        slowdown=measure_slowdown(replay),
        critical_path=None,
        edits=tuple(price_trace_edits(replay, list(wanted))),
    )


def simulate_run(
    attempt: Attempt,
    wanted: Sequence[WantedEdit],
    *,
    name: str,
    warmup_steps: int | None = None,
) -> Simulation:
    replay = _replay(attempt, warmup_steps)
    if isinstance(replay, Unavailable):
        return _not_replayed(name, attempt, replay, wanted)
    timeline = replay.timeline
    return Simulation(
        name=name,
        num_ranks=len(timeline.ranks),
        num_steps=len(timeline.steps),
        num_left_out=timeline.num_left_out,
        fidelity=replay.fidelity,
        slowdown=measure_run_slowdown(replay),
        critical_path=price_path(replay, find_critical_path(replay)),
        edits=tuple(RunEdits(attempt, replay).price(list(wanted))),
    )


@or_unavailable
def _replay(attempt: Attempt, warmup_steps: int | None) -> Replay:
    timeline = build_timeline(attempt, warmup_steps=warmup_steps)
    return need(build_replay(need(timeline)))


def _not_replayed(
    name: str, attempt: Attempt, reason: Unavailable, wanted: Sequence[WantedEdit]
) -> Simulation:
    return Simulation(
        name=name,
        num_ranks=len(attempt.ranks),
        num_steps=0,
        num_left_out=0,
        fidelity=reason,
        slowdown=reason,
        critical_path=None,
        edits=tuple(PricedEdit(text=one.text, gain=reason) for one in wanted),
    )


def price_path(replay: Replay, path: CriticalPath) -> PricedPath:
    """The path, and what its largest shares save when they take no time."""
    largest = path.shares[:_NUM_PRICED_SHARES]
    wanted = [share for share in largest if share.kind in (PathKind.WORK, PathKind.TRANSFER)]
    gains = replay.price(_without(replay.timeline, share) for share in wanted)
    gain_of = dict(zip(wanted, gains, strict=True))
    shares = (PricedShare(share=share, gain_without=gain_of.get(share)) for share in path.shares)
    return PricedPath(path=path, shares=tuple(shares))


def _without(timeline: Timeline, share: PathShare) -> Edit:
    """A share of work or of transfers takes no time."""
    if share.kind is PathKind.WORK:
        return scale_work(timeline, factor=0.0, ranks=(share.rank,), phases=(share.phase,))
    communication = timeline.communication
    assert communication is not None, "transfers are on the path"
    rows = communication.operations.rows
    kinds = [int(kind) for kind in Kind if kind.label == share.operation]
    chosen = choose_rows(timeline, axis=share.axis) & (rows.rank == share.rank)
    chosen &= np.isin(rows.kind, kinds)
    transfer = np.where(chosen, 0, communication.row_times.transfer_ns)
    return Edit(name="without", transfer_ns=transfer)
