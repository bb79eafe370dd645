"""Device time per phase: the accelerator's marks joined to the host spans they belong to.

A device span runs from the phase's first mark on the stream to its last, idle time included. Its
own time excludes the device spans of nested phases. The device runs behind the host, so a phase's
device time may fall after its host time; it belongs to the step of the host span.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.rank.phases import PhaseSpans, sum_by_interval
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording

NO_ACCELERATOR = "no accelerator was used by this process"
NO_EVENTS = "recorded without device events"
_NUM_SIDE_STEPS = 32
"""Steps before and after whose marks bound where a device's time line lies on the host's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """Device time of one rank's steps, without the warm-up steps."""

    phase_ns: Mapping[str, int]
    """Own device time per phase, summed over the steps."""
    num_steps: int
    """Steps with any device span; the last ones may not have been read back."""
    num_unmatched: int
    """Device spans left out because their host span is not recorded."""


def split_device_time(
    spans: PhaseSpans,
    device_spans: Columns,
    names: Mapping[int, str],
    *,
    is_steady: Bools,
) -> DeviceSplit:
    """Device time per phase over the steady steps."""
    host_row = join_spans(spans, device_spans)
    is_matched = host_row >= 0
    duration = int64_column(device_spans, "duration_ns")
    device_ns = np.zeros(len(spans.start_ns), dtype=np.int64)
    # A phase has several device spans if a profiler saw the device's gaps.
    np.add.at(device_ns, host_row[is_matched], duration[is_matched])
    own_ns = device_ns - _children_sum(spans, device_ns)
    table, phases = sum_by_interval(spans, own_ns, names, num_intervals=2 * len(is_steady) + 1)
    steady = table[1::2][is_steady]
    totals = steady.sum(axis=0).tolist()
    return DeviceSplit(
        phase_ns={name: ns for name, ns in zip(phases, totals, strict=True) if ns},
        num_steps=int(np.count_nonzero(steady.any(axis=1))),
        num_unmatched=int(np.count_nonzero(~is_matched)),
    )


def explain_no_device(recording: Recording, memory: Columns) -> Unavailable:
    """Why a rank has no device spans."""
    if bool((int64_column(memory, "allocated_bytes") >= 0).any()) or _saw_devices(recording):
        return Unavailable(NO_EVENTS)
    return Unavailable(NO_ACCELERATOR)


def explain_no_job_device(reasons: Collection[str]) -> Unavailable:
    """Why a job has no device spans, from why each of its ranks has none."""
    if set(reasons) == {NO_ACCELERATOR}:
        return Unavailable("no rank used an accelerator")
    if NO_ACCELERATOR not in reasons:
        return Unavailable("; ".join(dict.fromkeys(reasons)))
    num_with = sum(reason != NO_ACCELERATOR for reason in reasons)
    noun = "rank" if num_with == 1 else "ranks"
    return Unavailable(f"{num_with} {noun} {NO_EVENTS}, the others used no accelerator")


def _saw_devices(recording: Recording) -> bool:
    provenance = recording.header.get("provenance")
    facts = provenance.get("torch") if isinstance(provenance, dict) else None
    return isinstance(facts, dict) and bool(facts.get("devices"))


def join_spans(spans: PhaseSpans, device_spans: Columns) -> npt.NDArray[np.int64]:
    """For each device span the row of its host span, by start and name; -1 without one."""
    starts = int64_column(device_spans, "host_start_host_mono_ns")
    names = device_spans["name_id"]
    order = np.argsort(spans.start_ns, kind="stable")
    sorted_starts = spans.start_ns[order]
    position = np.searchsorted(sorted_starts, starts, side="left")
    found = np.full(len(starts), -1, dtype=np.int64)
    open_rows = np.arange(len(starts))
    # Nested phases may begin in the same nanosecond: walk along equal starts, a few at most.
    while len(open_rows):
        at = position[open_rows]
        in_range = at < len(order)
        open_rows, at = open_rows[in_range], at[in_range]
        same_start = sorted_starts[at] == starts[open_rows]
        open_rows, at = open_rows[same_start], at[same_start]
        same_name = spans.name_id[order[at]] == names[open_rows]
        found[open_rows[same_name]] = order[at[same_name]]
        open_rows = open_rows[~same_name]
        position[open_rows] += 1
    return found


def tighten_offsets(low_ns: Int64s, step: Int64s) -> Int64s:
    """For each device span the highest lower bound of its clock's offset among the steps around."""
    if not len(low_ns):
        return low_ns
    numbers, index = np.unique(step, return_inverse=True)
    bound = np.full(len(numbers), low_ns.min(), dtype=np.int64)
    np.maximum.at(bound, index, low_ns)
    padded = np.pad(bound, _NUM_SIDE_STEPS, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * _NUM_SIDE_STEPS + 1)
    return np.asarray(around.max(axis=1)[index], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MarkLeads:
    """How much work a device had left when its host marked the begin or the end of a phase."""

    step: Int64s
    """Index of the mark's step, in order of time."""
    lead_ns: Int64s
    """By which the host was ahead, at least."""


def measure_leads(spans: PhaseSpans, device_spans: Columns) -> MarkLeads:
    """Of all marks inside steps.

    The device reaches a mark when all that was launched before it is done. Where its time line lies
    on the host's clock is known from below, by the mark that it reached soonest among the steps
    around: a lead may be longer, and one that seems to be none may be one.
    """
    host_row = join_spans(spans, device_spans)
    kept = host_row >= 0
    kept[kept] &= (spans.interval[host_row[kept]] & 1 == 1) & (spans.interval[host_row[kept]] > 0)
    host_row = host_row[kept]
    step = spans.interval[host_row] // 2
    offset = tighten_offsets(int64_column(device_spans, "offset_min_ns")[kept], step)
    start = int64_column(device_spans, "start_device_ns")[kept] + offset
    lead = start - spans.start_ns[host_row]
    device_ns = int64_column(device_spans, "duration_ns")[kept]
    lead_at_end = lead + device_ns - spans.duration_ns[host_row]
    return MarkLeads(step=np.concatenate([step, step]), lead_ns=np.concatenate([lead, lead_at_end]))


def _children_sum(spans: PhaseSpans, values: Int64s) -> Int64s:
    """For each span the sum of `values` over the spans directly inside it.

    In order of their ends, inner before outer, the parent of a span at depth d is the next one at
    depth d - 1, provided that it contains it (its record may have been lost).
    """
    total = np.zeros(len(values), dtype=np.int64)
    end = spans.start_ns + spans.duration_ns
    order = np.lexsort((-spans.depth.astype(np.int64), end))
    depth = spans.depth[order]
    for level in range(1, int(depth.max(initial=0)) + 1):
        children = np.flatnonzero(depth == level)
        parents = np.flatnonzero(depth == level - 1)
        at = np.searchsorted(parents, children)
        has_parent = at < len(parents)
        child, owner = order[children[has_parent]], order[parents[at[has_parent]]]
        inside = (spans.start_ns[owner] <= spans.start_ns[child]) & (end[child] <= end[owner])
        np.add.at(total, owner[inside], values[child[inside]])
    return total
