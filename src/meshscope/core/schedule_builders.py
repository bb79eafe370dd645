"""The known pipeline schedules, for any number of ranks and microbatches.

p ranks, m microbatches, v chunks on each rank. F, I and W are the forward and the two halves of the
backward, B = I + W. Peak activations are counted as in `core.schedule.count_peak_activations`.

| name               | chunks | bubble of total, equal stages       | peak on rank 0, microbatches |
|--------------------|--------|-------------------------------------|------------------------------|
| `gpipe`            | 1      | (p−1)/(m+p−1)                       | m                            |
| `1f1b`             | 1      | (p−1)/(m+p−1)                       | p                            |
| `interleaved_1f1b` | v      | (p−1)/(v·m+p−1) where p divides m   | p + (p−1)/v                  |
| `round_robin`      | v      | (p−1)/(v·m+p−1) for m ≥ p           | m                            |
| `looped_bfs`       | v      | (p−1)/(v·m+p−1) for m ≥ p           | m                            |
| `zb_h1`            | 1      | (p−1)(F+I−W) as a time, m ≥ p       | p                            |
| `zb_h2`            | 1      | (p−1)(F+I−2W) as a time, m ≥ 2p−1   | 2p−1                         |
| `zb_v`             | 2      | 0 at F=I=W, for m ≥ 2p−1            | p                            |

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaving (arXiv 2104.04473), looped breadth-first
(arXiv 2211.05953), zero bubble (arXiv 2401.10241; ZB-V is its section 6).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshscope.core.schedule import (
    Action,
    ActionKind,
    Output,
    Schedule,
    output_of,
)
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.errors import UsageError

_F = ActionKind.FORWARD
_B = ActionKind.BACKWARD
_I = ActionKind.INPUT_GRAD
_W = ActionKind.WEIGHT_GRAD


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    _check_counts(num_ranks, num_microbatches)
    rows = [
        [Action(kind, rank, i) for kind in (_F, _B) for i in range(num_microbatches)]
        for rank in range(num_ranks)
    ]
    return _make_schedule("gpipe", num_microbatches, _place_in_loops(num_ranks, 1), rows)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As few forwards ahead as the pipeline needs, then one forward and one backward in turn."""
    _check_counts(num_ranks, num_microbatches)
    rows = [
        _alternate(
            [Action(_F, rank, i) for i in range(num_microbatches)],
            [Action(_B, rank, i) for i in range(num_microbatches)],
            num_ahead=num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    ]
    return _make_schedule("1f1b", num_microbatches, _place_in_loops(num_ranks, 1), rows)


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """1F1B over chunks: a round of microbatches goes through all chunks before the next round.

    Rounds are equal and, where there are enough microbatches, no smaller than p: torch's rule,
    which takes all that Megatron's takes (m a multiple of p).
    """
    _check_counts(num_ranks, num_microbatches, num_chunks)
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds != 0:
        below = num_microbatches // num_ranks * num_ranks
        raise UsageError(
            f"interleaved_1f1b cannot divide {num_microbatches} microbatches into {num_rounds} "
            f"equal rounds of at least {num_ranks} (the pipeline ranks); use a multiple of "
            f"{num_ranks} such as {below} or {below + num_ranks}, or the schedule round_robin"
        )
    rounds = _split_evenly(num_microbatches, num_rounds)
    rows = [
        _alternate(
            list(_run_rounds(_F, rounds, range(rank, num_ranks * num_chunks, num_ranks))),
            list(_run_rounds(_B, rounds, range(rank, num_ranks * num_chunks, num_ranks)[::-1])),
            # All but the last chunk's forwards of a round, and the way to the last rank and back.
            num_ahead=(num_chunks - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank),
        )
        for rank in range(num_ranks)
    ]
    placement = _place_in_loops(num_ranks, num_chunks)
    return _make_schedule("interleaved_1f1b", num_microbatches, placement, rows)


def round_robin(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Looped, depth first: each group of microbatches goes through all chunks before the next
    group starts; all forwards, then all backwards.

    Groups need not be equal, so any number of microbatches will do. It keeps the activations of
    all of them, like GPipe; `interleaved_1f1b` is the same order with backwards drawn forward.
    """
    _check_counts(num_ranks, num_microbatches, num_chunks)
    # Groups of at least p: a smaller one is back at its first rank before the loop has ended.
    groups = _split_evenly(num_microbatches, max(1, num_microbatches // num_ranks))
    return _loop("round_robin", num_ranks, num_microbatches, num_chunks, groups)


def looped_breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Looped, breadth first: all microbatches go through a chunk before the next chunk starts.

    torch's LoopedBFS, which runs the backwards from the last microbatch to the first.
    """
    _check_counts(num_ranks, num_microbatches, num_chunks)
    everything = [range(num_microbatches)]
    return _loop("looped_bfs", num_ranks, num_microbatches, num_chunks, everything, reverse=True)


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients wait for the end, within 1F1B's peak of activations."""
    return _build_handcrafted("zb_h1", num_ranks, num_microbatches, num_ahead_per_rank=1)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with twice the forwards ahead: hardly any bubble for twice the activations.

    Ranks start and end in a slant, so the next step can start only if the optimizer's step needs
    no meeting of all ranks.
    """
    return _build_handcrafted("zb_h2", num_ranks, num_microbatches, num_ahead_per_rank=2)


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two chunks on each rank, there and back in a V; no bubble at F=I=W within 1F1B's peak.

    The paper's pattern where its steady state is reached (m ≥ 2p−1). With fewer microbatches the
    pattern cut short leaves holes that a list scheduler fills; the shorter of both is taken.
    """
    _check_counts(num_ranks, num_microbatches)
    pattern = _make_v(num_ranks, num_microbatches, _follow_v_pattern(num_ranks, num_microbatches))
    if num_microbatches >= 2 * num_ranks - 1:
        return pattern
    return min(_pack_v(num_ranks, num_microbatches), pattern, key=_cost_in_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleBuilder:
    """How to build one schedule by name."""

    build: Callable[[int, int, int], Schedule]
    """From the numbers of ranks, microbatches and chunks."""
    default_chunks: int
    is_chunked: bool
    """Whether any number of chunks will do; else only the default."""


BUILDERS: dict[str, _ScheduleBuilder] = {
    "gpipe": _ScheduleBuilder(
        build=lambda p, m, _: gpipe(p, m), default_chunks=1, is_chunked=False
    ),
    "1f1b": _ScheduleBuilder(
        build=lambda p, m, _: one_f_one_b(p, m), default_chunks=1, is_chunked=False
    ),
    "interleaved_1f1b": _ScheduleBuilder(
        build=interleaved_one_f_one_b, default_chunks=2, is_chunked=True
    ),
    "round_robin": _ScheduleBuilder(build=round_robin, default_chunks=2, is_chunked=True),
    "looped_bfs": _ScheduleBuilder(build=looped_breadth_first, default_chunks=2, is_chunked=True),
    "zb_h1": _ScheduleBuilder(
        build=lambda p, m, _: zero_bubble_h1(p, m), default_chunks=1, is_chunked=False
    ),
    "zb_h2": _ScheduleBuilder(
        build=lambda p, m, _: zero_bubble_h2(p, m), default_chunks=1, is_chunked=False
    ),
    "zb_v": _ScheduleBuilder(
        build=lambda p, m, _: zero_bubble_v(p, m), default_chunks=2, is_chunked=False
    ),
}
"""Every schedule by its name."""


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """The schedule called `name`; case does not matter, and - and blanks stand for _.

    A text of several lines is a whole schedule (`Schedule.to_text`). Without `num_chunks`, 2 where
    the schedule has chunks and 1 where it has not.
    """
    if "\n" in name.strip():
        return _read_schedule(name, num_ranks, num_microbatches, num_chunks)
    key = re.sub(r"[-\s]", "_", name.strip().lower())
    builder = BUILDERS.get(key)
    if builder is None:
        raise UsageError(f"there is no schedule {name!r}; use one of {', '.join(BUILDERS)}")
    chunks = builder.default_chunks if num_chunks is None else num_chunks
    if not builder.is_chunked and chunks != builder.default_chunks:
        raise UsageError(
            f"{key} puts {builder.default_chunks} chunk(s) on each rank, but num_chunks is "
            f"{num_chunks}; leave it out, or use "
            f"{', '.join(other for other in BUILDERS if BUILDERS[other].is_chunked)}"
        )
    return builder.build(num_ranks, num_microbatches, chunks)


def _read_schedule(
    text: str, num_ranks: int, num_microbatches: int, num_chunks: int | None
) -> Schedule:
    schedule = Schedule.parse(text.strip() + "\n")
    found = {"pipeline ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    wanted = {"pipeline ranks": num_ranks, "microbatches": num_microbatches}
    problems = [
        f"the schedule {schedule.name!r} is for {found[name]} {name}, but there are "
        f"{wanted[name]}; write one for these"
        for name in found
        if found[name] != wanted[name]
    ]
    if num_chunks is not None:
        problems.append(f"the schedule {schedule.name!r} has its own stages; leave num_chunks out")
    if problems:
        raise UsageError("\n".join(problems))
    return schedule


def _check_counts(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
    }
    # bool is an int to Python; True as a count is a mistake.
    problems = [
        f"{name} is {count!r}, but a whole number of at least 1 is expected; correct it"
        for name, count in counts.items()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1
    ]
    if problems:
        raise UsageError("\n".join(problems))


def _make_schedule(
    name: str, num_microbatches: int, stage_ranks: tuple[int, ...], rows: list[list[Action]]
) -> Schedule:
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(row) for row in rows),
    )


def _place_in_loops(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * num_chunks


def _alternate(ahead: list[Action], behind: list[Action], num_ahead: int) -> list[Action]:
    """`num_ahead` of `ahead`, then one of each in turn, then what is left of `behind`."""
    num_ahead = min(num_ahead, len(ahead))
    row = ahead[:num_ahead]
    for index, action in enumerate(behind):
        row += ahead[num_ahead + index : num_ahead + index + 1]
        row.append(action)
    return row


def _split_evenly(num_microbatches: int, num_groups: int) -> list[range]:
    """Consecutive groups whose sizes differ by at most one."""
    edges = [index * num_microbatches // num_groups for index in range(num_groups + 1)]
    return [range(edges[i], edges[i + 1]) for i in range(num_groups)]


def _run_rounds(kind: ActionKind, rounds: list[range], stages: range) -> Iterator[Action]:
    for microbatches in rounds:
        for stage in stages:
            for microbatch in microbatches:
                yield Action(kind, stage, microbatch)


def _loop(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    groups: list[range],
    *,
    reverse: bool = False,
) -> Schedule:
    """All forwards, then all backwards, group by group; `reverse` runs backwards last first."""
    backward_groups = [group[::-1] for group in groups[::-1]] if reverse else groups
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = _run_rounds(_F, groups, stages)
        rows.append([*forwards, *_run_rounds(_B, backward_groups, stages[::-1])])
    return _make_schedule(name, num_microbatches, _place_in_loops(num_ranks, num_chunks), rows)


def _build_handcrafted(
    name: str, num_ranks: int, num_microbatches: int, num_ahead_per_rank: int
) -> Schedule:
    """ZB-H1 and ZB-H2: forwards ahead fall by 1 or 2 from rank to rank, and each rank puts off as
    many weight gradients as it runs fewer forwards ahead than rank 0. So all ranks hold the same
    number of activations, and what was put off fills the end, where 1F1B waits."""
    _check_counts(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        ahead = [Action(_F, rank, i) for i in range(num_microbatches)]
        inputs = [Action(_I, rank, i) for i in range(num_microbatches)]
        weights = [Action(_W, rank, i) for i in range(num_microbatches)]
        row = _alternate(ahead, inputs, num_ahead_per_rank * (num_ranks - 1 - rank))
        rows.append(_delay(row, weights, num_ahead_per_rank * rank))
    return _make_schedule(name, num_microbatches, _place_in_loops(num_ranks, 1), rows)


def _delay(row: list[Action], weights: list[Action], num_late: int) -> list[Action]:
    """After each I the W of `num_late` microbatches before it; the rest at the end."""
    delayed: list[Action] = []
    num_run = 0
    for action in row:
        delayed.append(action)
        if action.kind is _I and action.microbatch >= num_late:
            delayed.append(weights[num_run])
            num_run += 1
    return delayed + weights[num_run:]


def _make_v(num_ranks: int, num_microbatches: int, rows: list[list[Action]]) -> Schedule:
    there = tuple(range(num_ranks))
    return _make_schedule("zb_v", num_microbatches, there + there[::-1], rows)


def _follow_v_pattern(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    # Built for enough microbatches to reach the steady state; those too many are left out.
    num_built = max(num_microbatches, 2 * num_ranks - 1)
    return [
        [
            action
            for action in _run_v_row(rank, num_ranks, num_built)
            if action.microbatch < num_microbatches
        ]
        for rank in range(num_ranks)
    ]


def _run_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """One rank's row of the paper's ZB-V, for at least 2p−1 microbatches.

    Each kind takes its microbatches in order, so a row is a word over kinds: capitals for the
    rank's first chunk, small letters for its second, on the way back.
    """
    from_end = num_ranks - rank
    word = (
        # Until the first microbatch is back from the far end, and while both ways fill.
        "F" * (2 * from_end - 1) + "fF" * rank + "fiw" * from_end
        # Steady; in its last rounds there are no forwards left for the first chunk.
        + "FIWfiw" * (num_microbatches - 2 * num_ranks + rank + 1) + "IWfiw" * (from_end - 1)
        # Input gradients come first while earlier ranks wait for them.
        + "Ii" * rank + "IW" * from_end + "w" * rank + "W" * rank
    )  # fmt: skip
    seen: Counter[str] = Counter()
    for letter in word:
        stage = rank if letter.isupper() else 2 * num_ranks - 1 - rank
        yield Action(ActionKind(letter.upper()), stage, seen[letter])
        seen[letter] += 1


def _pack_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """List scheduling in slots of one action each: every rank takes the first that can start.

    Input gradients go first, because other ranks wait for them, weight gradients last.
    """
    empty = _make_v(num_ranks, num_microbatches, [[] for _ in range(num_ranks)])
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    num_run: Counter[tuple[ActionKind, int]] = Counter()
    live = [0] * num_ranks
    done: set[Output] = set()
    while any(len(row) < 6 * num_microbatches for row in rows):
        started = []
        for rank, row in enumerate(rows):
            action = _take_first(empty, rank, num_run, done, 2 * num_ranks - live[rank])
            if action is not None:
                row.append(action)
                started.append(action)
                num_run[action.kind, action.stage] += 1
                live[rank] += {_F: 1, _I: 0, _W: -1}[action.kind]
        assert started, "a slot in which no rank can do anything: the packing has a deadlock"
        # Only now: what starts in a slot is of use from the next slot on.
        done.update(map(output_of, started))
    return _make_v(num_ranks, num_microbatches, rows)


def _take_first(
    schedule: Schedule,
    rank: int,
    num_run: Counter[tuple[ActionKind, int]],
    done: set[Output],
    num_free: int,
) -> Action | None:
    """`num_free`: how many more activations the rank may hold."""
    first, second = rank, schedule.num_stages - 1 - rank
    order = ((_I, first), (_I, second), (_F, second), (_F, first), (_W, second), (_W, first))
    for kind, stage in order:
        action = Action(kind, stage, num_run[kind, stage])
        # The first chunk leaves one free for the second. Without it, microbatches on their way out
        # could take all the room that those on their way back need to end and make room.
        is_room = kind is not _F or num_free >= (2 if stage == first else 1)
        if (
            action.microbatch < schedule.num_microbatches
            and is_room
            and all(output in done for output in schedule.needs(action))
        ):
            return action
    return None


def _cost_in_slots(schedule: Schedule) -> float:
    """The cost of a schedule of two chunks at F=I=W."""
    costs = ActionCosts.uniform(schedule, forward_ns=2, input_grad_ns=2, weight_grad_ns=2)
    return replay_schedule(schedule, costs).cost_ns
