"""Runs with steps, phases, actions and communication whose timeline is known in closed form.

    job = TimedJob(path, num_ranks=2, layout=Layout(dp=2))
    job.train(num_steps=12, work_ms={0: {"forward": 10, "backward": 20}, 1: …}, transfer_ms=5)

Every step is a data-parallel one: phases one after another, an all-reduce at the end of the last
phase, which begins when the last rank is there. Ranks begin the next step when it is over.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from builders import MS, put_device_span, put_span, put_step
from communication_builders import Job
from meshscope.analyze.timeline.timeline import StepChoice, Timeline, build_timeline
from meshscope.core.layout import Layout
from meshscope.store.read.run import Attempt
from meshscope.store.schema import ACTION_KINDS, MISSING

Work = Mapping[int, Mapping[str, float]]
"""Rank to phase to milliseconds."""


class TimedJob(Job):
    """A job that also trains. Moments are ns from the start of the job."""

    def phase(self, rank: int, name: str, start_ns: int, end_ns: int, *, depth: int = 0) -> None:
        """A phase of one rank."""
        put_span(
            self.writers[rank], name, self.local_ns(rank, start_ns), end_ns - start_ns, depth=depth
        )

    def own_step(self, rank: int, step: int, start_ns: int, end_ns: int, *, flags: int = 0) -> None:
        """A step of one rank."""
        begin, end = self.local_ns(rank, start_ns), self.local_ns(rank, end_ns)
        put_step(self.writers[rank], step, begin, end, flags=flags)

    def action(
        self,
        rank: int,
        kind: str,
        *,
        step: int,
        microbatch: int,
        stage: int,
        start_ns: int,
        end_ns: int,
        wait_ns: int | None = None,
        flags: int = 0,
    ) -> None:
        """A pipeline action, and the phase it is; `wait_ns` is how long before it it waited."""
        name = "forward" if kind == "F" else "backward"
        self.phase(rank, name, start_ns, end_ns)
        if wait_ns is not None:
            self.phase(rank, "pipeline wait", start_ns - wait_ns, start_ns)
        begin = self.local_ns(rank, start_ns)
        self.writers[rank].table("actions").put(
            ACTION_KINDS.index(kind) | flags << 8 | stage << 32,
            step,
            microbatch,
            begin,
            end_ns - start_ns,
            MISSING if wait_ns is None else begin - wait_ns,
            MISSING if wait_ns is None else wait_ns,
        )

    def device_phase(
        self,
        rank: int,
        name: str,
        host: tuple[int, int],
        device: tuple[int, int],
        *,
        offset_ns: int,
        depth: int = 0,
    ) -> None:
        """A phase on host and device; the device's clock is the host's less `offset_ns`."""
        self.phase(rank, name, *host, depth=depth)
        local = self.local_ns(rank, 0)
        put_device_span(
            self.writers[rank],
            name,
            local + host[0],
            device[1] - device[0],
            start_device_ns=device[0] - offset_ns + local,
            offset_min_ns=offset_ns,
            offset_max_ns=offset_ns + 1000,
        )

    def train(
        self,
        *,
        num_steps: int,
        work_ms: Work,
        transfer_ms: float = 0,
        group: int | None = None,
        gap_ms: float = 0,
        first_step: int = 0,
        start_ns: int = 0,
        size_bytes: int = 4096,
    ) -> int:
        """Data-parallel steps; where they end. Without a group nobody waits for anybody."""
        now = dict.fromkeys(work_ms, start_ns)
        for step in range(first_step, first_step + num_steps):
            begin = {rank: at + round(gap_ms * MS) for rank, at in now.items()}
            for rank, phases in work_ms.items():
                at = begin[rank]
                for name, length_ms in phases.items():
                    end = at + round(length_ms * MS)
                    self.phase(rank, name, at, end)
                    at = end
                now[rank] = at
            if group is not None:
                self.collective(
                    group,
                    now,
                    transfer_ns=round(transfer_ms * MS),
                    step=step,
                    size_bytes=size_bytes,
                )
                now = dict.fromkeys(now, max(now.values()) + round(transfer_ms * MS))
            for rank in work_ms:
                self.own_step(rank, step, begin[rank], now[rank])
        return max(now.values())


def make_dp_run(
    path: Path,
    work_ms: Work,
    *,
    num_steps: int = 12,
    transfer_ms: float = 5,
    gap_ms: float = 0,
    layout: Layout | None = None,
    missing: Iterable[int] = (),
) -> Attempt:
    """A data-parallel run over all ranks of `work_ms`."""
    job = TimedJob(
        path, num_ranks=len(work_ms), layout=layout or Layout(dp=len(work_ms)), missing=missing
    )
    group = job.group(range(len(work_ms)), description="mesh_dp") if len(work_ms) > 1 else None
    own = {rank: phases for rank, phases in work_ms.items() if rank in job.writers}
    job.train(num_steps=num_steps, work_ms=own, transfer_ms=transfer_ms, gap_ms=gap_ms, group=group)
    return job.close()


def timeline_of(
    attempt: Attempt, *, warmup_steps: int = 0, steps: StepChoice | None = None
) -> Timeline:
    """The timeline of a run that has one."""
    found = build_timeline(attempt, warmup_steps=warmup_steps, steps=steps)
    assert isinstance(found, Timeline), found
    return found


def describe(timeline: Timeline, rank: int, step: int = 0) -> list[tuple[str, str, float]]:
    """Kind, phase and milliseconds of the pieces of one rank and step place."""
    from meshscope.analyze.timeline.pieces import PieceKind

    pieces = timeline.pieces
    own = pieces.select((pieces.rank == rank) & (pieces.step == step))
    return [
        (PieceKind(int(kind)).name, timeline.phases[phase], (end - begin) / MS)
        for kind, phase, begin, end in zip(
            own.kind, own.phase, own.start_ns.tolist(), own.end_ns.tolist(), strict=True
        )
    ]
