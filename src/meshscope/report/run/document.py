"""The report as one JSON document: the analyses as they are, and what `report.Report` adds.

Names carry their units, times are nanoseconds, ratios are 0..1. An unknown value is an object
`{"unavailable": "why"}`, never 0 and never null. `document_version` rises when a field changes its
meaning. `SHAPES` says where keys differ from the fields of an analysis.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope import __version__
from meshscope.analyze.budget.budget import Utilisation
from meshscope.analyze.communication.communication import (
    Communication,
    CommunicationHealth,
    PartialGroup,
    SlowOperation,
)
from meshscope.analyze.communication.communication_sums import CommunicationSum
from meshscope.analyze.device.hardware import Hardware
from meshscope.analyze.health import RecordingHealth
from meshscope.analyze.job.clocks import Clock
from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.job.job_time import JobTime
from meshscope.analyze.job.matching import OperationSide
from meshscope.analyze.memory.memory import JobMemory, RankMemory
from meshscope.analyze.pipeline.bubble import PipelineBubble
from meshscope.analyze.pipeline.stage_work import StageTime
from meshscope.analyze.prediction import CheckedMemory, CheckedTime, PredictionCheck
from meshscope.analyze.rank.overhead import Overhead
from meshscope.analyze.rank.phases import RankPartition, TimeSplit
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.rank.signals import JobSignal, Signal
from meshscope.analyze.rank.steps import JobStepSummary
from meshscope.analyze.rank.throughput import SampleRate, TokenRate
from meshscope.analyze.timeline.peers import PhaseClue, PhaseSpread
from meshscope.analyze.training.convergence import Convergence, JobSeries
from meshscope.analyze.training.logged import LoggedScalar
from meshscope.analyze.training.settings import SettingsGroup
from meshscope.analyze.training.totals import JobTotals
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.pricing import Scale, recoverable_hours
from meshscope.diagnose.runner import Diagnosis
from meshscope.report.encode import Shape, Shapes, encode
from meshscope.report.run.budget import BudgetFacts
from meshscope.report.run.communication import CommunicationFacts, CommunicationHealthFacts
from meshscope.report.run.ledger import LedgerFacts
from meshscope.report.run.pipeline import PipelineFacts, StageFacts
from meshscope.report.run.report import LayoutFacts, PhaseShare, Report, RunFacts, name_file
from meshscope.store.read.columns import Problem, ProblemKind
from meshscope.store.read.trace_windows import NO_TRACE, TraceWindow, windows_of

DOCUMENT = "meshscope-report", 4
MAX_TRACES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingFacts:
    """One cause, what to change about it, and what that would save."""

    finding: Finding
    name: str
    """The rule's name."""
    saved_ns: float | Unavailable
    """Per step, without the cause."""
    saved_ratio: float | Unavailable
    """Of the step."""
    step_ns: float | Unavailable
    """The step that `saved_ratio` is of."""
    price_basis: str | Unavailable
    """`replayed`, or how it was computed."""
    recoverable_rank_hours: float | Unavailable
    """`saved_ns` x steps x ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisFacts:
    """What the rules found."""

    findings: tuple[FindingFacts, ...]
    """The most urgent first; symptoms of others last."""
    worst_severity: Severity | None
    rules: tuple[str, ...]
    """Codes of the rules that ran."""
    scale: Scale
    step_ns: float | Unavailable
    """Median over steps from one start to the next, gaps included."""
    replay_error_ratio: float | Unavailable
    """Error of a replay with measured durations against the clock."""
    changed_thresholds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """One window of torch.profiler on one rank."""

    rank: int
    reason: str
    """Who asked for it."""
    first_step: int | Unavailable
    """First step in the trace."""
    last_step: int | Unavailable
    path: str | Unavailable
    """Relative to the run's folder."""
    num_bytes: int | Unavailable
    begin_host_mono_ns: int
    end_host_mono_ns: int | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFacts:
    """Something wrong with the recorded data, and where."""

    kind: ProblemKind
    text: str
    rank: int | None
    file: str | None
    """Relative to the run's folder if it is inside."""
    offset: int | None
    num_records: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """How good the recording is."""

    found: RecordingHealth
    problems: tuple[ProblemFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """The whole report."""

    meshscope_version: str
    run: RunFacts
    diagnosis: DiagnosisFacts | None
    """Null if not wanted."""
    budget: BudgetFacts | Unavailable | None
    """Where the wall clock of steps went; null if not wanted."""
    ledger: LedgerFacts | Unavailable | None
    """Lost time, loss by loss; null if not wanted."""
    prediction: PredictionCheck | Unavailable | None
    """What was predicted before the run, against it; null if not wanted."""
    pipeline: PipelineFacts | Unavailable | None
    """Null without a pipeline or a diagnosis."""
    layout: LayoutFacts
    steps: JobStepSummary
    phases: tuple[PhaseShare, ...]
    """Largest share first, then `unattributed`."""
    spreads: tuple[PhaseSpread, ...]
    """Largest excess first, then `unattributed`."""
    clues: tuple[PhaseClue, ...]
    """Largest difference first."""
    steps_per_s: float | Unavailable
    tokens: TokenRate | Unavailable
    samples: SampleRate | Unavailable
    signals: Mapping[str, JobSignal | Unavailable]
    """By name: `loss`, `grad_norm`, `lr`, and those of further optimizers, such as `loss 2`."""
    training: Convergence | Unavailable
    """Loss, gradient norm and learning rate over the run: medians over ranks."""
    totals: JobTotals | Unavailable
    """What the program counted, timed and logged itself, and sums over the run."""
    communication: CommunicationFacts | Unavailable
    time: JobTime
    ranks: tuple[RankSummary, ...]
    memory: JobMemory | Unavailable
    """Of every rank that read its memory: peaks, growth, limits."""
    hardware: Hardware | Unavailable
    """The devices as their driver saw them."""
    logged: tuple[LoggedScalar, ...] | Unavailable
    """Numbers that the program or its framework logged."""
    settings: tuple[SettingsGroup, ...] | Unavailable
    """Hyper-parameters and frameworks' arguments, by source."""
    traces: tuple[TraceFacts, ...]
    """Windows of torch.profiler, by rank."""
    health: HealthFacts


SHAPES: Shapes = {
    CheckedMemory: Shape(derived=("residual_bytes",)),
    CheckedTime: Shape(derived=("residual_ns",)),
    Clock: Shape(ranges=("ranks",)),
    Communication: Shape(
        dropped=("ranks", "groups", "observed_ns", "by_axis_and_kind", "by_axis", "by_rank",
                 "by_step", "shifts", "part")
    ),
    CommunicationFacts: Shape(inlined=("found",)),
    CommunicationHealth: Shape(dropped=("failures",), renamed={"num_warmup": "num_left_out"}),
    CommunicationHealthFacts: Shape(inlined=("found",)),
    CommunicationSum: Shape(derived=("exposed_ns",)),
    Convergence: Shape(dropped=("latest_loss", "loss_spikes", "norm_spikes")),
    DiagnosisFacts: Shape(inlined=("scale",)),
    Finding: Shape(dropped=("gain", "edit", "lost_steps"), ranges=("ranks",)),
    FindingFacts: Shape(inlined=("finding",)),
    HealthFacts: Shape(inlined=("found",)),
    JobGroup: Shape(dropped=("num_hosts", "recorded_ranks"), ranges=("ranks",)),
    JobSeries: Shape(
        dropped=("step", "value", "low", "high", "num_ranks", "bad_steps"),
        derived=("first", "last", "lowest", "highest", "points"),
    ),
    JobSignal: Shape(inlined=("shown",)),
    JobStepSummary: Shape(
        dropped=("step", "duration_ns", "is_profiled"), derived=("num_profiled", "series")
    ),
    JobTime: Shape(derived=("wall_ns",), renamed={"containers": "num_containers"}),
    LoggedScalar: Shape(dropped=("recorded_name",)),
    OperationSide: Shape(ranges=("ranks",)),
    Overhead: Shape(derived=("lost_ratio",)),
    PartialGroup: Shape(ranges=("missing_ranks",)),
    PipelineBubble: Shape(
        dropped=("executed", "rank_bubble_ratio", "run_bubble_ratio", "parts", "action_gaps"),
        derived=("utilisation_ratio",),
    ),
    PipelineFacts: Shape(inlined=("bubble",)),
    RankMemory: Shape(derived=("parts_bytes",)),
    RankPartition: Shape(
        dropped=("start_ns", "end_ns", "containers", "num_other_threads", "given"),
        derived=("wall_ns",),
    ),
    RankSummary: Shape(
        inlined=("time",),
        dropped=("device", "signals", "num_profiled"),
        derived=("device_phase_ns",),
    ),
    RecordingHealth: Shape(
        dropped=("problems",), derived=("is_complete", "num_missing_ranks")
    ),
    Signal: Shape(dropped=("num_nonfinite",)),
    SlowOperation: Shape(dropped=("axis",)),
    StageFacts: Shape(inlined=("time",)),
    StageTime: Shape(
        dropped=("kind_ns", "quiet_ns"), derived=("forward_ns", "backward_ns"), ranges=("ranks",)
    ),
    TimeSplit: Shape(derived=("unattributed_ns",)),
    Utilisation: Shape(derived=("is_impossible",)),
}  # fmt: skip


def encode_report(report: Report) -> str:
    return encode(*DOCUMENT, build_document(report), SHAPES)


def build_document(report: Report) -> Document:
    study, rest = report.study, report.study.unattributed
    return Document(
        meshscope_version=__version__,
        run=report.facts,
        diagnosis=None if report.diagnosis is None else _describe_diagnosis(report.diagnosis),
        budget=report.budget,
        ledger=report.ledger,
        prediction=report.prediction,
        pipeline=report.pipeline,
        layout=report.layout,
        steps=study.steps,
        phases=report.phases,
        spreads=study.spreads if isinstance(rest, Unavailable) else (*study.spreads, rest),
        clues=study.clues,
        steps_per_s=study.steps_per_s,
        tokens=study.tokens,
        samples=study.samples,
        signals=study.signals,
        training=study.convergence,
        totals=study.totals,
        communication=report.communication,
        time=study.time,
        ranks=study.ranks,
        memory=study.memory,
        hardware=study.hardware,
        logged=study.logged,
        settings=study.settings,
        traces=tuple(map(_describe_trace, windows_of(report.attempt)[:MAX_TRACES])),
        health=HealthFacts(
            found=study.health,
            problems=tuple(
                _describe_problem(report.run.path, one) for one in study.health.problems
            ),
        ),
    )


def _describe_diagnosis(diagnosis: Diagnosis) -> DiagnosisFacts:
    return DiagnosisFacts(
        findings=tuple(_describe_finding(one, diagnosis) for one in diagnosis.findings),
        worst_severity=diagnosis.worst,
        rules=diagnosis.rules,
        scale=diagnosis.scale,
        step_ns=diagnosis.step_ns,
        replay_error_ratio=diagnosis.replay_error_ratio,
        changed_thresholds=diagnosis.changed_thresholds,
    )


def _describe_finding(finding: Finding, diagnosis: Diagnosis) -> FindingFacts:
    gain = finding.gain

    def read(name: str) -> Any:
        return gain if isinstance(gain, Unavailable) else getattr(gain, name)

    return FindingFacts(
        finding=finding,
        name=diagnosis.names.get(finding.code, ""),
        saved_ns=read("saved_ns"),
        saved_ratio=read("saved_ratio"),
        step_ns=read("step_ns"),
        price_basis=read("basis"),
        recoverable_rank_hours=recoverable_hours(gain, diagnosis.scale),
    )


def _describe_trace(window: TraceWindow) -> TraceFacts:
    none = Unavailable(window.problem or NO_TRACE)
    early = none if window.path is None else Unavailable("not recorded")
    return TraceFacts(
        rank=window.rank,
        reason=window.reason,
        first_step=early if window.first_step is None else window.first_step,
        last_step=early if window.last_step is None else window.last_step,
        path=none if window.path is None else window.path,
        num_bytes=early if window.num_bytes is None else window.num_bytes,
        begin_host_mono_ns=window.begin_host_mono_ns,
        end_host_mono_ns=none if window.end_host_mono_ns is None else window.end_host_mono_ns,
    )


def _describe_problem(run_path: Path, problem: Problem) -> ProblemFacts:
    return ProblemFacts(
        kind=problem.kind,
        text=problem.text,
        rank=problem.rank,
        file=name_file(problem, run_path),
        offset=problem.offset,
        num_records=problem.num_records,
    )
