"""The time of all ranks added up, by phase and by where it lies around steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshscope.analyze.rank.device import explain_no_job_device
from meshscope.analyze.rank.phases import TimeSplit, add_splits
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """The ranks' time lines added up: rank-nanoseconds. The four parts sum to `wall_ns`."""

    before_first: TimeSplit
    steps: TimeSplit
    between: TimeSplit
    after_last: TimeSplit
    steady_steps: TimeSplit
    """`steps` without warm-up, profiled steps, and those of which phases are lost."""
    num_steady_rank_steps: int
    """Steps in `steady_steps`, counted on every rank."""
    device_phase_ns: Mapping[str, int] | Unavailable
    """Device time in the steady steps of the ranks that have it."""
    num_device_rank_steps: int
    """Steps with device time."""
    num_markable_rank_steps: int
    """Steps in `steady_steps` of the ranks that have any device time."""
    containers: Mapping[str, int]
    """Spans per phase that cross step boundaries and are left out of the split."""
    num_other_threads: int
    """Phases of other threads, also left out."""
    given: tuple[str, ...]
    """Phases of which some were measured by the program itself."""

    @property
    def wall_ns(self) -> int:
        parts = (self.before_first, self.steps, self.between, self.after_last)
        return sum(part.wall_ns for part in parts)


def add_times(ranks: Sequence[RankSummary]) -> JobTime:
    devices = [rank.device for rank in ranks if not isinstance(rank.device, Unavailable)]
    containers: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank.time.containers.items():
            containers[name] = containers.get(name, 0) + count
    device_ns: dict[str, int] = {}
    for device in devices:
        for name, total in device.phase_ns.items():
            device_ns[name] = device_ns.get(name, 0) + total
    reasons = [rank.device.reason for rank in ranks if isinstance(rank.device, Unavailable)]
    marked = [rank for rank in ranks if not isinstance(rank.device, Unavailable)]
    return JobTime(
        before_first=add_splits([rank.time.before_first for rank in ranks]),
        steps=add_splits([rank.time.steps for rank in ranks]),
        between=add_splits([rank.time.between for rank in ranks]),
        after_last=add_splits([rank.time.after_last for rank in ranks]),
        steady_steps=add_splits([rank.time.steady_steps for rank in ranks]),
        num_steady_rank_steps=sum(rank.num_phased for rank in ranks),
        device_phase_ns=device_ns if devices else explain_no_job_device(reasons),
        num_device_rank_steps=sum(device.num_steps for device in devices),
        num_markable_rank_steps=sum(rank.num_phased for rank in marked),
        containers=containers,
        num_other_threads=sum(rank.time.num_other_threads for rank in ranks),
        given=tuple(sorted({name for rank in ranks for name in rank.time.given})),
    )
