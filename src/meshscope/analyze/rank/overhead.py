"""What recording cost: the time inside the recorder on the steps in which it timed itself.

The recorder times its own hooks and calls on one step in 17. Warm-up steps are left out, because
the first one also opens the files, and so are steps that a trace window, a kernel sample or a count
of FLOPs disturbed: those end with tens of milliseconds of reading, now and then, and say nothing of
a usual step. What samples took is said beside it. This is time of the host. Without a device the
training thread loses it. With one it loses only what the device waited for: where the host is ahead
by more than the recorder takes in a step, the device has work all the while. So of the host's time
the share counts that lies at marks which the device reached too soon. Without marks on the device
the host's time is a bound, and nothing else is known.

Steps that are marked on the device or whose communication is recorded cost more than others, and of
short steps only some are: the medians of each kind are weighted by how many there are of it.

This is not the whole effect on training (caches, memory bandwidth), which only a comparison with an
unrecorded run shows (`benchmarks/recorder_overhead.py`). Steps without the recorder now and then,
to compare with their neighbours, were not built: with a noise of 1 % a step, one in 50 gives 20
pairs in 1,000 steps and an interval of ±0.5 points, wider than what it should show, and all ranks
would lose the phases and operations of these steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.device import MarkLeads
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.distribution import interpolate_percentile
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.trace_windows import TraceWindow, mark_profiled
from meshscope.store.schema import StepFlag

_NO_MARKS = "no mark on the device says whether it had work meanwhile"
_NO_DEVICE = "no accelerator was in use"
_NUM_KINDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time inside the recorder per step, over the steps in which it was measured."""

    num_steps: int
    """Steps measured, all ranks together."""
    is_warmup_only: bool
    """Only warm-up steps were measured; the first one also opened the files."""
    median_ns: float
    p95_ns: float
    max_ns: int
    median_ratio: float | Unavailable
    """Of the step's duration; the median of the steps' ratios."""
    p95_ratio: float | Unavailable
    max_ratio: float | Unavailable
    host_ns: float
    """Of the host, per step: medians of each kind of steps, weighted by their number."""
    host_ratio: float | Unavailable
    """The same of the steps' ratios."""
    has_device: bool
    starved_ratio: float | Unavailable
    """Share of the marks that the device reached with less work left than the recorder takes."""

    @property
    def lost_ratio(self) -> float | Unavailable:
        """Of a step, what the job lost: the host's time where nothing hid it."""
        if not self.has_device or isinstance(self.host_ratio, Unavailable):
            return self.host_ratio
        starved = self.starved_ratio
        return starved if isinstance(starved, Unavailable) else starved * self.host_ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverheadSamples:
    """The measured steps of one rank, in order of time."""

    cost_ns: Int64s
    duration_ns: Int64s
    kind: Int64s
    """By whether the step has marks on the device, and whether its communication is recorded."""
    num_warmup: int
    """First entries that are of warm-up steps."""
    num_of_kind: Int64s
    """All steps after warm-up, by kind."""
    lead_ns: Int64s | Unavailable
    """At marks after warm-up; see `MarkLeads`."""


def sample_overhead(
    steps: Columns,
    ordered_step: Int64s,
    num_warmup: int,
    leads: MarkLeads | Unavailable,
    windows: Sequence[TraceWindow] = (),
) -> OverheadSamples:
    """The rows of a rank's step table in which the recorder timed itself, and nothing disturbed it.

    `leads` is Unavailable without marks: because there is no device, or in spite of one.
    """
    cost = int64_column(steps, "recorder_ns")
    is_disturbed = mark_profiled(int64_column(steps, "step"), windows)
    measured = np.flatnonzero((cost >= 0) & ~is_disturbed)
    start = int64_column(steps, "start_host_mono_ns")[measured]
    found = known(leads)
    marked = np.empty(0, dtype=np.int64) if found is None else np.unique(found.step)
    is_marked = np.isin(int64_column(steps, "step"), ordered_step[marked])
    is_unwatched = (steps["flags"].astype(np.int64) & StepFlag.UNWATCHED) != 0
    kind = is_marked + 2 * is_unwatched.astype(np.int64)
    return OverheadSamples(
        cost_ns=cost[measured],
        duration_ns=int64_column(steps, "end_host_mono_ns")[measured] - start,
        kind=kind[measured],
        num_warmup=int(np.searchsorted(measured, num_warmup)),
        num_of_kind=np.bincount(
            kind[num_warmup:][~is_disturbed[num_warmup:]], minlength=_NUM_KINDS
        ),
        lead_ns=leads
        if isinstance(leads, Unavailable)
        else leads.lead_ns[leads.step >= num_warmup],
    )


def measure_overhead(
    samples: Sequence[OverheadSamples], *, has_device: bool
) -> Overhead | Unavailable:
    """The overhead over all ranks: after warm-up, where any step there is measured."""
    is_warmup_only = not any(len(sample.cost_ns) > sample.num_warmup for sample in samples)
    first = [0 if is_warmup_only else sample.num_warmup for sample in samples]
    pairs = list(zip(samples, first, strict=True))
    none_ns = np.empty(0, dtype=np.int64)
    cost = np.concatenate([none_ns, *(sample.cost_ns[at:] for sample, at in pairs)])
    if not len(cost):
        return Unavailable("the recorder timed itself in no undisturbed step")
    duration = np.concatenate([none_ns, *(sample.duration_ns[at:] for sample, at in pairs)])
    kind = np.concatenate([none_ns, *(sample.kind[at:] for sample, at in pairs)])
    num_of_kind = np.sum([sample.num_of_kind for sample in samples], axis=0)
    ordered = np.sort(cost)
    is_timed = duration > 0
    ratios = cost[is_timed] / duration[is_timed]
    in_order = np.sort(ratios)
    none = Unavailable("the measured steps have no duration")
    host_ns = _weigh(cost.astype(np.float64), kind, num_of_kind)
    return Overhead(
        num_steps=len(cost),
        is_warmup_only=is_warmup_only,
        median_ns=interpolate_percentile(ordered, 0.5),
        p95_ns=interpolate_percentile(ordered, 0.95),
        max_ns=int(ordered[-1]),
        median_ratio=interpolate_percentile(in_order, 0.5) if len(ratios) else none,
        p95_ratio=interpolate_percentile(in_order, 0.95) if len(ratios) else none,
        max_ratio=float(in_order[-1]) if len(ratios) else none,
        host_ns=host_ns,
        host_ratio=_weigh(ratios, kind[is_timed], num_of_kind) if len(ratios) else none,
        has_device=has_device,
        starved_ratio=_measure_starved(samples, host_ns) if has_device else Unavailable(_NO_DEVICE),
    )


def _weigh(values: Floats, kind: Int64s, num_of_kind: Int64s) -> float:
    """Medians of each kind of steps; without the kinds that were never timed."""
    timed = np.unique(kind)
    medians = [float(np.median(values[kind == one])) for one in timed]
    return float(np.average(medians, weights=np.maximum(num_of_kind[timed], 1)))


def _measure_starved(samples: Sequence[OverheadSamples], host_ns: float) -> float | Unavailable:
    leads = [lead for sample in samples if (lead := known(sample.lead_ns)) is not None]
    lead_ns = np.concatenate([np.empty(0, dtype=np.int64), *leads])
    return float(np.mean(lead_ns < host_ns)) if len(lead_ns) else Unavailable(_NO_MARKS)
