"""One attempt in numbers: what every rank did, what the job did, how good the recording is.

Ranks are read one after another and reduced at once to a few numbers and one duration per step,
so a thousand ranks need no more memory than one rank's tables and those. Communication is between
ranks: where any was recorded, the operations of all of them are read together. Of a run with more
operations than fit, those of some stretches of steps are, and `Communication.part` says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from meshscope.analyze.health import (
    OverheadSamples,
    RecordingHealth,
    as_int,
    assess_recording,
    count_errors,
)
from meshscope.analyze.rank.device import (
    NO_ACCELERATOR,
    DeviceSplit,
    explain_no_device,
    explain_no_job_device,
    split_device_time,
)
from meshscope.analyze.rank.phases import (
    PhaseTable,
    RankPartition,
    StepTimes,
    TimeSplit,
    add_splits,
    order_steps,
    partition_rank,
    place_phases,
    tabulate_phases,
)
from meshscope.analyze.rank.signals import (
    SIGNAL_NAMES,
    JobSignal,
    Signal,
    find_signals,
    merge_signals,
    read_scalars,
)
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.rank.steps import (
    ALL_PROFILED,
    NO_STEP,
    JobSteps,
    JobStepSummary,
    count_warmup,
    explain_no_steady_step,
    summarize_job_steps,
)
from meshscope.analyze.rank.throughput import (
    RankTokens,
    TokenRate,
    measure_steps_per_s,
    measure_tokens,
    pick_rank_tokens,
    stepping_ns,
    sum_tokens,
)
from meshscope.analyze.timeline.peers import (
    PeerGroups,
    PeerPhases,
    PhaseClue,
    PhaseSpread,
    group_peers,
    spread_phase,
)
from meshscope.analyze.timeline.timeline_steps import KeptSteps, keep_steps
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.distribution import Distribution, measure_distribution
from meshscope.store.read.arrays import Bools
from meshscope.store.read.columns import Columns, Problem, ProblemKind, int64_column
from meshscope.store.read.run import Attempt, RankRecording
from meshscope.store.read.trace_windows import TraceWindow, disturbing_windows, mark_profiled
from meshscope.store.read.usual_phases import is_recorded
from meshscope.store.schema import StepFlag

if TYPE_CHECKING:
    from meshscope.analyze.communication.communication import Communication, StepPart

_WANTED_SCALARS = frozenset(
    ("tokens", *(name for names in SIGNAL_NAMES.values() for name in names))
)


MAX_OPERATION_ROWS = 2_000_000
"""Rows of `collectives`, all ranks together, that are read at once: about a gigabyte."""
_PART_OF_STEPS = StepChoice(max_rank_steps=60_000, max_rows=1_000_000)
"""What is read of runs with more."""


class RankState(StrEnum):
    """How a rank's recording ends."""

    FINISHED = "finished"
    OPEN = "still running or killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank."""

    rank: int
    label: str | Unavailable
    """Coordinates on the mesh, such as `dp0.tp1.pp0`."""
    host: str | Unavailable
    num_steps: int
    """Finished steps."""
    num_warmup: int
    """First steps left out of `step_time`, `time.steady_steps` and `device`."""
    num_profiled: int
    """Later ones that a trace window disturbed, left out likewise."""
    num_aborted_steps: int
    """Steps left by an exception; counted in `num_steps`."""
    num_skipped_updates: int
    """Steps in which the gradient scaler skipped the optimizer."""
    last_step: int | Unavailable
    step_time: Distribution | Unavailable
    step_interval: Distribution | Unavailable
    steps_per_s: float | Unavailable
    time: RankPartition
    device: DeviceSplit | Unavailable
    tokens: TokenRate | Unavailable
    signals: Mapping[str, Signal]
    peak_rss_bytes: int | Unavailable
    """Highest sampled resident set; a peak between two samples is not seen."""
    peak_device_bytes: int | Unavailable
    """Highest allocation on the device, from the allocator's own peak."""
    state: RankState
    last_record_unix_ns: int | Unavailable
    """Wall clock of the rank's host at the last thing recorded, or at its closing line."""
    open_phase: str | None
    """The phase an unfinished rank was in when it last wrote; None between phases or at the end."""
    num_errors: int
    num_problems: int

    @property
    def num_steady_steps(self) -> int:
        """Steps the statistics are over."""
        return self.num_steps - self.num_warmup - self.num_profiled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadySteps:
    """Which of a rank's steps its statistics are over."""

    num_warmup: int
    num_profiled: int
    """After warm-up."""
    is_steady: Bools
    """Per step, in order of time."""
    has_interval: Bools
    """Per step but the last: steady, and the next one's begin was not disturbed either."""
    reason: str
    """Why there is none, where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """The ranks' time lines added up: rank-nanoseconds. The four parts sum to `wall_ns`."""

    before_first: TimeSplit
    steps: TimeSplit
    between: TimeSplit
    after_last: TimeSplit
    steady_steps: TimeSplit
    """`steps` without warm-up and profiled steps."""
    num_steady_rank_steps: int
    """Steps in `steady_steps`, counted on every rank."""
    device_phase_ns: Mapping[str, int] | Unavailable
    """Device time in the steady steps of the ranks that have it."""
    num_device_rank_steps: int
    """Steps with device time."""
    num_markable_rank_steps: int
    """Steps in `steady_steps` of the ranks that have any device time."""
    containers: Mapping[str, int]
    """Spans per phase that cross step boundaries and are left out of the split."""
    num_other_threads: int
    """Phases of other threads, left out likewise."""

    @property
    def wall_ns(self) -> int:
        """Recorded time of all ranks together."""
        parts = (self.before_first, self.steps, self.between, self.after_last)
        return sum(part.wall_ns for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttemptSummary:
    """One attempt of a run."""

    ranks: tuple[RankSummary, ...]
    layout: Layout | Unavailable
    world_size: int
    steps: JobStepSummary
    time: JobTime
    spreads: tuple[PhaseSpread, ...]
    """One per phase of the steady steps, the one with the rank furthest above its peers first;
    unattributed not among them."""
    clues: tuple[PhaseClue, ...]
    """Ranks that stand out among their peers in a phase, furthest first."""
    unattributed: PhaseSpread | Unavailable
    steps_per_s: float | Unavailable
    """Of the slowest of the ranks that finished most steps."""
    tokens: TokenRate | Unavailable
    signals: Mapping[str, JobSignal | Unavailable]
    communication: "Communication | Unavailable"
    health: RecordingHealth


def summarize_attempt(attempt: Attempt, *, warmup_steps: int | None = None) -> AttemptSummary:
    """Reads and reduces every rank. `warmup_steps` None: 1 where more than 3 steps finished."""
    warmup_steps = attempt.choose_warmup(warmup_steps)
    durations, intervals, overhead = JobSteps(), JobSteps(), OverheadSamples()
    peers = PeerPhases(num_ranks=len(attempt.ranks))
    ranks: list[RankSummary] = []
    tokens: dict[int, RankTokens] = {}
    longest = (0, 0)
    problems: list[Problem] = []
    windows = disturbing_windows(attempt)
    for recording in attempt:
        columns = recording.read("steps")
        steps = order_steps(columns)
        overhead.add(columns, count_warmup(len(steps), warmup_steps))
        durations.add(recording.rank, steps.step, steps.duration_ns)
        intervals.add(recording.rank, steps.step[:-1], np.diff(steps.start_ns))
        longest = max(longest, (len(steps), stepping_ns(steps)))
        chosen = choose_steady(steps, windows, warmup_steps)
        summary, rates, phases = _summarize_rank(recording, columns, steps, attempt.layout, chosen)
        peers.add(recording.rank, steps.step, phases, is_steady=chosen.is_steady)
        ranks.append(summary)
        tokens[recording.rank] = rates
        problems += _overlap_problems(recording, steps)
    steady = [rank for rank in ranks if rank.num_steady_steps]
    job_steps = summarize_job_steps(
        durations,
        intervals,
        num_ranks=len(ranks),
        asked_warmup=warmup_steps,
        windows=windows,
    )
    step_time = job_steps.time
    communication = _analyze_communication(attempt, job_steps, warmup_steps)
    ranks = _recount_problems(ranks, attempt, {problem.rank for problem in problems})
    peer_groups = group_peers(attempt.layout, attempt.ranks)
    return AttemptSummary(
        ranks=tuple(ranks),
        layout=attempt.layout,
        world_size=attempt.world_size,
        steps=job_steps,
        time=_add_times(ranks),
        spreads=_spread_phases(steady, peer_groups),
        unattributed=_spread_unattributed(steady, peer_groups),
        clues=peers.find_clues(
            peer_groups,
            step_time if isinstance(step_time, Unavailable) else step_time.median_ns,
        ),
        steps_per_s=longest[0] * 1e9 / longest[1] if longest[1] > 0 else Unavailable(NO_STEP),
        tokens=sum_tokens(tokens, attempt.layout, attempt.world_size),
        signals=merge_signals([dict(rank.signals) for rank in ranks]),
        communication=communication,
        health=assess_recording(
            attempt, {rank.rank: rank.num_steps for rank in ranks}, problems, overhead
        ),
    )


def _analyze_communication(
    attempt: Attempt, steps: JobStepSummary, asked_warmup: int | None
) -> "Communication | Unavailable":
    """Of the steps after warm-up, or of everything where no step finished."""
    if not any(recording.notes_operations for recording in attempt):
        return Unavailable("no communication was recorded: there was none, or it was not watched")
    # Not needed, and so not loaded, for runs that do not communicate.
    from meshscope.analyze.communication.communication import analyze_communication

    if not steps.num_steps:
        return analyze_communication(attempt, first_step=-1)
    is_any_left = steps.num_warmup < steps.num_steps
    first = int(steps.step[steps.num_warmup]) if is_any_left else int(steps.step[-1]) + 1
    if sum(recording.count_rows("collectives") for recording in attempt) > MAX_OPERATION_ROWS:
        kept = keep_steps(attempt, warmup_steps=asked_warmup, choice=_PART_OF_STEPS)
        if not isinstance(kept, Unavailable) and kept.num_left_out:
            found = analyze_communication(kept.attempt, first_step=first)
            part = _describe_part(kept, first)
            return found if isinstance(found, Unavailable) else replace(found, part=part)
    return analyze_communication(attempt, first_step=first)


def _describe_part(kept: KeptSteps, first_step: int) -> "StepPart":
    from meshscope.analyze.communication.communication import StepPart

    windows = disturbing_windows(kept.attempt)
    counted = [(own.step >= first_step) & ~mark_profiled(own.step, windows) for own in kept.by_rank]
    pairs = list(zip(kept.ranks, kept.by_rank, counted, strict=True))
    return StepPart(
        num_steps={rank: int(np.count_nonzero(rows)) for rank, _, rows in pairs},
        wall_ns={rank: int(own.duration_ns[rows].sum()) for rank, own, rows in pairs},
        num_left_out=kept.num_left_out,
    )


def _recount_problems(
    ranks: list[RankSummary], attempt: Attempt, others: set[int | None]
) -> list[RankSummary]:
    """Reading is what finds damage, and communication is read last. `others` have one more."""
    return [
        replace(rank, num_problems=len(attempt.ranks[rank.rank].problems) + (rank.rank in others))
        for rank in ranks
    ]


def choose_steady(
    steps: StepTimes, windows: Sequence[TraceWindow], asked_warmup: int | None
) -> SteadySteps:
    """Those after warm-up that no trace window of any rank disturbed."""
    num_steps = len(steps)
    num_warmup = count_warmup(num_steps, asked_warmup)
    is_profiled = mark_profiled(steps.step, windows)
    is_steady = ~is_profiled
    is_steady[:num_warmup] = False
    num_profiled = int(np.count_nonzero(is_profiled[num_warmup:]))
    return SteadySteps(
        num_warmup=num_warmup,
        num_profiled=num_profiled,
        is_steady=is_steady,
        has_interval=is_steady[:-1] & ~is_profiled[1:],
        reason=ALL_PROFILED if num_profiled else explain_no_steady_step(num_steps),
    )


def _summarize_rank(
    recording: RankRecording,
    columns: Columns,
    steps: StepTimes,
    layout: Layout | Unavailable,
    chosen: SteadySteps,
) -> tuple[RankSummary, RankTokens, PhaseTable]:
    num_steps = len(steps)
    spans = recording.read("spans")
    memory = recording.read("memory")
    scalars = read_scalars(recording, _WANTED_SCALARS)
    placed, num_other_threads = place_phases(steps, spans)
    phases = tabulate_phases(placed, recording.names, num_steps=num_steps)
    recorded_ns = _recorded_range(recording, steps, spans, memory)
    device: DeviceSplit | Unavailable
    if recording.has_table("device_spans"):
        device = split_device_time(
            placed,
            recording.read("device_spans"),
            recording.names,
            is_steady=chosen.is_steady,
        )
    else:
        device = explain_no_device(recording, memory)
    rates = measure_tokens(steps, columns, scalars.get("tokens"))
    flags = columns["flags"].astype(np.int64, copy=False)
    summary = RankSummary(
        rank=recording.rank,
        label=layout if isinstance(layout, Unavailable) else layout.label(recording.rank),
        host=_host_of(recording),
        num_steps=num_steps,
        num_warmup=chosen.num_warmup,
        num_profiled=chosen.num_profiled,
        num_aborted_steps=int(np.count_nonzero(flags & StepFlag.ABORTED)),
        num_skipped_updates=int(np.count_nonzero(flags & StepFlag.SKIPPED)),
        last_step=int(steps.step[-1]) if num_steps else Unavailable(NO_STEP),
        step_time=measure_distribution(steps.duration_ns[chosen.is_steady], reason=chosen.reason),
        step_interval=measure_distribution(
            np.diff(steps.start_ns)[chosen.has_interval],
            reason="it takes two steps" if chosen.is_steady.any() else chosen.reason,
        ),
        steps_per_s=measure_steps_per_s(steps),
        time=partition_rank(
            steps,
            placed,
            phases,
            recording.names,
            recorded_ns=recorded_ns,
            is_steady=chosen.is_steady,
            num_other_threads=num_other_threads,
        ),
        device=device,
        tokens=pick_rank_tokens(rates),
        signals=find_signals(recording.rank, scalars),
        peak_rss_bytes=_peak(memory, "rss_bytes", "memory was not sampled"),
        peak_device_bytes=_peak(memory, "peak_allocated_bytes", NO_ACCELERATOR),
        state=RankState.OPEN if recording.closing is None else RankState.FINISHED,
        last_record_unix_ns=_to_unix(recording, recorded_ns[1]),
        open_phase=_find_open_phase(recording, spans),
        num_errors=count_errors(recording),
        num_problems=len(recording.problems) + bool(steps.num_overlapping),
    )
    return summary, rates, phases


def _recorded_range(
    recording: RankRecording, steps: StepTimes, spans: Columns, memory: Columns
) -> tuple[int, int]:
    """First and last moment of the rank's recording, on its monotonic clock.

    The header is written with the first record, which is the end of the first phase: that phase,
    and the step it is in, may have begun before.
    """
    span_start = int64_column(spans, "start_host_mono_ns")
    begins = [as_int(recording.header.get("start_host_mono_ns"))]
    ends = [as_int(recording.closing.get("end_host_mono_ns")) if recording.closing else None]
    if len(steps):
        begins.append(int(steps.start_ns[0]))
        ends.append(int(steps.end_ns[-1]))
    if len(span_start):
        begins.append(int(span_start.min()))
        ends.append(int((span_start + int64_column(spans, "duration_ns")).max()))
    sampled = int64_column(memory, "time_host_mono_ns")
    if len(sampled):
        ends.append(int(sampled.max()))
    known = [moment for moment in begins if moment is not None]
    start_ns = min(known, default=0)
    end_ns = max((moment for moment in (*known, *ends) if moment is not None), default=0)
    return start_ns, end_ns


def _to_unix(recording: RankRecording, mono_ns: int) -> int | Unavailable:
    start_mono_ns = as_int(recording.header.get("start_host_mono_ns"))
    start_unix_ns = as_int(recording.header.get("start_unix_ns"))
    if start_mono_ns is None or start_unix_ns is None:
        return Unavailable("the rank's journal does not say when it began")
    return start_unix_ns + mono_ns - start_mono_ns


def _find_open_phase(recording: RankRecording, spans: Columns) -> str | None:
    if recording.closing is not None:
        return None
    going_on = [
        phase
        for phase in recording.open_phases()
        if phase.end_host_mono_ns is None and not is_recorded(phase, spans)
    ]
    return recording.name_of(going_on[-1].name_id) if going_on else None


def _host_of(recording: RankRecording) -> str | Unavailable:
    host = recording.header.get("host")
    return host if isinstance(host, str) else Unavailable("the rank's journal does not say")


def _peak(memory: Columns, name: str, reason: str) -> int | Unavailable:
    highest = int(int64_column(memory, name).max(initial=-1))
    return highest if highest >= 0 else Unavailable(reason)


def _overlap_problems(recording: RankRecording, steps: StepTimes) -> list[Problem]:
    if not steps.num_overlapping:
        return []
    text = f"{steps.num_overlapping} step(s) overlap an earlier one in time and are left out"
    return [Problem(kind=ProblemKind.DAMAGED, rank=recording.rank, text=text)]


def _add_times(ranks: list[RankSummary]) -> JobTime:
    devices = [rank.device for rank in ranks if not isinstance(rank.device, Unavailable)]
    containers: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank.time.containers.items():
            containers[name] = containers.get(name, 0) + count
    device_ns: dict[str, int] = {}
    for device in devices:
        for name, total in device.phase_ns.items():
            device_ns[name] = device_ns.get(name, 0) + total
    reasons = [rank.device.reason for rank in ranks if isinstance(rank.device, Unavailable)]
    marked = [rank for rank in ranks if not isinstance(rank.device, Unavailable)]
    return JobTime(
        before_first=add_splits([rank.time.before_first for rank in ranks]),
        steps=add_splits([rank.time.steps for rank in ranks]),
        between=add_splits([rank.time.between for rank in ranks]),
        after_last=add_splits([rank.time.after_last for rank in ranks]),
        steady_steps=add_splits([rank.time.steady_steps for rank in ranks]),
        num_steady_rank_steps=sum(rank.num_steady_steps for rank in ranks),
        device_phase_ns=device_ns if devices else explain_no_job_device(reasons),
        num_device_rank_steps=sum(device.num_steps for device in devices),
        num_markable_rank_steps=sum(rank.num_steady_steps for rank in marked),
        containers=containers,
        num_other_threads=sum(rank.time.num_other_threads for rank in ranks),
    )


def _spread_phases(ranks: list[RankSummary], peer_groups: PeerGroups) -> tuple[PhaseSpread, ...]:
    values: dict[str, list[tuple[float, int]]] = {}
    for rank in ranks:
        for phase, total in rank.time.steady_steps.phase_ns.items():
            values.setdefault(phase, []).append((total / rank.num_steady_steps, rank.rank))
    spreads = [spread_phase(phase, found, peer_groups) for phase, found in values.items()]
    return tuple(sorted(spreads, key=_order_spread))


def _order_spread(spread: PhaseSpread) -> tuple[float, float, str]:
    excess_ns = 0.0 if isinstance(spread.excess_ns, Unavailable) else spread.excess_ns
    return -excess_ns, -spread.median_ns, spread.phase


def _spread_unattributed(
    ranks: list[RankSummary], peer_groups: PeerGroups
) -> PhaseSpread | Unavailable:
    found = [
        (rank.time.steady_steps.unattributed_ns / rank.num_steady_steps, rank.rank)
        for rank in ranks
    ]
    return spread_phase("unattributed", found, peer_groups) if found else Unavailable(NO_STEP)
