"""Programs that all ranks follow, and one rank that does not go on: the waits lead to it."""

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.operations import Kind, Outcome
from meshscope.hang.processes import Life, ProcessState
from meshscope.hang.rank_states import Meeting, Operation, OperationGroup, RankState
from meshscope.hang.wait_graph import CauseKind, find_causes, find_waits

NOW_NS = 10**18
NUM_RANKS = 8
GROUPS = [
    OperationGroup(name=name, description="", backend="nccl", ranks=ranks, axis="other")
    for name, ranks in {
        "world": tuple(range(8)),
        **{f"tp{a}": (a, a + 1) for a in (0, 2, 4, 6)},
        **{f"dp{a}": (a, a + 2) for a in (0, 1, 4, 5)},
        "half": (0, 1, 2, 3),
        "other": (2, 3, 4, 5, 6),
    }.items()
]
Script = list[OperationGroup]

scripts = st.lists(st.sampled_from(GROUPS), min_size=1, max_size=40)


class Program:
    """Ranks run through their parts of a script until nobody can go on."""

    def __init__(self, parts: dict[int, Script], ends: dict[int, int]) -> None:
        """`ends`: how many operations a rank enters before it enters no more."""
        self.parts = parts
        self.ends = ends
        self.entered: dict[int, Counter[OperationGroup]] = {rank: Counter() for rank in parts}
        self.place = dict.fromkeys(parts, 0)
        self.inside: dict[int, Meeting | None] = dict.fromkeys(parts)
        while any(self._advance(rank) for rank in parts):
            pass

    def _advance(self, rank: int) -> bool:
        inside = self.inside[rank]
        if inside is not None:
            if any(self.entered[m][inside.group] <= inside.sequence for m in inside.members):
                return False
            self.inside[rank] = None
            return True
        place = self.place[rank]
        if place >= min(len(self.parts[rank]), self.ends.get(rank, len(self.parts[rank]))):
            return False
        group = self.parts[rank][place]
        self.inside[rank] = Meeting(group, self.entered[rank][group])
        self.entered[rank][group] += 1
        self.place[rank] += 1
        return True

    def states(self) -> dict[int, RankState]:
        return {
            rank: RankState(
                rank=rank,
                directory=Path(),
                process=ProcessState(life=Life.UNKNOWN),
                looked_unix_ns=NOW_NS,
                entered=self.entered[rank],
                in_flight=(self._operation(rank, inside),) if inside else (),
            )
            for rank, inside in self.inside.items()
        }

    def _operation(self, rank: int, meeting: Meeting) -> Operation:
        return Operation(
            rank=rank,
            kind=Kind.ALL_REDUCE,
            meeting=meeting,
            peer=-1,
            size_bytes=4,
            is_async=False,
            is_device=False,
            entered_unix_ns=NOW_NS - 10**9 + self.place[rank],
            ended_unix_ns=None,
            outcome=Outcome.UNFINISHED,
            message="",
            phase="",
            step=None,
        )


def parts_of(script: Script) -> dict[int, Script]:
    return {rank: [g for g in script if rank in g.ranks] for rank in range(NUM_RANKS)}


@given(scripts)
def test_a_program_that_everybody_follows_leaves_nobody_waiting(script):
    program = Program(parts_of(script), {})
    assert find_waits(program.states()) == []


@settings(max_examples=300)
@given(scripts, st.integers(0, NUM_RANKS - 1), st.integers(0, 20))
def test_all_waits_lead_to_the_rank_that_does_not_go_on(script, victim, num_entered):
    program = Program(parts_of(script), {victim: num_entered})
    states = program.states()
    waits = find_waits(states)
    causes = find_causes(states, waits)
    assert bool(causes) == bool(waits)
    for cause in causes:
        assert (cause.kind, cause.ranks) == (CauseKind.MISSING, (victim,))
        held = {wait.rank for wait in (*cause.direct, *cause.behind)}
        assert held == {wait.rank for wait in waits}
        assert all(victim in wait.missing for wait in cause.direct)


@settings(max_examples=300)
@given(scripts, st.sets(st.integers(0, NUM_RANKS - 1), min_size=2, max_size=3))
def test_of_several_ranks_only_those_that_do_not_wait_are_named(script, victims):
    program = Program(parts_of(script), dict.fromkeys(victims, 3))
    states = program.states()
    waiting = {wait.rank for wait in find_waits(states)}
    for cause in find_causes(states, find_waits(states)):
        assert cause.kind is CauseKind.MISSING
        assert set(cause.ranks) <= victims - waiting


@settings(max_examples=300)
@given(scripts, st.integers(0, NUM_RANKS - 1), st.data())
def test_a_rank_that_swaps_two_operations_is_in_the_circle(script, rank, data):
    parts = parts_of(script)
    own = parts[rank]
    swaps = [i for i in range(len(own) - 1) if own[i] is not own[i + 1]]
    if not swaps:
        return
    place = data.draw(st.sampled_from(swaps))
    own[place], own[place + 1] = own[place + 1], own[place]
    program = Program(parts, {})
    states = program.states()
    causes = find_causes(states, find_waits(states))
    assert all(cause.kind is CauseKind.CIRCLE and rank in cause.ranks for cause in causes)
    assert bool(causes) == any(program.inside.values())


def test_a_chain_as_long_as_a_large_job():
    size = 2000  # beyond any limit of recursion
    pairs = [
        OperationGroup(name=f"{a}", description="", backend="", ranks=(a, a + 1), axis="other")
        for a in range(size - 1)
    ]
    parts = {rank: [] for rank in range(size)}
    for group in reversed(pairs):
        for rank in group.ranks:
            parts[rank].append(group)
    states = Program(parts, {size - 1: 0}).states()
    (cause,) = find_causes(states, find_waits(states))
    assert (cause.ranks, cause.num_waiting) == ((size - 1,), size - 1)
