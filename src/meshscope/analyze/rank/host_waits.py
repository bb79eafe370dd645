"""Calls in which a rank's host waited for its device, in the steps of its kernel samples."""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.phases import order_steps
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.schema import KernelKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostWaits:
    """One row per call."""

    start_ns: Int64s
    """Host monotonic clock of the rank."""
    end_ns: Int64s
    num_steps: int
    """Steps that any of the calls lies in; other sampled steps had none."""


def read_host_waits(recording: Recording) -> HostWaits | Unavailable:
    if not recording.has_table("kernels"):
        return Unavailable("no kernels of this rank were sampled")
    columns = recording.read("kernels")
    is_wait = columns["kind"] == KernelKind.SYNCHRONISATION
    start = int64_column(columns, "start_host_mono_ns")[is_wait]
    duration = int64_column(columns, "duration_ns")[is_wait]
    is_good = (start >= 0) & (duration >= 0)
    start, end = start[is_good], (start + duration)[is_good]
    steps = order_steps(recording.read("steps"))
    inside = np.unique(np.searchsorted(steps.end_ns, start, side="right"))
    return HostWaits(start_ns=start, end_ns=end, num_steps=len(inside))
