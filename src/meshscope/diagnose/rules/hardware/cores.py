"""A rule about threads that share too few cores."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.device.core_queue import CoreQueue, read_core_queue
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import name_ranks, plural, ratio

_MIN_QUEUED_RATIO = Threshold(
    name="threads_min_queued_ratio",
    default=0.05,
    meaning="share of the time that training threads must have waited for a core",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crowd:
    """Ranks whose threads may run on the same cores."""

    ranks: tuple[int, ...]
    num_threads: int
    """Of one rank, at most."""
    total_threads: int
    num_cores: int
    queued_ratio: float
    """Mean over its ranks."""

    @property
    def fitting(self) -> int:
        """Threads of a rank that the cores have room for."""
        return max(1, self.num_cores // len(self.ranks))


def _find_crowds(study: Study) -> tuple[_Crowd, ...]:
    shared: dict[tuple[str, str], dict[int, CoreQueue]] = {}
    for rank, recording in study.attempt.ranks.items():
        queue = read_core_queue(recording)
        if isinstance(queue, Unavailable) or not queue.cores:
            continue
        key = (str(recording.header.get("host")), queue.cores)
        shared.setdefault(key, {})[rank] = queue
    crowds = (_count(queues) for queues in shared.values())
    return tuple(one for one in crowds if one is not None)


def _count(queues: dict[int, CoreQueue]) -> _Crowd | None:
    threads = [q.num_threads for q in queues.values() if not isinstance(q.num_threads, Unavailable)]
    cores = [q.num_cores for q in queues.values() if not isinstance(q.num_cores, Unavailable)]
    if len(threads) < len(queues) or not cores:
        return None
    return _Crowd(
        ranks=tuple(sorted(queues)),
        num_threads=max(threads),
        total_threads=sum(threads),
        num_cores=min(cores),
        queued_ratio=float(np.mean([queue.queued_ratio for queue in queues.values()])),
    )


class TooManyThreads(Rule):
    """Ranks compute with more threads than they have cores.

    What it finds: ranks of a host whose threads together outnumber the cores they may run on, while
    fewer threads for each would fit, and training threads that waited for a core for
    `threads_min_queued_ratio` of the time or more.

    Why it matters: threads of one operation wait for each other, so an operation is over when the
    last of them had its turn; switching between them costs time as well.

    How it is measured: torch's number of threads, added up over the ranks with the same cores
    (those the process may run on, or what the container's share of time is worth), and the time in
    which the kernel had the training thread ready and without a core. The gain is that time.

    What to change: `OMP_NUM_THREADS`, or `torch.set_num_threads`, to the cores over the ranks of a
    host; torchrun sets it to 1, other launchers leave it at the number of cores.

    When it is wrong: if other programs have the cores: the time is theirs then, in part. Loader
    workers and other threads of a rank are not counted.
    """

    code = "HW003"
    name = "too-many-threads"
    thresholds = (_MIN_QUEUED_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: the host that waits most."""
        step_ns = need(context.study.step_ns)
        crowds = [
            one
            for one in need(context.study.get(_find_crowds))
            if one.total_threads > one.num_cores
            and one.num_threads > one.fitting
            and one.queued_ratio >= context.thresholds[_MIN_QUEUED_RATIO]
        ]
        if not crowds:
            return
        worst = max(crowds, key=lambda one: one.queued_ratio)
        ranks = tuple(rank for one in crowds for rank in one.ranks)
        gain = Estimate(
            saved_ns=worst.queued_ratio * step_ns,
            step_ns=step_ns,
            basis="the time in which the training thread was ready and had no core",
        )
        cores = plural(worst.num_cores, "core")
        yield Finding(
            code=self.code,
            title=f"{plural(worst.total_threads, 'thread')} share {cores}",
            severity=severity_of(gain),
            summary=f"{name_ranks(worst.ranks)} compute with {plural(worst.num_threads, 'thread')} "
            f"each on {cores} together; the training threads waited {ratio(worst.queued_ratio)} of "
            "the time for a core.",
            ranks=() if len(ranks) == len(context.study.attempt.ranks) else ranks,
            evidence=(
                Evidence(name="threads of a rank", value=worst.num_threads),
                Evidence(name="ranks with the same cores", value=len(worst.ranks)),
                Evidence(name="cores", value=worst.num_cores),
                Evidence(name="waited for a core", value=worst.queued_ratio, unit="ratio"),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM, text="other programs on the cores add to it"
            ),
            change=f"Set OMP_NUM_THREADS={worst.fitting}, or torch.set_num_threads"
            f"({worst.fitting}), on each rank.",
            gain=gain,
        )
