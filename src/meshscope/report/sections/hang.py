"""The verdict on a stuck or dead job, its evidence, and the waiting ranks.

In JSON times are unix nanoseconds, sequences count from 0, and texts are as the run has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from meshscope.hang.flight_recorder import GroupRecord
from meshscope.hang.hang import Hang, StuckOperation
from meshscope.hang.hang_rules import Reason
from meshscope.hang.rank_states import Operation
from meshscope.hang.stacks import Frame
from meshscope.hang.wait_graph import Cause, CauseKind, Wait
from meshscope.report import format as form
from meshscope.report.encode import Shape
from meshscope.report.section import (
    Blank,
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
)
from meshscope.report.sections.hang_words import (
    MAX_CULPRITS,
    MAX_MESSAGE,
    advise,
    describe_frames,
    describe_position,
    describe_record,
    list_evidence,
    make_sentence,
    name_operation,
    say_ago,
)

DOCUMENT = ("meshscope-hang", 2)
"""Name and version of the JSON document: a `HangDocument`."""
MAX_ROWS = 16
"""Ranks in the table by default."""
_COLUMNS = (
    ("rank", 9),
    ("position", 2),
    ("process", 4),
    ("step", 1),
    ("phase", 3),
    ("in", 6),
    ("for", 5),
    ("waits for", 8),
)
"""Of the table, with their importance."""
_OTHER_CAUSES = {
    CauseKind.MISSING: "waited for as well",
    CauseKind.TRANSFER: "in a transfer that does not finish",
    CauseKind.CIRCLE: "wait for each other as well",
    CauseKind.MISMATCH: "disagree on an operation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritFacts:
    """A rank that holds others up, or that failed first."""

    rank: int
    reason: Reason
    evidence: tuple[str, ...]
    """Facts about it, one sentence each."""
    stack: tuple[Frame, ...]
    flight_recorder: tuple[GroupRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStack:
    """The stack of a waiting rank."""

    rank: int
    frames: tuple[Frame, ...]
    """Innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The state of one rank."""

    rank: int
    place: str
    """Coordinates along the axes in use; empty if the layout is not known."""
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
    """The ranks that hold a job up, the operation, and the evidence."""

    run: str
    attempt: int
    sentence: str
    """The verdict in words."""
    advice: str
    """What to do about it; empty where nothing hangs."""
    hang: Hang
    culprits: tuple[CulpritFacts, ...]
    waiting_stack: WaitingStack | None
    ranks: tuple[RankFacts, ...]
    """The ranks named elsewhere, or all."""


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
    Wait: Shape(dropped=("since_complete_ns",), renamed={"missing": "waits_for"}),
    Cause: Shape(dropped=("direct", "behind", "is_certain")),
    GroupRecord: Shape(dropped=("rank",)),
}


def make_hang_document(
    hang: Hang, *, run: str, attempt: int, shows_all_ranks: bool
) -> HangDocument:
    """The verdict with facts about the named ranks, or about all."""
    stack = hang.waiting_frames
    return HangDocument(
        run=run,
        attempt=attempt,
        sentence=make_sentence(hang),
        advice=advise(hang),
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
        place=describe_position(hang, rank),
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


def make_hang_section(hang: Hang, *, shows_all_ranks: bool) -> Section:
    parts = (
        Headline(make_sentence(hang)),
        *((Line(advice),) if (advice := advise(hang)) else ()),
        *_list_culprits(hang),
        *_list_witness(hang),
        *_list_waits(hang, shows_all_ranks=shows_all_ranks),
        *_list_errors(hang),
        *(Headline(f"! {form.clean_text(note)}", Tone.NOTICE) for note in hang.notes),
    )
    return Section(key="hang", title="", parts=parts)


def _list_culprits(hang: Hang) -> Iterator[Part]:
    for culprit in hang.culprits[:MAX_CULPRITS]:
        label = describe_position(hang, culprit.rank)
        yield Blank()
        yield Headline(f"rank {culprit.rank}{f' ({label})' if label else ''}", Tone.PLAIN)
        yield from map(Line, list_evidence(hang, culprit))
    num_more = len(hang.culprits) - MAX_CULPRITS
    if num_more > 0:
        yield Line(f"… and {form.plural(num_more, 'more rank')} like it")


def _list_witness(hang: Hang) -> Iterator[Part]:
    """The stack and flight record of one waiting rank."""
    lines = []
    if hang.waiting_frames is not None:
        rank, frames = hang.waiting_frames
        lines.append((rank, f"stack: {describe_frames(frames)}"))
    if hang.waiting_flight:
        record = hang.waiting_flight[0]
        lines.append((record.rank, f"flight recorder: {describe_record(record)}"))
    if lines:
        yield Blank()
        yield Headline(f"rank {lines[0][0]}, which waits", Tone.PLAIN)
        yield from (Line(text) for _, text in lines)


def _list_waits(hang: Hang, *, shows_all_ranks: bool) -> Iterator[Part]:
    held = {one.rank: one for one in (*hang.cascade, *hang.waiting)}
    order = list(dict.fromkeys(one.rank for one in (*hang.waiting, *hang.cascade)))
    ranks = sorted(hang.states) if shows_all_ranks else order[:MAX_ROWS]
    if not ranks:
        return
    rows = [_make_row(hang, rank, held.get(rank)) for rank in ranks]
    columns = [
        make_column(title, rows, itemgetter(index), importance, is_right=False)
        for index, (title, importance) in enumerate(_COLUMNS)
    ]
    yield Blank()
    yield Table(tuple(one for one in columns if any(cell.text for cell in one.cells)))
    if len(order) > len(ranks):
        num_more = form.plural(len(order) - len(ranks), "more rank")
        yield Line(f"… and {num_more}; --all-ranks shows all")


def _make_row(hang: Hang, rank: int, held: Wait | None) -> tuple[str, ...]:
    state = hang.states[rank]
    return (
        str(rank),
        describe_position(hang, rank),
        "ended" if state.is_closed else state.process.life.value,
        "" if state.step is None else str(state.step),
        form.clean_text(state.phase.name, 20) if state.phase else "",
        name_operation(held.operation) if held else "",
        form.duration(held.waited_ns) if held else "",
        _show_missing(held) if held else "",
    )


def _show_missing(held: Wait) -> str:
    if held.is_over:
        return f"failed: {held.operation.outcome.label}"
    return form.name_ranks(held.missing) if held.missing else "its transfer"


def _list_errors(hang: Hang) -> Iterator[Part]:
    error = hang.first_error
    if error is not None:
        message = form.clean_text(error.message, MAX_MESSAGE) or error.outcome.label
        when = say_ago(hang.asked_unix_ns, error.ended_unix_ns)
        yield Blank()
        yield Headline(
            f"{form.plural(hang.num_errors, 'rank')} with errors; first rank {error.rank}, "
            f"{when}, in {name_operation(error)}: {message}",
            Tone.PLAIN,
        )
    for cause in hang.others[:MAX_CULPRITS]:
        what, age = _OTHER_CAUSES[cause.kind], form.duration(cause.age_ns)
        yield Headline(f"also: {form.name_ranks(cause.ranks)} {what}, since {age}", Tone.PLAIN)
