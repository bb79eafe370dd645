"""Runs in which ranks compute forward and backward, meet in an all-reduce and step the optimizer.

    run = LateRun(layout=Layout(dp=4), work=lambda rank, step: {"forward": 10 * MS, …})
    step_ns = run.record(path)

The time of a step is computed here, with nothing of what is tested: the same run with other work
has a known gain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builders import MS, put_span, put_step
from communication_builders import Job
from meshscope.analyze.timeline.peer_work import PeerWork, group_true_peers
from meshscope.core.layout import Layout
from meshscope.store.schema import MISSING
from meshscope.store.write.writer import RankWriter

Work = Callable[[int, int], Mapping[str, int]]
"""Rank and step to nanoseconds of `forward`, `backward` and `optimizer`."""
STEADY = {"forward": 10 * MS, "backward": 20 * MS, "optimizer": 2 * MS}
DETAIL = 2


def noisy(seed: int, *, sigma: float = 0.02, num_ranks: int = 16, num_steps: int = 400) -> Work:
    """Steady work with independent noise."""
    factors = 1 + sigma * np.random.default_rng(seed).standard_normal((num_ranks, num_steps, 3))

    def work(rank: int, step: int) -> Mapping[str, int]:
        own = factors[rank, step]
        return {name: int(ns * own[i]) for i, (name, ns) in enumerate(STEADY.items())}

    return work


@dataclass(kw_only=True)
class LateRun:
    """One job of which every rank meets every other in each step."""

    layout: Layout
    work: Work
    num_steps: int = 40
    transfer_ns: int = MS
    host: Callable[[int], str] = lambda rank: f"node{rank // 4}"
    tokens: Callable[[int, int], int] = lambda rank, step: MISSING
    samples: Callable[[int, int], int] = lambda rank, step: 0
    collections: Callable[[int, int], int] = lambda rank, step: 0
    """Rank and step to the length of a collection at the begin of forward, part of its work."""
    also: Callable[[RankWriter], None] = lambda writer: None
    """Writes what a test adds to a rank."""

    def record(self, path: Path) -> float:
        """Writes the run and returns the mean time of its steps without the first."""
        world = self.layout.world_size
        job = Job(path, num_ranks=world, layout=self.layout, host=self.host)
        group = job.group(range(world), description="mesh_dp")
        now = dict.fromkeys(range(world), 0)
        ends = []
        for step in range(self.num_steps):
            work = {rank: self.work(rank, step) for rank in range(world)}
            begin = dict(now)
            arrival = {
                rank: begin[rank] + work[rank]["forward"] + work[rank]["backward"]
                for rank in range(world)
            }
            reduced = max(arrival.values()) + self.transfer_ns
            job.collective(
                group, arrival, transfer_ns=self.transfer_ns, step=step, phase="backward"
            )
            for rank, writer in job.writers.items():
                self._put_phases(job, rank, step, begin[rank], work[rank], reduced)
                now[rank] = reduced + work[rank]["optimizer"]
                put_step(
                    writer,
                    step,
                    job.local_ns(rank, begin[rank]),
                    job.local_ns(rank, now[rank]),
                    input_tokens=self.tokens(rank, step),
                    input_samples=self.samples(rank, step),
                )
            ends.append(max(now.values()))
        for writer in job.writers.values():
            self.also(writer)
        job.close()
        return (ends[-1] - ends[0]) / (self.num_steps - 1)

    def _put_phases(
        self, job: Job, rank: int, step: int, start_ns: int, work: Mapping[str, int], reduced: int
    ) -> None:
        backward = start_ns + work["forward"]
        spans = (
            ("forward", start_ns, work["forward"]),
            ("backward", backward, reduced - backward),
            ("optimizer", reduced, work["optimizer"]),
        )
        writer = job.writers[rank]
        for name, start, length in spans:
            put_span(writer, name, job.local_ns(rank, start), length)
        collected = self.collections(rank, step)
        if collected:
            start = job.local_ns(rank, start_ns)
            put_span(writer, "gc gen2", start, collected, depth=1, flags=DETAIL)


def make_peer_work(
    forward_ns: np.ndarray, backward_ns: np.ndarray, layout: Layout, *, step_ns: float = 40.0 * MS
) -> PeerWork:
    """Work [step, rank] of two phases as an analysis would have it."""
    num_steps, num_ranks = forward_ns.shape
    ranks = tuple(range(num_ranks))
    return PeerWork(
        ranks=ranks,
        steps=np.arange(100, 100 + num_steps),
        step_ns=step_ns,
        phases=("backward", "forward"),
        phase_indices=(2, 1),
        work_ns=np.stack([backward_ns, forward_ns]),
        total_ns=forward_ns + backward_ns,
        groups=group_true_peers(layout, ranks, is_piped=False),
    )


def make_noise(
    kind: str, random: np.random.Generator, shape: tuple[int, int], *, sigma: float, rho: float = 0
) -> np.ndarray:
    """Factors [step, rank] around 1: `normal`, `lognormal`, `ar` (exp of AR(1)), `drift`,
    `pauses` (3 % of the cells half as long again) or `pareto` (tail index 2.5)."""
    noise = random.standard_normal(shape)
    if kind == "pauses":
        return (1 + sigma * noise) * np.where(random.random(shape) < 0.03, 1.5, 1.0)
    if kind == "pareto":
        return 1 + sigma * random.pareto(2.5, shape)
    if kind == "normal":
        return 1 + sigma * noise
    if kind == "lognormal":
        return np.exp(sigma * noise)
    if kind == "drift":
        time = np.linspace(0, 1, shape[0])[:, None]
        own = 0.02 * random.standard_normal(shape[1]) * time
        return (1 + 0.3 * time) * (1 + own + sigma * noise)
    for step in range(1, shape[0]):
        noise[step] = rho * noise[step - 1] + np.sqrt(1 - rho**2) * noise[step]
    return np.exp(sigma * noise)
