"""Names the ranks that hold a stuck or dead job up, the operation, and the evidence.

`rank_look` reads the state of every rank, `hang_rules` finds the culprits. This module adds the
operation, the ranks held up in it and behind it and, if available, the stacks of the culprits and
the records of torch's flight recorder.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.hang.flight_recorder import GroupRecord, read_dumps
from meshscope.hang.hang_rules import (
    AFTER_NS,
    Facts,
    Judgement,
    Reason,
    VerdictKind,
    first_failure,
    gather_facts,
    is_stuck,
    judge,
)
from meshscope.hang.processes import Here, Life
from meshscope.hang.rank_look import look_at_ranks
from meshscope.hang.rank_states import (
    Meeting,
    Operation,
    OperationGroup,
    RankState,
    find_pair_axis,
)
from meshscope.hang.stacks import Frame, ask_for_stacks, find_askable
from meshscope.hang.wait_graph import Attendance, Cause, Wait, find_kinds
from meshscope.store.read.rank_ranges import abbreviate_ranks
from meshscope.store.read.run import Attempt

_MAX_ASKED = 4
"""Culprits that are asked for their stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckOperation:
    """The operation in which ranks wait."""

    kind: Kind
    group: OperationGroup
    axis: str
    sequence: int
    """Index among the operations of its group, from 0; of a message, among those of its pair."""
    source: int | None
    """Of a message; None for a collective."""
    destination: int | None
    ranks: tuple[int, ...]
    """Its members."""
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    kinds: Mapping[Kind, tuple[int, ...]]
    """Kind to the members that called it; more than one kind if they disagree."""
    size_bytes: int | None
    since_unix_ns: int
    """When the first rank entered it."""

    @property
    def group_name(self) -> str:
        """torch's name for the group."""
        return self.group.name

    @property
    def group_description(self) -> str:
        """What its maker calls the group."""
        return self.group.description


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank that holds others up, or that failed first."""

    rank: int
    reason: Reason
    state: RankState
    frames: tuple[Frame, ...] = ()
    """Stack of its main thread, innermost first; empty if it was not asked or did not answer."""
    flight: tuple[GroupRecord, ...] = ()
    """What its flight recorder says about the operation's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The verdict on one attempt."""

    kind: VerdictKind
    is_stuck: bool
    """Whether action is needed: every kind except `moving` and `finished`."""
    culprits: tuple[Culprit, ...]
    """With `moving`: the ranks that an unusually long wait leads to, though it is no hang yet."""
    is_certain: bool
    """False if a named rank may itself be held up, or if a transfer may be over."""
    operation: StuckOperation | None
    age_ns: int | None
    """How long the first rank has waited; None where all have ended, as nobody saw when."""
    waiting: tuple[Wait, ...]
    """Ranks in an operation with a culprit."""
    cascade: tuple[Wait, ...]
    """Ranks held up behind them."""
    first_error: Operation | None
    """The earliest error that ended an operation."""
    num_errors: int
    """Ranks whose operations ended in errors."""
    others: tuple[Cause, ...]
    """Further, unrelated causes."""
    last_operation_unix_ns: int | None
    """When a rank last entered or left an operation."""
    states: Mapping[int, RankState]
    layout: Layout | Unavailable
    asked_unix_ns: int
    waiting_frames: tuple[int, tuple[Frame, ...]] | None = None
    """A waiting rank and its stack."""
    waiting_flight: tuple[GroupRecord, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether no recorded rank is left: what is said is how they ended."""
        return _has_ended(self.states)


def _has_ended(states: Mapping[int, RankState]) -> bool:
    return all(state.has_ended for state in states.values() if state.directory is not None)


def diagnose_hang(
    attempt: Attempt,
    here: Here,
    *,
    after_ns: int = AFTER_NS,
    asks_stacks: bool = True,
    flight_recorder: Path | None = None,
) -> Hang:
    """Looks at an attempt now and names what holds it up."""
    states = look_at_ranks(attempt, here)
    facts = gather_facts(states, after_ns)
    found = judge(facts)
    hang = _make_hang(facts, found, attempt.layout)
    if asks_stacks:
        hang = _with_stacks(hang)
    return _with_flight_records(hang, flight_recorder) if flight_recorder is not None else hang


# --- the verdict ----------------------------------------------------------------------------------


def _make_hang(facts: Facts, found: Judgement, layout: Layout | Unavailable) -> Hang:
    states = facts.states
    meeting = found.meeting or _find_meeting(facts, found.reasons)
    waiting, cascade = _split_waits(facts, found, meeting)
    operations = (o for s in states.values() for o in (*s.recent[-1:], *s.in_flight[-1:]))
    times = [o.ended_unix_ns or o.entered_unix_ns for o in operations]
    culprits = set(found.reasons)
    others = [
        cause
        for cause in facts.causes
        if cause is not found.cause
        and is_stuck(facts, cause)
        and not culprits & {*cause.ranks, *(r for w in cause.direct for r in w.missing)}
    ]
    ages = [held.waited_ns for held in waiting if not held.is_over]
    age_ns = found.age_ns if found.age_ns is not None else max(ages, default=None)
    return Hang(
        kind=found.kind,
        is_stuck=found.is_stuck,
        culprits=tuple(
            Culprit(rank=rank, reason=reason, state=states[rank])
            for rank, reason in sorted(found.reasons.items())
        ),
        is_certain=found.is_certain,
        operation=_describe_operation(facts, meeting, layout) if meeting is not None else None,
        age_ns=None if _has_ended(states) else age_ns,
        waiting=waiting,
        cascade=cascade,
        first_error=first_failure(facts) if facts.failures else None,
        num_errors=len(facts.failures),
        others=tuple(others),
        last_operation_unix_ns=max(times, default=None),
        states=states,
        layout=layout,
        asked_unix_ns=time.time_ns(),
        notes=_make_notes(facts),
    )


def _make_notes(facts: Facts) -> tuple[str, ...]:
    """Further facts for readers of the verdict."""
    recorded = [state for state in facts.states.values() if state.directory is not None]
    unended = [state for state in recorded if not state.is_closed]
    notes = []
    if len(unended) > 1 and all(state.process.is_gone for state in unended):
        notes.append(
            f"all {len(unended)} processes without a closing line are gone; who was first is told "
            "by who waited for whom"
        )
    unknown = [state.rank for state in unended if state.process.life is Life.UNKNOWN]
    if unknown and len(unended) < len(recorded):
        notes.append(f"without an end, running or killed elsewhere: {abbreviate_ranks(unknown)}")
    raised = [state for state in recorded if state.exception]
    if raised:
        first = min(raised, key=lambda state: state.closed_unix_ns or 0)
        who = abbreviate_ranks(state.rank for state in raised)
        notes.append(f"ended with an exception: ranks {who}; first {first.rank}: {first.exception}")
    resting = [state.rank for state in recorded if state.is_resting]
    if resting:
        notes.append(
            "operations of the current step were not recorded (to keep the cost small, only those "
            f"of some steps are) on {abbreviate_ranks(resting)}: whether one is under way is not "
            "known"
        )
    unseen = [
        state.rank
        for state in recorded
        if not state.is_complete and state.resting_since_step is None
    ]
    if unseen:
        notes.append(f"communication is not, or not all, recorded on {abbreviate_ranks(unseen)}")
    silent = [state.rank for state in facts.states.values() if state.directory is None]
    if silent:
        notes.append(f"recorded nothing: {abbreviate_ranks(silent)}")
    return tuple(notes)


def _find_meeting(facts: Facts, culprits: Iterable[int]) -> Meeting | None:
    """The earliest operation in which others wait for a culprit or saw its end.

    Operations that a culprit had not entered or not left come before those it had left.
    """
    named = set(culprits)
    ranked = []
    for held in facts.held:
        meeting = held.operation.meeting
        if held.rank in named or named.isdisjoint(meeting.members):
            continue
        is_open = any(
            rank in held.missing or facts.states[rank].is_inside(meeting) for rank in named
        )
        ranked.append(((not is_open, not held.is_certain, held.operation.entered_unix_ns), meeting))
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _split_waits(
    facts: Facts, found: Judgement, meeting: Meeting | None
) -> tuple[tuple[Wait, ...], tuple[Wait, ...]]:
    """Waits in an operation with a culprit, and the rest; one per rank, the oldest first."""
    culprits = set(found.reasons)
    direct: dict[int, Wait] = {}
    behind: dict[int, Wait] = {}
    ordered = sorted(
        facts.held,
        key=lambda held: (
            held.operation.meeting != meeting,
            not held.is_certain,
            held.operation.entered_unix_ns,
        ),
    )
    for held in ordered:
        is_among = held.rank in culprits
        if found.kind is VerdictKind.CYCLE:
            is_direct = is_among
        elif is_among:
            continue
        else:
            is_direct = held.operation.meeting == meeting or any(
                rank in held.missing or facts.states[rank].is_inside(held.operation.meeting)
                for rank in culprits
            )
        side = direct if is_direct else behind
        side.setdefault(held.rank, held)
    for rank in direct:
        behind.pop(rank, None)
    return tuple(direct.values()), tuple(behind.values())


def _describe_operation(
    facts: Facts, meeting: Meeting, layout: Layout | Unavailable
) -> StuckOperation:
    states = facts.states
    parts = [
        operation
        for rank in meeting.members
        if rank in states and (operation := states[rank].find(meeting)) is not None
    ]
    waiting = [h.operation for h in facts.held if h.operation.meeting == meeting]
    kinds = find_kinds(states, meeting)
    known = waiting or parts
    ends = [o.ended_unix_ns for o in known if o.ended_unix_ns is not None]
    missing = Attendance(states, min(ends, default=None)).missing_from(meeting)
    axis = meeting.group.axis
    if meeting.is_message:
        axis = find_pair_axis(meeting.group, meeting.source, meeting.destination, layout)
    return StuckOperation(
        kind=known[0].kind if known else Kind.CUSTOM,
        group=meeting.group,
        axis=axis,
        sequence=meeting.sequence,
        source=meeting.source if meeting.is_message else None,
        destination=meeting.destination if meeting.is_message else None,
        ranks=meeting.members,
        entered=tuple(rank for rank in meeting.members if rank not in missing),
        missing=missing,
        kinds=kinds,
        size_bytes=known[0].size_bytes if known else None,
        since_unix_ns=min((o.entered_unix_ns for o in (*parts, *waiting)), default=0),
    )


# --- asking further -------------------------------------------------------------------------------


def _with_stacks(hang: Hang) -> Hang:
    """Asks the culprits, and one rank that waits for them, for their stacks."""
    if not hang.is_stuck and not hang.culprits:
        return hang
    named = [culprit.rank for culprit in hang.culprits][:_MAX_ASKED]
    waiting = [held.rank for held in hang.waiting if held.rank not in named and not held.is_over]
    targets = {}
    for rank in (*named, *waiting[:1]):
        state = hang.states[rank]
        if state.directory is None:
            continue
        askable = find_askable(state.stack_signal, state.process, state.directory)
        if askable is not None:
            targets[rank] = askable
    if not targets:
        return hang
    stacks = ask_for_stacks(targets)
    witness = waiting[0] if waiting and waiting[0] in stacks else None
    return replace(
        hang,
        culprits=tuple(replace(c, frames=stacks.get(c.rank, ())) for c in hang.culprits),
        waiting_frames=(witness, stacks[witness]) if witness is not None else None,
    )


def _with_flight_records(hang: Hang, path: Path) -> Hang:
    """Adds what torch's flight recorder says about the operation's group."""
    records, problems = read_dumps(path)
    group = hang.operation.group.name if hang.operation is not None else None
    by_rank: dict[int, list[GroupRecord]] = {}
    for record in records:
        if group is None or record.group == group:
            by_rank.setdefault(record.rank, []).append(record)
    waiting = [by_rank[held.rank] for held in hang.waiting if held.rank in by_rank]
    return replace(
        hang,
        culprits=tuple(replace(c, flight=tuple(by_rank.get(c.rank, ()))) for c in hang.culprits),
        waiting_flight=tuple(waiting[0]) if waiting else (),
        notes=(*hang.notes, *problems[:4]),
    )
