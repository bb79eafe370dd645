"""Rules about the recording and the diagnosis itself: how far the other findings can be trusted."""

from collections.abc import Iterable
from itertools import islice

from meshscope.analyze.rank.overhead import Overhead
from meshscope.analyze.timeline.whole_steps import count_thinned
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.stopped_ranks import StoppedRanks, find_stopped_ranks
from meshscope.diagnose.wording import be, capitalize, count, duration, name_ranks, plural, ratio
from meshscope.store.read.columns import Problem, ProblemKind
from meshscope.store.read.run import Attempt
from meshscope.store.schema import LIMIT_WORDS

_MAX_RANKS_LISTED = 1024
"""Missing ranks: a header can claim a million."""
_RAISE_LIMIT = (
    "Raise the limit, meshscope.start(max_detail_bytes=…), or record less: fewer detail spans, a "
    "shorter run; the steps before the limit are whole."
)
_FREE_SPACE = "Free space where the run is written; the report's problems have files and offsets."
_COPY_AGAIN = (
    "Copy the run again from where it was written, or check that file system; the report's "
    "problems have files and offsets."
)
_NO_TIME_LOST = Unavailable("it does not make steps longer")

_MAX_OVERHEAD_RATIO = Threshold(
    name="recorder_max_overhead_ratio",
    default=0.02,
    meaning="share of a step the recorder may take, by the steps it timed itself in",
)
_MIN_OVERHEAD_SAMPLES = Threshold(
    name="recorder_min_timed_steps",
    default=64,
    meaning="steps in which the recorder timed itself below which its cost is a hint only",
)
_MIN_KEPT_RATIO = Threshold(
    name="diagnosis_min_steps_ratio",
    default=0.5,
    meaning="share of the steps after warm-up that the timeline should hold",
)
MIN_STEPS = Threshold(
    name="diagnosis_min_steps",
    default=10,
    meaning="steps after warm-up below which tests have no power",
)

_REPORTED_ELSEWHERE = frozenset(
    (
        ProblemKind.MISSING_RANK,
        ProblemKind.SHORT_RANK,
        ProblemKind.TORN_TAIL,
        ProblemKind.DUPLICATE_RANK,
        ProblemKind.OVERLAPPING_STEPS,
    )
)
_SERIOUS = frozenset((ProblemKind.DROPPED, ProblemKind.UNREADABLE))


class RuleFailed(Rule):
    """A rule or an analysis broke, so the diagnosis may miss something.

    What it finds: every rule and analysis that ended in an error while this run was diagnosed, with
    the error and the line of code.

    Why it matters: a rule that broke found nothing, and a missing finding looks like a healthy run.

    How it is measured: errors are caught around each rule and each analysis; the others go on.

    What to change: report it with the error's line. `meshscope report --no-diagnosis` shows the
    report without findings.

    When it is wrong: never; but a damaged recording can be the cause, see HE003.
    """

    code = "HE001"
    name = "rule-failed"
    severities = (Severity.MEDIUM, Severity.MEDIUM)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per failure; the runner calls this last."""
        for failure in context.study.failures:
            yield Finding(
                code=self.code,
                title=f"{failure.what} failed",
                severity=Severity.MEDIUM,
                summary=f"{failure.what} ended in an error, {failure.error} ({failure.place}); "
                "what it would have found is missing here.",
                evidence=(
                    Evidence(name="error", value=failure.error),
                    Evidence(name="location", value=failure.place),
                ),
                change="Report this error to whoever wrote it; the other findings are valid.",
                gain=_NO_TIME_LOST,
            )


class RankStopped(Rule):
    """A rank died, stopped before the others, or recorded nothing.

    What it finds: ranks whose recording has no end although their process is gone or the others
    went on, ranks whose program ended in an exception, ranks that stopped two or more steps before
    the others, and ranks of the job that left no recording. If there are several, the one that
    stopped first.

    Why it matters: a job with a dead rank makes no more steps, and all results about the others
    hold only up to that moment.

    How it is measured: a rank that ends writes a closing line. If it is missing, the process is
    looked up if it ran on this machine; otherwise a rank counts as dead when another finished or
    wrote records more than a minute later. `meshscope hang` decides which rank was first: who
    waited for whom, and whose error came first; without a verdict it is the rank with fewer steps.

    What to change: look at that rank's log at the moment of its last record; `meshscope hang` says
    what the others were waiting in.

    When it is wrong: a rank on another machine that is only slow to write looks dead after a
    minute. If no rank wrote an end and nothing is known about the processes, the finding is LOW:
    the run may still be going on.
    """

    code = "HE002"
    name = "rank-stopped"
    severities = (Severity.LOW, Severity.HIGH)

    def find(self, context: Context) -> Iterable[Finding]:
        """One for ranks that stopped, one for missing ranks."""
        stopped = known(context.study.get(find_stopped_ranks))
        if stopped is not None:
            yield from self._report_stopped(stopped)
        missing = context.study.health.missing_ranks
        if len(missing) and context.study.attempt.is_from_traces:
            yield Finding(
                code=self.code,
                title=f"there is no trace of {name_ranks(missing)}",
                severity=Severity.LOW,
                summary=f"{plural(len(missing), 'rank')} of {count(context.study.num_ranks)} "
                f"{'has' if len(missing) == 1 else 'have'} no trace: waits for them cannot "
                "be separated from transfers.",
                ranks=tuple(islice(missing, _MAX_RANKS_LISTED)),
                evidence=(Evidence(name="ranks without a trace", value=len(missing)),),
                change="Trace all ranks of the group in question, over the same steps.",
                gain=_NO_TIME_LOST,
            )
        elif len(missing):
            yield Finding(
                code=self.code,
                title=f"{name_ranks(missing)} {be(missing)} not recorded",
                severity=Severity.MEDIUM,
                summary=f"{plural(len(missing), 'rank')} of {count(context.study.num_ranks)} left "
                "no recording: waits for them cannot be separated from transfers.",
                ranks=tuple(islice(missing, _MAX_RANKS_LISTED)),
                evidence=(Evidence(name="ranks without a recording", value=len(missing)),),
                change="Start every rank under `meshscope run`, or make its run directory one that "
                "all hosts share.",
                gain=_NO_TIME_LOST,
            )

    def _report_stopped(self, stopped: StoppedRanks) -> Iterable[Finding]:
        if stopped.ranks:
            is_all = stopped.is_whole_job
            who = "every rank" if is_all else name_ranks(stopped.ranks)
            yield Finding(
                code=self.code,
                title=f"{who} stopped {stopped.how}",
                severity=Severity.HIGH,
                summary=f"{who} stopped {stopped.how}{stopped.where}; "
                f"the job finished {plural(stopped.num_job_steps, 'step')}.",
                ranks=() if is_all else stopped.ranks,
                first_step=stopped.last_step,
                last_step=stopped.last_step,
                evidence=stopped.evidence,
                confidence=Confidence(level=stopped.level, text=stopped.reason),
                change="Read that rank's log at its last record; `meshscope hang` names the "
                "operation the others wait in.",
                gain=_NO_TIME_LOST,
            )
        elif stopped.num_unknown:
            yield Finding(
                code=self.code,
                title="the recording has no end",
                severity=Severity.LOW,
                summary=f"{plural(stopped.num_unknown, 'rank')} wrote no closing line: the job is "
                "still running, or was killed as a whole.",
                evidence=(Evidence(name="ranks without an end", value=stopped.num_unknown),),
                confidence=Confidence(
                    level=ConfidenceLevel.LOW, text="nothing is known about the processes"
                ),
                change="Nothing, if the job is still running.",
                gain=_NO_TIME_LOST,
            )


class RecordingDamaged(Rule):
    """Part of the recording is damaged, was dropped, or ended in errors of the recorder.

    What it finds: records that failed their checksum, files that cannot be read, records that found
    no space or came after a table's limit (`max_detail_bytes`, which keeps the oldest), and errors
    the recorder caught inside training.

    Why it matters: what a rank did in a step without its records is not known. Such steps are left
    out of budget, phases and findings, and findings that rest on the others are less sure.

    How it is measured: every record is checked when it is read. Records that are left out are
    counted, and the recorder counts what it could not write.

    What to change: raise the limit that was reached, free space on the file system of the run, or
    copy again what a copy damaged;
    report errors of the recorder with their message.

    When it is wrong: never about the damage. Whether it affects a number depends on where the
    damage is; the report's problems name file and offset.
    """

    code = "HE003"
    name = "recording-damaged"
    severities = (Severity.LOW, Severity.MEDIUM)

    def find(self, context: Context) -> Iterable[Finding]:
        """One for all damage, one for all errors, one for processes that are one rank, one for
        steps at one time."""
        health = context.study.health
        duplicates = [p for p in health.problems if p.kind is ProblemKind.DUPLICATE_RANK]
        if duplicates:
            yield self._describe_duplicates(context, duplicates)
        overlaps = [p for p in health.problems if p.kind is ProblemKind.OVERLAPPING_STEPS]
        if overlaps:
            yield self._describe_overlaps(overlaps)
        problems = [
            problem for problem in health.problems if problem.kind not in _REPORTED_ELSEWHERE
        ]
        if problems:
            is_serious = any(problem.kind in _SERIOUS for problem in problems)
            ranks = tuple(sorted({p.rank for p in problems if p.rank is not None}))
            lost = sum(problem.num_records or 0 for problem in problems)
            records = f", {plural(lost, 'record')} lost" if lost else ""
            limit = _describe_limit(context.study.attempt)
            num_dropped = known(health.num_dropped) or 0
            yield Finding(
                code=self.code,
                title="part of the recording is lost",
                severity=Severity.MEDIUM if is_serious else Severity.LOW,
                summary=f"{plural(len(problems), 'part')} of the recording could not be read"
                f"{records}; the first: {problems[0].text}."
                + (f" {capitalize(limit)}." if limit else ""),
                ranks=ranks,
                evidence=(
                    Evidence(name="unreadable parts", value=len(problems)),
                    Evidence(name="records lost", value=lost),
                    Evidence(name="records dropped for lack of space", value=num_dropped),
                ),
                change=_RAISE_LIMIT if limit else _FREE_SPACE if num_dropped else _COPY_AGAIN,
                gain=_NO_TIME_LOST,
            )
        if health.num_errors:
            first = health.errors[0]
            yield Finding(
                code=self.code,
                title="the recorder had errors",
                severity=Severity.LOW,
                summary=f"{plural(health.num_errors, 'error')} inside the recorder, most in "
                f"{first.site}: {first.first_message}.",
                ranks=tuple(sorted({rank for error in health.errors for rank in error.ranks})),
                evidence=(Evidence(name="errors", value=health.num_errors),),
                change="Report the message; training was not affected.",
                gain=_NO_TIME_LOST,
            )

    def _describe_overlaps(self, problems: list[Problem]) -> Finding:
        ranks = tuple(sorted({p.rank for p in problems if p.rank is not None}))
        return Finding(
            code=self.code,
            title=f"steps of {name_ranks(ranks)} overlap in time",
            severity=Severity.LOW,
            summary=f"{capitalize(problems[0].text)}. Nothing is damaged: a rank's time line has "
            "room for one step at a time.",
            ranks=ranks,
            evidence=(Evidence(name="ranks with overlapping steps", value=len(ranks)),),
            change="Give each thread that trains a process and a RANK of its own, or mark the "
            "steps of one of them only.",
            gain=_NO_TIME_LOST,
        )

    def _describe_duplicates(self, context: Context, problems: list[Problem]) -> Finding:
        """A program that starts workers itself, without ranks, is meant to be so: no more than
        low. In a job of several ranks two of one number are a mistake."""
        ranks = tuple(sorted({p.rank for p in problems if p.rank is not None}))
        is_job = context.study.attempt.world_size > 1
        return Finding(
            code=self.code,
            title=f"several processes recorded as {name_ranks(ranks)}",
            severity=Severity.MEDIUM if is_job else Severity.LOW,
            summary=f"{capitalize(problems[0].text)}. Nothing is lost: each is a launch of its "
            "own here, and this report shows one of them.",
            ranks=ranks,
            evidence=(Evidence(name="pairs of processes", value=len(problems)),),
            change="Look at each with --attempt N; give each process a RANK of its own to see them "
            "side by side.",
            gain=_NO_TIME_LOST,
        )


def _describe_limit(attempt: Attempt) -> str:
    """Which table reached its limit; empty if none did, or its rank could not say so any more."""
    for recording in attempt:
        for line in recording.health:
            text = str(line.get("text", ""))
            if line.get("cause") == "store" and LIMIT_WORDS in text:
                return (
                    f"{line.get('where')} of rank {recording.rank}: {text}, and what came later is "
                    "missing"
                )
    return ""


class ClocksApart(Rule):
    """The clocks of the hosts could not be aligned.

    What it finds: hosts whose clocks no operation connects, and clocks that contradict each other.

    Why it matters: times of different hosts must be compared to find out who waited for whom.
    Without one clock, waits and transfers between those hosts cannot be separated.

    How it is measured: collectives that end together on all ranks give each host's offset and
    drift; messages in both directions bound them; loops of hosts must close.

    What to change: call `recorder.calibrate_clocks()` once at the start, or record at least one
    all-reduce or barrier over all hosts.

    When it is wrong: if hosts really share a clock but report that they do not.
    """

    code = "HE004"
    name = "clocks-apart"
    severities = (Severity.LOW, Severity.MEDIUM)

    def find(self, context: Context) -> Iterable[Finding]:
        communication = need(context.study.communication)
        clocks = communication.clocks
        unplaced = [c for c in clocks.clocks if isinstance(c.offset_ns, Unavailable)]
        if not unplaced and not clocks.problems:
            return
        ranks = tuple(sorted(rank for clock in unplaced for rank in clock.ranks))
        what = (
            f"{plural(len(unplaced), 'clock')} of {count(len(clocks.clocks))} cannot be aligned"
            if unplaced
            else clocks.problems[0]
        )
        yield Finding(
            code=self.code,
            title="clocks of hosts could not be aligned",
            severity=Severity.MEDIUM if unplaced else Severity.LOW,
            summary=f"{what}; waits between these hosts cannot be separated from transfers.",
            ranks=ranks,
            evidence=tuple(Evidence(name="clocks", value=text) for text in clocks.problems[:4]),
            change="Call recorder.calibrate_clocks() once at the start of training.",
            gain=_NO_TIME_LOST,
        )


class RecorderCost(Rule):
    """Recording takes a noticeable part of the steps.

    What it finds: steps of which the recorder itself took more than `recorder_max_overhead_ratio`.

    Why it matters: the run is slower than it would be, and short phases look longer than they are.

    How it is measured: on one step in 17 the recorder times what it does inside its hooks and
    calls; the finding uses the median over these steps, without warm-up. On a device only the share
    counts at which the device waited: marks of phases that it reached with less work left than the
    recorder takes in a step. Without such marks the host's time is an upper bound, and LOW.

    What to change: record less: fewer detail spans, no per-operation recording if steps have
    thousands of operations.

    When it is wrong: on hosts with more processes than cores, it includes other processes' time;
    with fewer than `recorder_min_timed_steps` timed steps it is LOW. It does not include the
    recorder's effect on caches; a comparison with an unrecorded run shows that.
    """

    code = "HE005"
    name = "recorder-cost"
    severities = (Severity.LOW, Severity.CRITICAL)
    thresholds = (_MAX_OVERHEAD_RATIO, _MIN_OVERHEAD_SAMPLES)

    def find(self, context: Context) -> Iterable[Finding]:
        overhead = need(context.study.health.overhead)
        if overhead.is_warmup_only:
            return
        host_share = need(overhead.host_ratio)
        is_bound = isinstance(overhead.lost_ratio, Unavailable)
        share = host_share if is_bound else need(overhead.lost_ratio)
        if not share or share < context.thresholds[_MAX_OVERHEAD_RATIO]:
            return
        lost_ns = overhead.host_ns * share / host_share
        gain = Estimate(
            saved_ns=lost_ns,
            step_ns=overhead.host_ns / host_share,
            basis="measured by the recorder itself, "
            + ("host time, an upper bound" if is_bound else "median"),
        )
        is_hint = is_bound or overhead.num_steps < context.thresholds[_MIN_OVERHEAD_SAMPLES]
        at_most = "at most " if is_bound else ""
        yield Finding(
            code=self.code,
            title=f"recording takes {at_most}a part of every step",
            severity=Severity.LOW if is_hint else severity_of(gain),
            summary=f"the recorder takes {at_most}{duration(lost_ns)} of a step "
            f"({ratio(share)}), median over {plural(overhead.num_steps, 'step')}"
            f"{_describe_hiding(overhead)}.",
            evidence=(
                Evidence(name="recorder per step", value=overhead.host_ns, unit="ns"),
                Evidence(name="share of the step", value=share, unit="ratio"),
            ),
            change="Record fewer detail spans.",
            gain=gain,
        )


def _describe_hiding(overhead: Overhead) -> str:
    if not overhead.has_device:
        return ""
    if isinstance(overhead.starved_ratio, Unavailable):
        return f"; that is host time, and {overhead.starved_ratio.reason}"
    return (
        f"; of {duration(overhead.host_ns)} of host time the device waited at "
        f"{ratio(overhead.starved_ratio)} of the marks"
    )


class Desynchronised(Rule):
    """Ranks of a group called different operations at the same position.

    What it finds: the first operation of a group, or of a pair of ranks, for which ranks disagree
    in kind, size, dtype or root.

    Why it matters: the job computes with the wrong numbers, or hangs at the next operation.

    How it is measured: operations are matched by group and sequence number, and each side's kind,
    size, dtype and root are compared.

    What to change: find the branch of the program that ranks take differently at that step; where
    two threads use one group, give each a group of its own.

    When it is wrong: if one rank's recorder missed an operation without noticing. Recorders that
    began later are recognised and shifted.
    """

    code = "HE006"
    name = "desynchronised"
    severities = (Severity.HIGH, Severity.HIGH)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per group that disagrees, of those kept."""
        communication = need(context.study.communication)
        for found in communication.desynchronisations:
            sides = [
                f"{name_ranks(side.ranks)}: {side.kind.name.lower()} of "
                f"{count(known(side.size_bytes) or 0)} bytes {known(side.dtype) or ''}".rstrip()
                for side in found.sides
            ]
            fewest = min(found.sides, key=lambda side: len(side.ranks))
            yield Finding(
                code=self.code,
                title=f"ranks disagree on operation {found.sequence} of a group along "
                f"{found.group.axis}",
                severity=Severity.HIGH,
                summary=f"at operation {found.sequence} of {name_ranks(found.group.ranks)}, "
                f"{'; '.join(sides)}.",
                ranks=fewest.ranks if len(found.sides) > 1 else (),
                first_step=known(fewest.step),
                evidence=(
                    Evidence(name="operations not trusted", value=found.num_untrusted),
                    *(Evidence(name="side", value=side) for side in sides),
                ),
                change="Make all ranks call the same operations in the same order; look for a "
                "branch on rank, data or loss at that step, and for two threads that use one group "
                "(a checkpoint written beside training, say): give each its own.",
                gain=_NO_TIME_LOST,
            )


class ReplayRefused(Rule):
    """The replay does not reproduce this run, so findings have no price.

    What it finds: a replay with measured durations that misses the measured time by 5 % or more.

    Why it matters: gains come from that replay. It cannot change what it cannot reproduce, so
    findings are then graded by the time their cause takes, an upper bound.

    How it is measured: the run's dependency graph is timed with the measured durations, and the
    result is compared with the clock.

    What to change: nothing in training; record all ranks and all communication, so that nothing is
    missing from the graph.

    When it is wrong: it says that nothing is known, not that something is wrong.
    """

    code = "HE007"
    name = "replay-refused"
    severities = (Severity.LOW, Severity.LOW)

    def find(self, context: Context) -> Iterable[Finding]:
        replay = need(context.replay)
        if replay.fidelity.is_enough:
            return
        fidelity = replay.fidelity
        yield Finding(
            code=self.code,
            title="no replayed savings are given: the replay misses the step time",
            severity=Severity.LOW,
            summary=f"a replay of what the recording explains misses the step time of "
            f"{duration(fidelity.measured_ns)} by {ratio(fidelity.error_ratio)}; findings are "
            "graded by the time their cause takes, and none has a replayed price.",
            evidence=(
                Evidence(name="measured step", value=fidelity.measured_ns, unit="ns"),
                Evidence(name="error", value=fidelity.error_ratio, unit="ratio"),
            ),
            change="Record every rank and its communication.",
            gain=_NO_TIME_LOST,
        )


def _describe_thinning(num_thinned: int) -> str:
    if not num_thinned:
        return ""
    return (
        f" Operations of {plural(num_thinned, 'step')} were thinned to keep the run within its "
        "size; table aggregates has exact sums of them, and the budget rests on these."
    )


class PartOfTheSteps(Rule):
    """The diagnosis is based on few steps, or on a part of them.

    What it finds: runs with fewer than `diagnosis_min_steps` steps after warm-up, and runs whose
    timeline holds less than `diagnosis_min_steps_ratio` of the steps.

    Why it matters: few steps give tests no power: a rank that is 10 % slow shows after some tens of
    steps. Long runs are sampled by windows of steps, so that memory stays bounded; only the rules
    that read all steps see what happened between them.

    How it is measured: counted.

    What to change: record more steps; lower `--warmup`.

    When it is wrong: never, but a part can be enough: windows are spread over the whole run.
    """

    code = "HE008"
    name = "part-of-the-steps"
    severities = (Severity.LOW, Severity.LOW)
    thresholds = (MIN_STEPS, _MIN_KEPT_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        steady = context.study.num_steady_steps
        timeline = known(context.study.timeline)
        kept = steady if timeline is None else len(timeline.steps)
        num_thinned = count_thinned(tuple(context.study.attempt))
        is_short = steady < context.thresholds[MIN_STEPS]
        if not is_short and kept >= context.thresholds[_MIN_KEPT_RATIO] * steady:
            return
        yield Finding(
            code=self.code,
            title="the diagnosis is based on few steps"
            if is_short
            else "the diagnosis is based on a part of the steps",
            severity=Severity.LOW,
            summary=f"{count(kept)} of {plural(steady, 'step')} after warm-up were analysed."
            + ("" if is_short else " The budget and prices count each for those around it.")
            + _describe_thinning(num_thinned),
            evidence=(
                Evidence(name="steps after warm-up", value=steady, unit="steps"),
                Evidence(name="steps on the timeline", value=kept, unit="steps"),
                *(
                    [Evidence(name="thinned steps", value=num_thinned, unit="steps")]
                    * bool(num_thinned)
                ),
            ),
            change="Record more steps." if is_short else "Nothing; windows cover the whole run.",
            gain=_NO_TIME_LOST,
        )
