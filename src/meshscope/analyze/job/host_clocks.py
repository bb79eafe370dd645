"""Which ranks share a clock, and what each clock's wall-clock readings say about it.

CLOCK_MONOTONIC belongs to a machine (and to a time namespace on it): ranks with the same host name
and the same `clock_id` in their headers are taken to share one, until their times contradict it.
Wall clocks are set by hand or over the network: they locate a clock to about a second at best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.write.attempts import CLOCK_SKEW_NS

WALL_CLOCK_UNCERTAINTY_NS = CLOCK_SKEW_NS
"""Hosts that keep time over the network differ by an unknown 1 ms to 1 s."""
_MAX_MONO_NS = 1 << 60
_MAX_UNIX_NS = 1 << 62
"""36 years after boot and the year 2116: later times are damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """A clock as the headers of its ranks describe it."""

    host: str
    """Empty when the header is lost: such a rank has a separate clock."""
    clock_id: str
    ranks: tuple[int, ...]
    mono_minus_unix_ns: int | None
    """This clock minus its host's wall clock; None without a reading."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostClocks:
    """The clocks of an attempt, in the order of their lowest rank."""

    clocks: tuple[HostClock, ...]
    of_rank: Int64s
    """Index in `clocks` by rank; -1 for ranks that recorded nothing."""

    def rough_offsets(self) -> tuple[Int64s, Bools]:
        """By rank: its clock minus the first by wall clocks; and whether that is known."""
        readings = [clock.mono_minus_unix_ns for clock in self.clocks]
        first = readings[0] if readings else None
        offset = np.zeros(len(self.clocks) + 1, dtype=np.int64)
        is_known = np.zeros(len(self.clocks) + 1, dtype=np.bool_)
        is_known[:1] = len(self.clocks) > 0
        for index, reading in enumerate(readings):
            if first is not None and reading is not None:
                offset[index], is_known[index] = reading - first, True
        return offset[self.of_rank], is_known[self.of_rank]

    def is_one_clock(self, ranks: Sequence[int]) -> bool:
        return len(set(self.of_rank[list(ranks)].tolist())) == 1


def find_host_clocks(attempt: Attempt) -> HostClocks:
    """One clock per host and clock id."""
    keys: dict[tuple[str, str, int], list[Recording]] = {}
    for recording in attempt:
        host = recording.header.get("host")
        clock_id = recording.header.get("clock_id")
        is_known = isinstance(host, str) and bool(host)
        key = (
            str(host) if is_known else "",
            "" if clock_id is None else str(clock_id)[:80],
            -1 if is_known else recording.rank,
        )
        keys.setdefault(key, []).append(recording)
    of_rank = np.full(attempt.world_size, -1, dtype=np.int64)
    clocks: list[HostClock] = []
    for (host, clock_id, _), recordings in keys.items():
        of_rank[[recording.rank for recording in recordings]] = len(clocks)
        readings = (_read_wall_clock(recording) for recording in recordings)
        clocks.append(
            HostClock(
                host=host,
                clock_id=clock_id,
                ranks=tuple(recording.rank for recording in recordings),
                mono_minus_unix_ns=next((r for r in readings if r is not None), None),
            )
        )
    return HostClocks(clocks=tuple(clocks), of_rank=of_rank)


def _read_wall_clock(recording: Recording) -> int | None:
    """A rank's monotonic clock minus the wall clock: the middle of its readings."""
    columns = recording.read("clocks")
    mono = int64_column(columns, "time_host_mono_ns")
    unix = int64_column(columns, "time_unix_ns")
    is_good = (mono >= 0) & (mono < _MAX_MONO_NS) & (unix > 0) & (unix < _MAX_UNIX_NS)
    differences = np.sort((mono - unix)[is_good])
    if len(differences):
        return int(differences[len(differences) // 2])
    start_mono = recording.header.get("start_host_mono_ns")
    start_unix = recording.header.get("start_unix_ns")
    if _is_time(start_mono, _MAX_MONO_NS) and _is_time(start_unix, _MAX_UNIX_NS):
        return start_mono - start_unix
    return None


def _is_time(value: object, limit: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < limit
