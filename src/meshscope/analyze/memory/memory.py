"""Memory of every rank over the run: growth, when it runs out, which rank needs most.

Host memory is the resident set of the rank's process, device memory what its allocator holds
(allocated) and has taken from the device (reserved). Growth is judged on samples at step ends, when
a step's own activations are gone: see `growth`. What rose while torch.compile made code is taken
out: that is the size of the code, and ends with it. A forecast divides the free memory by the
growth per step. For a host it covers all its recorded ranks, against the machine's memory or the
limit of their control group; for a device it covers allocated memory, because cached memory is
released on demand, against what the process can get: what it has reserved and what is free.

Wrong where other programs need the host's memory, where processes share pages (each counts them),
and where sampling missed the peak: between two step ends only the allocator's own peak is seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.memory.retry_cost import RetryCost, measure_retry_cost
from meshscope.analyze.rank.caught_errors import as_int
from meshscope.analyze.rank.compilations import read_compilations
from meshscope.analyze.rank.not_in_traces import NOT_SAMPLED, explain_no_memory
from meshscope.analyze.rank.parameters import read_parameter_bytes
from meshscope.analyze.timeline.peers import group_peers
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.growth import Growth, GrowthKind, measure_growth
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

_MIN_RISE_BYTES = 16 << 20
"""Less over all samples is no leak, however steady: allocators creep."""
_NO_DEVICE = "no accelerator was in use"
_NO_LIMIT = "how much memory there is was not recorded"


class Place(StrEnum):
    """Where memory is."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorState:
    """The device's allocator at the sample with most memory reserved, and its counts at the end."""

    step: int
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int | Unavailable
    """In free blocks of segments in use."""
    unused_at_peak_bytes: int
    """Highest reserved minus highest allocated since the peaks were reset: at least this much was
    unused at the highest reservation."""
    peak_reserved_bytes: int
    growth: Growth | Unavailable
    """Of what is reserved beyond the highest allocation, in bytes per step."""
    num_retries: int | Unavailable
    """Allocations that succeeded only after the cache was emptied."""
    num_failures: int | Unavailable
    """Allocations that failed."""
    first_retry_step: int | Unavailable
    """The first sampled step after a retry since recording began."""
    retry_cost: RetryCost | Unavailable
    """What steps with retries took longer."""

    def is_hollowing(self, least_bytes: float) -> bool:
        """Whether unused reservations grow steadily, by at least so much over the run."""
        growth = self.growth
        if isinstance(growth, Unavailable) or growth.kind is not GrowthKind.STEADY:
            return False
        return growth.rise >= least_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory on its host or its device."""

    rank: int
    place: Place
    host: str
    """Name of the rank's host; empty if unknown."""
    peak_bytes: int
    """Highest sampled resident set, or the allocator's own highest allocation."""
    peak_step: int
    first_bytes: int
    """At the first sample, the end of a step: resident, or allocated."""
    first_step: int
    parameter_bytes: int | Unavailable
    """Of what was there at the first sample: trained parameters, as counted."""
    kept_bytes: int
    """Most at any end of a step; what is above it at the peak is freed within the step."""
    last_bytes: int
    """At the last sample: resident, or allocated."""
    last_step: int
    growth: Growth | Unavailable
    """Of the resident set, or of what is allocated, in bytes per step."""
    limit_bytes: int | Unavailable
    """Of the host or the device."""
    allocator: AllocatorState | Unavailable

    @property
    def parts_bytes(self) -> Mapping[str, int]:
        """What the peak consists of, as far as any run tells without a profile; sums to it.

        `parameters` are counted. `other_at_start` is what else the first sample held: on a host
        code and libraries, too. `added_later` is what later ends of steps held more, and
        `within_steps` what is freed before a step ends: activations, temporary memory.
        """
        start = min(self.first_bytes, self.peak_bytes)
        parameters = min(known(self.parameter_bytes) or 0, start)
        kept = max(start, min(self.kept_bytes, self.peak_bytes))
        return {
            "parameters": parameters,
            "other_at_start": start - parameters,
            "added_later": kept - start,
            "within_steps": self.peak_bytes - kept,
        }

    @property
    def is_leaking(self) -> bool:
        """Whether it grows steadily and by a relevant amount."""
        growth = self.growth
        if isinstance(growth, Unavailable) or growth.kind is not GrowthKind.STEADY:
            return False
        return growth.rise >= _MIN_RISE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When memory runs out if growth continues."""

    ranks: tuple[int, ...]
    """Growing ranks."""
    limit_bytes: int
    used_bytes: int
    """By all recorded ranks under the limit."""
    num_steps: float
    """From the last sample on."""
    seconds: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSkew:
    """A rank that needs more memory than ranks that do the same work."""

    rank: int
    place: Place
    peak_bytes: int
    peers_bytes: float
    """The median of the other peers' peaks."""
    num_peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """Memory of all ranks that sampled it."""

    ranks: tuple[RankMemory, ...]
    skews: tuple[PeerSkew, ...]
    """The rank of every peer group that needs most, largest excess first."""

    def leaking(self, place: Place) -> tuple[RankMemory, ...]:
        return tuple(rank for rank in self.ranks if rank.place is place and rank.is_leaking)


def analyze_memory(attempt: Attempt) -> JobMemory | Unavailable:
    num_tests = 2 * len(attempt.ranks)
    found: list[RankMemory] = []
    for recording in attempt:
        samples = recording.read("memory")
        if len(samples["step"]):
            found += _measure_rank(recording, samples, num_tests)
    if not found:
        return explain_no_memory(next(iter(attempt)))
    return JobMemory(ranks=tuple(found), skews=_find_skews(attempt, found))


def _measure_rank(recording: Recording, samples: Columns, num_tests: int) -> Iterable[RankMemory]:
    rss = int64_column(samples, "rss_bytes")
    if bool((rss >= 0).any()):
        yield _measure_host(recording, samples, num_tests)
    if bool((int64_column(samples, "allocated_bytes") >= 0).any()):
        yield _measure_device(recording, samples, num_tests)


def _measure_host(recording: Recording, samples: Columns, num_tests: int) -> RankMemory:
    step, rss = _known(samples, "rss_bytes")
    at = int(np.argmax(rss))
    return RankMemory(
        rank=recording.rank,
        place=Place.HOST,
        host=_host_of(recording),
        peak_bytes=int(rss[at]),
        peak_step=int(step[at]),
        first_bytes=int(rss[0]),
        first_step=int(step[0]),
        parameter_bytes=Unavailable("they are on the device")
        if bool((int64_column(samples, "allocated_bytes") >= 0).any())
        else read_parameter_bytes(recording),
        kept_bytes=int(rss[at]),
        last_bytes=int(rss[-1]),
        last_step=int(step[-1]),
        growth=_measure_growth(step, _without_compilation(recording, samples, rss), num_tests),
        limit_bytes=_host_limit(recording),
        allocator=Unavailable(_NO_DEVICE),
    )


def _measure_device(recording: Recording, samples: Columns, num_tests: int) -> RankMemory:
    step, allocated = _known(samples, "allocated_bytes")
    peak_step, peak = _known(samples, "peak_allocated_bytes")
    if not len(peak) or int(peak.max()) < int(allocated.max()):
        peak_step, peak = step, allocated
    at = int(np.argmax(peak))
    rows = recording.read("allocator")
    return RankMemory(
        rank=recording.rank,
        place=Place.DEVICE,
        host=_host_of(recording),
        peak_bytes=int(peak[at]),
        peak_step=int(peak_step[at]),
        first_bytes=int(allocated[0]),
        first_step=int(step[0]),
        parameter_bytes=read_parameter_bytes(recording),
        kept_bytes=int(allocated.max()),
        last_bytes=int(allocated[-1]),
        last_step=int(step[-1]),
        growth=_measure_growth(step, allocated, num_tests),
        limit_bytes=_device_limit(recording, samples, rows, int(peak[at])),
        allocator=_measure_allocator(recording, samples, rows, num_tests),
    )


def _known(samples: Columns, name: str) -> tuple[Int64s, Int64s]:
    values = int64_column(samples, name)
    is_there = values >= 0
    return int64_column(samples, "step")[is_there], values[is_there]


def _measure_growth(step: Int64s, value: Int64s, num_tests: int) -> Growth | Unavailable:
    # The lowest sample of a step: what is left without temporary memory.
    numbers, first = np.unique(step, return_index=True)
    lowest: Floats = np.minimum.reduceat(value[np.argsort(step, kind="stable")], first).astype(
        np.float64
    )
    return measure_growth(numbers.astype(np.float64), lowest, num_tests=num_tests)


def _without_compilation(recording: Recording, samples: Columns, rss: Int64s) -> Int64s:
    """The resident set without what it rose by from one sample to the next around a compilation."""
    start = np.array([one.start_ns for one in read_compilations(recording)], dtype=np.int64)
    time = int64_column(samples, "time_host_mono_ns")[int64_column(samples, "rss_bytes") >= 0]
    num_begun = np.searchsorted(start, time, side="right")
    rise = np.diff(rss)
    rise[(np.diff(num_begun) == 0) | (rise < 0)] = 0
    rest: Int64s = rss - np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rise)])
    return rest


def _measure_allocator(
    recording: Recording, samples: Columns, rows: Columns, num_tests: int
) -> AllocatorState | Unavailable:
    step, reserved = _known(samples, "reserved_bytes")
    if not len(reserved):
        return Unavailable("the allocator's reservations were not recorded")
    at = int(np.argmax(reserved))
    allocated = int64_column(samples, "allocated_bytes")[
        np.flatnonzero(int64_column(samples, "reserved_bytes") >= 0)[at]
    ]
    peak_reserved = int(int64_column(samples, "peak_reserved_bytes").max(initial=-1))
    peak_allocated = int(int64_column(samples, "peak_allocated_bytes").max(initial=-1))
    highest = max(peak_reserved, int(reserved[at]))
    split_step, split = _known(rows, "inactive_split_bytes")
    in_step = np.flatnonzero(split_step == step[at])
    retry_step, retries = _known(rows, "num_alloc_retries")
    return AllocatorState(
        step=int(step[at]),
        allocated_bytes=max(int(allocated), 0),
        reserved_bytes=int(reserved[at]),
        inactive_split_bytes=int(split[in_step[-1]]) if len(in_step) else Unavailable(NOT_SAMPLED),
        unused_at_peak_bytes=max(0, highest - max(peak_allocated, int(allocated), 0)),
        peak_reserved_bytes=highest,
        growth=_measure_hollowing(samples, num_tests),
        num_retries=_highest(rows, "num_alloc_retries"),
        num_failures=_highest(rows, "num_ooms"),
        first_retry_step=_first_rise(retry_step, retries),
        retry_cost=measure_retry_cost(recording.read("steps"), retry_step, retries),
    )


def _measure_hollowing(samples: Columns, num_tests: int) -> Growth | Unavailable:
    """Growth of the highest reservation beyond the highest allocation.

    Peaks stay until the program resets them. A new highest allocation makes the reservation grow
    as well, and the difference stays; blocks that nothing fits into make it grow alone.
    """
    reserved = int64_column(samples, "peak_reserved_bytes")
    allocated = int64_column(samples, "peak_allocated_bytes")
    is_known = (reserved >= 0) & (allocated >= 0)
    unused = (reserved - allocated)[is_known]
    return _measure_growth(int64_column(samples, "step")[is_known], unused, num_tests)


def _highest(rows: Columns, name: str) -> int | Unavailable:
    _, values = _known(rows, name)
    return int(values.max()) if len(values) else Unavailable("the allocator's counts were not read")


def _first_rise(step: Int64s, counts: Int64s) -> int | Unavailable:
    above = np.flatnonzero(counts > 0)
    return int(step[above[0]]) if len(above) else Unavailable("there was none")


def _host_of(recording: Recording) -> str:
    host = recording.header.get("host")
    return host if isinstance(host, str) else ""


def _host_limit(recording: Recording) -> int | Unavailable:
    """The smaller of the machine's memory and the control group's limit."""
    known: list[int] = []
    for fields in (recording.header, *recording.updates):
        facts = fields.get("host_memory")
        if isinstance(facts, Mapping):
            sizes = (as_int(facts.get(name)) for name in ("total_bytes", "limit_bytes"))
            known += [size for size in sizes if size is not None and size > 0]
    return min(known) if known else Unavailable(_NO_LIMIT)


def _device_limit(
    recording: Recording, samples: Columns, rows: Columns, peak_bytes: int
) -> int | Unavailable:
    """What the process can get: the device, less what others hold, or the share it was given."""
    total = int(int64_column(rows, "device_total_bytes").max(initial=-1))
    if total <= 0:
        return Unavailable(_NO_LIMIT)
    known = [total]
    for fields in recording.updates:
        facts = fields.get("device_memory")
        size = as_int(facts.get("limit_bytes")) if isinstance(facts, Mapping) else None
        known[1:] = [size] if size is not None and size > 0 else []
    step, reserved = _known(samples, "reserved_bytes")
    read_step, free = _known(rows, "device_free_bytes")
    at = np.flatnonzero(step == read_step[-1]) if len(free) else np.empty(0, dtype=np.int64)
    if len(at):  # what others took since the peak cannot undo it
        known.append(max(int(free[-1]) + int(reserved[at[-1]]), peak_bytes))
    return min(known)


def forecast_host(
    memory: JobMemory, host: str, step_ns: float | Unavailable
) -> Forecast | Unavailable:
    """When the host's growing ranks use up its memory."""
    here = [rank for rank in memory.ranks if rank.place is Place.HOST and rank.host == host]
    return _forecast(here, step_ns)


def forecast_device(rank: RankMemory, step_ns: float | Unavailable) -> Forecast | Unavailable:
    """When the device's memory is used up, from the allocator's highest allocation."""
    return _forecast([rank], step_ns)


def _forecast(ranks: list[RankMemory], step_ns: float | Unavailable) -> Forecast | Unavailable:
    growing = [rank for rank in ranks if rank.is_leaking]
    limits = [r.limit_bytes for r in ranks if not isinstance(r.limit_bytes, Unavailable)]
    if not growing:
        return Unavailable("nothing grows all the time")
    if not limits:
        return Unavailable(_NO_LIMIT)
    slope = sum(r.growth.per_step for r in growing if not isinstance(r.growth, Unavailable))
    is_device = ranks[0].place is Place.DEVICE
    used = sum(rank.peak_bytes if is_device else rank.last_bytes for rank in ranks)
    num_steps = max(0.0, (min(limits) - used) / slope)
    return Forecast(
        ranks=tuple(rank.rank for rank in growing),
        limit_bytes=min(limits),
        used_bytes=used,
        num_steps=num_steps,
        seconds=step_ns if isinstance(step_ns, Unavailable) else num_steps * step_ns / 1e9,
    )


def _find_skews(attempt: Attempt, ranks: list[RankMemory]) -> tuple[PeerSkew, ...]:
    if isinstance(attempt.layout, Unavailable) and attempt.world_size > 1:
        return ()  # without a layout peers are unknown
    peers = group_peers(attempt.layout, attempt.ranks)
    groups: dict[tuple[Place, int], list[RankMemory]] = {}
    for rank in ranks:
        groups.setdefault((rank.place, peers[rank.rank]), []).append(rank)
    found = [_measure_skew(group) for group in groups.values() if len(group) > 1]
    return tuple(sorted(found, key=lambda skew: skew.peers_bytes - skew.peak_bytes))


def _measure_skew(group: list[RankMemory]) -> PeerSkew:
    most = max(group, key=lambda rank: rank.peak_bytes)
    others = [rank.peak_bytes for rank in group if rank is not most]
    return PeerSkew(
        rank=most.rank,
        place=most.place,
        peak_bytes=most.peak_bytes,
        peers_bytes=float(np.median(others)),
        num_peers=len(others),
    )
