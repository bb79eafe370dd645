"""Runs small programs of several ranks on a made-up clock and records them as a recorder would.

    run = ProgramRun(lambda rank, step: [work("forward", 3 * MS), reduce((0, 1), MS)], num_ranks=2)
    attempt = run.record(path)

What a step takes is computed here, rank by rank and instruction by instruction, with nothing of
what is tested: so a program with one number changed has a known gain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders import MS, put_span, put_step
from communication_builders import Job, operation_words
from meshscope.analyze.timeline.timeline import Timeline, build_timeline
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind
from meshscope.simulate.what_if import Replay, build_replay
from meshscope.store.read.run import Attempt
from meshscope.store.schema import OperationFlag

Instruction = tuple[str, object, int]
Program = Sequence[Instruction]
_KINDS = {
    "send": Kind.SEND,
    "settle": Kind.SEND,
    "hand": Kind.SEND,
    "recv": Kind.RECV,
    "share": Kind.BROADCAST,
}


def work(phase: str, ns: int) -> Instruction:
    """The rank computes."""
    return ("work", phase, ns)


def reduce(group: tuple[int, ...], transfer_ns: int) -> Instruction:
    """A blocking all-reduce of these ranks."""
    return ("reduce", group, transfer_ns)


def start(group: tuple[int, ...], transfer_ns: int) -> Instruction:
    """An all-reduce with a handle."""
    return ("start", group, transfer_ns)


def wait(group: tuple[int, ...]) -> Instruction:
    """Waits for the oldest open handle of the group."""
    return ("wait", group, 0)


def send(peer: int) -> Instruction:
    """Posts a send that goes into a buffer at once."""
    return ("send", peer, 0)


def post(peer: int) -> Instruction:
    """Posts a send that is waited for later."""
    return ("post", peer, 0)


def call(peer: int, ns: int) -> Instruction:
    """Posts a send that is waited for later; the call alone takes so long, whoever is there."""
    return ("call", peer, ns)


def settle(peer: int) -> Instruction:
    """Waits for the oldest open send to the peer: it is over already, but only this shows it."""
    return ("settle", peer, 0)


def hand(peer: int) -> Instruction:
    """A blocking send that returns when the peer has received; all to that peer must be such."""
    return ("hand", peer, 0)


def share(group: tuple[int, ...], transfer_ns: int) -> Instruction:
    """A blocking broadcast from the first of the group, who waits for all; they for it alone."""
    return ("share", group, transfer_ns)


def receive(peer: int, latency_ns: int) -> Instruction:
    """Waits for the peer's next message, which takes so long once both are there."""
    return ("recv", peer, latency_ns)


@dataclass
class _Collective:
    transfer_ns: int
    arrived: dict[int, int] = field(default_factory=dict)

    def end_ns(self, size: int) -> int | None:
        return max(self.arrived.values()) + self.transfer_ns if len(self.arrived) == size else None

    def shared_ns(self, rank: int, group: tuple[int, ...]) -> int | None:
        """The end of a broadcast on one rank."""
        root = group[0]
        if rank == root:
            return self.end_ns(len(group))
        if root not in self.arrived:
            return None
        return max(self.arrived[root], self.arrived[rank]) + self.transfer_ns


class ProgramRun:
    """One job; `make` gives each rank's program for a step."""

    def __init__(
        self,
        make: Callable[[int, int], Program],
        *,
        num_ranks: int,
        num_steps: int = 5,
        layout: Layout | None = None,
    ) -> None:
        self.num_ranks, self.num_steps, self.layout = num_ranks, num_steps, layout
        self.lines = {
            rank: [(step, one) for step in range(num_steps) for one in [*make(rank, step), None]]
            for rank in range(num_ranks)
        }
        self.collectives: dict[tuple[object, int], _Collective] = {}
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.posted: dict[tuple[int, int], list[int]] = {}
        self.received: dict[tuple[int, int], list[int]] = {}
        """Ends of recvs, by sender and receiver."""
        self.ends: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
        self.work: list[tuple[int, str, int, int]] = []
        self.calls: list[tuple[int, int, str, object, int, int, int]] = []
        self.slow_calls: dict[tuple[int, int], int] = {}
        """How long calls took that return before what they start is over, by rank and moment."""
        self.lost: list[tuple] = []
        """Calls of which no record is left."""
        self._play()

    def _play(self) -> None:
        clock = dict.fromkeys(self.lines, 0)
        at = dict.fromkeys(self.lines, 0)
        count: dict[tuple[int, str, object], int] = {}
        while any(at[rank] < len(line) for rank, line in self.lines.items()):
            moved = [self._advance(rank, clock, at, count) for rank in self.lines]
            assert any(moved), "the program waits for itself"

    def _advance(
        self, rank: int, clock: dict[int, int], at: dict[int, int], count: dict[object, int]
    ) -> bool:
        """Runs a rank until it must wait for somebody."""
        has_moved = False
        while at[rank] < len(self.lines[rank]):
            step, one = self.lines[rank][at[rank]]
            if one is None:
                self.ends[rank].append(clock[rank])
            elif not self._execute(rank, step, one, clock, count):
                return has_moved
            at[rank] += 1
            has_moved = True
        return has_moved

    def _execute(
        self, rank: int, step: int, one: Instruction, clock: dict[int, int], count: dict
    ) -> bool:
        verb, what, ns = one
        now = clock[rank]
        if verb == "work":
            self.work.append((rank, str(what), now, ns))
            clock[rank] = now + ns
            return True
        if verb == "send":
            self.sent.setdefault((rank, what), []).append(now)
            self.calls.append((rank, step, "send", what, now, now, now + 1000))
            return True
        if verb in ("post", "call"):
            self.sent.setdefault((rank, what), []).append(now)
            self.posted.setdefault((rank, what), []).append(now)
            if ns:
                self.slow_calls[rank, now] = ns
            clock[rank] = now + ns
            return True
        if verb == "settle":
            self.calls.append(
                (rank, step, "settle", what, self.posted[rank, what].pop(0), now, now)
            )
            return True
        if verb == "hand":
            return self._hand(rank, step, what, clock, count)
        if verb == "recv":
            number = count.get((rank, "recv", what), 0)
            times = self.sent.get((what, rank), [])
            if number >= len(times):
                return False
            end = max(times[number], now) + ns
            count[rank, "recv", what] = number + 1
            self.received.setdefault((what, rank), []).append(end)
            self.calls.append((rank, step, "recv", what, now, now, end))
            clock[rank] = end
            return True
        return self._execute_collective(rank, step, one, clock, count)

    def _hand(self, rank: int, step: int, peer: int, clock: dict[int, int], count: dict) -> bool:
        number = count.get((rank, "hand", peer), 0)
        sent = self.sent.setdefault((rank, peer), [])
        if len(sent) == number:
            sent.append(clock[rank])
        ends = self.received.get((rank, peer), [])
        if number >= len(ends):
            return False
        count[rank, "hand", peer] = number + 1
        self.calls.append((rank, step, "hand", peer, clock[rank], clock[rank], ends[number]))
        clock[rank] = ends[number]
        return True

    def _execute_collective(
        self, rank: int, step: int, one: Instruction, clock: dict[int, int], count: dict
    ) -> bool:
        verb, group, ns = one
        now = clock[rank]
        if verb == "wait":
            number = count.get((rank, "wait", group), 0)
            found = self.collectives[group, number]
            end = found.end_ns(len(group))
            if end is None:
                return False
            count[rank, "wait", group] = number + 1
            clock[rank] = max(now, end)
            self.calls.append((rank, step, "wait", group, found.arrived[rank], now, end))
            return True
        number = count.get((rank, "call", group), 0)
        found = self.collectives.setdefault((group, number), _Collective(ns))
        found.arrived.setdefault(rank, now)
        if verb in ("reduce", "share"):
            end = found.shared_ns(rank, group) if verb == "share" else found.end_ns(len(group))
            if end is None:
                return False
            self.calls.append((rank, step, verb, group, now, now, end))
            clock[rank] = end
            count[rank, "wait", group] = number + 1
        count[rank, "call", group] = number + 1
        return True

    @property
    def step_ns(self) -> float:
        """What a step after the first takes on average: from last end to last end."""
        last = [max(self.ends[rank][step] for rank in self.ends) for step in range(self.num_steps)]
        return (last[-1] - last[0]) / (self.num_steps - 1)

    def record(self, path: Path) -> Attempt:
        """Writes the run; its first step is the warm-up."""
        job = Job(path, num_ranks=self.num_ranks, layout=self.layout)
        groups = {
            members: job.group(sorted(members), backend="nccl")
            for members in {call[3] for call in self.calls if isinstance(call[3], tuple)}
        }
        world = job.group(range(self.num_ranks))
        for rank, phase, begin, ns in self.work:
            put_span(job.writers[rank], phase, job.local_ns(rank, begin), ns)
        for rank, ends in self.ends.items():
            for step, end in enumerate(ends):
                begin = ends[step - 1] if step else 0
                put_step(
                    job.writers[rank], step, job.local_ns(rank, begin), job.local_ns(rank, end)
                )
        for call in self.calls:
            self._put(job, groups, world, call, is_lost=call in self.lost)
        return job.close()

    def _put(self, job: Job, groups: Mapping, world: int, call: tuple, *, is_lost: bool) -> None:
        rank, step, verb, what, arrived, asked, end = call
        kind = _KINDS.get(verb, Kind.ALL_REDUCE)
        is_pair = kind in (Kind.SEND, Kind.RECV)
        peer = what if is_pair else what[0] if verb == "share" else -1
        flags = OperationFlag.ASYNC if verb in ("wait", "send", "settle") else 0
        end += 2_000 if verb == "settle" else 0  # looking takes 2 µs, too short to cost the rank
        group = world if is_pair else groups[what]
        channel = (group, rank, what, kind) if is_pair else (group, rank)
        sequence = job.next_sequence(*channel)
        if is_lost:
            return
        job.writers[rank].table("collectives").put(
            *operation_words(
                kind=kind,
                flags=flags,
                end_source=EndSource.FUTURE if verb == "wait" else EndSource.WAIT,
                group_id=group,
                sequence=sequence,
                peer=peer,
                enqueue_ns=job.local_ns(rank, arrived),
                end_ns=job.local_ns(rank, end),
                step=step,
            )
        )
        if (rank, arrived) in self.slow_calls:
            took_ns = self.slow_calls[rank, arrived]
            job.wait(rank, job.local_ns(rank, arrived), arrived, took_ns, step=step)
        if verb in ("wait", "settle"):
            job.wait(rank, job.local_ns(rank, arrived), asked, max(0, end - asked), step=step)


def ddp(slow: dict[int, int], *, data_ns: int = 0, transfer_ns: int = 2 * MS):
    """Forward, backward with two overlapped buckets, optimizer; extra forward time by rank."""

    def make(rank: int, step: int):
        extra = slow.get(rank, 0)
        return [
            work("data", MS + data_ns),
            work("forward", 10 * MS + extra),
            work("backward", 6 * MS),
            start((0, 1, 2, 3), transfer_ns),
            work("backward", 6 * MS),
            start((0, 1, 2, 3), transfer_ns),
            wait((0, 1, 2, 3)),
            wait((0, 1, 2, 3)),
            work("optimizer", MS),
        ]

    return ProgramRun(make, num_ranks=4, num_steps=6, layout=Layout(dp=4))


def replay_of(run: ProgramRun, path: Path) -> Replay:
    timeline = build_timeline(run.record(path))
    assert isinstance(timeline, Timeline), timeline
    replay = build_replay(timeline)
    assert isinstance(replay, Replay), replay
    return replay


__all__ = [
    "MS",
    "ProgramRun",
    "call",
    "ddp",
    "hand",
    "post",
    "receive",
    "reduce",
    "replay_of",
    "send",
    "settle",
    "share",
    "start",
    "wait",
    "work",
]
