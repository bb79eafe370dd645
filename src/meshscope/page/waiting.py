"""Who waits for whom in a stuck job, as a tree: its roots wait for nobody that is known."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.hang.hang import Hang
from meshscope.hang.wait_graph import Wait
from meshscope.report.sections.hang_words import describe_position, name_operation

MAX_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """A node of the tree."""

    rank: int
    parent: int | None
    """The rank it waits for, one step nearer to a root; null for a root."""
    depth: int
    label: str
    """Coordinates along the axes in use; empty if the layout is not known."""
    host: str
    operation: str
    """`all_reduce #308 of the tp group`; empty where it is in none."""
    waited_ns: int | None
    """Null where it waits for nobody, and where its end was not seen."""
    waits_for: tuple[int, ...]
    """All ranks that its operation misses."""
    is_certain: bool
    """False for a handle that the rank may not be waiting for."""
    is_culprit: bool


def grow_tree(hang: Hang) -> tuple[WaitingRank, ...]:
    """Roots first, then by depth; a rank comes once, below the first it is found from."""
    waits: dict[int, Wait] = {}
    for wait in (*hang.cascade, *hang.waiting):
        waits[wait.rank] = wait  # those next to a culprit hold
    roots = [culprit.rank for culprit in hang.culprits]
    behind = _reverse(waits)
    roots += [rank for rank in sorted(behind) if rank not in waits and rank not in roots]
    order: dict[int, tuple[int | None, int]] = dict.fromkeys(roots, (None, 0))
    level = list(order)
    while level:
        following = []
        for rank in level:
            for other in behind.get(rank, ()):
                if other not in order and len(order) < MAX_NODES:
                    order[other] = (rank, order[rank][1] + 1)
                    following.append(other)
        level = following
    for rank in sorted(set(waits) - set(order)):  # a circle
        order[rank] = (None, 0)
    culprits = {culprit.rank for culprit in hang.culprits}
    return tuple(
        _describe(hang, rank, parent, depth, waits.get(rank), is_culprit=rank in culprits)
        for rank, (parent, depth) in order.items()
    )


def _reverse(waits: Mapping[int, Wait]) -> dict[int, list[int]]:
    """Rank to those that wait for it, the longest first."""
    found: dict[int, list[int]] = {}
    for rank, wait in sorted(waits.items(), key=lambda item: (-item[1].waited_ns, item[0])):
        for missing in wait.missing:
            found.setdefault(missing, []).append(rank)
    return found


def _describe(
    hang: Hang, rank: int, parent: int | None, depth: int, wait: Wait | None, *, is_culprit: bool
) -> WaitingRank:
    state = hang.states.get(rank)
    return WaitingRank(
        rank=rank,
        parent=parent,
        depth=depth,
        label=describe_position(hang, rank),
        host="" if state is None else state.host,
        operation="" if wait is None else name_operation(wait.operation),
        waited_ns=None if wait is None or hang.has_ended else wait.waited_ns,
        waits_for=() if wait is None else wait.missing,
        is_certain=wait is None or wait.is_certain,
        is_culprit=is_culprit,
    )
