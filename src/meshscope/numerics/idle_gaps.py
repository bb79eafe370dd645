"""Why a device had nothing to do, gap by gap, from when its next work was launched.

A gap ends with the begin of the next work of the device. Up to the end of the call that launched
that work the host had not come so far: `host`, but `synchronising` where the host waited for the
device just when that ran dry, or later in the gap, and `communicating` while it was inside a
collective's call. A host that waits has nothing queued when the wait is over: all it does before
it launches again is then behind the wait, and `synchronising` as well. From there to the gap's end
it is `launch`, as long as a launch may take (LAUNCH_NS); what is longer, and all of a gap whose
next work had been launched before it, is `dependency`: the work was there and waited for an event,
a copy, a stream. Gaps whose next work has no launching call are `unknown`.

Wrong for kernels of a CUDA graph: one call launches all of them, so gaps inside are `dependency`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.numerics.intervals import EMPTY, Intervals, complement
from meshscope.store.read.arrays import Int64s

LAUNCH_NS = 20_000
"""Longer than a launch takes on any device in use; torch's own take 5 to 10 µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Idle time of a device by cause; the parts sum to `total_ns`."""

    total_ns: int
    host_ns: int
    """The host was at something else."""
    synchronising_ns: int
    """The host had waited for the device before it launched more."""
    communicating_ns: int
    """The host was inside a collective's call."""
    launch_ns: int
    dependency_ns: int
    unknown_ns: int
    num_gaps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdleGaps:
    """Gaps in order of time, with how long each was for which cause."""

    begin_ns: Int64s
    end_ns: Int64s
    following: Int64s
    """The work that ends it; -1: none does."""
    host_ns: Int64s
    synchronising_ns: Int64s
    communicating_ns: Int64s
    launch_ns: Int64s
    dependency_ns: Int64s
    unknown_ns: Int64s

    def __len__(self) -> int:
        return len(self.begin_ns)

    @property
    def host_end_ns(self) -> Int64s:
        """Up to when the host, and not the device, is why nothing ran."""
        return self.begin_ns + self.host_ns + self.synchronising_ns + self.communicating_ns

    def sum_up(self, picked: npt.NDArray[np.bool_] | slice = slice(None)) -> IdleTime:
        """Some of them together."""
        return IdleTime(
            total_ns=int((self.end_ns - self.begin_ns)[picked].sum()),
            host_ns=int(self.host_ns[picked].sum()),
            synchronising_ns=int(self.synchronising_ns[picked].sum()),
            communicating_ns=int(self.communicating_ns[picked].sum()),
            launch_ns=int(self.launch_ns[picked].sum()),
            dependency_ns=int(self.dependency_ns[picked].sum()),
            unknown_ns=int(self.unknown_ns[picked].sum()),
            num_gaps=len(self.begin_ns[picked]),
        )


def _find_first(start_ns: Int64s, moments_ns: Int64s) -> Int64s:
    """The first piece of work that begins at each moment or later; -1 where none does."""
    if not (start_ns[1:] < start_ns[:-1]).any():  # most often it is in order
        place = start_ns.searchsorted(moments_ns)
        place[place == len(start_ns)] = -1
        return place
    order = np.argsort(start_ns, kind="stable")
    found: Int64s = np.append(order, -1)[np.searchsorted(start_ns[order], moments_ns)]
    return found


def explain_gaps(
    busy: Intervals,
    start_ns: Int64s,
    launched_ns: Int64s,
    *,
    first_ns: int,
    last_ns: int,
    synchronising: Intervals = EMPTY,
    communicating: Intervals = EMPTY,
) -> IdleGaps:
    """The gaps from `first_ns` to `last_ns` in which one device was not busy.

    `start_ns` is when each piece of its work began, in any order, `launched_ns` when the call that
    launched it was over, -1 where that is not known.
    """
    gaps = complement(busy, first_ns, last_ns)
    following = _find_first(start_ns, gaps.end_ns)
    launched = np.append(launched_ns, -1)[following]
    is_known = launched >= 0
    length = gaps.end_ns - gaps.start_ns
    host_end = np.clip(np.where(is_known, launched, gaps.start_ns), gaps.start_ns, gaps.end_ns)
    del launched  # each of these is as long as a device has gaps: up to one for each kernel
    host = host_end - gaps.start_ns
    unknown = np.where(is_known, 0, length)
    rest = length - host
    del length
    launching = np.where(host == 0, 0, np.minimum(rest, LAUNCH_NS))
    dependency = np.where(is_known, rest - launching, 0)
    del rest, is_known
    in_sync = synchronising.within(gaps.start_ns, host_end)
    ran_dry = synchronising.within(gaps.start_ns - 1, gaps.start_ns) > 0
    in_sync = np.where(ran_dry, host, in_sync)
    in_call = np.minimum(communicating.within(gaps.start_ns, host_end), host - in_sync)
    del host_end, ran_dry
    return IdleGaps(
        begin_ns=gaps.start_ns,
        end_ns=gaps.end_ns,
        following=following,
        host_ns=host - in_sync - in_call,
        synchronising_ns=in_sync,
        communicating_ns=in_call,
        launch_ns=launching,
        dependency_ns=dependency,
        unknown_ns=unknown,
    )
