"""Finds the culprits from the states of all ranks, rule by rule.

The first rule that applies decides:

    a process is stopped, is gone without a closing line, or raised its own error: that rank
    operations timed out: the ranks that had not entered them
    connections were lost: the ranks that recorded neither an error nor an end
    ranks wait: the ranks that the chains of waits lead to (`wait_graph`)
    all ranks have entered every open operation, and none has recorded anything for long: none

The death of a rank ends the operations of all others with errors, and each of their ends does so
again: errors of connections are never the cause. Waits count as a hang if they are older than
`after_ns`, or at once if the rank waited for has ended.

Wrong if ranks of other hosts die unseen and leave no error behind, if several ranks fail within the
difference of their hosts' clocks, and if a program waits for something that is not an operation of
torch (a file, a store, a lock): such a rank appears as the missing one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.core.operations import Outcome
from meshscope.hang.processes import Life
from meshscope.hang.rank_states import Meeting, Operation, RankState
from meshscope.hang.wait_graph import (
    Attendance,
    Cause,
    CauseKind,
    Wait,
    find_causes,
    find_leaders,
    find_waits,
    is_elsewhere,
)
from meshscope.store.write.attempts import CLOCK_SKEW_NS

AFTER_NS = 5_000_000_000
"""Waits older than this are a hang."""
_NOTABLE_NS = 100_000_000
"""Shorter waits are not reported."""
_NOTABLE_RATIO = 3.0
"""A wait is unusual if it lasts this many times the longest recent operation of its rank."""
DELAY_NS = 500_000_000
"""How old a file may be where files cannot be mapped: they are written every 0.2 s."""
SILENT_STEPS = 3
"""Number of step times for which a job must be silent to count as a hang."""
_CONNECTION = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted|lost)|broken pipe|socket closed"
    r"|peer .*(?:closed|exited)|remote (?:process|peer|error)|ncclRemoteError|not connected"
    r"|recv(?:Value|Bytes|Vector)? failed|failed to recv|no route to host|aborted communicator"
    r"|communicator was aborted|transport endpoint",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"\btime(?:d[ -]?|[ -]?)out|watchdog", re.IGNORECASE)
_INTERRUPT = re.compile(r"^(?:KeyboardInterrupt|SystemExit|SignalException)\b")


class VerdictKind(StrEnum):
    DEAD = "dead"
    STOPPED = "stopped"
    MISSING = "missing"
    TRANSFER = "transfer"
    CYCLE = "cycle"
    MOVING = "moving"
    FINISHED = "finished"


class Reason(StrEnum):
    """Why a rank is named."""

    KILLED = "killed"
    """Its process is gone and its recording has no end."""
    LOST = "lost"
    """It recorded neither an error nor an end while others lost their connections."""
    RAISED = "raised"
    """It failed first, with its own error."""
    STOPPED = "stopped"
    NOT_ENTERED = "not_entered"
    """It has not entered an operation that others are in."""
    LATE = "late"
    """It had not entered an operation when that timed out."""
    LEFT = "left"
    """Its program ended without an error while others still wait for it."""
    NEVER_RECORDED = "never_recorded"
    IN_CIRCLE = "in_circle"
    """It and another rank wait for each other."""
    MISMATCH = "mismatch"
    """It called another operation than the rest of its group."""


class ErrorClass(StrEnum):
    CONNECTION = "connection"
    """The other side is gone: a consequence."""
    TIMEOUT = "timeout"
    """A rank did not arrive: a consequence."""
    INTERRUPT = "interrupt"
    """It was ended from outside."""
    OWN = "own"


def classify_error(text: str) -> ErrorClass:
    """Classifies by the messages of torch and its back ends."""
    if _INTERRUPT.search(text):
        return ErrorClass.INTERRUPT
    if _CONNECTION.search(text):
        return ErrorClass.CONNECTION
    return ErrorClass.TIMEOUT if _TIMEOUT.search(text) else ErrorClass.OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    kind: VerdictKind
    reasons: Mapping[int, Reason]
    is_stuck: bool = True
    is_certain: bool = True
    meeting: Meeting | None = None
    cause: Cause | None = None
    age_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    states: Mapping[int, RankState]
    waits: Sequence[Wait]
    causes: Sequence[Cause]
    failures: Mapping[int, tuple[Operation, ...]]
    """Errors after which a rank completed nothing."""
    after_ns: int
    blur_ns: int
    """Ranks are not read at one instant: shorter waits may not exist."""
    held: Sequence[Wait]
    """`waits`, failures, and handles of operations with a stopped or dead member."""


def gather_facts(states: Mapping[int, RankState], after_ns: int) -> Facts:
    waits = find_waits(states)
    failures = {rank: final for rank, state in states.items() if (final := _final_failures(state))}
    held = list(waits)
    for operations in failures.values():
        for operation in operations:
            ended_ns = operation.ended_unix_ns or operation.entered_unix_ns
            missing = Attendance(states, ended_ns).missing_from(operation.meeting)
            held.append(_hold_until(ended_ns, operation, missing, is_certain=True))
    held += _held_by_handles(states, {wait.rank for wait in waits})
    return Facts(
        states=states,
        waits=waits,
        causes=find_causes(states, waits),
        failures=failures,
        after_ns=after_ns,
        blur_ns=_measure_blur(states.values()),
        held=held,
    )


def _measure_blur(states: Iterable[RankState]) -> int:
    recorded = [state for state in states if state.directory is not None]
    looked_ns = [state.looked_unix_ns for state in recorded]
    if not looked_ns:
        return 0
    delay_ns = DELAY_NS if any(state.is_delayed for state in recorded) else 0
    return min(max(looked_ns) - min(looked_ns), CLOCK_SKEW_NS) + delay_ns


def _hold_until(
    time_unix_ns: int, operation: Operation, missing: tuple[int, ...], *, is_certain: bool
) -> Wait:
    return Wait(
        rank=operation.rank,
        operation=operation,
        waited_ns=max(0, time_unix_ns - operation.entered_unix_ns),
        missing=missing,
        is_certain=is_certain,
        since_complete_ns=0,
    )


def _held_by_handles(states: Mapping[int, RankState], waiting: set[int]) -> list[Wait]:
    """Ranks that hold handles of operations in which a member is stopped or gone."""
    held = []
    for rank, state in states.items():
        if rank in waiting or state.has_ended or is_elsewhere(state):
            continue
        for operation in state.in_flight:
            members = (states.get(member) for member in operation.meeting.members)
            if any(
                member.rank != rank and _is_silenced(member) and member.is_inside(operation.meeting)
                for member in members
                if member is not None
            ):
                held.append(_hold_until(state.looked_unix_ns, operation, (), is_certain=False))
                break
    return held


def _is_silenced(state: RankState) -> bool:
    is_stopped = state.process.life is Life.STOPPED or state.process.is_gone
    return is_stopped and not state.is_closed


def _final_failures(state: RankState) -> tuple[Operation, ...]:
    """Failed operations after which the rank completed no other."""
    good = [o.entered_unix_ns for o in state.recent if o.outcome is Outcome.OK]
    last_good_ns = max(good, default=0)
    final = [o for o in state.failures if (o.ended_unix_ns or 0) >= last_good_ns]
    if state.is_closed and not state.exception:
        # A block that the program timed itself, without other ranks, in a program that ended well.
        final = [o for o in final if o.group.ranks]
    return tuple(final)


# --- the rules ------------------------------------------------------------------------------------


def judge(facts: Facts) -> Judgement:
    """The first rule that applies."""
    return (
        _judge_processes(facts)
        or _judge_timeouts(facts)
        or _judge_connections(facts)
        or _judge_waits(facts)
        or _judge_silence(facts)
        or _judge_rest(facts)
    )


def _judge_processes(facts: Facts) -> Judgement | None:
    """Ranks that are stopped, gone or failed by themselves, without those they took with them."""
    reasons: dict[int, Reason] = {}
    for rank, state in facts.states.items():
        if state.is_closed or state.directory is None:
            continue
        if state.process.life is Life.STOPPED:
            reasons[rank] = Reason.STOPPED
        elif state.process.is_gone and rank not in facts.failures:
            reasons[rank] = Reason.KILLED
    reasons = _without_survivors(facts, reasons)
    first = _find_first_to_raise(facts)
    if first is not None:
        reasons[first] = Reason.RAISED
    reasons = _without_victims(facts, reasons)
    if not reasons:
        return None
    if set(reasons.values()) == {Reason.KILLED}:
        before = _judge_timeouts_alone(facts) or _judge_before_the_end(facts, reasons)
        if before is not None:
            return before
    is_stopped = set(reasons.values()) == {Reason.STOPPED}
    kind = VerdictKind.STOPPED if is_stopped else VerdictKind.DEAD
    return Judgement(kind=kind, reasons=reasons)


def _judge_timeouts_alone(facts: Facts) -> Judgement | None:
    """All errors are timeouts, no connection was lost: processes that are gone ended later."""
    errors = [_error_class(o) for operations in facts.failures.values() for o in operations]
    if not errors or set(errors) != {ErrorClass.TIMEOUT}:
        return None
    return _judge_timeouts(facts)


def _judge_before_the_end(facts: Facts, reasons: Mapping[int, Reason]) -> Judgement | None:
    """All processes are gone: what they were in says more than that they were ended."""
    recorded = {rank for rank, state in facts.states.items() if state.directory is not None}
    if len(recorded) < 2 or set(reasons) != recorded:
        return None
    causes = [cause for cause in facts.causes if cause.kind is not CauseKind.TRANSFER]
    return _judge_cause(facts, causes[0]) if causes else None


def _without_survivors(facts: Facts, reasons: Mapping[int, Reason]) -> dict[int, Reason]:
    """Drops ranks that were ended after others had failed, or on request while another was not."""
    killed = {rank for rank, reason in reasons.items() if reason is Reason.KILLED}
    killed = _silent_before_failures(facts, killed) or killed
    struck = {rank for rank in killed if not facts.states[rank].process.was_sent_off}
    killed = struck or killed
    return {
        r: reason for r, reason in reasons.items() if reason is not Reason.KILLED or r in killed
    }


def _silent_before_failures(facts: Facts, ranks: Iterable[int]) -> set[int]:
    """Ranks that recorded nothing after the first failure; others were alive then."""
    if not facts.failures:
        return set(ranks)
    failure, states = first_failure(facts), facts.states
    felt_ns = failure.ended_unix_ns or failure.entered_unix_ns
    host = states[failure.rank].host
    return {
        rank
        for rank in ranks
        if (states[rank].last_sign_unix_ns or 0)
        <= felt_ns + (0 if states[rank].host == host else CLOCK_SKEW_NS)
    }


def _find_first_to_raise(facts: Facts) -> int | None:
    """The rank with the earliest error that is not of a connection, a timeout or an interrupt."""
    times: dict[int, int] = {}
    for rank, state in facts.states.items():
        for operation in facts.failures.get(rank, ()):
            if _error_class(operation) is ErrorClass.OWN:
                times.setdefault(rank, operation.ended_unix_ns or operation.entered_unix_ns)
        if state.exception and classify_error(state.exception) is ErrorClass.OWN:
            ended_ns = state.closed_unix_ns or state.last_sign_unix_ns or 0
            # An error after the rank's connections were lost is a consequence.
            if rank not in facts.failures:
                times.setdefault(rank, ended_ns)
    return min(times, key=lambda rank: times[rank], default=None)


def _error_class(operation: Operation) -> ErrorClass:
    if operation.outcome is Outcome.TIMEOUT:
        return ErrorClass.TIMEOUT
    found = classify_error(operation.message)
    # An error without text counts as one of a connection: most errors are.
    return ErrorClass.CONNECTION if not operation.message else found


def _without_victims(facts: Facts, reasons: Mapping[int, Reason]) -> dict[int, Reason]:
    """Drops ranks that waited for another of these: they held no rank up."""
    unfinished = [s.rank for s in facts.states.values() if not s.is_closed and s.directory]
    if reasons and all(reasons.get(rank) is Reason.STOPPED for rank in unfinished):
        return dict(reasons)
    leaders = find_leaders(facts.waits, reasons)
    return {rank: reason for rank, reason in reasons.items() if rank in leaders}


def _judge_timeouts(facts: Facts) -> Judgement | None:
    """Operations timed out: the ranks that were waited for when the first one did."""
    ends = [
        operation.ended_unix_ns or operation.entered_unix_ns
        for operations in facts.failures.values()
        for operation in operations
        if _error_class(operation) is ErrorClass.TIMEOUT
    ]
    if not ends:
        return None
    causes = find_causes(facts.states, find_waits(facts.states, min(ends)))
    if not causes:
        meeting = first_failure(facts).meeting
        return Judgement(kind=VerdictKind.TRANSFER, reasons={}, meeting=meeting)
    return replace(_judge_cause(facts, causes[0], Reason.LATE), age_ns=None)


def _explain_absence(facts: Facts, rank: int, otherwise: Reason) -> Reason:
    state = facts.states[rank]
    if state.directory is None:
        return Reason.NEVER_RECORDED
    if state.is_closed and rank not in facts.failures and not state.exception:
        return Reason.LEFT
    return otherwise


def _judge_connections(facts: Facts) -> Judgement | None:
    """Connections were lost, and no process was seen to end."""
    if not facts.failures:
        return None
    first = first_failure(facts)
    silent = [
        state
        for rank, state in facts.states.items()
        if rank not in facts.failures and rank in first.meeting.members
    ]
    unseen = [s.rank for s in silent if not s.is_closed and s.process.life is Life.UNKNOWN]
    lost = find_leaders(facts.waits, _silent_before_failures(facts, unseen))
    if lost:
        reasons = {rank: _explain_absence(facts, rank, Reason.LOST) for rank in sorted(lost)}
        return Judgement(kind=VerdictKind.DEAD, reasons=reasons, meeting=first.meeting)
    left = [s.rank for s in silent if s.is_closed]
    if left:
        reasons = dict.fromkeys(left, Reason.LEFT)
        return Judgement(kind=VerdictKind.MISSING, reasons=reasons, meeting=first.meeting)
    return Judgement(kind=VerdictKind.TRANSFER, reasons={}, meeting=first.meeting)


def first_failure(facts: Facts) -> Operation:
    """The operation that failed first; there must be one."""
    return min(
        (o for operations in facts.failures.values() for o in operations),
        key=lambda o: o.ended_unix_ns or o.entered_unix_ns,
    )


_KIND_OF_CAUSE = {
    CauseKind.MISSING: VerdictKind.MISSING,
    CauseKind.TRANSFER: VerdictKind.TRANSFER,
    CauseKind.CIRCLE: VerdictKind.CYCLE,
    CauseKind.MISMATCH: VerdictKind.CYCLE,
}


def _judge_waits(facts: Facts) -> Judgement | None:
    """No rank failed: the ranks that the waits lead to."""
    stuck = [cause for cause in facts.causes if is_stuck(facts, cause)]
    if stuck:
        return _judge_cause(facts, _without_the_young(facts, stuck[0]))
    notable = [cause for cause in facts.causes if _is_notable(facts, cause)]
    if not notable:
        return None
    found = _judge_cause(facts, notable[0])
    return replace(found, kind=VerdictKind.MOVING, is_stuck=False)


def is_stuck(facts: Facts, cause: Cause) -> bool:
    """Whether a wait is a hang: it is old enough, or for a rank that has ended."""
    if cause.kind is CauseKind.MISSING and any(facts.states[r].has_ended for r in cause.ranks):
        return True
    if cause.kind is CauseKind.MISMATCH:
        return cause.age_ns > facts.blur_ns  # different operations never meet
    return cause.age_ns > max(facts.after_ns, facts.blur_ns)


def _without_the_young(facts: Facts, cause: Cause) -> Cause:
    """Only the ranks that have ended, if the wait is a hang for that reason alone."""
    if cause.kind is not CauseKind.MISSING or cause.age_ns >= facts.after_ns:
        return cause
    ended = tuple(rank for rank in cause.ranks if facts.states[rank].has_ended)
    return replace(cause, ranks=ended)


def _is_notable(facts: Facts, cause: Cause) -> bool:
    longest_ns = max(
        (
            operation.ended_unix_ns - operation.entered_unix_ns
            for wait in cause.direct
            for operation in facts.states[wait.rank].recent
            if operation.ended_unix_ns is not None and operation.outcome is Outcome.OK
        ),
        default=0,
    )
    return cause.age_ns >= max(_NOTABLE_NS, facts.blur_ns, _NOTABLE_RATIO * longest_ns)


def _judge_cause(facts: Facts, cause: Cause, missing: Reason = Reason.NOT_ENTERED) -> Judgement:
    reasons: dict[int, Reason] = {}
    if cause.kind is CauseKind.MISSING:
        reasons = {rank: _explain_absence(facts, rank, missing) for rank in cause.ranks}
    elif cause.kind is not CauseKind.TRANSFER:
        is_circle = cause.kind is CauseKind.CIRCLE
        reasons = dict.fromkeys(cause.ranks, Reason.IN_CIRCLE if is_circle else Reason.MISMATCH)
    return Judgement(
        kind=_KIND_OF_CAUSE[cause.kind],
        reasons=reasons,
        is_certain=cause.is_certain,
        meeting=cause.direct[0].meeting,
        cause=cause,
        age_ns=cause.age_ns,
    )


def _judge_silence(facts: Facts) -> Judgement | None:
    """All ranks have entered every open operation, and nothing has happened for long."""
    states = [s for s in facts.states.values() if s.directory is not None and not s.is_closed]
    under_way = [operation for state in states for operation in state.in_flight]
    if not under_way or any(is_elsewhere(state) for state in states):
        return None
    silence_ns = min(
        (s.looked_unix_ns - s.last_sign_unix_ns for s in states if s.last_sign_unix_ns is not None),
        default=0,
    )
    step_ns = max((state.step_ns or 0 for state in states), default=0)
    if silence_ns < max(facts.after_ns, SILENT_STEPS * step_ns, 1):
        return None
    return Judgement(
        kind=VerdictKind.TRANSFER,
        reasons={},
        is_certain=False,
        meeting=min(under_way, key=lambda o: o.entered_unix_ns).meeting,
        age_ns=silence_ns,
    )


def _judge_rest(facts: Facts) -> Judgement:
    recorded = [state for state in facts.states.values() if state.directory is not None]
    is_over = all(state.is_closed for state in recorded)
    kind = VerdictKind.FINISHED if is_over else VerdictKind.MOVING
    return Judgement(kind=kind, reasons={}, is_stuck=False)
