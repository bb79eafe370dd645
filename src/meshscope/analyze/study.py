"""One attempt and every analysis of it, each made once, on first use.

Analyses are composed only here. The first group of attributes is the start of every report: ranks
are read one after another and reduced at once to a few numbers and one duration per step, so a
thousand ranks need little more memory than one rank's tables. An error there is an error of the
whole study. Everything else may be `Unavailable`; an analysis that raises is, and `failures` names
it. `study.get(build)` adds an analysis that is not here, shared like the rest.

`job` reads the operations of all ranks, matches them and puts them on one clock, once. A run with
too many rows is sampled by windows of steps (`rank.step_choice`), the same for `communication` and
`timeline`; `Communication.part` and `Timeline.num_left_out` describe them.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from meshscope.analyze.health import RecordingHealth, assess_recording
from meshscope.analyze.job.job_time import JobTime, add_times
from meshscope.analyze.rank.not_in_traces import NO_COMMUNICATION
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.rank.rank_map import map_ranks
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.rank.signals import JobSignal, merge_signals
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.rank.steps import NO_STEP, JobSteps, JobStepSummary, summarize_job_steps
from meshscope.analyze.rank.throughput import (
    SampleRate,
    TokenRate,
    sum_samples,
    sum_tokens,
)
from meshscope.analyze.rank_parts import pass_rank
from meshscope.analyze.rank_totals import RankTotals, merge_ranks
from meshscope.analyze.timeline.peers import (
    PhaseClue,
    PhaseSpread,
    group_peers,
    spread_phases,
    spread_unattributed,
)
from meshscope.core.config.given_flops import GivenFlops
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Missing, Unavailable, known, need
from meshscope.store.read.columns import ProblemKind
from meshscope.store.read.memory import MemoryRecording
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt, keep_tables
from meshscope.store.read.trace_windows import disturbing_windows

if TYPE_CHECKING:
    from meshscope.analyze.budget.budget import Budget
    from meshscope.analyze.budget.model_flops import RankFlops
    from meshscope.analyze.communication.communication import Communication
    from meshscope.analyze.device.hardware import Hardware
    from meshscope.analyze.job.job import Job
    from meshscope.analyze.memory.memory import JobMemory
    from meshscope.analyze.pipeline.pipeline import PipelineAnalysis
    from meshscope.analyze.pipeline.pipeline_waits import PipelineWaits
    from meshscope.analyze.stragglers.pauses import Pauses
    from meshscope.analyze.stragglers.sampled_excess import SampledExcess
    from meshscope.analyze.stragglers.sequence_imbalance import SequenceImbalance
    from meshscope.analyze.stragglers.stragglers import Stragglers
    from meshscope.analyze.stragglers.suspects import Suspects
    from meshscope.analyze.timeline.device_parts import DeviceParts
    from meshscope.analyze.timeline.gc_collections import Collections
    from meshscope.analyze.timeline.peer_work import PeerWork
    from meshscope.analyze.timeline.timeline import Timeline
    from meshscope.analyze.timeline.timeline_steps import KeptSteps
    from meshscope.analyze.timeline.work import WorkTable
    from meshscope.analyze.training.convergence import Convergence
    from meshscope.analyze.training.logged import LoggedScalar
    from meshscope.analyze.training.settings import SettingsGroup
    from meshscope.analyze.training.skipped_updates import SkippedUpdates
    from meshscope.analyze.training.totals import JobTotals
    from meshscope.store.read.arrays import Floats

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    what: str
    """A rule's code, or the name of an analysis."""
    error: str
    """Type and message of the exception, on one line."""
    place: str
    """File and line that raised it, without folders, which would name the machine."""


def catch_failure(what: str, build: Callable[[], T]) -> T | Failure:
    """The result, or the exception as a value, so that one failure does not stop the rest."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - see above
        message = " ".join(str(error).split())
        name = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
        return Failure(what=what, error=f"{name}: {message}" if message else name, place=place)


class _Analysis(Generic[T]):
    """An attribute of a study, made by `Study.get`."""

    def __init__(self, build: "Callable[[Study], T]") -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, study: None, owner: "type[Study]") -> "_Analysis[T]": ...
    @overload
    def __get__(self, study: "Study", owner: "type[Study]") -> T | Unavailable: ...

    def __get__(
        self, study: "Study | None", owner: "type[Study]"
    ) -> "_Analysis[T] | T | Unavailable":
        return self if study is None else study.get(self._build)


class Study:
    """One attempt under study. Without `warmup_steps` the analyses choose."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        warmup_steps: int | None = None,
        step_choice: StepChoice | None = None,
        flops: GivenFlops | None = None,
    ) -> None:
        """`flops` stand above those that were recorded."""
        self.attempt = keep_tables(attempt)
        self._given_flops = flops or GivenFlops()
        self.warmup_steps = warmup_steps
        self.failures: list[Failure] = []
        """Analyses that raised."""
        self._step_choice = step_choice or StepChoice()
        self._made: dict[Callable[..., Any], Any] = {}

    def get(self, build: "Callable[[Study], T | Unavailable]") -> T | Unavailable:
        """What `build` makes of this study: made once, and Unavailable where it raises."""
        if build not in self._made:
            self._made[build] = self.make(build)
        made: T | Unavailable = self._made[build]
        return made

    def make(self, build: "Callable[[Study], T | Unavailable]") -> T | Unavailable:
        """The same, made anew in each call."""

        def build_or_reason() -> T | Unavailable:
            try:
                return build(self)
            except Missing as missing:
                return missing.value

        what = build.__name__.strip("_")
        made = catch_failure(what, build_or_reason)
        if isinstance(made, Failure):
            self.failures.append(made)
            return Unavailable(f"{what.replace('_', ' ')} failed: {made.error}")
        return made

    # Ranks, one after another.

    @cached_property
    def _totals(self) -> RankTotals:
        attempt, windows = self.attempt, disturbing_windows(self.attempt)
        warmup_steps = attempt.choose_warmup(self.warmup_steps)
        work = partial(pass_rank, layout=attempt.layout, windows=windows, warmup_steps=warmup_steps)
        return merge_ranks(map_ranks(work, attempt), attempt, warmup_steps=warmup_steps)

    @cached_property
    def ranks(self) -> tuple[RankSummary, ...]:
        _ = self.communication  # reading finds damage, and communication is read last
        extra = {problem.rank for problem in self._totals.problems}
        return tuple(
            replace(
                rank,
                num_problems=len(self.attempt.ranks[rank.rank].problems) + (rank.rank in extra),
            )
            for rank in self._totals.ranks
        )

    @property
    def layout(self) -> Layout | Unavailable:
        """Degrees of the mesh, where they are known."""
        return self.attempt.layout

    @property
    def world_size(self) -> int:
        """Ranks of the job as the ranks report it."""
        return self.attempt.world_size

    @property
    def num_ranks(self) -> int:
        """Ranks the job had, recorded or not."""
        return max(self.attempt.world_size, len(self.attempt.ranks))

    @property
    def steps(self) -> JobStepSummary:
        return self._totals.steps

    @cached_property
    def _steps_alone(self) -> JobStepSummary:
        """The same as `steps`, without anything else of the ranks."""
        durations, intervals = JobSteps(), JobSteps()
        for recording in self.attempt:
            steps = order_steps(recording.read("steps"))
            durations.add(recording.rank, steps.step, steps.duration_ns)
            follows = steps.is_followed
            intervals.add(
                recording.rank, steps.step[:-1][follows], np.diff(steps.start_ns)[follows]
            )
        return summarize_job_steps(
            durations,
            intervals,
            num_ranks=len(self.attempt.ranks),
            asked_warmup=self.attempt.choose_warmup(self.warmup_steps),
            windows=disturbing_windows(self.attempt),
        )

    @cached_property
    def step_ns(self) -> float | Unavailable:
        """The period of a step: median over steps from one start to the next, gaps included."""
        interval = self.steps.interval
        time = self.steps.time if isinstance(interval, Unavailable) else interval
        return time if isinstance(time, Unavailable) else time.median_ns

    @property
    def num_steady_steps(self) -> int:
        """Steps after warm-up that at least one rank finished."""
        return self.steps.num_steps - self.steps.num_warmup

    @cached_property
    def time(self) -> JobTime:
        """The ranks' time lines added up."""
        return add_times(self._totals.ranks)

    @cached_property
    def spreads(self) -> tuple[PhaseSpread, ...]:
        """One per phase of the steady steps, without unattributed time; first the one whose rank is
        furthest above its peers."""
        return spread_phases(self._totals.steady, self._peer_groups)

    @cached_property
    def unattributed(self) -> PhaseSpread | Unavailable:
        """The time of steady steps that no phase claimed."""
        return spread_unattributed(self._totals.steady, self._peer_groups)

    @property
    def clues(self) -> tuple[PhaseClue, ...]:
        """Ranks that stand out among their peers in a phase, furthest first."""
        return self._totals.clues

    @cached_property
    def _peer_groups(self) -> Mapping[int, int]:
        return group_peers(self.layout, self.attempt.ranks)

    @property
    def steps_per_s(self) -> float | Unavailable:
        """Of the slowest among the ranks that finished most steps."""
        num_steps, span_ns = self._totals.longest
        return num_steps * 1e9 / span_ns if span_ns > 0 else Unavailable(NO_STEP)

    @cached_property
    def tokens(self) -> TokenRate | Unavailable:
        """Tokens per second of the job."""
        return sum_tokens(self._totals.rates, self.layout, self.world_size)

    @cached_property
    def samples(self) -> SampleRate | Unavailable:
        """Samples per second of the job."""
        return sum_samples(self._totals.rates, self.layout, self.world_size)

    @cached_property
    def signals(self) -> Mapping[str, JobSignal | Unavailable]:
        """Loss, gradient norm and learning rate."""
        return merge_signals([dict(rank.signals) for rank in self._totals.ranks])

    @cached_property
    def has_accelerators(self) -> bool:
        """Whether any rank recorded an accelerator's memory or stream."""
        return any(rank.has_accelerator for rank in self._totals.ranks)

    @cached_property
    def health(self) -> RecordingHealth:
        """The state of the recording, as far as reading `ranks` shows."""
        num_steps = {rank.rank: rank.num_steps for rank in self.ranks}
        totals = self._totals
        return assess_recording(self.attempt, num_steps, totals.problems, totals.overhead)

    # All ranks together.

    @cached_property
    def _kept(self) -> "KeptSteps | Unavailable":
        from meshscope.analyze.timeline.timeline_steps import keep_steps

        return keep_steps(self.attempt, warmup_steps=self.warmup_steps, choice=self._step_choice)

    @cached_property
    def job(self) -> "Job":
        """The operations of all ranks, matched and on one clock; there may be none."""
        from meshscope.analyze.job.job import load_job

        kept = known(self._kept)
        attempt = self.attempt if kept is None else kept.attempt
        # Where steps may become thinned while they are read, they are looked at afterwards.
        is_known = "_totals" in vars(self) and not any(map(_may_be_thinned, attempt))
        return load_job(attempt, unwatched=self._totals.unwatched if is_known else None)

    @cached_property
    def communication(self) -> "Communication | Unavailable":
        """Communication after warm-up, or all of it where no step finished."""
        if not any(recording.notes_operations for recording in self.attempt):
            problems = [problem for recording in self.attempt for problem in recording.problems]
            if any(problem.kind is ProblemKind.CUT for problem in problems):
                return Unavailable("the recording is cut off: communication may be in what is lost")
            if self.attempt.is_from_traces:
                return Unavailable(NO_COMMUNICATION)
            return Unavailable(
                "no communication was recorded: there was none, or it was not watched"
            )
        # Not loaded for runs that do not communicate.
        from meshscope.analyze.communication.communication import (
            analyze_communication,
            describe_part,
        )

        first, job, kept = self._first_steady_step, self.job, known(self._kept)
        part = None if kept is None else describe_part(kept, first)
        return analyze_communication(job, first_step=first, part=part)

    @property
    def _first_steady_step(self) -> int:
        """The first step after warm-up; -1 where no step finished."""
        # Of ranks in memory their steps are read again in no time; summing up all they did is not.
        is_cheap = all(type(one) is MemoryRecording for one in self.attempt)
        is_alone = is_cheap and "_totals" not in vars(self)
        steps = self._steps_alone if is_alone else self.steps
        if not steps.num_steps:
            return -1
        is_any_left = steps.num_warmup < steps.num_steps
        return int(steps.step[steps.num_warmup]) if is_any_left else int(steps.step[-1]) + 1

    @_Analysis
    def hardware(self) -> "Hardware":
        """The devices' clocks, power, errors and energy, as their driver saw them."""
        from meshscope.analyze.device.hardware import measure_hardware

        tokens = self.tokens
        return need(
            measure_hardware(
                self.attempt,
                first_step=self._first_steady_step,
                steps_per_s=self.steps_per_s,
                tokens_per_s=tokens if isinstance(tokens, Unavailable) else tokens.tokens_per_s,
            )
        )

    @_Analysis
    def timeline(self) -> "Timeline":
        """All ranks' time on one clock."""
        from meshscope.analyze.timeline.timeline import cut_timeline

        return need(cut_timeline(need(self._kept), self.job))

    @_Analysis
    def work(self) -> "WorkTable":
        """What every rank worked, by step and phase."""
        from meshscope.analyze.timeline.work import measure_work

        return measure_work(need(self.timeline))

    @_Analysis
    def budget(self) -> "Budget":
        """Where the wall clock of every rank and step went."""
        from meshscope.analyze.budget.budget import measure_budget
        from meshscope.analyze.budget.exact_sums import read_exact_sums

        timeline = need(self.timeline)
        exact = read_exact_sums(self.attempt, int(timeline.steps[0]))
        return measure_budget(timeline, self.flops, known(self.device_parts), exact)

    @cached_property
    def flops(self) -> "Mapping[int, RankFlops] | Unavailable":
        """FLOPs of a step and peak of every rank."""
        from meshscope.analyze.budget.model_flops import read_flops

        return read_flops(self.attempt, self._given_flops)

    @_Analysis
    def pipeline(self) -> "PipelineAnalysis":
        """The pipelines of the run."""
        from meshscope.analyze.pipeline.pipeline import analyze_pipeline

        return need(analyze_pipeline(need(self.timeline), self.attempt))

    @_Analysis
    def pipeline_waits(self) -> "PipelineWaits":
        """Waits for messages, for pipelines without actions or phases."""
        from meshscope.analyze.pipeline.pipeline_waits import measure_pipeline_waits

        return need(measure_pipeline_waits(need(self.timeline)))

    @_Analysis
    def device_parts(self) -> "DeviceParts":
        """Idle time of devices by cause, for runs made of traces."""
        from meshscope.analyze.timeline.device_parts import divide_device_time

        timeline = need(self.timeline)
        if not timeline.on_device.any():
            raise Missing("no rank's time is a device's")
        return divide_device_time(self.attempt, timeline)

    # Ranks late by themselves. Garbage collections are subtracted before ranks are compared: a rank
    # that collects in every step is not slow, it pauses.

    @_Analysis
    def peer_work(self) -> "PeerWork":
        """Work by phase, step and rank."""
        from meshscope.analyze.timeline.peer_work import measure_peer_work

        return need(measure_peer_work(need(self.timeline)))

    @_Analysis
    def collections(self) -> "Collections":
        """What the garbage collector took."""
        from meshscope.analyze.timeline.gc_collections import measure_collections

        return measure_collections(self.attempt, need(self.timeline))

    @_Analysis
    def collected_ns(self) -> "Floats":
        """[step, rank index]: compared work time that the garbage collector took."""
        from meshscope.analyze.timeline.peer_work import sum_compared

        return sum_compared(need(self.timeline), need(self.collections).lost_ns)

    @_Analysis
    def compared_work(self) -> "PeerWork":
        """What ranks are compared by: their work without the garbage collector's time."""
        from meshscope.analyze.timeline.peer_work import subtract_lost

        work, collections = need(self.peer_work), known(self.collections)
        if collections is None or not collections.has_any:
            return work
        return subtract_lost(work, need(self.timeline), collections.lost_ns)

    @_Analysis
    def stragglers(self) -> "Stragglers":
        """Slow ranks, without the garbage collector's time."""
        from meshscope.analyze.stragglers.stragglers import find_stragglers

        work, timeline = need(self.compared_work), need(self.timeline)
        hosts = {
            rank: host
            for rank, recording in self.attempt.ranks.items()
            if isinstance(host := recording.header.get("host"), str)
        }
        return find_stragglers(work, timeline.layout, hosts, known(self.sampled_excess) or {})

    @_Analysis
    def sampled_excess(self) -> "Mapping[int, SampledExcess]":
        """What ranks are slow at, by kernel samples; only those that stand out."""
        from meshscope.analyze.stragglers.sampled_excess import find_sampled_excess

        return find_sampled_excess(need(self.device_parts), need(self.peer_work), need(self.work))

    @_Analysis
    def pauses(self) -> "Pauses":
        """Sporadic pauses of ranks that are not slow otherwise."""
        from meshscope.analyze.stragglers.pauses import find_pauses

        stragglers = known(self.stragglers)
        named = frozenset() if stragglers is None else stragglers.ranks
        return find_pauses(need(self.peer_work), without=named)

    @_Analysis
    def suspects(self) -> "Suspects":
        """Ranks late by themselves: waits for them are not reported again."""
        from meshscope.analyze.stragglers.suspects import list_suspects

        return list_suspects(need(self.peer_work), need(self.stragglers), need(self.pauses))

    @_Analysis
    def sequence_imbalance(self) -> "SequenceImbalance":
        """How forward and backward of the same data vary together."""
        from meshscope.analyze.stragglers.sequence_imbalance import (
            TOKENS,
            measure_sequence_imbalance,
        )

        work, timeline = need(self.peer_work), need(self.timeline)
        tokens = need(self.input_counts)[TOKENS]
        return need(measure_sequence_imbalance(work, timeline, tokens))

    @_Analysis
    def input_counts(self) -> "dict[str, Floats]":
        """Samples and tokens by the columns of `steps`, [step, rank] of `peer_work`."""
        from meshscope.analyze.stragglers.sequence_imbalance import read_counts

        return read_counts(self.attempt, need(self.peer_work))

    @_Analysis
    def memory(self) -> "JobMemory":
        """What ranks' memory does over the run."""
        from meshscope.analyze.memory.memory import analyze_memory

        return need(analyze_memory(self.attempt))

    @_Analysis
    def convergence(self) -> "Convergence":
        """What loss, gradient norm and learning rate do over the run."""
        from meshscope.analyze.training.convergence import analyze_convergence

        return analyze_convergence(
            self.attempt, [parts.signals.take() for parts in self._totals.parts]
        )

    @_Analysis
    def skipped_updates(self) -> "SkippedUpdates":
        """Steps whose update a gradient scaler skipped."""
        from meshscope.analyze.training.skipped_updates import merge_skipped

        of_ranks = zip(self.attempt.ranks, self._totals.parts, strict=True)
        return need(merge_skipped({rank: parts.skipped.take() for rank, parts in of_ranks}))

    @_Analysis
    def logged(self) -> "tuple[LoggedScalar, ...]":
        """Numbers that the program or its framework logged."""
        from meshscope.analyze.training.logged import NOT_LOGGED

        found = (parts.logged.take() for parts in self._totals.parts)
        return need(next((one for one in found if one), NOT_LOGGED))

    @_Analysis
    def settings(self) -> "tuple[SettingsGroup, ...]":
        """Hyper-parameters and frameworks' arguments."""
        from meshscope.analyze.training.settings import read_settings

        return need(read_settings(self.attempt))

    @_Analysis
    def totals(self) -> "JobTotals":
        """Sums over the run, and what the program counted, timed and logged itself."""
        from meshscope.analyze.training.totals import sum_totals

        ranks = [parts.sums.take() for parts in self._totals.parts]
        return sum_totals(self.attempt, ranks, self.time.steps.phase_ns)


def _may_be_thinned(recording: Recording) -> bool:
    return recording.closing is None and "max_bytes" in recording.header
