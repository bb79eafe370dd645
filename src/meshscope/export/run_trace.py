"""A run as a trace: ranks are processes, on the aligned clock.

Window by window (`step_windows`), so that memory is bounded; all ranks are analysed and the chosen
ones are written: who waits for whom is known only from all of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshscope.analyze.budget.budget_lines import sort_bound_pieces
from meshscope.analyze.job.job import load_job
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.device_parts import divide_device_time
from meshscope.analyze.timeline.timeline import cut_timeline
from meshscope.analyze.timeline.timeline_steps import keep_range
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable, known
from meshscope.diagnose.finding import Finding
from meshscope.export.lanes import NEVER_NS, Lanes
from meshscope.export.rank_slices import (
    STEPS,
    Slice,
    WindowFacts,
    find_arrows,
    list_actions,
    list_operations,
    list_pieces,
    list_steps,
    list_waits,
)
from meshscope.export.step_windows import StepRange, StepWindow, choose_range, cut_windows
from meshscope.export.trace_counters import RankCounters, StepTimes, put_job_counters
from meshscope.export.trace_findings import FindingSpans
from meshscope.export.trace_sink import Arrow, TraceSink, Track, Written

MAX_ROWS = 2_000_000
"""Rows of tables that a trace of a whole run is made of; of a larger run the last steps are."""
JOB_PROCESS = -1
"""Process number of what belongs to no rank; Perfetto's is one higher."""
_ROWS = {
    STEPS: 10,
    "where the time goes": 20,
    "pipeline": 30,
    "operations": 40,
    "waits": 50,
    "thread": 60,
}
"""Order of a rank's rows; counters and findings have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What a trace has."""

    written: Written
    steps: StepRange | None
    ranks: tuple[int, ...]
    num_crowded: int
    """Slices left out because too many were open at once."""


def export_trace(
    study: Study,
    findings: tuple[Finding, ...],
    sink: TraceSink,
    *,
    ranks: Iterable[int] | None = None,
    steps: tuple[int, int | None] | None = None,
    max_rows: int = MAX_ROWS,
) -> Exported:
    """Writes the trace of some ranks and steps; by default of all."""
    attempt = study.attempt
    chosen = tuple(sorted(attempt.ranks if ranks is None else ranks))
    range_ = choose_range(attempt, steps, max_rows)
    job = sink.add_process(JOB_PROCESS, "job")
    rows = {
        rank: _RankRows(sink, sink.add_process(rank, name))
        for rank, name in _name_ranks(study, chosen).items()
    }
    counters = {
        rank: RankCounters(sink, own.process, attempt.ranks[rank]) for rank, own in rows.items()
    }
    spans, ends = FindingSpans(findings, chosen), dict[int, int]()
    for window in cut_windows(attempt, range_):
        facts = _analyze(study, window)
        arrows = find_arrows(facts, frozenset(chosen))
        for rank, own in rows.items():
            times = _put_rank(own, facts, rank, arrows)
            counters[rank].put_rates(times)
            spans.note(rank, times)
            if rank == chosen[0]:
                ends |= {step: end for step, (_, end) in times.items()}
    for one in counters.values():
        one.put_read(study)
    put_job_counters(sink, job, study, ends)
    spans.put(sink, job, {rank: own.process for rank, own in rows.items()})
    sink.close()
    return Exported(
        written=sink.written,
        steps=range_,
        ranks=chosen,
        num_crowded=sum(own.num_crowded for own in rows.values()),
    )


def _name_ranks(study: Study, chosen: tuple[int, ...]) -> dict[int, str]:
    """`rank 5 dp0.tp1.pp1 node3`."""
    layout = known(study.layout)
    return {
        rank: " ".join(
            part
            for part in (f"rank {rank}", _name_place(layout, rank), _name_host(study, rank))
            if part
        )
        for rank in chosen
    }


def _name_place(layout: Layout | None, rank: int) -> str:
    if layout is None or rank >= layout.world_size:
        return ""
    return layout.label(rank)


def _name_host(study: Study, rank: int) -> str:
    host = study.attempt.ranks[rank].header.get("host")
    return host if isinstance(host, str) else ""


def _analyze(study: Study, window: StepWindow) -> WindowFacts:
    job = load_job(window.attempt, study.job.alignment)
    timeline = None
    if window.steps is not None:
        kept = keep_range(window.attempt, *window.steps)
        timeline = None if isinstance(kept, Unavailable) else known(cut_timeline(kept, job))
    if timeline is None:
        return WindowFacts(
            window=window, job=job, timeline=None, lines=(), line=np.empty(0, dtype=np.int64)
        )
    has_device = bool(timeline.on_device.any())
    parts = divide_device_time(window.attempt, timeline) if has_device else None
    lines, line = sort_bound_pieces(timeline, parts)
    return WindowFacts(window=window, job=job, timeline=timeline, lines=lines, line=line)


@dataclass(slots=True)
class _RankRows:
    """The rows of one rank, made when the first slice comes."""

    sink: TraceSink
    process: Track
    _lanes: dict[str, Lanes] = field(default_factory=dict)
    _tracks: dict[tuple[str, int], Track] = field(default_factory=dict)

    @property
    def num_crowded(self) -> int:
        return sum(lanes.num_crowded for lanes in self._lanes.values())

    def put(self, name: str, slices: list[Slice], *, nests: bool) -> None:
        slices.sort(key=lambda one: (one.start_ns, -one.end_ns))
        lanes = self._lanes.setdefault(name, Lanes(nests=nests))
        for one in slices:
            lane = lanes.place(one.start_ns, one.end_ns)
            if lane >= 0:
                end = None if one.end_ns == NEVER_NS else one.end_ns
                self.sink.put_slice(
                    self._find_track(name, lane),
                    one.category,
                    one.name,
                    one.start_ns,
                    end,
                    one.arguments,
                    one.arrows,
                )

    def _find_track(self, name: str, lane: int) -> Track:
        if name == STEPS and lane == 0:
            return self.process  # seen even when the rank's other rows are folded
        if (name, lane) not in self._tracks:
            shown = name if lane == 0 else f"{name} ({lane + 1})"
            first = next((order for prefix, order in _ROWS.items() if name.startswith(prefix)), 90)
            # Rows of one name stay together.
            order = 100 * first + list(self._lanes).index(name)
            self._tracks[name, lane] = self.sink.add_track(self.process, shown, order)
        return self._tracks[name, lane]


def _put_rank(
    rows: _RankRows, facts: WindowFacts, rank: int, arrows: Mapping[int, list[Arrow]]
) -> StepTimes:
    """Writes a rank's slices; returns its steps."""
    times: dict[int, tuple[int, int]] = {}
    for name, found in _collect(list_steps(facts, rank)).items():
        for one in found:
            if one.category == "step":
                times[int(one.arguments[0][1])] = (one.start_ns, one.end_ns)
        rows.put(name, found, nests=True)
    rows.put("where the time goes", list(list_pieces(facts, rank)), nests=False)
    rows.put("pipeline", list(list_actions(facts, rank)), nests=False)
    for axis, found in _collect(list_operations(facts, rank, arrows)).items():
        rows.put(f"operations {axis}", found, nests=False)
    rows.put("waits", list(list_waits(facts, rank)), nests=False)
    return times


def _collect(slices: Iterator[tuple[str, Slice]]) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    for name, one in slices:
        found.setdefault(name, []).append(one)
    return found
