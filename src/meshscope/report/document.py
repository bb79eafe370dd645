"""The report as one JSON document; the terminal shows these same numbers.

Names carry their units, times are nanoseconds, ratios are 0..1. What is not known is an object
`{"unavailable": "why"}` in the number's place, never 0 and never null. `docs/report.schema.json`
is generated from the types here; `document_version` rises when a field changes its meaning.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from meshscope import __version__
from meshscope.analyze.health import RecordingHealth
from meshscope.analyze.rank.phases import TimeSplit
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.rank.signals import JobSignal
from meshscope.analyze.rank.steps import JobStepSummary
from meshscope.analyze.rank.throughput import TOKEN_SOURCES, TokenRate
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peers import PhaseClue, PhaseSpread
from meshscope.core.layout import Axis
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.runner import Diagnosis
from meshscope.numerics.distribution import Distribution
from meshscope.report.budget_document import BudgetFacts
from meshscope.report.communication_facts import CommunicationFacts
from meshscope.report.findings_document import DiagnosisFacts, build_diagnosis
from meshscope.report.pipeline_document import PipelineFacts
from meshscope.report.traces_document import TraceFacts, build_traces
from meshscope.report.values import (
    Absent,
    RankRange,
    as_number,
    as_ranges,
    as_string,
    as_text,
    as_value,
)
from meshscope.store.read.columns import Problem
from meshscope.store.read.run import Attempt, JsonFields, Run

DOCUMENT_NAME = "meshscope-report"
DOCUMENT_VERSION = 3
MAX_SERIES_BINS = 240
"""Longer runs are binned to this many points."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A set of durations; percentiles interpolate linearly."""

    count: int
    mean_ns: float | Absent
    median_ns: float | Absent
    p95_ns: float | Absent
    p99_ns: float | Absent
    min_ns: int | Absent
    max_ns: int | Absent
    cv_ratio: float | Absent
    """Standard deviation over mean."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Wall clock by phase: `sum(phase_ns) + unattributed_ns == wall_ns` exactly."""

    wall_ns: int
    phase_ns: dict[str, int]
    unattributed_ns: int


class PhaseShare(msgspec.Struct, frozen=True, kw_only=True):
    """One phase inside the steps after warm-up, over all ranks."""

    phase: str
    ratio: float | Absent
    """Of the steps' wall clock."""
    mean_ns: float | Absent
    """Host self time per step."""
    device_mean_ns: float | Absent
    """Device time per step, of the steps that have any."""
    is_unattributed: bool
    """What no phase claimed, rather than a phase."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time per step of one phase, compared over ranks."""

    phase: str
    num_ranks: int
    min_ns: float
    median_ns: float
    max_ns: float
    min_rank: int
    max_rank: int
    furthest_rank: int | Absent
    """The rank furthest above the median of its peers: ranks that share all coordinates but dp,
    all ranks without a known layout."""
    excess_ns: float | Absent
    """By how much."""


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that spends persistently more time in a phase than its peers; not a diagnosis."""

    rank: int
    phase: str
    median_ns: float
    """Of the rank's time per step in the phase."""
    peers_median_ns: float
    """The median of the other peers' medians."""
    num_peers: int
    num_steps: int
    """Steps compared, without warm-up."""
    num_steps_largest: int
    """Of these, steps in which no peer spent as long."""


class StepBin(msgspec.Struct, frozen=True, kw_only=True):
    """Some consecutive steps of the job."""

    first_step: int
    num_steps: int
    median_ns: float
    max_ns: int


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that had the longest step more often than chance would have it."""

    rank: int
    num_steps: int


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The job's steps; a step takes the median over ranks of the ranks' own durations."""

    num_steps: int
    num_partial: int
    """Steps that not every recording rank finished."""
    num_warmup: int
    """First steps left out of the statistics."""
    warmup_ns: list[int]
    num_profiled: int
    """Steps that a trace window disturbed, left out of the statistics as well."""
    time: Times
    interval: Times
    """Start to start on the same rank, gaps included; again the median over ranks."""
    slowest_rank_time: Times
    """The maximum over ranks of each step; not the job's pace where ranks wait for each other."""
    slowest: list[SlowRank]
    """At most three, most often first; empty when no rank stands out."""
    num_compared: int
    """Steps that `slowest` is about: without warm-up, finished by every rank."""
    series: list[StepBin]
    """All steps, warm-up included."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """A token rate and where it comes from."""

    tokens_per_s: float | Absent
    source: str | Absent
    num_ranks: int
    """Ranks summed."""
    num_steps: int
    """Steps that have a value."""
    num_nonfinite: int


class SignalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A training signal, as the lowest rank that has finite values logged it."""

    signal: str
    name: str | Absent
    """The scalar it was read from."""
    source: str | Absent
    """Where it comes from, if its name tells."""
    rank: int | Absent
    first: float | Absent
    last: float | Absent
    last_step: int | Absent
    num_values: int
    num_ranks: int
    num_nonfinite: int
    """NaN and infinite values, over all ranks."""
    nonfinite_ranks: list[int]


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    label: str | Absent
    host: str | Absent
    state: str
    num_steps: int
    num_warmup: int
    num_aborted_steps: int
    num_skipped_updates: int
    last_step: int | Absent
    last_record_unix_ns: int | Absent
    open_phase: str | None
    """The phase an unfinished rank was in when it last wrote, if any."""
    step_time: Times
    step_interval: Times
    steps_per_s: float | Absent
    tokens: Tokens
    wall_ns: int
    before_first: Split
    steps: Split
    between: Split
    after_last: Split
    steady_steps: Split
    """`steps` without warm-up and profiled steps."""
    device_phase_ns: dict[str, int] | None
    """Device time in the steady steps; null with `device_reason`."""
    device_reason: str | None
    peak_rss_bytes: int | Absent
    peak_device_bytes: int | Absent
    num_errors: int
    num_problems: int


class JobTimeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks' time added up (rank-nanoseconds); the four parts sum to `wall_ns`."""

    wall_ns: int
    before_first: Split
    steps: Split
    between: Split
    after_last: Split
    steady_steps: Split
    num_steady_rank_steps: int
    num_device_rank_steps: int
    """Steps with device time, out of `num_markable_rank_steps`."""
    num_markable_rank_steps: int
    """Steps after warm-up of the ranks that have any device time."""
    num_containers: dict[str, int]
    """Spans per phase that cross step boundaries; left out of the split."""
    num_other_threads: int
    """Phases of other threads; left out of the split."""


class ErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Errors the recorder caught at one of its call sites."""

    site: str
    count: int
    is_at_least: bool
    ranks: list[int]
    first_message: str


class NoteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Something the recorder could not watch."""

    where: str
    text: str
    ranks: list[int]


class ProblemFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with the recorded data, and where."""

    kind: str
    text: str
    rank: int | None = None
    file: str | None = None
    offset: int | None = None
    num_records: int | None = None


class OverheadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The recorder's own time per step, on the steps where it measured itself."""

    num_steps: int
    num_rank_steps: int
    """Steps of all ranks, measured or not."""
    is_warmup_only: bool
    """Only warm-up steps were measured; the first one also opened the files."""
    median_ns: float | Absent
    p95_ns: float | Absent
    max_ns: int | Absent
    median_ratio: float | Absent
    """Of the step's duration."""
    p95_ratio: float | Absent
    max_ratio: float | Absent
    opening_cost_ns: int | Absent
    """Longest time a rank took to open its files, once."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How good the recording is."""

    is_complete: bool
    """Every rank is there, finished and undamaged; what `--strict` asks for."""
    errors: list[ErrorFacts]
    notes: list[NoteFacts]
    problems: list[ProblemFacts]
    num_dropped: int
    num_missing_ranks: int
    missing_ranks: list[RankRange]
    """Stretches of ranks that recorded nothing."""
    short_ranks: list[int]
    unfinished_ranks: list[int]
    num_pauses: int
    num_device_steps_given_up: int
    overhead: OverheadFacts


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks are arranged."""

    text: str | Absent
    degrees: dict[str, int]
    """Empty when not known."""
    source: str | Absent
    """How the recorder knows."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and how many ranks recorded on it."""

    host: str
    num_ranks: int


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and by what program; the program's facts are those of one rank."""

    path: str
    run_id: str | Absent
    attempt: int
    """Counted from 0."""
    num_attempts: int
    started_unix_ns: int | Absent
    """The first rank's start, by its host's wall clock."""
    longest_wall_ns: int
    """Recorded time of the rank that recorded longest."""
    world_size: int
    num_ranks: int
    """Ranks that recorded anything."""
    hosts: list[HostFacts]
    argv: list[str]
    git_revision: str | Absent
    is_git_dirty: bool | None
    torch_version: str | Absent
    device_name: str | Absent


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    document: str = DOCUMENT_NAME
    document_version: int = DOCUMENT_VERSION
    meshscope_version: str = __version__
    run: RunFacts
    diagnosis: DiagnosisFacts | None
    """Null where none was asked for."""
    budget: BudgetFacts | None
    """Where the wall clock of steps went; null where it was not asked for, or with the reason."""
    budget_reason: str | None
    pipeline: PipelineFacts | None
    """Null where there is none, where it cannot be seen, or no diagnosis was asked for."""
    pipeline_reason: str | None
    """Why a declared pipeline cannot be seen; null otherwise."""
    layout: LayoutFacts
    steps: StepFacts
    phases: list[PhaseShare]
    """Largest share first, then `unattributed`."""
    spreads: list[Spread]
    """Largest excess first, then `unattributed`."""
    clues: list[Clue]
    """Largest difference first."""
    steps_per_s: float | Absent
    tokens: Tokens
    signals: list[SignalFacts]
    communication: CommunicationFacts | None
    """Null with `communication_reason`."""
    communication_reason: str | None
    time: JobTimeFacts
    device_reason: str | None
    """Why there is no device time; null when there is some."""
    ranks: list[RankFacts]
    traces: list[TraceFacts]
    """Windows of torch.profiler, by rank."""
    health: Health


def encode_report(report: Report) -> bytes:
    """The document as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def report_schema() -> bytes:
    """JSON Schema of the document, as committed in docs/report.schema.json."""
    schema = msgspec.json.schema(Report)
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


def build_report(
    run: Run,
    attempt: Attempt,
    summary: Study,
    diagnosis: Diagnosis | None = None,
    budget: BudgetFacts | Absent | None = None,
    pipeline: PipelineFacts | Absent | None = None,
) -> Report:
    """Everything the summary and the diagnosis say, as values that JSON can hold."""
    device, communication = summary.time.device_phase_ns, summary.communication
    return Report(
        run=_run_facts(run, attempt, summary),
        diagnosis=None if diagnosis is None else build_diagnosis(diagnosis),
        budget=budget if isinstance(budget, BudgetFacts) else None,
        budget_reason=budget.unavailable if isinstance(budget, Absent) else None,
        pipeline=None if isinstance(pipeline, Absent) else pipeline,
        pipeline_reason=pipeline.unavailable if isinstance(pipeline, Absent) else None,
        layout=_layout_facts(attempt),
        steps=_step_facts(summary.steps),
        phases=_phase_shares(summary),
        spreads=_spreads(summary),
        clues=[_clue(clue) for clue in summary.clues],
        steps_per_s=as_number(summary.steps_per_s),
        tokens=_tokens(summary.tokens),
        signals=[_signal(name, found) for name, found in summary.signals.items()],
        communication=_communication(summary),
        communication_reason=as_text(communication.reason)
        if isinstance(communication, Unavailable)
        else None,
        time=_job_time(summary),
        device_reason=as_text(device.reason) if isinstance(device, Unavailable) else None,
        ranks=[_rank_facts(rank) for rank in summary.ranks],
        traces=build_traces(attempt),
        health=_health(run.path, summary),
    )


# --- values ---------------------------------------------------------------------------------


def _times(found: Distribution | Unavailable) -> Times:
    if isinstance(found, Unavailable):
        none = Absent(as_text(found.reason))
        return Times(
            count=0,
            mean_ns=none,
            median_ns=none,
            p95_ns=none,
            p99_ns=none,
            min_ns=none,
            max_ns=none,
            cv_ratio=none,
        )
    return Times(
        count=found.count,
        mean_ns=found.mean_ns,
        median_ns=found.median_ns,
        p95_ns=found.p95_ns,
        p99_ns=found.p99_ns,
        min_ns=found.min_ns,
        max_ns=found.max_ns,
        cv_ratio=as_number(found.cv_ratio),
    )


def _split(split: TimeSplit) -> Split:
    return Split(
        wall_ns=split.wall_ns,
        phase_ns=_named(split.phase_ns),
        unattributed_ns=split.unattributed_ns,
    )


def _named(values: Mapping[str, int]) -> dict[str, int]:
    named: dict[str, int] = {}
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        named[as_text(name)] = named.get(as_text(name), 0) + value
    return named


# --- sections -------------------------------------------------------------------------------


def _run_facts(run: Run, attempt: Attempt, summary: Study) -> RunFacts:
    headers = [rank.header for rank in attempt]
    provenance = next((p for h in headers if (p := _fields(h.get("provenance")))), {})
    git, torch = _fields(provenance.get("git")), _fields(provenance.get("torch"))
    starts = [start for h in headers if isinstance(start := h.get("start_unix_ns"), int)]
    hosts: dict[str, int] = {}
    for rank in summary.ranks:
        if isinstance(rank.host, str):
            hosts[as_text(rank.host)] = hosts.get(as_text(rank.host), 0) + 1
    argv = provenance.get("argv")
    is_dirty = git.get("is_dirty")
    return RunFacts(
        path=as_text(run.shown_path),
        run_id=_string_field(run.manifest, "run_id", "run.json is missing or has none"),
        attempt=attempt.index,
        num_attempts=len(run.attempts),
        started_unix_ns=min(starts) if starts else Absent("no rank's journal has a start"),
        longest_wall_ns=max((rank.time.wall_ns for rank in summary.ranks), default=0),
        world_size=summary.world_size,
        num_ranks=len(summary.ranks),
        hosts=[HostFacts(host=host, num_ranks=count) for host, count in hosts.items()],
        argv=[as_text(str(word)) for word in argv] if isinstance(argv, list) else [],
        git_revision=_string_field(git, "revision", str(git.get("reason", "not recorded"))),
        is_git_dirty=is_dirty if isinstance(is_dirty, bool) else None,
        torch_version=_string_field(torch, "version", "not recorded"),
        device_name=_device_name(torch),
    )


def _fields(value: object) -> JsonFields:
    return value if isinstance(value, dict) else {}


def _string_field(fields: JsonFields, name: str, reason: str) -> str | Absent:
    value = fields.get(name)
    return as_text(value) if isinstance(value, str) else Absent(as_text(reason))


def _device_name(torch: JsonFields) -> str | Absent:
    devices = torch.get("devices")
    first = _fields(devices[0]) if isinstance(devices, list) and devices else {}
    return _string_field(first, "name", "no accelerator was in use when recording began")


def _layout_facts(attempt: Attempt) -> LayoutFacts:
    layout = attempt.layout
    if isinstance(layout, Unavailable):
        none = Absent(as_text(layout.reason))
        return LayoutFacts(text=none, degrees={}, source=none)
    known = (fields for rank in attempt for fields in (rank.header, *rank.updates))
    sources = (fields.get("layout_source") for fields in known if fields.get("layout"))
    source = next((source for source in sources if isinstance(source, str)), None)
    return LayoutFacts(
        text=layout.describe(),
        degrees={str(axis): layout.degree(axis) for axis in Axis},
        source=Absent("not recorded") if source is None else as_text(source),
    )


def _step_facts(steps: JobStepSummary) -> StepFacts:
    return StepFacts(
        num_steps=steps.num_steps,
        num_partial=steps.num_partial,
        num_warmup=steps.num_warmup,
        warmup_ns=list(steps.warmup_ns),
        num_profiled=steps.num_profiled,
        time=_times(steps.time),
        interval=_times(steps.interval),
        slowest_rank_time=_times(steps.slowest_rank_time),
        slowest=[SlowRank(rank=s.rank, num_steps=s.num_steps) for s in steps.slowest],
        num_compared=steps.num_compared,
        series=_bin_steps(steps),
    )


def _bin_steps(steps: JobStepSummary) -> list[StepBin]:
    num_bins = min(MAX_SERIES_BINS, steps.num_steps)
    if not num_bins:
        return []
    numbers = np.array_split(steps.step, num_bins)
    durations = np.array_split(steps.duration_ns, num_bins)
    return [
        StepBin(
            first_step=int(number[0]),
            num_steps=len(number),
            median_ns=float(np.median(duration)),
            max_ns=int(duration.max()),
        )
        for number, duration in zip(numbers, durations, strict=True)
    ]


def _phase_shares(summary: Study) -> list[PhaseShare]:
    split, num_steps = summary.time.steady_steps, summary.time.num_steady_rank_steps
    if not num_steps:
        return []

    def share(name: str, total_ns: int, device_mean_ns: float | Absent) -> PhaseShare:
        return PhaseShare(
            phase=name,
            ratio=total_ns / split.wall_ns if split.wall_ns else Absent("the steps took no time"),
            mean_ns=total_ns / num_steps,
            device_mean_ns=device_mean_ns,
            is_unattributed=False,
        )

    device, num_device = summary.time.device_phase_ns, summary.time.num_device_rank_steps
    if not isinstance(device, Unavailable):
        device = _named(device)
    shares = [
        share(name, total_ns, _device_mean(name, device, num_device))
        for name, total_ns in _named(split.phase_ns).items()
    ]
    none = Absent("the device's own time outside phases is not marked")
    rest = share("unattributed", split.unattributed_ns, none)
    return [*shares, msgspec.structs.replace(rest, is_unattributed=True)]


def _device_mean(
    name: str, device: Mapping[str, int] | Unavailable, num_steps: int
) -> float | Absent:
    if isinstance(device, Unavailable):
        return Absent(as_text(device.reason))
    if name not in device or not num_steps:
        return Absent("no device time was recorded for this phase")
    return device[name] / num_steps


def _spreads(summary: Study) -> list[Spread]:
    last = summary.unattributed
    found = [*summary.spreads] + ([] if isinstance(last, Unavailable) else [last])
    return [_spread(spread) for spread in found]


def _spread(spread: PhaseSpread) -> Spread:
    return Spread(
        phase=as_text(spread.phase),
        num_ranks=spread.num_ranks,
        min_ns=spread.min_ns,
        median_ns=spread.median_ns,
        max_ns=spread.max_ns,
        min_rank=spread.min_rank,
        max_rank=spread.max_rank,
        furthest_rank=as_value(spread.furthest_rank),
        excess_ns=as_number(spread.excess_ns),
    )


def _clue(clue: PhaseClue) -> Clue:
    return Clue(
        rank=clue.rank,
        phase=as_text(clue.phase),
        median_ns=clue.median_ns,
        peers_median_ns=clue.peers_median_ns,
        num_peers=clue.num_peers,
        num_steps=clue.num_steps,
        num_steps_largest=clue.num_steps_largest,
    )


def _tokens(rate: TokenRate | Unavailable) -> Tokens:
    if isinstance(rate, Unavailable):
        none = Absent(as_text(rate.reason))
        return Tokens(tokens_per_s=none, source=none, num_ranks=0, num_steps=0, num_nonfinite=0)
    return Tokens(
        tokens_per_s=as_number(rate.tokens_per_s),
        source=TOKEN_SOURCES[rate.source],
        num_ranks=rate.num_ranks,
        num_steps=rate.num_steps,
        num_nonfinite=rate.num_nonfinite,
    )


def _signal(signal: str, found: JobSignal | Unavailable) -> SignalFacts:
    if isinstance(found, Unavailable):
        none = Absent(as_text(found.reason))
        return SignalFacts(
            signal=signal,
            name=none,
            source=none,
            rank=none,
            first=none,
            last=none,
            last_step=none,
            num_values=0,
            num_ranks=0,
            num_nonfinite=0,
            nonfinite_ranks=[],
        )
    shown = found.shown
    return SignalFacts(
        signal=signal,
        name=shown.name,
        source=as_string(shown.source),
        rank=shown.rank,
        first=as_number(shown.first),
        last=as_number(shown.last),
        last_step=as_value(shown.last_step),
        num_values=shown.num_values,
        num_ranks=found.num_ranks,
        num_nonfinite=found.num_nonfinite,
        nonfinite_ranks=list(found.nonfinite_ranks),
    )


def _communication(summary: Study) -> CommunicationFacts | None:
    if isinstance(summary.communication, Unavailable):
        return None
    from meshscope.report.communication import build_communication  # loads the analysis

    return build_communication(summary.communication, summary)


def _job_time(summary: Study) -> JobTimeFacts:
    time = summary.time
    return JobTimeFacts(
        wall_ns=time.wall_ns,
        before_first=_split(time.before_first),
        steps=_split(time.steps),
        between=_split(time.between),
        after_last=_split(time.after_last),
        steady_steps=_split(time.steady_steps),
        num_steady_rank_steps=time.num_steady_rank_steps,
        num_device_rank_steps=time.num_device_rank_steps,
        num_markable_rank_steps=time.num_markable_rank_steps,
        num_containers=_named(time.containers),
        num_other_threads=time.num_other_threads,
    )


def _rank_facts(rank: RankSummary) -> RankFacts:
    device = rank.device
    return RankFacts(
        rank=rank.rank,
        label=as_string(rank.label),
        host=as_string(rank.host),
        state=str(rank.state),
        num_steps=rank.num_steps,
        num_warmup=rank.num_warmup,
        num_aborted_steps=rank.num_aborted_steps,
        num_skipped_updates=rank.num_skipped_updates,
        last_step=as_value(rank.last_step),
        last_record_unix_ns=as_value(rank.last_record_unix_ns),
        open_phase=None if rank.open_phase is None else as_text(rank.open_phase),
        step_time=_times(rank.step_time),
        step_interval=_times(rank.step_interval),
        steps_per_s=as_number(rank.steps_per_s),
        tokens=_tokens(rank.tokens),
        wall_ns=rank.time.wall_ns,
        before_first=_split(rank.time.before_first),
        steps=_split(rank.time.steps),
        between=_split(rank.time.between),
        after_last=_split(rank.time.after_last),
        steady_steps=_split(rank.time.steady_steps),
        device_phase_ns=None if isinstance(device, Unavailable) else _named(device.phase_ns),
        device_reason=as_text(device.reason) if isinstance(device, Unavailable) else None,
        peak_rss_bytes=as_value(rank.peak_rss_bytes),
        peak_device_bytes=as_value(rank.peak_device_bytes),
        num_errors=rank.num_errors,
        num_problems=rank.num_problems,
    )


def _health(run_path: Path, summary: Study) -> Health:
    health = summary.health
    return Health(
        is_complete=health.is_complete,
        errors=[
            ErrorFacts(
                site=as_text(error.site),
                count=error.count,
                is_at_least=error.is_at_least,
                ranks=list(error.ranks),
                first_message=as_text(error.first_message),
            )
            for error in health.errors
        ],
        notes=[
            NoteFacts(where=as_text(note.where), text=as_text(note.text), ranks=list(note.ranks))
            for note in health.notes
        ],
        problems=[_problem(run_path, problem) for problem in health.problems],
        num_dropped=health.num_dropped,
        num_missing_ranks=len(health.missing_ranks),
        missing_ranks=as_ranges(health.missing_ranks),
        short_ranks=list(health.short_ranks),
        unfinished_ranks=list(health.unfinished_ranks),
        num_pauses=health.num_pauses,
        num_device_steps_given_up=health.num_device_steps_given_up,
        overhead=_overhead(health, sum(rank.num_steps for rank in summary.ranks)),
    )


def _problem(run_path: Path, problem: Problem) -> ProblemFacts:
    path = problem.path
    if path is not None and path.is_relative_to(run_path):
        path = path.relative_to(run_path)
    return ProblemFacts(
        kind=str(problem.kind),
        text=as_text(problem.text),
        rank=problem.rank,
        file=None if path is None else as_text(str(path)),
        offset=problem.offset,
        num_records=problem.num_records,
    )


def _overhead(health: RecordingHealth, num_rank_steps: int) -> OverheadFacts:
    cost = health.overhead
    opening_cost_ns = as_value(health.opening_cost_ns)
    if isinstance(cost, Unavailable):
        none = Absent(as_text(cost.reason))
        return OverheadFacts(
            num_steps=0,
            num_rank_steps=num_rank_steps,
            is_warmup_only=False,
            median_ns=none,
            p95_ns=none,
            max_ns=none,
            median_ratio=none,
            p95_ratio=none,
            max_ratio=none,
            opening_cost_ns=opening_cost_ns,
        )
    return OverheadFacts(
        num_steps=cost.num_steps,
        num_rank_steps=num_rank_steps,
        is_warmup_only=cost.is_warmup_only,
        median_ns=cost.median_ns,
        p95_ns=cost.p95_ns,
        max_ns=cost.max_ns,
        median_ratio=as_number(cost.median_ratio),
        p95_ratio=as_number(cost.p95_ratio),
        max_ratio=as_number(cost.max_ratio),
        opening_cost_ns=opening_cost_ns,
    )
