"""Decides when phases are marked on the accelerator, and hands what comes back to the store.

Marking costs about 10 µs of host time a phase on a device of one's own and 100 where ranks share
one; a pipeline has two phases for each microbatch. So it is timed: where it takes more than
`MAX_SHARE` of steps and the gaps between them, one step in 2, 4, 8 … is marked (`chosen_steps`).
The first steps may cost twice that where they would else have fewer than one mark in
`_EARLY_STRIDE`: a short run is to have enough marks.
Steps whose operations are recorded where those of others are not are marked, too. An accelerator is
used when the program uses it; none is ever woken up.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from meshscope.capture.steps.chosen_steps import MAX_STRIDE, is_chosen
from meshscope.capture.steps.device_events import DeviceScalar, DeviceTimeline, find_backend
from meshscope.capture.steps.timeline import Timeline

MAX_SHARE = 0.003
_EARLY_STEPS, _EARLY_STRIDE, _EARLY_FACTOR = 64, 4, 2
_NUM_COSTS = 8
_MIN_COSTS = 3
"""Steps that are marked before the first choice."""
_SLACK = 0.5
"""The stride is halved only if the cost then stays below this part of what is allowed, so that
ranks do not go to and fro."""


class Marking:
    """The device of one rank, once the program has one."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Callable[[], int],
        put_span: Callable[..., None],
        put_scalar: Callable[[DeviceScalar, float], None],
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._put_span = put_span
        self._put_scalar = put_scalar
        self.is_wanted = True
        self._last_end_ns = 0
        self._costs: deque[int] = deque(maxlen=_NUM_COSTS)
        """Of steps that were marked, with what was read since the one before."""
        self._stride = 1
        self._num_steps = 0
        """On the device."""
        self.device: DeviceTimeline | None = None
        self.on_probe: Callable[[Any, int], None] | None = None
        """Hears of every probe of the device's clock."""

    @property
    def num_given_up(self) -> int:
        """Steps whose marks the device never reached."""
        return self.device.num_given_up if self.device is not None else 0

    def find(self) -> DeviceTimeline | None:
        """The device in use; marking begins when it is first seen."""
        torch: Any = sys.modules.get("torch")
        if self.device is not None or torch is None or not self.is_wanted:
            return self.device
        found = find_backend(torch)
        if found is None:
            return None
        device_type, index = found
        self.device = device = DeviceTimeline(device_type, torch, index, self._clock)
        device.put_span = self._put_span
        device.put_scalar = self._put_scalar
        if self.on_probe is not None:
            device.probe.listeners.append(self.on_probe)
        self._timeline.mark_device(device)
        self._timeline.next_visit_ns = 0
        return device

    def find_for(self, device_type: str) -> DeviceTimeline | None:
        """The device in use, if it is of that type."""
        device = self.find()
        return device if device is not None and device.device_type == device_type else None

    def end_step(self, end_ns: int) -> None:
        """Called at the end of every step. RuntimeError when the device has failed."""
        device = self.device
        if device is not None and device.end_step(end_ns):
            self._costs.append(device.cost_ns)
            device.cost_ns = 0

    def choose(self, step: int, end_ns: int, *, is_wanted: bool, operation_stride: int = 1) -> None:
        """Chooses whether the next step is marked; `is_wanted`: in any case.

        The first steps are marked no more often than their operations are recorded: marks alone
        say less, and make what is launched behind them slower than their own time shows (12 ms of
        a step with 18 phases on the last of four stages that share an H200, 1.3 ms of them in
        marking).
        """
        device, timeline = self.device, self._timeline
        if device is None:
            return
        duration_ns = end_ns - (self._last_end_ns or timeline.step_start_ns)
        self._last_end_ns = end_ns
        self._num_steps += 1
        self._follow_cost(duration_ns)
        is_early = self._num_steps < _EARLY_STEPS
        stride = max(self._stride, operation_stride) if is_early else self._stride
        is_marked = is_wanted or is_chosen(step + 1, stride)
        if is_marked != (timeline.device is not None):
            timeline.mark_device(device if is_marked else None)

    def _follow_cost(self, step_ns: int) -> None:
        costs = self._costs
        if len(costs) < _MIN_COSTS:
            return
        # Without the largest: the first marks make their events.
        cost_ns = (sum(costs) - max(costs)) / (len(costs) - 1)
        wanted = cost_ns / (MAX_SHARE * max(step_ns, 1))
        if self._num_steps < _EARLY_STEPS and wanted > _EARLY_STRIDE:
            wanted = max(_EARLY_STRIDE, wanted / _EARLY_FACTOR)
        while self._stride < min(wanted, MAX_STRIDE):
            self._stride *= 2
        while self._stride > 1 and wanted < self._stride / 2 * _SLACK:
            self._stride //= 2

    def drop(self) -> None:
        self.device = None
        self._timeline.mark_device(None)

    def drain(self, deadline_ns: int) -> None:
        """Reads what is still under way, without synchronising, until the deadline."""
        if self.device is not None:
            self.device.drain(deadline_ns)
