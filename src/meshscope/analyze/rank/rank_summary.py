"""One rank in numbers: what it did, how its recording ends, and its part of the job's sums.

`summarize_rank` reads and reduces one rank's tables, without other ranks: a job is a map over ranks
and a merge of `RankResult`s in order of rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.rank.caught_errors import as_int, list_errors
from meshscope.analyze.rank.device import (
    NO_ACCELERATOR,
    DeviceSplit,
    MarkLeads,
    explain_no_device,
    measure_leads,
    split_device_time,
)
from meshscope.analyze.rank.lost_records import PHASE_TABLES, mark_incomplete
from meshscope.analyze.rank.not_in_traces import (
    NO_END,
    NO_HOST,
    explain_no_memory,
    explain_no_resident,
)
from meshscope.analyze.rank.overhead import OverheadSamples, sample_overhead
from meshscope.analyze.rank.phases import (
    PhaseTable,
    RankPartition,
    StepTimes,
    assign_phases,
    order_steps,
    partition_rank,
    tabulate_phases,
)
from meshscope.analyze.rank.signals import SIGNAL_NAMES, Signal, find_signals, read_scalars
from meshscope.analyze.rank.steps import (
    ALL_PROFILED,
    NO_STEP,
    count_warmup,
    explain_no_steady_step,
)
from meshscope.analyze.rank.throughput import (
    RankRates,
    TokenRate,
    measure_rates,
    measure_steps_per_s,
    pick_rank_tokens,
)
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.distribution import Distribution, measure_distribution
from meshscope.store.read.arrays import Bools
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.trace_windows import TraceWindow, mark_profiled
from meshscope.store.read.usual_phases import is_recorded
from meshscope.store.schema import StepFlag

_WANTED_SCALARS = frozenset(
    ("tokens", "samples", *(name for names in SIGNAL_NAMES.values() for name in names))
)


ON_PURPOSE = "KeyboardInterrupt"
"""How an exception begins that somebody wanted."""


class RankState(StrEnum):
    """How a rank's recording ends."""

    FINISHED = "finished"
    FAILED = "failed"
    """Its program ended in an exception that nobody wanted."""
    OPEN = "still running or killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    rank: int
    label: str | Unavailable
    """Coordinates on the mesh, such as `dp0.tp1.pp0`."""
    host: str | Unavailable
    num_steps: int
    """Finished steps."""
    num_warmup: int
    """First steps, left out of `step_time`, `time.steady_steps` and `device`."""
    num_profiled: int
    """Later steps that a trace window disturbed; also left out."""
    num_phased: int
    """Steps that `time.steady_steps` and `device` are over: steady, and with all their phases."""
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
    state: RankState | Unavailable
    last_record_unix_ns: int | Unavailable
    """Wall clock of the rank's host at the last thing recorded, or at its closing line."""
    open_phase: str | None
    """The phase an unfinished rank was in when it last wrote; None between phases or at the end."""
    num_errors: int
    num_problems: int

    @property
    def device_phase_ns(self) -> Mapping[str, int] | Unavailable:
        """Device time in the steady steps, by phase."""
        return self.device if isinstance(self.device, Unavailable) else self.device.phase_ns

    @property
    def has_accelerator(self) -> bool:
        """Whether its memory or its stream was recorded."""
        both = (self.device, self.peak_device_bytes)
        return not all(isinstance(found, Unavailable) for found in both)

    @property
    def num_steady_steps(self) -> int:
        """Steps the statistics are over."""
        return self.num_steps - self.num_warmup - self.num_profiled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SteadySteps:
    """Which of a rank's steps its statistics are over."""

    num_warmup: int
    num_profiled: int
    """After warm-up."""
    is_steady: Bools
    """Per step, in order of time."""
    has_interval: Bools
    """Per step except the last: steady, and the next step's start was not disturbed."""
    reason: str
    """Why no step is steady, if none is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankResult:
    """What is kept of one rank until it is merged into the job."""

    summary: RankSummary
    steps: StepTimes
    is_phased: Bools
    """Per step: it is steady, and all its phases are there."""
    phases: PhaseTable
    """Self time by step and phase."""
    rates: RankRates
    overhead: OverheadSamples


def _choose_steady(
    steps: StepTimes, windows: Sequence[TraceWindow], asked_warmup: int | None
) -> _SteadySteps:
    """Steps after warm-up that no rank's trace window disturbed."""
    num_steps = len(steps)
    num_warmup = count_warmup(num_steps, asked_warmup)
    is_profiled = mark_profiled(steps.step, windows)
    is_steady = ~is_profiled
    is_steady[:num_warmup] = False
    num_profiled = int(np.count_nonzero(is_profiled[num_warmup:]))
    return _SteadySteps(
        num_warmup=num_warmup,
        num_profiled=num_profiled,
        is_steady=is_steady,
        has_interval=is_steady[:-1] & ~is_profiled[1:] & steps.is_followed,
        reason=ALL_PROFILED if num_profiled else explain_no_steady_step(num_steps),
    )


def summarize_rank(
    recording: Recording,
    layout: Layout | Unavailable,
    *,
    windows: Sequence[TraceWindow],
    warmup_steps: int | None,
) -> RankResult:
    """Reads a rank's tables. Without `warmup_steps`, 1 step is warm-up if more than 3 finished."""
    columns = recording.read("steps")
    steps = order_steps(columns)
    chosen = _choose_steady(steps, windows, warmup_steps)
    num_steps = len(steps)
    spans = recording.read("spans")
    memory = recording.read("memory")
    scalars = read_scalars(recording, _WANTED_SCALARS)
    is_phased = chosen.is_steady & ~mark_incomplete(recording, steps, PHASE_TABLES)
    placed, num_other_threads = assign_phases(steps, spans)
    phases = tabulate_phases(placed, recording.names, num_steps=num_steps)
    recorded_ns = _recorded_range(recording, steps, spans, memory)
    device: DeviceSplit | Unavailable
    leads: MarkLeads | Unavailable
    if recording.has_table("device_spans"):
        device_spans = recording.read("device_spans")
        device = split_device_time(placed, device_spans, recording.names, is_steady=is_phased)
        leads = measure_leads(placed, device_spans)
    else:
        device = leads = explain_no_device(recording, memory)
    rates = measure_rates(steps, columns, scalars)
    flags = columns["flags"].astype(np.int64, copy=False)
    summary = RankSummary(
        rank=recording.rank,
        label=layout if isinstance(layout, Unavailable) else layout.label(recording.rank),
        host=_host_of(recording),
        num_steps=num_steps,
        num_warmup=chosen.num_warmup,
        num_profiled=chosen.num_profiled,
        num_phased=int(np.count_nonzero(is_phased)),
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
            is_steady=is_phased,
            num_other_threads=num_other_threads,
        ),
        device=device,
        tokens=pick_rank_tokens(rates),
        signals=find_signals(recording, scalars),
        peak_rss_bytes=_peak(memory, "rss_bytes", explain_no_resident(recording)),
        peak_device_bytes=_peak(memory, "peak_allocated_bytes", _explain_no_peak(recording)),
        state=_find_state(recording),
        last_record_unix_ns=to_unix(recording, recorded_ns[1]),
        open_phase=_find_open_phase(recording, spans),
        num_errors=sum(found.count for found in list_errors(recording)),
        num_problems=len(recording.problems)
        + bool(steps.num_overlapping)
        + bool(steps.num_reversed),
    )
    return RankResult(
        summary=summary,
        steps=steps,
        is_phased=is_phased,
        phases=phases,
        rates=rates,
        overhead=sample_overhead(columns, steps.step, chosen.num_warmup, leads, windows),
    )


def _find_state(recording: Recording) -> RankState | Unavailable:
    if recording.is_from_trace:
        return Unavailable(NO_END)
    exception = recording.exception
    if exception is not None and not exception.startswith(ON_PURPOSE):
        return RankState.FAILED
    return RankState.OPEN if recording.closing is None else RankState.FINISHED


def _recorded_range(
    recording: Recording, steps: StepTimes, spans: Columns, memory: Columns
) -> tuple[int, int]:
    """First and last moment of the rank's recording, on its monotonic clock.

    The header is written with the first record, which is the end of the first phase: that phase,
    and the step it is in, may have begun before.
    """
    span_start = int64_column(spans, "start_host_mono_ns")
    starts = [as_int(recording.header.get("start_host_mono_ns"))]
    ends = [as_int(recording.closing.get("end_host_mono_ns")) if recording.closing else None]
    if len(steps):
        starts.append(int(steps.start_ns[0]))
        ends.append(int(steps.end_ns[-1]))
    if len(span_start):
        starts.append(int(span_start.min()))
        ends.append(int((span_start + int64_column(spans, "duration_ns")).max()))
    sampled = int64_column(memory, "time_host_mono_ns")
    if len(sampled):
        ends.append(int(sampled.max()))
    known = [moment for moment in starts if moment is not None]
    start_ns = min(known, default=0)
    end_ns = max((moment for moment in (*known, *ends) if moment is not None), default=0)
    return start_ns, end_ns


def to_unix(recording: Recording, mono_ns: int) -> int | Unavailable:
    """A moment of a rank's own clock as its host told the time when the rank began."""
    start_mono_ns = as_int(recording.header.get("start_host_mono_ns"))
    start_unix_ns = as_int(recording.header.get("start_unix_ns"))
    if start_mono_ns is None or start_unix_ns is None:
        return Unavailable("the rank's journal does not say when it began")
    return start_unix_ns + mono_ns - start_mono_ns


def _find_open_phase(recording: Recording, spans: Columns) -> str | None:
    if recording.closing is not None:
        return None
    going_on = [
        phase
        for phase in recording.open_phases()
        if phase.end_host_mono_ns is None and not is_recorded(phase, spans)
    ]
    return recording.name_of(going_on[-1].name_id) if going_on else None


def _host_of(recording: Recording) -> str | Unavailable:
    host = recording.header.get("host")
    if isinstance(host, str):
        return host
    return Unavailable(NO_HOST if recording.is_from_trace else "the rank's journal does not say")


def _explain_no_peak(recording: Recording) -> Unavailable:
    """Why nothing is known of the device's memory."""
    if recording.is_from_trace and recording.has_table("device_spans"):
        return explain_no_memory(recording)
    return Unavailable(NO_ACCELERATOR)


def _peak(memory: Columns, name: str, reason: Unavailable) -> int | Unavailable:
    highest = int(int64_column(memory, name).max(initial=-1))
    return highest if highest >= 0 else reason
