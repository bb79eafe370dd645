"""One way to lay a job out: degrees, microbatch, schedule, recompute, ZeRO."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from meshscope.core.schedule import ActionKind, Schedule
from meshscope.core.schedule_builders import build_schedule

HOLDS_ALL = ("gpipe", "round_robin", "looped_bfs")
"""Schedules in which a rank holds all microbatches at the end of its forwards."""
STEADY_ROUNDS = 4
"""Times pp: with so many microbatches a schedule has reached its steady state. More change what a
rank holds in proportion (`HOLDS_ALL`) or not at all, and its time by the same for each."""
RECOMPUTES = ("none", "selective", "full", "offload")
"""And `every-K`: a checkpoint before every Kth layer."""
_EVERY = re.compile(r"every-([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with everything that decides its memory and time.

    World size is dp·tp·pp·cp. ep re-cuts ranks that dp and cp count, as in Megatron-LM and
    torchtitan, so it divides dp·cp; dense weights are replicated or cut over dp·cp, experts over
    dp·cp/ep.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero_stage: int = 0
    """0 nothing, 1 optimizer states and master weights, 2 gradients too, 3 weights too."""
    shard_size: int | None = None
    """Ranks that ZeRO cuts over; None is all of dp·cp, fewer is HSDP."""
    recompute: str = "none"
    sequence_parallel: bool = False
    stage_sizes: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.microbatch_size * self.num_microbatches

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO cuts dense weights over."""
        return min(self.shard_size or self.dp * self.cp, self.dp * self.cp)

    @property
    def num_steady(self) -> int:
        """Microbatches to build a schedule for that stands for one of all."""
        steady = STEADY_ROUNDS * self.pp
        is_whole = self.num_microbatches % self.pp == 0 or self.schedule != "interleaved_1f1b"
        return steady if is_whole and self.num_microbatches > 2 * steady else self.num_microbatches

    def build_schedule(self) -> Schedule:
        """Of `num_steady` microbatches."""
        return build_cached(self.schedule, self.pp, self.num_steady, self.chunks)

    def list_held(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Of `build_schedule`."""
        return list_held(self.schedule, self.pp, self.num_steady, self.chunks)

    def list_tails(self) -> tuple[tuple["Tail", ...], ...]:
        """Of `build_schedule`."""
        return list_tails(self.schedule, self.pp, self.num_steady, self.chunks)

    def describe(self) -> str:
        """`dp8×tp4×pp2 b1 1f1b zero1 full+sp`: what tells it from others."""
        degrees = "×".join(
            f"{axis}{degree}"
            for axis, degree in (
                ("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep),
            )
            if degree > 1
        )  # fmt: skip
        parts = [degrees or "dp1", f"b{self.microbatch_size}"]
        if self.pp > 1:
            parts.append(self.schedule + (f"/{self.chunks}" if self.chunks > 1 else ""))
        if self.zero_stage:
            cut = "" if self.shard_size is None else f"({self.shard_size})"
            parts.append(f"zero{self.zero_stage}{cut}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        return " ".join(parts) + (" sp" if self.sequence_parallel else "")


@lru_cache(maxsize=256)
def build_cached(name: str, pp: int, num_microbatches: int, chunks: int) -> Schedule:
    """Schedules are asked for once for memory and once for time, and shared by candidates."""
    is_chunked = name in ("interleaved_1f1b", "round_robin", "looped_bfs")
    return build_schedule(name, pp, num_microbatches, chunks if is_chunked else None)


@lru_cache(maxsize=256)
def list_held(
    name: str, pp: int, num_microbatches: int, chunks: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank, how many microbatches of each of its stages it holds, at all times that
    count: from a forward to the end of the backward. Where weight gradients are apart, numbers of
    those between the two, of which a stage keeps less, follow."""
    schedule = build_cached(name, pp, num_microbatches, chunks)
    found = []
    for rank, row in enumerate(schedule.actions):
        place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
        is_split = any(action.kind is ActionKind.INPUT_GRAD for action in row)
        held, seen = [0] * len(place) * (1 + is_split), set()
        for action in row:
            whole, split = place[action.stage], place[action.stage] + len(place)
            if action.kind is ActionKind.FORWARD:
                held[whole] += 1
                seen.add(tuple(held))
            elif action.kind is ActionKind.INPUT_GRAD:
                held[whole] -= 1
                held[split] += 1
            else:
                held[split if action.kind is ActionKind.WEIGHT_GRAD else whole] -= 1
        found.append(tuple(sorted(seen)))
    return tuple(found)


Tail = tuple[tuple[ActionKind, int, int], ...]
"""From the last gradients of a stage on: how often a rank runs an action of a kind, by stage."""


@lru_cache(maxsize=256)
def list_tails(
    name: str, pp: int, num_microbatches: int, chunks: int
) -> tuple[tuple[Tail, ...], ...]:
    """For each rank and each of its stages, in the order in which their gradients are complete,
    what the rank runs from that stage's last action on."""
    schedule = build_cached(name, pp, num_microbatches, chunks)
    found = []
    for rank, row in enumerate(schedule.actions):
        left, counts = set(schedule.stages_of(rank)), Counter[tuple[ActionKind, int]]()
        tails: list[Tail] = []
        for action in reversed(row):
            counts[action.kind, action.stage] += 1
            is_gradient = action.kind not in (ActionKind.FORWARD, ActionKind.INPUT_GRAD)
            if is_gradient and action.stage in left:
                left.remove(action.stage)
                tails.append(tuple((*key, number) for key, number in counts.items()))
            if not left:
                break
        found.append(tuple(reversed(tails)))
    return tuple(found)


def read_segment(recompute: str) -> int | None:
    """K of `every-K`, 1 of `full`; None of the others."""
    if recompute in ("full", "offload"):
        return 1
    match = _EVERY.fullmatch(recompute)
    return None if match is None else int(match[1])


def is_recompute(text: str) -> bool:
    return text in RECOMPUTES or read_segment(text) is not None
