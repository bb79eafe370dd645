"""Ranks that died, failed, fell behind or hold the job up: what needs no diagnosis of steps."""

from meshscope.alarms.screening import Screening
from meshscope.alarms.sighting import Sighting
from meshscope.core.verdict.severity import Severity
from meshscope.hang.hang import diagnose_hang
from meshscope.hang.hang_rules import VerdictKind
from meshscope.hang.processes import this_machine
from meshscope.report import format as form
from meshscope.report.sections.hang_words import make_sentence
from meshscope.store.read.run import Attempt

DEAD, STUCK, STALL, BEHIND, FAILED = "dead", "stuck", "stall", "behind", "failed"
WATCH_CODES = frozenset((DEAD, STUCK, STALL, BEHIND, FAILED))
_ON_PURPOSE = "KeyboardInterrupt"
_MAX_NAMED = 16


def look_for_hang(attempt: Attempt, stalled_s: float) -> tuple[Sighting, ...]:
    """Of a job in which no step was new for so long."""
    hang = diagnose_hang(attempt, this_machine(), asks_stacks=False)
    for_long = f"no step was finished for {form.duration(stalled_s * 1e9)}"
    ranks = tuple(culprit.rank for culprit in hang.culprits[:_MAX_NAMED])
    if not hang.is_stuck:
        summary = f"{for_long}; no operation is stuck and no process is seen to be gone"
        return (
            Sighting(
                code=STALL,
                severity=Severity.HIGH,
                title="no step is being finished",
                summary=summary,
                ranks=ranks,
                change="Look at what the job does outside of steps: saving, evaluation, input.",
            ),
        )
    is_dead = hang.kind is VerdictKind.DEAD
    who = form.name_ranks(ranks) if ranks else "no rank"
    return (
        Sighting(
            code=DEAD if is_dead else STUCK,
            severity=Severity.CRITICAL,
            title=f"{who} died" if is_dead else f"the job is stuck: {who}",
            summary=form.clean_text(f"{make_sentence(hang)}; {for_long}", 600),
            ranks=ranks,
            change="Run meshscope hang RUN on the rank's host for its stack.",
            is_certain=hang.is_certain,
        ),
    )


def see_failed(attempt: Attempt) -> tuple[Sighting, ...]:
    """Ranks whose program ended with an exception."""
    raised = {
        one.rank: one.exception
        for one in attempt
        if one.exception is not None and not one.exception.startswith(_ON_PURPOSE)
    }
    if not raised:
        return ()
    first, text = next(iter(raised.items()))
    error = form.clean_text(text or "", 200)
    ranks = tuple(raised)[:_MAX_NAMED]
    return (
        Sighting(
            code=FAILED,
            severity=Severity.CRITICAL,
            title=f"{form.name_ranks(tuple(raised))} failed",
            summary=f"rank {first} ended with {error}",
            ranks=ranks,
            is_certain=True,
        ),
    )


def see_behind(attempt: Attempt, screening: Screening, num_steps: int) -> tuple[Sighting, ...]:
    """Ranks that other ranks left behind, and that did not end."""
    behind = [
        rank for rank in screening.find_behind(num_steps) if attempt.ranks[rank].closing is None
    ]
    if not behind:
        return ()
    who = form.name_ranks(behind)
    return (
        Sighting(
            code=BEHIND,
            severity=Severity.HIGH,
            title=f"{who} is silent while others go on"
            if len(behind) == 1
            else f"{who} are silent while others go on",
            summary=f"{who} recorded no step for more than {num_steps} steps of the others",
            ranks=tuple(behind[:_MAX_NAMED]),
            change="Look whether the process lives and can write its run folder.",
        ),
    )
