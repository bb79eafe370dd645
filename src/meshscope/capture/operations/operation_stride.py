"""Records operations in some steps only, where recording all of them would take too much.

A step's operations cost host time, and marks on streams the device's; a model in small pieces has
hundreds in a step. Where they would take more than `MAX_SHARE` of the step's time they are recorded
in one step of 8, 16, … (`chosen_steps`), and in more of the first ones. In between the taps pass
everything on, and steps carry a flag that says so (`StepFlag.UNWATCHED`).

Only where operations run on a device: what the device did is known from kernel samples there, whose
steps are always recorded.
"""

from collections import deque
from statistics import median_low

from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.steps.chosen_steps import MAX_STRIDE, is_chosen

MAX_SHARE = 0.01
"""Of a step's time that recording its operations may take in every step."""
SPARSE_SHARE = 0.0015
"""What it may take in the mean of steps where it would take more than that. Far less, because it
is an estimate: operations that a device waits for cost up to three times as much (10 % of a step
with tensor parallel, where 3 % were expected), and along a pipeline the costs of ranks add up."""
FIRST_STEPS = 2
"""Recorded in any case."""
EARLY_STEPS, EARLY_SHARE, EARLY_STRIDE = 64, 0.004, 16
"""A short run is to have enough of them: the first steps may cost more in the mean, and at least
one in so many is recorded whatever it costs."""
PYTHON_COST_NS = 15_000
KERNEL_COST_NS = 65_000
"""What recording one operation takes the host, seen in Python and by the dispatcher's kernels:
10 and 43 µs in a loop (`benchmarks/operation_cost.py`), and half as much again for caches that a
program keeps busy."""
EVENT_COST_NS = 25_000
"""What an event of an operation or a wait takes, its reading included: on four ranks that share
an H200, pipelined messages with four events each cost 140 µs, functional ones with three 80 µs."""
_NUM_DURATIONS = 8
_NUM_KNOWN = 2
"""Steps after which a step's length and operations are known."""
_SLACK = 0.5
"""The stride is halved only if the cost then stays below this part of what is allowed, so that
ranks and steps do not go to and fro."""


class OperationStride:
    """Decides at the end of a step whether the next one's operations are recorded."""

    def __init__(self, log: OperationLog, follower: Follower) -> None:
        self._log = log
        self._follower = follower
        self._durations: deque[int] = deque(maxlen=_NUM_DURATIONS)
        self._num_steps = 0
        self._last_step = -1
        self._last_end_ns = 0
        self._num_before = 0
        self._num_operations = 0
        """In the last recorded step."""
        self._num_events_before = 0
        self._num_events = 0
        """Likewise."""
        self._steady_stride = self._early_stride = 1

    @property
    def stride(self) -> int:
        """The operations of one step in so many are recorded."""
        is_early = self._num_steps < EARLY_STEPS
        return self._early_stride if is_early else self._steady_stride

    def end_step(self, step: int, start_ns: int, end_ns: int, *, is_wanted: bool) -> None:
        """A step ended; `is_wanted` says that the next one is to be recorded in any case."""
        log, groups = self._log, self._log.groups
        if groups is None or not groups.has_device_group or not (log.is_on or log.is_resting):
            return
        self._count(step, end_ns - (self._last_end_ns or start_ns))
        self._last_end_ns = end_ns
        if not log.is_resting and self._num_steps >= _NUM_KNOWN:
            self._choose()
        if self._num_steps < FIRST_STEPS or is_wanted or is_chosen(step + 1, self.stride):
            log.go_on()
            groups.number_by_step(step + 1)
        elif not log.is_resting:
            self._follower.by_pointer.clear()
            log.rest(step + 1)

    def _count(self, step: int, duration_ns: int) -> None:
        num_operations = self._log.num_calls - self._num_before
        self._num_before = self._log.num_calls
        device = self._follower.device
        num_all = 0 if device is None else device.num_events
        num_events, self._num_events_before = num_all - self._num_events_before, num_all
        if step == self._last_step and self._durations:  # it was gone on with
            self._durations[-1] += duration_ns
            self._num_operations += num_operations
            self._num_events += num_events
            return
        if step < self._last_step:  # a new attempt
            self._num_steps = 0
        self._last_step = step
        self._num_steps += 1
        self._durations.append(duration_ns)
        if not self._log.is_resting:
            self._num_operations, self._num_events = num_operations, num_events

    def _choose(self) -> None:
        cost_ns = KERNEL_COST_NS if self._follower.sees_all else PYTHON_COST_NS
        cost_ns = self._num_operations * cost_ns + self._num_events * EVENT_COST_NS
        share = cost_ns / max(median_low(self._durations), 1)
        if share <= MAX_SHARE * (_SLACK if self._steady_stride > 1 else 1):
            self._steady_stride = self._early_stride = 1
            return
        wanted = share / SPARSE_SHARE
        while self._steady_stride < min(wanted, MAX_STRIDE):
            self._steady_stride *= 2
        while self._steady_stride > 2 and wanted < self._steady_stride // 2 * _SLACK:
            self._steady_stride //= 2
        early = 2
        while early < min(share / EARLY_SHARE, EARLY_STRIDE):
            early *= 2
        self._early_stride = min(early, self._steady_stride)
