"""What the monitor answers with: frozen values. What is not known is `Unavailable` with its reason.

Ratios are of 0..1, times in ns, rates per second. Every ratio of a step is the median over the
steps read, so that one odd step decides nothing.
"""

from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.advice import MIN_DATA_PARALLEL_RATIO, MIN_STALL_RATIO, NEAR_RATIO
from meshscope.core.verdict.severity import Severity

WINDOWS = (1, 10, 50)
"""Steps over which rates are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorThresholds:
    """Limits of bottlenecks; those of the rules where a rule has the same cause."""

    min_steps: int = 5
    """Fewer steps give no verdict."""
    communication_ratio: float = MIN_DATA_PARALLEL_RATIO.default
    """Exposed communication of an axis, of the step."""
    input_ratio: float = MIN_STALL_RATIO.default
    """Waiting for data, of the step."""
    bubble_excess_ratio: float = 0.05
    """Pipeline utilisation below what the plain schedule reaches."""
    memory_used_ratio: float = NEAR_RATIO.default
    """Share of the device's memory, or of the host's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRate:
    """The newest steps, the gaps before them included."""

    num_steps: int
    step_ns: float
    """Wall-clock time per step."""
    tokens_per_s: float | Unavailable
    """Tokens of the whole job."""
    device_tokens_per_s: float | Unavailable
    """The job's divided by its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorStats:
    """Counts and sums since the last reset, of this rank."""

    num_steps: int
    """Finished steps that were read: all, or the newest 20,000."""
    num_forwards: int
    num_backwards: int
    forward_ns: int
    """Sums of self times; host times, where `clock` says so: the time to issue work."""
    backward_ns: int
    optimizer_ns: int
    data_ns: int
    clock: str
    """`host` or `device`: of forward, backward and optimizer."""
    exposed_communication_ns: int | Unavailable
    """Time in which communication held this rank up, waiting for others included."""
    wall_ns: int
    """From the first step's begin to the last one's end."""
    num_tokens: int | Unavailable
    """Tokens of this rank."""
    windows: dict[int, WindowRate]
    """By window size in steps; a window that is not full has a smaller `num_steps`."""
    rss_bytes: int | Unavailable
    allocated_bytes: int | Unavailable
    peak_allocated_bytes: int | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Something that costs time, or will end the run."""

    category: str
    """`communication`, `dp`, `tp`, `pp`, `input`, `memory`."""
    severity: Severity
    description: str
    suggested_fix: str
    recoverable_ns: int | None
    """At most so much per step; None where it is not about time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAnalysis:
    """What the numbers say about this rank, over the newest steps."""

    num_steps: int
    step_ns: float | Unavailable
    tokens_per_s: float | Unavailable
    device_tokens_per_s: float | Unavailable
    forward_ns: float | Unavailable
    """Mean per step."""
    backward_ns: float | Unavailable
    clock: str
    communication_ratio: float | Unavailable
    """Exposed communication, of the step: what overlaps with computing is not in it."""
    communication_ratio_by_axis: dict[str, float]
    input_ratio: float | Unavailable
    memory_efficiency_ratio: float | Unavailable
    """At the peak: tensors, of what the allocator has taken from the device."""
    memory_used_ratio: float | Unavailable
    """Share of the device's memory at the peak, or of the host's limit now."""
    pipeline_utilization_ratio: float | Unavailable
    """Time inside pipeline actions, of the step without its update."""
    pipeline_plain_ratio: float | Unavailable
    """What GPipe and 1F1B reach with as many stages, chunks and microbatches."""
    tp_efficiency_ratio: float | Unavailable
    """1 − exposed communication over tp, of the step."""
    dp_efficiency_ratio: float | Unavailable
    mfu_ratio: float | Unavailable
    """MFU of this rank, by its own step; above 1 something is wrong."""
    bottlenecks: tuple[Bottleneck, ...]
    """The one that costs most first; empty with too few steps."""
    has_verdict: bool
    """Whether there were enough steps to look for bottlenecks."""
