"""Which rank waits for which, and where the chains of waits end.

A rank in a collective waits for the members that have not called it, a rank in a send or recv for
the other side. Following these waits leads to their causes, the ends of the graph:

    a rank that waits for no other      it is missing from the operations of the others
    an operation that all have entered  its transfer does not finish
    a circle                            ranks in different operations wait for each other

An operation that gave its caller a handle, or that runs on a device, may not hold the program up.
Such a wait counts unless the rank is held up by another operation or its main thread is known to do
something else. In a circle it is the first to be doubted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.core.operations import POINT_TO_POINT, Kind, Outcome
from meshscope.hang.rank_states import Meeting, Operation, RankState

_HOST_BACKEND = "gloo"
"""A back end that waits on a lock: a main thread elsewhere does not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank that an operation holds up, or in which it failed."""

    rank: int
    operation: Operation
    waited_ns: int
    missing: tuple[int, ...]
    """Members that have not entered it; none if its transfer takes so long."""
    is_certain: bool
    """False for a handle that the rank may not be waiting for."""
    since_complete_ns: int
    """Time since the last known member entered: the transfer so far, if all have."""

    @property
    def meeting(self) -> Meeting:
        return self.operation.meeting

    @property
    def is_over(self) -> bool:
        """Whether it ended in an error."""
        return self.operation.is_failed


class CauseKind(StrEnum):
    """How a chain of waits ends."""

    MISSING = "missing"
    TRANSFER = "transfer"
    CIRCLE = "circle"
    MISMATCH = "mismatch"
    """Members of one group called different operations as its n-th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The end of chains of waits."""

    kind: CauseKind
    ranks: tuple[int, ...]
    """The missing rank, the members of the transfer, the ranks of the circle."""
    direct: tuple[Wait, ...]
    """Direct waits for it, the oldest first."""
    behind: tuple[Wait, ...]
    """Waits of other ranks that lead to it."""
    age_ns: int
    """How long it has lasted."""
    is_certain: bool = True
    """False if a circle was broken at a rank that may not be held up."""

    @property
    def num_waiting(self) -> int:
        """Ranks that it holds up."""
        return len({wait.rank for wait in (*self.direct, *self.behind)} - set(self.ranks))


def find_leaders(waits: Sequence[Wait], ranks: Iterable[int]) -> set[int]:
    """Those of `ranks` that wait for no other of them, except for ranks that also wait for them."""
    named = set(ranks)
    graph = _Graph(waits)
    parts = _find_components(graph.edges)  # ends come before what leads to them
    part_of = {node: index for index, nodes in enumerate(parts) for node in nodes}
    leads_to_named: list[bool] = []
    leaders = named - set(part_of)
    for index, nodes in enumerate(parts):
        outside = {part_of[to] for node in nodes for to in graph.edges[node]} - {index}
        leads = any(leads_to_named[other] or named & set(parts[other]) for other in outside)
        leads_to_named.append(leads)
        if not leads:
            leaders |= {node for node in nodes if isinstance(node, int) and node in named}
    return leaders


def find_waits(states: Mapping[int, RankState], at_unix_ns: int | None = None) -> list[Wait]:
    """Ranks that an operation holds up, or may hold up, now or at a moment in the past."""
    attendance = Attendance(states, at_unix_ns)
    waits: list[Wait] = []
    for state in states.values():
        if at_unix_ns is None:
            unfinished = [] if state.is_closed else list(state.in_flight)
        else:
            unfinished = _unfinished_at(state, at_unix_ns)
        if is_elsewhere(state) and all(o.ended_unix_ns is None for o in unfinished):
            continue
        certain = [o for o in unfinished if _is_holding(o)]
        found = certain or _first_unattended(unfinished, attendance)
        waits += [attendance.wait(state, operation) for operation in found]
    return waits


def _is_holding(operation: Operation) -> bool:
    """Whether its rank certainly waits, or waited, for it: a call, or a wait that failed.

    An operation on a device holds up the device's stream, and the host later or not at all.
    """
    return not (operation.is_async or operation.is_device) or operation.is_failed


def _unfinished_at(state: RankState, time_unix_ns: int) -> list[Operation]:
    """The operations it was in then, without those that may have been over."""
    return [
        operation
        for operation in (*state.recent, *state.in_flight)
        if operation.entered_unix_ns <= time_unix_ns
        and operation.outcome is not Outcome.UNSEEN
        and (operation.ended_unix_ns is None or operation.ended_unix_ns >= time_unix_ns)
    ]


def is_elsewhere(state: RankState) -> bool:
    """Whether its main thread is known to do something else than wait for an operation."""
    return state.process.waits_for_no_lock and all(
        not o.is_device and _HOST_BACKEND in o.group.backend for o in state.in_flight
    )


def _first_unattended(unfinished: Sequence[Operation], attendance: "Attendance") -> list[Operation]:
    """Per channel, the first handle that not all members have entered.

    An operation that all have entered may be over without the program having asked.
    """
    found: dict[tuple[object, ...], Operation] = {}
    for operation in unfinished:
        meeting = operation.meeting
        channel = (meeting.group, meeting.source, meeting.destination, meeting.tag)
        earlier = found.get(channel)
        if (
            earlier is None or meeting.sequence < earlier.meeting.sequence
        ) and attendance.missing_from(meeting):
            found[channel] = operation
    return list(found.values())


class Attendance:
    """Which ranks entered which operations, now or at a moment in the past; cached by meeting."""

    def __init__(self, states: Mapping[int, RankState], at_unix_ns: int | None = None) -> None:
        self._states = states
        self._at_unix_ns = at_unix_ns
        self._missing: dict[Meeting, tuple[int, ...]] = {}
        self._complete: dict[Meeting, int] = {}

    def missing_from(self, meeting: Meeting) -> tuple[int, ...]:
        """Members that have not called their part."""
        found = self._missing.get(meeting)
        if found is None:
            found = self._missing[meeting] = self._find_missing(meeting)
        return found

    def _find_missing(self, meeting: Meeting) -> tuple[int, ...]:
        if meeting.is_message and meeting.source < 0:  # from any rank that could send
            return tuple(rank for rank in meeting.members if rank != meeting.destination)
        return tuple(rank for rank in meeting.members if self._is_missing(rank, meeting))

    def _is_missing(self, rank: int, meeting: Meeting) -> bool:
        state = self._states.get(rank)
        if state is None:
            return False
        if state.is_resting:
            return state.is_before(meeting)
        if not state.is_complete:
            return False
        if not state.has_entered(meeting):
            return True
        if self._at_unix_ns is None:
            return False
        operation = state.find(meeting)  # it may have come later
        return operation is not None and operation.entered_unix_ns > self._at_unix_ns

    def completed_unix_ns(self, meeting: Meeting) -> int:
        """When the last member that is known to be in it entered."""
        found = self._complete.get(meeting)
        if found is None:
            entries = (
                operation.entered_unix_ns
                for rank in meeting.members
                if (state := self._states.get(rank)) is not None
                and (operation := state.find(meeting)) is not None
            )
            found = self._complete[meeting] = max(entries, default=0)
        return found

    def wait(self, state: RankState, operation: Operation) -> Wait:
        now_ns = state.looked_unix_ns if self._at_unix_ns is None else self._at_unix_ns
        last_ns = max(self.completed_unix_ns(operation.meeting), operation.entered_unix_ns)
        return Wait(
            rank=operation.rank,
            operation=operation,
            waited_ns=max(0, now_ns - operation.entered_unix_ns),
            missing=self.missing_from(operation.meeting),
            is_certain=_is_holding(operation),
            since_complete_ns=max(0, now_ns - last_ns),
        )


def find_causes(states: Mapping[int, RankState], waits: Sequence[Wait]) -> list[Cause]:
    """The ends of the graph; those that hold up most ranks come first."""
    graph = _Graph(waits)
    causes = [cause for nodes in graph.find_sinks() for cause in _judge_sink(states, graph, nodes)]
    causes = _merge_missing(causes)
    causes.sort(key=lambda cause: (-cause.num_waiting, -cause.age_ns))
    return causes


def _merge_missing(causes: Sequence[Cause]) -> list[Cause]:
    """Joins causes of ranks that are missing from the same operations."""
    merged: dict[tuple[bool, frozenset[Meeting]], Cause] = {}
    others: list[Cause] = []
    for cause in causes:
        if cause.kind is not CauseKind.MISSING:
            others.append(cause)
            continue
        key = (cause.is_certain, frozenset(wait.meeting for wait in cause.direct))
        same = merged.get(key)
        if same is not None:
            cause = replace(same, ranks=tuple(sorted({*same.ranks, *cause.ranks})))
        merged[key] = cause
    return [*merged.values(), *others]


Node = int | Meeting


class _Graph:
    """Ranks point to their operations, operations to the ranks missing from them."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = waits
        self.edges: dict[Node, list[Node]] = {}
        self.by_meeting: dict[Meeting, list[Wait]] = {}
        for wait in waits:
            self.edges.setdefault(wait.rank, []).append(wait.meeting)
            self.by_meeting.setdefault(wait.meeting, []).append(wait)
            self.edges.setdefault(wait.meeting, list(wait.missing))
            for rank in wait.missing:
                self.edges.setdefault(rank, [])

    def find_sinks(self) -> list[list[Node]]:
        """Components that lead to no other component (Tarjan 1972)."""
        parts = _find_components(self.edges)
        part_of = {node: index for index, nodes in enumerate(parts) for node in nodes}
        return [
            nodes
            for index, nodes in enumerate(parts)
            if all(part_of[to] == index for node in nodes for to in self.edges[node])
        ]

    def reaching(self, targets: Iterable[Node]) -> set[int]:
        """Ranks from which a chain of waits leads to one of these."""
        backwards: dict[Node, list[Node]] = {}
        for node, ends in self.edges.items():
            for end in ends:
                backwards.setdefault(end, []).append(node)
        pending, seen = list(targets), set(targets)
        while pending:
            for node in backwards.get(pending.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    pending.append(node)
        return {node for node in seen if isinstance(node, int)}


def _find_components(edges: Mapping[Node, Sequence[Node]]) -> list[list[Node]]:
    """Strongly connected components, without recursion: chains may be as long as a pipeline."""
    index_of: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    parts: list[list[Node]] = []
    for root in edges:
        if root in index_of:
            continue
        work: list[tuple[Node, int]] = [(root, 0)]
        while work:
            node, index = work.pop()
            if index == 0:
                index_of[node] = low[node] = len(index_of)
                stack.append(node)
                on_stack.add(node)
            ends = edges[node]
            while index < len(ends):
                end = ends[index]
                index += 1
                if end not in index_of:
                    work.append((node, index))
                    work.append((end, 0))
                    break
                if end in on_stack:
                    low[node] = min(low[node], index_of[end])
            else:
                if low[node] == index_of[node]:
                    part: list[Node] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    parts.append(part)
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
    return parts


def _judge_sink(states: Mapping[int, RankState], graph: _Graph, nodes: list[Node]) -> list[Cause]:
    ranks = sorted(node for node in nodes if isinstance(node, int))
    meetings = [node for node in nodes if isinstance(node, Meeting)]
    if not meetings:
        direct = [wait for wait in graph.waits if ranks[0] in wait.missing]
        return [_make_cause(CauseKind.MISSING, ranks, direct, graph)] if direct else []
    for meeting in meetings:
        kinds = find_kinds(states, meeting)
        if len(kinds) > 1:
            sides = sorted(rank for members in kinds.values() for rank in members)
            waits = graph.by_meeting[meeting]
            return [_make_cause(CauseKind.MISMATCH, sides, waits, graph)]
    if not ranks:
        (meeting,) = meetings
        waits = graph.by_meeting[meeting]
        return [_make_cause(CauseKind.TRANSFER, list(meeting.members), waits, graph)]
    inside = [wait for meeting in meetings for wait in graph.by_meeting[meeting]]
    inside = [wait for wait in inside if wait.rank in ranks]
    held = {wait.rank for wait in inside if wait.is_certain}
    doubtful = [rank for rank in ranks if rank not in held]
    if held and doubtful:
        # The others wait for those that may continue at any moment.
        waits = [wait for wait in graph.waits if wait.rank not in doubtful]
        return [
            replace(cause, is_certain=False)
            for cause in find_causes(states, waits)
            if set(cause.ranks) & set(ranks)
        ]
    return [_make_cause(CauseKind.CIRCLE, ranks, inside, graph)]


def find_kinds(states: Mapping[int, RankState], meeting: Meeting) -> dict[Kind, tuple[int, ...]]:
    """What the members called, by kind; both sides of a message are one kind."""
    found: dict[Kind, list[int]] = {}
    for rank in meeting.members:
        kind = states[rank].kind_in(meeting) if rank in states else None
        if kind is not None:
            found.setdefault(Kind.SEND if kind in POINT_TO_POINT else kind, []).append(rank)
    return {kind: tuple(ranks) for kind, ranks in found.items()}


def _make_cause(
    kind: CauseKind, ranks: Sequence[int], direct: Sequence[Wait], graph: _Graph
) -> Cause:
    oldest_first = sorted(direct, key=lambda wait: wait.operation.entered_unix_ns)
    direct_ranks = {wait.rank for wait in direct}
    targets: list[Node] = [wait.meeting for wait in direct]
    reaching = graph.reaching(targets) - direct_ranks
    behind = [wait for wait in graph.waits if wait.rank in reaching and wait.rank not in ranks]
    ages = [
        wait.waited_ns if kind is CauseKind.MISSING else wait.since_complete_ns for wait in direct
    ]
    return Cause(
        kind=kind,
        ranks=tuple(ranks),
        direct=tuple(oldest_first),
        behind=tuple(sorted(behind, key=lambda wait: wait.operation.entered_unix_ns)),
        # A circle closes, and a transfer starts, when the last rank has entered.
        age_ns=max(ages) if kind is CauseKind.MISSING else min(ages),
    )
