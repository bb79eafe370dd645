"""Prices the edits of a command line, on a recorded run."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from meshscope.analyze.pipeline.action_gaps import measure_action_gaps
from meshscope.analyze.pipeline.pipeline_times import collect_pipeline_times
from meshscope.analyze.pipeline.stage_work import measure_stage_work
from meshscope.analyze.timeline.device_parts import (
    COMPUTE,
    OWN_PHASES,
    SPAN,
    divide_device_time,
)
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import BUILDERS
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.errors import UsageError
from meshscope.simulate.edit_text import EditKind, WantedEdit
from meshscope.simulate.edits import choose_pieces, equalise, scale_work, transfer_factor
from meshscope.simulate.even_shares import EvenShares, find_even_shares
from meshscope.simulate.pipeline.pipeline_edits import LayerMove, price_move
from meshscope.simulate.pipeline.pipeline_replay import PipelineReplay, build_pipeline_replay
from meshscope.simulate.pipeline.schedule_edits import price_schedule
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit, Gain, Replay
from meshscope.store.read.arrays import Bools, Int32s
from meshscope.store.read.run import Attempt

_PIPELINE_KINDS = (EditKind.MICROBATCHES, EditKind.SCHEDULE, EditKind.MOVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedEdit:
    """An edit and what it saves."""

    text: str
    gain: Gain | Unavailable


@dataclass(slots=True)
class RunEdits:
    """Makes and prices edits of one run; shared parts are built once."""

    attempt: Attempt
    replay: Replay
    _shares: EvenShares | None = field(default=None, init=False)
    _pipeline: PipelineReplay | Unavailable | None = field(default=None, init=False)

    def price(self, wanted: list[WantedEdit]) -> list[PricedEdit]:
        """In the order given; UsageError if the run does not have what an edit names."""
        answers: list[Gain | Unavailable | None] = []
        gains = iter(self.replay.price(self._make_all(wanted, answers)))
        found = [next(gains) if one is None else one for one in answers]
        return [
            PricedEdit(text=one.text, gain=gain) for one, gain in zip(wanted, found, strict=True)
        ]

    def _make_all(
        self, wanted: list[WantedEdit], answers: list[Gain | Unavailable | None]
    ) -> Iterator[Edit]:
        """Edits to be replayed; fills in `answers`: None for those, what is known for others."""
        for one in wanted:
            made = self._price_pipeline(one) if one.kind in _PIPELINE_KINDS else self.make(one)
            answers.append(None if isinstance(made, Edit) else made)
            if isinstance(made, Edit):
                yield made

    def make(self, wanted: WantedEdit) -> Edit | Unavailable:
        timeline, factor = self.replay.timeline, wanted.factor
        if wanted.kind is EditKind.RANKS:
            self._check_ranks(wanted)
            if factor is None:
                return equalise(timeline, wanted.numbers)
            return scale_work(timeline, factor=factor, ranks=wanted.numbers, name=wanted.text)
        if wanted.kind is EditKind.AXIS:
            ranks = self._ranks_along(wanted)
            if factor is None:
                return self._make_even(wanted.text, choose_pieces(timeline, ranks=ranks), ranks)
            return scale_work(timeline, factor=factor, ranks=ranks, name=wanted.text)
        if wanted.kind is EditKind.PHASE:
            return self._make_phase(wanted)
        if wanted.kind is EditKind.COMPUTE:
            return self._scale_compute(wanted.text, _known(factor))
        return self._make_bandwidth(wanted)

    def _make_phase(self, wanted: WantedEdit) -> Edit | Unavailable:
        timeline = self.replay.timeline
        if wanted.name not in timeline.phases:
            known = ", ".join(repr(name) for name in timeline.phases if name) or "none"
            raise UsageError(f"edit {wanted.text!r}: the run has no such phase; it has {known}")
        if wanted.factor is None:
            return self._make_even(wanted.text, choose_pieces(timeline, phases=(wanted.name,)), [])
        return scale_work(timeline, factor=wanted.factor, phases=(wanted.name,), name=wanted.text)

    @or_unavailable
    def _scale_compute(self, name: str, factor: float) -> Edit:
        """What the budget calls compute: neither idle time nor what no phase explains."""
        timeline = self.replay.timeline
        pieces, work = timeline.pieces, measured_work(timeline)
        parts = divide_device_time(self.attempt, timeline)
        own = [n for n, phase in enumerate(timeline.phases) if not phase or phase in OWN_PHASES]
        is_compute = (pieces.kind == PieceKind.WORK) & (pieces.row < 0)
        is_compute &= ~np.isin(pieces.phase, own) & ~parts.is_divided
        if parts.total_ns(SPAN):
            raise Missing("what devices computed is not known: no kernel sample was taken")
        compute_ns = parts.time_of(COMPUTE)
        if not compute_ns.any() and not is_compute.any():
            raise Missing("no phase of the run is known to compute")
        removed = np.asarray((1 - factor) * compute_ns, dtype=np.float64)
        shorter = parts.shorten(timeline, removed)
        work = np.where(parts.is_divided & (pieces.kind == PieceKind.WORK), shorter, work)
        work = np.where(is_compute, np.rint(work * factor), work).astype(np.int64)
        return Edit(name=name, work_ns=work)

    def _make_bandwidth(self, wanted: WantedEdit) -> Edit | Unavailable:
        timeline = self.replay.timeline
        if timeline.communication is None:
            return Unavailable("the run has no recorded communication")
        axes = sorted({group.axis for group in timeline.communication.operations.groups})
        if wanted.name and wanted.name not in axes:
            raise UsageError(
                f"edit {wanted.text!r}: no group of the run lies along {wanted.name!r}; there are "
                f"{', '.join(axes) or 'none'}"
            )
        return transfer_factor(
            timeline, factor=1 / _known(wanted.factor), axis=wanted.name or None, name=wanted.text
        )

    def _make_even(self, name: str, pieces: Bools, ranks: list[int]) -> Edit:
        if self._shares is None:
            self._shares = find_even_shares(self.replay)
        communication = self.replay.timeline.communication
        rank: Int32s = np.empty(0, dtype=np.int32)
        if communication is not None:
            rank = communication.operations.rows.rank
        return self._shares.edit(name, pieces, np.isin(rank, ranks))

    def _check_ranks(self, wanted: WantedEdit) -> None:
        known = self.replay.timeline.ranks
        missing = [rank for rank in wanted.numbers if rank not in known]
        if missing:
            raise UsageError(
                f"edit {wanted.text!r}: rank {missing[0]} did not record; ranks are {known[0]} to "
                f"{known[-1]}"
            )

    def _ranks_along(self, wanted: WantedEdit) -> list[int]:
        layout = self.replay.timeline.layout
        if not isinstance(layout, Layout):
            raise UsageError(f"edit {wanted.text!r}: the layout is not known: {layout.reason}")
        degree = layout.degree(wanted.name)
        if wanted.numbers[-1] >= degree:
            raise UsageError(
                f"edit {wanted.text!r}: {wanted.name} has {degree} (0 to {degree - 1})"
            )
        return [
            rank
            for rank in self.replay.timeline.ranks
            if layout.coordinates(rank).along(wanted.name) in wanted.numbers
        ]

    @or_unavailable
    def _price_pipeline(self, wanted: WantedEdit) -> Gain:
        if wanted.kind is EditKind.SCHEDULE and wanted.name not in BUILDERS:
            raise UsageError(
                f"edit {wanted.text!r}: there is no such schedule; schedules: {', '.join(BUILDERS)}"
            )
        if self._pipeline is None:
            self._pipeline = self._build_pipeline()
        pipeline = need(self._pipeline)
        if wanted.kind is EditKind.MOVE:
            count, source, target = wanted.numbers
            move = LayerMove(count=count, source=source, target=target)
            return need(price_move(pipeline, move))
        name = wanted.name or None
        number = wanted.numbers[0] if wanted.numbers else None
        return need(need(price_schedule(pipeline, name=name, num_microbatches=number)).gain)

    @or_unavailable
    def _build_pipeline(self) -> PipelineReplay:
        times = need(collect_pipeline_times(self.replay.timeline, self.attempt))
        action_gaps = need(measure_action_gaps(times))
        work = measure_stage_work(times, self.attempt)
        return need(build_pipeline_replay(self.replay.timeline, times, work, action_gaps))


def _known(factor: float | None) -> float:
    assert factor is not None, "the parser gives these kinds a factor"
    return factor
