"""Follows one run: `Follower` is what a screen, a server or a watcher asks.

    follower = Follower(run_dir)
    while True:
        moment = follower.poll()         # 64 ranks: a few ms; state, new steps, new points
        excess = follower.excess()       # now and then: own work above peers of the new steps
        analysis = follower.report()     # now and then: the whole report, and what changed in it
        …
        time.sleep(0.5)

`poll` may be called as often as a screen needs it. `excess` and `report` give None until they are
due: each at most every so many seconds, and at most a small share of a core, however often they are
called. Both may take seconds for large runs: call them from a thread of their own, where a screen
must not stop. A `Follower` is safe to be used from several threads.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.core.unavailable import known
from meshscope.errors import RunError, RunNotFound
from meshscope.live.attempt_tail import AttemptTail
from meshscope.live.changes import FindingChange, SeenFinding, compare_findings, note_findings
from meshscope.live.moment import OVER, Moment
from meshscope.live.pace import Pace
from meshscope.page.heat.cells import Cells
from meshscope.page.run_state import RunState, StateKind, describe_state
from meshscope.store.read.files import change_time_ns, look_again
from meshscope.store.read.run import Attempt, Run, open_run
from meshscope.store.read.tail import list_ranks
from meshscope.store.write.writer import rank_dir_name

if TYPE_CHECKING:
    from meshscope.hang.hang import Hang
    from meshscope.report.run.report import Report

REPORT_LEAST_S, REPORT_CPU_RATIO = 10.0, 50.0
"""A whole report at most this often, and 50 times its own CPU time apart: 2 % of a core."""
LIVE_CHOICE = StepChoice(max_rank_steps=25_600, max_rows=256_000)
"""Steps that a report reads in full while the run goes on: with all of them it would take more time
and memory with every hour. The last report, of a run that is over, reads as many as any other."""
EXCESS_LEAST_S, EXCESS_CPU_RATIO = 0.5, 100.0
_MAX_EXCESS_STEPS = 64
"""Last steps that `excess` gives at once."""
_EXCESS_MARGIN_STEPS = 4
"""More than are new: the first of a window has no step before it, and others came meanwhile."""
_STALL_S = 10.0
"""Without a new step: look whether the job is stuck."""
_STALL_PACES = 20
"""Or so many steps' time, where that is longer."""
_LISTING_S = 1.0
"""New ranks and attempts are looked for this often."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """A whole report of a run as it was when it was read."""

    number: int
    """Counts reports of one follower from 1."""
    report: "Report"
    """As of `meshscope report`: `report.study` has all analyses, `report.diagnosis` the findings,
    `report.hang` whether the job is stuck. `page.document.describe_page` makes its page."""
    findings: tuple[SeenFinding, ...]
    """Most urgent first."""
    changes: tuple[FindingChange, ...]
    """Against the report before; all findings are new in the first."""
    is_first: bool
    cpu_s: float
    """What making it took."""


class Follower:
    """Follows the last attempt of a run; a new launch of the job is noticed and followed."""

    def __init__(self, run_dir: Path | str, *, max_ranks: int | None = None) -> None:
        """Nothing is read yet. With `max_ranks`, steps and curves are those of the first ranks; the
        state is that of all."""
        self._max_ranks = max_ranks
        self.path = Path(run_dir)
        self._lock = Lock()
        self._tail: AttemptTail | None = None
        self._index = -1
        self._signature: tuple[int, ...] = ()
        self._next_listing = 0.0
        self._hang: Hang | None = None
        self._hang_step = -1
        """Last step when somebody looked whether the job is stuck."""
        self._report_pace = Pace(least_s=REPORT_LEAST_S, cpu_ratio=REPORT_CPU_RATIO)
        self._excess_pace = Pace(least_s=EXCESS_LEAST_S, cpu_ratio=EXCESS_CPU_RATIO)
        self._hang_pace = Pace(least_s=_STALL_S, cpu_ratio=EXCESS_CPU_RATIO)
        self._analysis: Analysis | None = None
        self._analysed: tuple[int, int, StateKind] | None = None
        """Attempt, last step and state of the last report."""
        self._excess_step = -1
        self._report_begun = 0.0

    # --- cheap ------------------------------------------------------------------------------------

    def poll(self) -> Moment:
        """The run now. Raises RunError while there is nothing to read yet (`RunNotFound`,
        `RunEmpty`) or if it cannot be read; a later call may succeed."""
        with self._lock:
            self._look_again()
            is_other = self._open()
            tail = self._tail
            assert tail is not None
            new = tail.look()
            read_unix_ns = time.time_ns()
            last_end = tail.last_end_unix_ns
            return Moment(
                attempt=self._index,
                is_other_attempt=is_other,
                state=self._describe_state(tail),
                num_ranks=len(tail.attempt.ranks),
                world_size=tail.attempt.world_size,
                step=tail.last_step if tail.last_step >= 0 else None,
                age_ns=max(read_unix_ns - last_end, 0) if last_end else None,
                read_unix_ns=read_unix_ns,
                pace_ns=tail.pace_ns,
                tokens_per_s=tail.tokens_per_s,
                steps=new.steps,
                job_ns=new.job_ns,
                series=new.series,
            )

    @property
    def attempt(self) -> Attempt | None:
        """What is followed, as the journals last said; None before the first `poll`."""
        tail = self._tail
        return None if tail is None else tail.attempt

    def _look_again(self) -> None:
        try:
            look_again(self.path)
        except OSError:  # storage that does not answer now: what is known holds
            if self._tail is None:
                raise RunNotFound(f"{self.path}: its storage does not answer") from None

    def _open(self) -> bool:
        """Opens the run at first, and when ranks or attempts are new; whether it is another
        attempt than before."""
        now = time.monotonic()
        if self._tail is not None and now < self._next_listing:
            return False
        self._next_listing = now + _LISTING_S
        signature = self._sign()
        if self._tail is not None and signature == self._signature:
            return False
        try:
            attempt = open_run(self.path).last_attempt
        except RunError:
            if self._tail is None:
                raise
            return False
        self._signature = signature
        before = self._tail
        if before is not None and attempt.ranks.keys() == before.attempt.ranks.keys():
            is_same = all(
                before.attempt.ranks[rank].directory == one.directory
                for rank, one in attempt.ranks.items()
            )
            if is_same:
                return False
        self._tail, self._index = AttemptTail(attempt, max_ranks=self._max_ranks), attempt.index
        self._hang, self._hang_step, self._excess_step = None, -1, -1
        return before is not None

    def _sign(self) -> tuple[int, ...]:
        """Changes when a rank or an attempt is new."""
        try:
            folders = [self.path / rank_dir_name(rank) for rank in list_ranks(self.path)]
            return tuple(map(change_time_ns, folders))
        except OSError:
            return ()

    def _describe_state(self, tail: AttemptTail) -> RunState:
        # What was seen of a hang holds until a step is new.
        hang = self._hang if self._hang_step == tail.last_step else None
        state = describe_state(tail.attempt, hang)
        is_moving = tail.has_moved and time.monotonic() - tail.moved_mono_s < _stall_s(tail)
        if state.kind is StateKind.OPEN and is_moving:
            note = state.note.partition(":")[0]
            return RunState(kind=StateKind.LIVE, text="Moving", note=note)
        return state

    # --- dear -------------------------------------------------------------------------------------

    def excess(self) -> Cells | None:
        """Own work above peers ([rank, step], as in the heat map) of steps that are newer than
        those of the last call, at most the last 64; None where none is, where it is not due, or
        where it is not known (no peers, too few steps)."""
        with self._lock:
            tail = self._tail
            if tail is None or not self._excess_pace.is_due or tail.last_step <= self._excess_step:
                return None
            last, after, attempt = tail.last_step, self._excess_step, tail.attempt
        begun, cpu = time.monotonic(), time.thread_time()
        wanted = max(last - after, 1) + _EXCESS_MARGIN_STEPS
        found = measure_recent(attempt, min(wanted, _MAX_EXCESS_STEPS))
        self._excess_pace.note(begun, time.thread_time() - cpu)
        if found is None:
            return None
        is_new = found.steps > after
        self._excess_step = max(int(found.steps[-1]), after) if len(found.steps) else after
        return replace(found, steps=found.steps[is_new], value=found.value[:, is_new])

    def report(self, *, now: bool = False) -> Analysis | None:
        """The whole report, where it is due and the run has changed since the last one, or its end
        was written; None otherwise. `now` makes it whatever the clock says."""
        with self._lock:
            tail = self._tail
        if tail is None:
            return None
        self._look_for_hang(tail)
        state = self._describe_state(tail)
        seen = (self._index, tail.last_step, state.kind)
        if not now:
            if seen == self._analysed:
                return None
            if not self._has_turned(state.kind) and not self._report_pace.is_due:
                return None
        begun, cpu = time.monotonic(), time.thread_time()
        made = make_report(open_run(self.path), None if state.kind in OVER else LIVE_CHOICE)
        cpu_s = time.thread_time() - cpu
        self._report_begun = begun
        self._report_pace.note(begun, cpu_s)
        self._analysed = seen
        if made.hang is not None:
            self._hang, self._hang_step = made.hang, seen[1]
        findings = () if made.diagnosis is None else note_findings(made.diagnosis.findings)
        before = self._analysis
        self._analysis = Analysis(
            number=1 if before is None else before.number + 1,
            report=made,
            findings=findings,
            changes=compare_findings(() if before is None else before.findings, findings),
            is_first=before is None,
            cpu_s=cpu_s,
        )
        return self._analysis

    def _has_turned(self, kind: StateKind) -> bool:
        """Whether the job ended, got stuck or moves again since the last report."""
        before = None if self._analysed is None else self._analysed[2]
        return before is not kind and bool({before, kind} & {*OVER, StateKind.STUCK})

    def note_use(self, cpu_s: float) -> None:
        """Something was made of the last report that took so much CPU time: the next one is due
        later, so that both stay within the share."""
        if self._analysis is not None:
            self._report_pace.note(self._report_begun, self._analysis.cpu_s + cpu_s)

    @property
    def last_report(self) -> Analysis | None:
        """What `report` gave last."""
        return self._analysis

    def _look_for_hang(self, tail: AttemptTail) -> None:
        """Where no step was new for a while and some rank has not ended."""
        is_open = any(recording.closing is None for recording in tail.attempt)
        is_stalled = time.monotonic() - tail.moved_mono_s > _stall_s(tail)
        if not (is_open and is_stalled and self._hang_pace.is_due):
            return
        from meshscope.hang.hang import diagnose_hang
        from meshscope.hang.processes import this_machine

        begun, cpu = time.monotonic(), time.thread_time()
        hang = diagnose_hang(tail.attempt, this_machine(), asks_stacks=False)
        self._hang_pace.note(begun, time.thread_time() - cpu)
        self._hang, self._hang_step = hang, tail.last_step


def make_report(run: Run, step_choice: StepChoice | None) -> "Report":
    """The report of the last attempt."""
    from meshscope.report.run_study import RunStudy

    return RunStudy(run, run.last_attempt, step_choice=step_choice).report().content


def measure_recent(attempt: Attempt, num_steps: int) -> Cells | None:
    """Own work above peers in the last steps that all ranks finished; None where not known."""
    from meshscope.analyze.study import Study
    from meshscope.page.heat.cells import measure_cells

    choice = StepChoice(max_rank_steps=max(len(attempt.ranks), 1) * num_steps, num_windows=1)
    return known(measure_cells(Study(attempt, step_choice=choice), "excess"))


def _stall_s(tail: AttemptTail) -> float:
    return max(_STALL_S, _STALL_PACES * (tail.pace_ns or 0) / 1e9)
