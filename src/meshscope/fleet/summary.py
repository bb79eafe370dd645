"""One run in a line: what its files tell cheaply, and on request what its report says."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshscope.analyze.rank.phases import order_steps
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.errors import MeshscopeError, RunError
from meshscope.hang.processes import Life, look_at_process, this_machine
from meshscope.live.run_name import name_job
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.report.goodput import measure_goodput
from meshscope.report.listings import ListedReport, Listing
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording, last_sign_of_life_ns
from meshscope.store.read.run import Attempt, open_run

FINISHED, RUNNING, KILLED = "finished", "running", "killed"
_MAX_PROCESSES = 256
"""Processes of one run that are looked for; all its ranks here end together."""
_PACE_STEPS = 1000
_MIN_STEPS = 5
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, of normal values."""


def describe_run(path: Path, shown: str) -> Listing:
    """A run that cannot be read has a state that says why. `shown` is its path or URL."""
    try:
        run = open_run(path)
        attempt = run.last_attempt
        first = next(iter(attempt))
        num_steps = order_steps(first.read("steps")).num_finished
        goodput = measure_goodput(run)
        step_ns, error_ns = _measure_steps(first)
    except RunError as error:
        return Listing(path=shown, state=f"unreadable: {error}", job=name_job(path))
    run_id = run.manifest.get("run_id")
    return Listing(
        path=shown,
        run_id=run_id if isinstance(run_id, str) else None,
        started_unix_ns=min(
            (start for rank in attempt if (start := rank.start_unix_ns)), default=None
        ),
        num_attempts=len(run.attempts),
        num_ranks=len(attempt.ranks),
        world_size=attempt.world_size,
        num_steps=num_steps,
        state=describe_state(attempt),
        job=name_job(path),
        is_open=any(rank.closing is None for rank in attempt),
        last_sign_unix_ns=last_sign_of_life_ns(first),
        step_ns=step_ns,
        step_error_ns=error_ns,
        goodput=goodput,
    )


def _measure_steps(recording: Recording) -> tuple[float | None, float | None]:
    """The period of the last steps, without the first ones, and its standard error."""
    starts = np.sort(int64_column(recording.read("steps"), "start_host_mono_ns"))
    periods = np.diff(starts[min(len(starts) // 10, 10) :])[-_PACE_STEPS:]
    if len(periods) < _MIN_STEPS:
        return None, None
    median = float(np.median(periods))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(periods - median)))
    return median, _MEDIAN_ERROR * spread / len(periods) ** 0.5


def add_report(listing: Listing, path: Path) -> Listing:
    """With the worst finding, MFU and energy of the whole report of the last attempt."""
    from meshscope.report.run_study import RunStudy

    try:
        run = open_run(path)
        made = RunStudy(run, run.last_attempt)
        urgent = [one for one in made.findings if one.severity > Severity.LOW]
        budget, hardware = made.study.budget, made.study.hardware
    except MeshscopeError as error:
        return replace(listing, report=Unavailable(str(error)))
    worst = urgent[0] if urgent else None
    gain = Unavailable("no finding above low") if worst is None else worst.gain
    mfu = budget if isinstance(budget, Unavailable) else budget.mfu
    per_step = hardware if isinstance(hardware, Unavailable) else hardware.joules_per_step
    num_steps = made.study.steps.num_steps
    found = ListedReport(
        worst=None if worst is None else worst.label,
        severity=None if worst is None else worst.severity.word,
        saved_ratio=gain if isinstance(gain, Unavailable) else gain.saved_ratio,
        mfu_ratio=mfu if isinstance(mfu, Unavailable) else mfu.ratio,
        joules=per_step if isinstance(per_step, Unavailable) else per_step * num_steps,
    )
    return replace(listing, report=found)


def describe_state(attempt: Attempt) -> str:
    opened = [rank for rank in attempt if rank.closing is None]
    if opened:
        found = _find_life(opened)
        is_all = len(opened) == len(attempt.ranks)
        state = found or ("still running or killed" if is_all else "without an end")
        state = state if is_all else f"{len(opened)} of {len(attempt.ranks)} ranks {state}"
    else:
        state = _describe_end(attempt)
    missing = len(attempt.missing_ranks)
    return f"{state}, {missing} missing" if missing else state


def is_running(state: str) -> bool:
    """Whether a process was seen to live when this was said."""
    return state.startswith(RUNNING) or f"ranks {RUNNING}" in state


def _find_life(opened: Sequence[Recording]) -> str:
    """Whether ranks without an end live, as far as this machine can know; empty where it cannot."""
    here = this_machine()
    seen = [look_at_process(rank.header, here) for rank in opened[:_MAX_PROCESSES]]
    if any(one.life is not Life.UNKNOWN and not one.is_gone for one in seen):
        return RUNNING
    return KILLED if all(one.is_gone for one in seen) else ""


def _describe_end(attempt: Attempt) -> str:
    """How ranks ended that all have an end: by themselves, or with an exception."""
    raised = [rank for rank in attempt if rank.exception is not None]
    if not raised:
        return FINISHED
    kinds = [(rank.exception or "").partition(":")[0] for rank in raised]
    if set(kinds) == {KeyboardInterrupt.__name__}:
        return "interrupted"
    # What one rank raises is often an interrupt on the others.
    first = next(kind for kind in kinds if kind != KeyboardInterrupt.__name__)
    who = f"{len(raised)} of {len(attempt.ranks)} ranks " if len(attempt.ranks) > 1 else ""
    return f"{who}ended with {first}"


def search(listings: Sequence[Listing], text: str) -> list[Listing]:
    """Those that have all words in their path, job, id, state or worst finding."""
    words = text.lower().split()
    return [one for one in listings if all(word in _text_of(one) for word in words)]


def _text_of(one: Listing) -> str:
    report = known(one.report)
    worst = "" if report is None else report.worst or ""
    return f"{one.path} {one.job} {one.run_id} {one.state} {worst}".lower()
