"""The verdict on a stuck or dead job, what it rests on, and who waits for what.

In JSON times are unix nanoseconds, sequences count from 0, and texts are as the run has them.
"""

from dataclasses import dataclass

from meshscope.hang.flight_recorder import GroupRecord
from meshscope.hang.hang import Hang, StuckOperation
from meshscope.hang.hang_rules import Held, Reason
from meshscope.hang.rank_states import Operation
from meshscope.hang.stacks import Frame
from meshscope.hang.wait_graph import Cause
from meshscope.report.encode import Shape
from meshscope.report.sections.hang_words import describe_place, list_evidence, make_sentence

DOCUMENT = ("meshscope-hang", 2)
"""Name and version of the JSON document: a `HangDocument`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritFacts:
    """A rank that holds others up, or that failed first."""

    rank: int
    reason: Reason
    evidence: tuple[str, ...]
    """What is known about it, one sentence each."""
    stack: tuple[Frame, ...]
    flight_recorder: tuple[GroupRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStack:
    """Where a rank that waits is."""

    rank: int
    frames: tuple[Frame, ...]
    """Innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Where one rank stands."""

    rank: int
    place: str
    """Along the axes in use; empty when the layout is not known."""
    host: str
    pid: int | None
    process: str
    process_detail: str
    has_recorded: bool
    is_closed: bool
    exception: str
    step: int | None
    phase: str | None
    phase_since_unix_ns: int | None
    last_sign_unix_ns: int | None
    in_flight: tuple[Operation, ...]
    last_operation: Operation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDocument:
    """Which ranks hold a job up, in which operation, and how that is known."""

    run: str
    attempt: int
    sentence: str
    """The verdict in words."""
    hang: Hang
    culprits: tuple[CulpritFacts, ...]
    waiting_stack: WaitingStack | None
    ranks: tuple[RankFacts, ...]
    """Those that are named elsewhere, or all."""


SHAPES = {
    HangDocument: Shape(inlined=("hang",)),
    Hang: Shape(
        dropped=("culprits", "states", "layout", "waiting_frames", "waiting_flight"),
        renamed={"num_errors": "num_ranks_with_errors"},
    ),
    StuckOperation: Shape(
        dropped=("group",),
        derived=("group_name", "group_description"),
        renamed={"group_name": "group"},
    ),
    Operation: Shape(
        dropped=("meeting", "is_device", "peer"),
        derived=("group_name", "axis", "sequence", "known_peer"),
        renamed={"group_name": "group", "known_peer": "peer"},
    ),
    Held: Shape(renamed={"missing": "waits_for"}),
    Cause: Shape(dropped=("direct", "behind", "is_certain")),
    GroupRecord: Shape(dropped=("rank",)),
}


def make_hang_document(
    hang: Hang, *, run: str, attempt: int, shows_all_ranks: bool
) -> HangDocument:
    """The verdict with facts about the ranks that it names, or about all."""
    stack = hang.waiting_frames
    return HangDocument(
        run=run,
        attempt=attempt,
        sentence=make_sentence(hang),
        hang=hang,
        culprits=tuple(
            CulpritFacts(
                rank=culprit.rank,
                reason=culprit.reason,
                evidence=tuple(list_evidence(hang, culprit)),
                stack=culprit.frames,
                flight_recorder=culprit.flight,
            )
            for culprit in hang.culprits
        ),
        waiting_stack=None if stack is None else WaitingStack(rank=stack[0], frames=stack[1]),
        ranks=tuple(
            _gather_facts(hang, rank)
            for rank in (sorted(hang.states) if shows_all_ranks else _list_named(hang))
        ),
    )


def _list_named(hang: Hang) -> list[int]:
    named = {culprit.rank for culprit in hang.culprits}
    return sorted(named | {held.rank for held in (*hang.waiting, *hang.cascade)})


def _gather_facts(hang: Hang, rank: int) -> RankFacts:
    state = hang.states[rank]
    return RankFacts(
        rank=rank,
        place=describe_place(hang, rank),
        host=state.host,
        pid=state.process.pid,
        process=state.process.life.value,
        process_detail=state.process.reason or state.process.system_call,
        has_recorded=state.directory is not None,
        is_closed=state.is_closed,
        exception=state.exception,
        step=state.step,
        phase=state.phase.name if state.phase else None,
        phase_since_unix_ns=state.phase.since_unix_ns if state.phase else None,
        last_sign_unix_ns=state.last_sign_unix_ns,
        in_flight=state.in_flight,
        last_operation=state.recent[-1] if state.recent else None,
    )
