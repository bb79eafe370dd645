"""What limits a device in a trace, in one sentence, and what to do about it.

The largest part of its time that is no compute is named if it is more than MIN_RATIO of it: waiting
for the host, for other ranks' data, for copies, for itself. Otherwise the device is busy, and the
largest category of its kernels is named, with its distance from the roofline where that is known.
Where the other ranks' traces are there, what it waited for them is told apart from what it sent.
Without a device the same is said of the main thread; Python and the optimizer are named only where
they take more than all operators, because the profiler makes them slower.
Not a finding with a price: `meshscope report` has those.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshscope.analyze.device.trace_launches import LaunchQueue
from meshscope.analyze.device.trace_summary import DeviceSummary, TraceSummary
from meshscope.core import unit_text
from meshscope.core.kernel_names import KernelCategory
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.kineto import OPEN_LIST, lacks_end
from meshscope.ingest.traces.trace_steps import StepSource

MIN_RATIO = 0.10
_SHORT_RATIO = 0.5
_SLOW_RATIO = 0.3
_LITTLE_RATIO = 0.002
_UNMATCHED_RATIO = 0.1
"""Of exposed communication; with more, waiting is not told from transfer."""
_PLAIN_FLOAT32 = re.compile(r"(?<!16)sgemm(?!.*tf32)|_f32f32_f32f32_")
"""Names of NVIDIA's matrix products in float32; those on matrix units say tf32 or 1688."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceVerdict:
    """Of one device, or of a host without one."""

    cause: str
    """`host`, `synchronising`, `communication`, `waiting` for other ranks, `copies`, `dependency`,
    `unknown`, `kernels`; `little work`, or `incomplete` where the trace lacks its end. Of a host
    `loading`, `communication`, `waiting`, `optimizer`, `python`, `operators`, or `unseen` where the
    device's work was not recorded."""
    share_ratio: float
    """Of the device's time, or the main thread's."""
    text: str
    """One sentence."""
    advice: str
    """What to do; "" where nothing is known that would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersPart:
    """What a rank waited for others, which of them came last most often, if any did, and where that
    is not known."""

    wait_ns: int
    late_rank: int | None
    unmatched_ns: int = 0
    """In operations of which some rank's trace is missing: whom it waited for is not known."""


def judge(summary: TraceSummary, others: OthersPart | None = None) -> TraceVerdict | Unavailable:
    """The verdict on the busiest device of a trace, without one on its host; `others` where traces
    of them tell."""
    if not summary.devices and not summary.host.total_ns:
        return Unavailable("neither a device nor operators in this trace")
    if any(lacks_end(warning) for warning in summary.warnings):
        return TraceVerdict(
            cause="incomplete",
            share_ratio=0.0,
            text="The trace is cut off: what limits the program is not known.",
            advice="Record it again, and let the profiler finish writing before the program ends.",
        )
    if not summary.devices:
        return _judge_host(summary, others)
    device = max(summary.devices, key=lambda one: one.breakdown.time.busy_ns)
    work_ns = device.breakdown.time.busy_ns
    host_ns = summary.host.total_ns - summary.unrecorded_ns
    if work_ns < _LITTLE_RATIO * host_ns:
        return TraceVerdict(
            cause="little work",
            share_ratio=work_ns / host_ns,
            text=f"The device works {unit_text.duration(work_ns)} in a trace of "
            f"{unit_text.duration(host_ns)}: too little to say what limits the program.",
            advice="Record later steps, after the start of the program and its compilation.",
        )
    return _judge_device(device, others, summary.unrecorded_ns)


def _judge_device(
    device: DeviceSummary, others: OthersPart | None, unrecorded_ns: int
) -> TraceVerdict:
    time, idle = device.breakdown.time, device.idle
    whole = max(time.total_ns - unrecorded_ns, 1)
    wait_ns = min(others.wait_ns, time.exposed_ns) if others else 0
    host_ns = idle.host_ns + idle.launch_ns + idle.communicating_ns
    off_ns = min(unrecorded_ns, host_ns)  # the rest is unknown where calls are not in the trace
    parts = {
        "host": host_ns - off_ns,
        "synchronising": idle.synchronising_ns,
        "communication": time.exposed_ns - wait_ns,
        "waiting": wait_ns,
        "copies": time.exposed_copy_ns,
        "dependency": idle.dependency_ns,
        "unknown": max(idle.unknown_ns - (unrecorded_ns - off_ns), 0),
    }
    cause, ns = max(parts.items(), key=lambda item: item[1])
    ratio = ns / whole
    if ratio < MIN_RATIO:
        return _judge_kernels(device, whole)
    percent = _percent(ratio)
    text, advice = {
        "host": (
            f"The device waits for its host {percent} of the time.",
            _advise_host(device.launches),
        ),
        "synchronising": (
            f"{percent} of the time the device has nothing to do because the host waited for it.",
            "Take .item(), .cpu(), print of tensors and cudaStreamSynchronize out of the loop.",
        ),
        "communication": (
            f"{percent} of the time the device communicates and computes nothing.",
            _advise_communication(device, others),
        ),
        "waiting": (
            f"{percent} of the time the device waits for other ranks in communication.",
            _advise_waiting(others),
        ),
        "copies": (
            f"{percent} of the time the device only copies.",
            "Pin host memory and copy with non_blocking=True on a separate stream.",
        ),
        "dependency": (
            f"{percent} of the time queued work waits for another stream or an event.",
            "Look at what the streams wait for: collectives of other groups, events, a graph's own "
            "order, or work that was launched before the trace began and is not in it.",
        ),
        "unknown": (
            f"The device is idle {percent} of the time; the trace lacks the calls that show why.",
            "Record ProfilerActivity.CPU as well.",
        ),
    }[cause]
    return TraceVerdict(cause=cause, share_ratio=ratio, text=text, advice=advice)


def _judge_host(summary: TraceSummary, others: OthersPart | None) -> TraceVerdict:
    """Of a program on CPUs: what its main thread did."""
    if summary.recognition.num_unseen:
        return TraceVerdict(
            cause="unseen",
            share_ratio=0.0,
            text="The program launched device work, and none of it is in the trace.",
            advice="Record the device's activity, too (ProfilerActivity.CUDA).",
        )
    time = summary.host.time
    whole = max(time.total_ns - summary.unrecorded_ns, 1)
    wait_ns = min(others.wait_ns, time.exposed_ns) if others else 0
    parts = {
        "loading": time.loading_ns,
        "communication": time.exposed_ns - wait_ns,
        "waiting": wait_ns,
    }
    rest = {
        "optimizer": time.optimizer_ns,
        "python": max(time.other_ns - summary.unrecorded_ns, 0),
    }
    if max(parts.values()) < MIN_RATIO * whole:
        if max(rest.values()) <= time.operator_ns:
            return _judge_operators(summary, time.operator_ns / whole)
        parts = rest
    cause, ns = max(parts.items(), key=lambda item: item[1])
    percent = _percent(ns / whole)
    text, advice = {
        "loading": (
            f"The main thread waits for data {percent} of the time.",
            "Give the DataLoader more workers, or let it do less for each sample.",
        ),
        "communication": (
            f"{percent} of the time the program communicates and runs no operator.",
            "Overlap it with compute, or send less."
            if others is not None
            else "Overlap it with compute, send less, or find the rank that the others wait for; "
            "that takes the traces of all ranks.",
        ),
        "waiting": (
            f"{percent} of the time the program waits for other ranks in communication.",
            _advise_waiting(others),
        ),
        "optimizer": (
            f"The optimizer takes {percent} of the time.",
            "Update many tensors in one call: foreach=True, or fused=True.",
        ),
        "python": (
            f"{percent} of the time no operator runs: that is Python, or was not recorded.",
            "Use with_stack=True to see which functions; the profiler itself slows Python.",
        ),
    }[cause]
    return TraceVerdict(cause=cause, share_ratio=ns / whole, text=text, advice=advice)


def _judge_operators(summary: TraceSummary, ratio: float) -> TraceVerdict:
    text = f"The main thread is in operators {_percent(ratio)} of the time."
    if summary.host.operators:
        most = summary.host.operators[0]
        text = (
            f"{text[:-1]}, most of it in {most.name} ({_percent(most.share_ratio)} of all "
            "operators' own time)."
        )
    return TraceVerdict(cause="operators", share_ratio=ratio, text=text, advice="")


def _percent(ratio: float) -> str:
    return f"{ratio:.0%}".replace("%", " %")


def _advise_host(launches: LaunchQueue | Unavailable) -> str:
    if not isinstance(launches, Unavailable) and launches.short_ratio >= _SHORT_RATIO:
        return (
            f"{launches.short_ratio:.0%} of its work takes 10 µs or less: compile or capture "
            "graphs, fuse, or give the device a larger batch."
        ).replace("%", " %")
    return "Find what the host does between launches: input, Python, synchronous calls."


def _advise_communication(device: DeviceSummary, others: OthersPart | None) -> str:
    rows = sorted(device.communication, key=lambda row: -row.exposed_ns)
    where = f"{rows[0].kind} along {rows[0].axis}" if rows else "it"
    time = device.breakdown.time
    if others is not None and others.unmatched_ns < _UNMATCHED_RATIO * time.exposed_ns:
        return f"Overlap {where} with compute, or send less: it is the transfer that takes time."
    return (
        f"Overlap {where} with compute, send less, or find the rank that the others wait for; "
        "that takes the traces of all ranks."
    )


def _advise_waiting(others: OthersPart | None) -> str:
    if others is not None and others.late_rank is not None:
        return f"Rank {others.late_rank} comes last most often: --rank {others.late_rank} shows it."
    return "The critical path shows which rank it waits for; `meshscope report` prices causes."


def _judge_kernels(device: DeviceSummary, whole_ns: int) -> TraceVerdict:
    ratio = device.breakdown.time.compute_ns / whole_ns
    own = [row for row in device.categories if row.category is not KernelCategory.COMMUNICATION]
    if not own:
        return TraceVerdict(
            cause="kernels", share_ratio=ratio, text="The device is busy.", advice=""
        )
    most = own[0]
    text = (
        f"The device computes {ratio:.0%} of the time, mostly {most.category} "
        f"({most.share_ratio:.0%} of device time)."
    )
    coverage = device.coverage
    advice = ""
    if _lacks_matrix_units(device):
        advice = (
            "Its products run in float32 without matrix units: use bfloat16, or allow tf32 with "
            "torch.set_float32_matmul_precision('high')."
        )
    elif not isinstance(coverage.roofline_ratio, Unavailable):
        advice = f"Operators of known cost run at {coverage.roofline_ratio:.0%} of the roofline"
        advice += (
            ": look at the slowest rows below." if coverage.roofline_ratio < _SLOW_RATIO else "."
        )
    elif most.category in (KernelCategory.ELEMENTWISE, KernelCategory.COPY):
        advice = "Fuse: torch.compile joins operators that only move data."
    return TraceVerdict(
        cause="kernels",
        share_ratio=ratio,
        text=text.replace("%", " %"),
        advice=advice.replace("%", " %"),
    )


def _lacks_matrix_units(device: DeviceSummary) -> bool:
    """Whether most of the time of the device's products is in plain float32, and most of its
    time in products."""
    own = [row for row in device.kernels if row.category is KernelCategory.GEMM]
    plain_ns = sum(row.total_ns for row in own if _PLAIN_FLOAT32.search(row.name))
    return 2 * plain_ns > sum(row.total_ns for row in device.kernels)


class _OfRank(Protocol):
    """A summary, or an outline, of one trace."""

    @property
    def rank(self) -> int | Unavailable: ...

    @property
    def world_size(self) -> int | Unavailable: ...


def find_missing_ranks(traces: Sequence[_OfRank]) -> list[str]:
    """Of which ranks of the job there is no trace, and of which more than one."""
    sizes = {one.world_size for one in traces if isinstance(one.world_size, int)}
    num_of = Counter(one.rank for one in traces if isinstance(one.rank, int))
    world_size, found = max(sizes, default=0), []
    if num_of and world_size > len(num_of):
        found.append(
            f"traces of only {len(num_of):,} of {world_size:,} ranks: whether these waited for the "
            "others is not known"
        )
    most, num = num_of.most_common(1)[0] if num_of else (0, 0)
    if num > 1:
        found.append(
            f"{num:,} traces name rank {most}: they are of different steps, of different jobs, or "
            "copies"
        )
    return found


def list_unknown(summaries: Sequence[TraceSummary], left_out: Sequence[str]) -> tuple[str, ...]:
    """What traces cannot tell, for the document and the screen."""
    found = [f"left out: {text}" for text in left_out] + find_missing_ranks(summaries)
    sources = {one.step_source for one in summaries} - {StepSource.PROFILER}
    found += [f"steps are {source.words}" for source in sorted(sources)]
    found += [
        f"{one.source}: {warning}"
        for one in summaries
        for warning in one.warnings
        if lacks_end(warning) or warning == OPEN_LIST
    ]
    return tuple(found)
