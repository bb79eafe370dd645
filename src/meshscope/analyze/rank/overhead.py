"""What recording cost: the time inside the recorder on the steps in which it timed itself.

The recorder times its own hooks and calls on one step in 17. Warm-up steps are left out, because
the first one also opens the files. This is time of the host. Without a device the training thread
loses it. With one it loses only what the device waited for: where the host is ahead by more than
the recorder takes in a step, the device has work all the while. So of the host's time the share
counts that lies at marks which the device reached too soon. Without marks on the device the host's
time is a bound, and nothing else is known.

Steps that are marked on the device cost more than others, and only some of short steps are marked:
medians of both kinds are weighted by how many there are of each.

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
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.columns import Columns, int64_column

_NO_MARKS = "no mark on the device says whether it had work meanwhile"
_NO_DEVICE = "no accelerator was in use"


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
    """Of the host, per step: medians of marked and other steps, weighted by their number."""
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
    is_marked: Bools
    """Whether the step has marks on the device."""
    num_warmup: int
    """First entries that are of warm-up steps."""
    marked_ratio: float
    """Share of all steps after warm-up that have marks on the device."""
    lead_ns: Int64s | Unavailable
    """At marks after warm-up; see `MarkLeads`."""


def sample_overhead(
    steps: Columns, ordered_step: Int64s, num_warmup: int, leads: MarkLeads | Unavailable
) -> OverheadSamples:
    """The rows of a rank's step table in which the recorder timed itself.

    `leads` is Unavailable without marks: because there is no device, or in spite of one.
    """
    cost = int64_column(steps, "recorder_ns")
    measured = np.flatnonzero(cost >= 0)
    start = int64_column(steps, "start_host_mono_ns")[measured]
    found = known(leads)
    marked = np.empty(0, dtype=np.int64) if found is None else np.unique(found.step)
    num_after = max(len(ordered_step) - num_warmup, 1)
    return OverheadSamples(
        cost_ns=cost[measured],
        duration_ns=int64_column(steps, "end_host_mono_ns")[measured] - start,
        is_marked=np.isin(int64_column(steps, "step")[measured], ordered_step[marked]),
        num_warmup=int(np.searchsorted(measured, num_warmup)),
        marked_ratio=float(np.count_nonzero(marked >= num_warmup)) / num_after,
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
        return Unavailable("the recorder timed itself in no step")
    duration = np.concatenate([none_ns, *(sample.duration_ns[at:] for sample, at in pairs)])
    is_marked = np.concatenate([none_ns, *(s.is_marked[at:] for s, at in pairs)]).astype(bool)
    marked_ratio = float(np.mean([sample.marked_ratio for sample in samples]))
    ordered = np.sort(cost)
    is_timed = duration > 0
    ratios = cost[is_timed] / duration[is_timed]
    in_order = np.sort(ratios)
    none = Unavailable("the measured steps have no duration")
    host_ns = _weigh(cost.astype(np.float64), is_marked, marked_ratio)
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
        host_ratio=_weigh(ratios, is_marked[is_timed], marked_ratio) if len(ratios) else none,
        has_device=has_device,
        starved_ratio=_measure_starved(samples, host_ns) if has_device else Unavailable(_NO_DEVICE),
    )


def _weigh(values: Floats, is_marked: Bools, marked_ratio: float) -> float:
    """Medians of both kinds of steps; of the one kind, where the other was never timed."""
    if not is_marked.any() or is_marked.all():
        return float(np.median(values))
    marked, other = float(np.median(values[is_marked])), float(np.median(values[~is_marked]))
    return marked_ratio * marked + (1 - marked_ratio) * other


def _measure_starved(samples: Sequence[OverheadSamples], host_ns: float) -> float | Unavailable:
    leads = [lead for sample in samples if (lead := known(sample.lead_ns)) is not None]
    lead_ns = np.concatenate([np.empty(0, dtype=np.int64), *leads])
    return float(np.mean(lead_ns < host_ns)) if len(lead_ns) else Unavailable(_NO_MARKS)
