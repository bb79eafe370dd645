"""The content of a report: the analyses of one attempt, and a few numbers for readers only.

Sections and the JSON document both read this, so every number shown is in the document too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meshscope.core.layout import Axis
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.store.remote.mirror import name_place

if TYPE_CHECKING:
    from meshscope.analyze.prediction import PredictionCheck
    from meshscope.analyze.study import Study
    from meshscope.diagnose.runner import Diagnosis
    from meshscope.hang.hang import Hang
    from meshscope.report.run.budget import BudgetFacts
    from meshscope.report.run.communication import CommunicationFacts
    from meshscope.report.run.ledger import LedgerFacts
    from meshscope.report.run.pipeline import PipelineFacts
    from meshscope.store.read.columns import Problem
    from meshscope.store.read.recording import JsonFields
    from meshscope.store.read.run import Attempt, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A machine and how many ranks recorded on it."""

    host: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What was recorded, and by what program; the program's facts are those of one rank."""

    path: str
    run_id: str | Unavailable
    attempt: int
    """Counted from 0."""
    num_attempts: int
    started_unix_ns: int | Unavailable
    """The first rank's start, by its host's wall clock."""
    longest_wall_ns: int
    """Recorded time of the rank that recorded longest."""
    world_size: int
    num_ranks: int
    """Ranks that recorded anything."""
    hosts: tuple[HostFacts, ...]
    argv: tuple[str, ...]
    git_revision: str | Unavailable
    is_git_dirty: bool | None
    torch_version: str | Unavailable
    device_name: str | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """How the ranks are arranged."""

    text: str | Unavailable
    degrees: Mapping[str, int]
    """Empty when not known."""
    source: str | Unavailable
    """How the recorder knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShare:
    """One phase inside the steps after warm-up, over all ranks."""

    phase: str
    ratio: float | Unavailable
    """Of the steps' wall clock."""
    mean_ns: float
    """Host self time per step."""
    device_mean_ns: float | Unavailable
    """Device time per step, of the steps that have any."""
    is_unattributed: bool
    """What no phase claimed, rather than a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """How much of a report is shown."""

    shows_all_ranks: bool = False
    shows_all_communication: bool = False
    """The whole section on communication instead of its head."""
    explains: bool = False
    """Findings of the first screen in full, with evidence and confidence."""
    ranks: str | None = None
    """The ranks that were asked for, if not all."""
    directory: Path | None = None
    """Paths below it are shown relative to it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    run: "Run"
    study: "Study"
    diagnosis: "Diagnosis | None" = None
    """None if not wanted; then neither budget nor pipeline is shown."""
    hang: "Hang | None" = None
    """What holds the job up, or whether it moves; None where all ranks ended, or nobody looked."""

    @property
    def attempt(self) -> "Attempt":
        return self.study.attempt

    @cached_property
    def facts(self) -> RunFacts:
        return _describe_run(self)

    @cached_property
    def layout(self) -> LayoutFacts:
        return _describe_layout(self.attempt)

    @cached_property
    def phases(self) -> tuple[PhaseShare, ...]:
        """Largest share first, then unattributed time; empty without steps."""
        return _share_phases(self.study)

    @cached_property
    def communication(self) -> "CommunicationFacts | Unavailable":
        found = self.study.communication
        if isinstance(found, Unavailable):
            return found
        from meshscope.report.run.communication import describe_communication  # loads the analysis

        return describe_communication(found, self.study)

    @cached_property
    def ledger(self) -> "LedgerFacts | Unavailable | None":
        """Lost time as means per step."""
        if self.diagnosis is None:
            return None
        from meshscope.report.run.ledger import describe_ledger

        ledger = self.diagnosis.ledger
        return ledger if isinstance(ledger, Unavailable) else describe_ledger(ledger)

    @cached_property
    def budget(self) -> "BudgetFacts | Unavailable | None":
        """The budget as means per rank and step."""
        if self.diagnosis is None:
            return None
        budget, timeline = self.study.budget, self.study.timeline
        if isinstance(budget, Unavailable) or isinstance(timeline, Unavailable):
            return budget if isinstance(budget, Unavailable) else None
        from meshscope.report.run.budget import describe_budget

        return describe_budget(budget, timeline.num_left_out)

    @cached_property
    def prediction(self) -> "PredictionCheck | Unavailable | None":
        """What was predicted before the run, against it; None without a diagnosis."""
        if self.diagnosis is None:
            return None
        from meshscope.analyze.prediction import NOT_PREDICTED, check_prediction, has_prediction
        from meshscope.store.read.memory_points import read_memory

        if not has_prediction(self.study):
            return NOT_PREDICTED
        try:
            profiles = read_memory(self.run.path)
        except MeshscopeError:
            profiles = []  # it has none
        return check_prediction(self.study, profiles)

    @cached_property
    def pipeline(self) -> "PipelineFacts | Unavailable | None":
        """None without a pipeline; the reason if a declared one was not recorded."""
        if self.diagnosis is None:
            return None
        found, layout = self.study.pipeline, self.study.layout
        if isinstance(found, Unavailable):
            is_declared = not isinstance(layout, Unavailable) and layout.pp > 1
            return found if is_declared else None
        from meshscope.report.run.pipeline import describe_pipeline

        return describe_pipeline(found)


def sort_phases(phase_ns: Mapping[str, int]) -> dict[str, int]:
    """Longest first."""
    return dict(sorted(phase_ns.items(), key=lambda item: -item[1]))


def name_file(problem: "Problem", run_path: Path) -> str | None:
    """The damaged file, relative to the run's folder where it is in it."""
    path = problem.path
    if path is not None and path.is_relative_to(run_path):
        path = path.relative_to(run_path)
    return None if path is None else str(path)


def _describe_run(report: Report) -> RunFacts:
    run, attempt, study = report.run, report.attempt, report.study
    headers = [rank.header for rank in attempt]
    provenance = _find_provenance(attempt)
    git, torch = _fields(provenance.get("git")), _fields(provenance.get("torch"))
    starts = [start for h in headers if isinstance(start := h.get("start_unix_ns"), int)]
    hosts: dict[str, int] = {}
    for rank in study.ranks:
        if isinstance(rank.host, str):
            hosts[rank.host] = hosts.get(rank.host, 0) + 1
    argv = provenance.get("argv")
    is_dirty = git.get("is_dirty")
    no_id = "traces have none" if attempt.is_from_traces else "run.json is missing or has none"
    return RunFacts(
        path=name_place(run.path),
        run_id=_text_field(run.manifest, "run_id", no_id),
        attempt=attempt.index,
        num_attempts=len(run.attempts),
        started_unix_ns=min(starts) if starts else Unavailable("no rank's journal has a start"),
        longest_wall_ns=max((rank.time.wall_ns for rank in study.ranks), default=0),
        world_size=study.world_size,
        num_ranks=len(study.ranks),
        hosts=tuple(HostFacts(host=host, num_ranks=count) for host, count in hosts.items()),
        argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
        git_revision=_text_field(git, "revision", str(git.get("reason", "not recorded"))),
        is_git_dirty=is_dirty if isinstance(is_dirty, bool) else None,
        torch_version=_text_field(torch, "version", "not recorded"),
        device_name=find_device(attempt),
    )


def _find_provenance(attempt: "Attempt") -> "JsonFields":
    """Of the first rank that has any."""
    return next((p for rank in attempt if (p := _fields(rank.header.get("provenance")))), {})


def find_device(attempt: "Attempt") -> str | Unavailable:
    """The name of a rank's accelerator."""
    if attempt.is_from_traces:
        names = (rank.header.get("device_name") for rank in attempt)
        found = (name for name in names if isinstance(name, str))
        return next(found, Unavailable("no trace names a device"))
    return _name_device(_fields(_find_provenance(attempt).get("torch")))


def _fields(value: object) -> "JsonFields":
    return value if isinstance(value, dict) else {}


def _text_field(fields: "JsonFields", name: str, reason: str) -> str | Unavailable:
    value = fields.get(name)
    return value if isinstance(value, str) else Unavailable(reason)


def _name_device(torch: "JsonFields") -> str | Unavailable:
    devices = torch.get("devices")
    first = _fields(devices[0]) if isinstance(devices, list) and devices else {}
    return _text_field(first, "name", "no accelerator was in use when recording began")


def _describe_layout(attempt: "Attempt") -> LayoutFacts:
    layout = attempt.layout
    if isinstance(layout, Unavailable):
        return LayoutFacts(text=layout, degrees={}, source=layout)
    known = (fields for rank in attempt for fields in (rank.header, *rank.updates))
    sources = (fields.get("layout_source") for fields in known if fields.get("layout"))
    source = next((source for source in sources if isinstance(source, str)), None)
    return LayoutFacts(
        text=layout.describe(),
        degrees={str(axis): layout.degree(axis) for axis in Axis},
        source=Unavailable("not recorded") if source is None else source,
    )


def _share_phases(study: "Study") -> tuple[PhaseShare, ...]:
    split, num_steps = study.time.steady_steps, study.time.num_steady_rank_steps
    if not num_steps:
        return ()

    def share(
        name: str, total_ns: int, device_mean_ns: float | Unavailable, *, is_rest: bool = False
    ) -> PhaseShare:
        no_time = Unavailable("the steps took no time")
        return PhaseShare(
            phase=name,
            ratio=total_ns / split.wall_ns if split.wall_ns else no_time,
            mean_ns=total_ns / num_steps,
            device_mean_ns=device_mean_ns,
            is_unattributed=is_rest,
        )

    shares = [
        share(name, total_ns, _mean_device_time(name, study))
        for name, total_ns in sort_phases(split.phase_ns).items()
    ]
    none = Unavailable("the device's own time outside phases is not marked")
    return *shares, share("unattributed", split.unattributed_ns, none, is_rest=True)


def _mean_device_time(name: str, study: "Study") -> float | Unavailable:
    device, num_steps = study.time.device_phase_ns, study.time.num_device_rank_steps
    if isinstance(device, Unavailable):
        return device
    if name not in device or not num_steps:
        return Unavailable("no device time was recorded for this phase")
    return device[name] / num_steps
