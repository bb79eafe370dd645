"""Marks on an accelerator's stream, read later: when the device began and ended each phase.

A mark is a pooled timing event recorded on the current stream; the host never waits for it. About
ten times a second the steps whose last mark has been reached (`query`) are read and written, all
at once: reading costs more than marking, and less when it is done in a row.
Device times count from the first mark and are chained from step to step, because the runtime
gives differences as 32-bit floats in milliseconds, which are fine over a step and coarse over a
day. Placement on the host clock is given as two bounds that hold without any synchronisation.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from meshscope.capture.steps.clock_probe import ClockProbe
from meshscope.capture.steps.stream_events import StreamEvents

_MAX_PENDING_STEPS = 256
"""Steps kept unread; beyond this the oldest is given up and counted (a device that hangs)."""
READ_EVERY_NS = 100_000_000
_NEEDED = ("Event", "Stream", "current_device", "is_initialized")


class Mark:
    """A recorded event and what the host knew when it issued it."""

    __slots__ = ("event", "host_ns", "name_id")

    def __init__(self, name_id: int, host_ns: int, event: Any) -> None:
        self.name_id = name_id
        self.host_ns = host_ns
        self.event = event


class _DeviceSpan:
    """A phase between two marks, waiting to be read."""

    __slots__ = ("begin", "end_event", "microbatch")

    def __init__(self, begin: Mark, end_event: Any, microbatch: int) -> None:
        self.begin = begin
        self.end_event = end_event
        self.microbatch = microbatch


class DeviceScalar:
    """A number on its way from the device into pinned memory."""

    __slots__ = ("cell", "fields")

    def __init__(self, cell: Any, fields: tuple[int, ...]) -> None:
        self.cell = cell
        self.fields = fields
        """What its record holds beside the number; see `ScalarLog`."""


class _PendingStep:
    """What one step left on the device's stream."""

    __slots__ = ("last_event", "scalars", "spans")

    def __init__(self) -> None:
        self.spans: list[_DeviceSpan] = []
        self.scalars: list[DeviceScalar] = []
        self.last_event: Any = None


class DeviceTimeline:
    """Pooled events of one device, "cuda" or another type whose torch module has the same shape."""

    def __init__(self, device_type: str, torch: Any, device_index: int, clock: Callable[[], int]):
        self._torch = torch
        self._backend = backend = getattr(torch, device_type)
        self.device_type = device_type
        self._clock = clock
        self._events = StreamEvents(backend)
        self._free_events = self._events.free
        self._free_cells: list[Any] = []
        self._open = _PendingStep()
        self._pending: deque[_PendingStep] = deque()
        self._anchor: Any = None
        self._anchor_device_ns = 0
        self._next_read_ns = 0
        self.device_index = device_index
        self.probe = ClockProbe(backend, clock)
        self.probe.listeners.append(self._note_probe)
        self._probe_offset_ns: int | None = None
        self.num_given_up = 0
        self.cost_ns = 0
        """What marking and reading took the host; whoever looks sets it back."""
        self.put_span: Callable[[int, int, int, int, int, int, int], None] | None = None
        self.put_scalar: Callable[[DeviceScalar, float], None] | None = None
        self._is_capturing = self._events.is_capturing

    def mark(self, name_id: int, host_ns: int) -> Mark | None:
        """Marks the begin of a phase; None while a graph is being captured."""
        if self._is_capturing():
            return None  # an event recorded now would become part of the user's graph
        start_ns = self._clock()
        event = self._events.record()
        self.cost_ns += self._clock() - start_ns
        return Mark(name_id, host_ns, event)

    def close_span(self, begin: Mark, microbatch: int) -> None:
        """Marks the end of the phase that `begin` opened."""
        if self._is_capturing():
            self._free_events.append(begin.event)
            return
        start_ns = self._clock()
        event = self._events.record()
        self.cost_ns += self._clock() - start_ns
        self._open.spans.append(_DeviceSpan(begin, event, microbatch))
        self._open.last_event = event

    def forget(self, begin: Mark) -> None:
        """Takes back the begin of a phase that is none."""
        self._free_events.append(begin.event)

    def take_scalar(self, tensor: Any, fields: tuple[int, ...]) -> None:
        """Sends a one-element tensor towards the host without waiting for it."""
        if self._is_capturing():
            return
        cell = self._free_cells.pop() if self._free_cells else self._new_cell()
        cell.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._open.scalars.append(DeviceScalar(cell, fields))
        self._open.last_event = None  # must be covered by an event that comes after it

    def _new_cell(self) -> Any:
        return self._torch.empty((), dtype=self._torch.float64, pin_memory=True)

    def end_step(self, now_ns: int) -> int:
        """Closes the step's account, and says how many phases it has; now and then reads the
        steps the device has finished."""
        if self._is_capturing():
            return 0  # a step inside a graph: even asking for an event would break the capture
        step = self._open
        num_phases = len(step.spans)
        if step.spans or step.scalars:
            if step.last_event is None:
                step.last_event = self._events.record()
                step.spans.append(_DeviceSpan(Mark(0, 0, None), step.last_event, 0))
            self._pending.append(step)
            self._open = _PendingStep()
        self.probe.visit(now_ns)
        if now_ns >= self._next_read_ns or len(self._pending) > _MAX_PENDING_STEPS:
            self._next_read_ns = now_ns + READ_EVERY_NS
            start_ns = self._clock()
            self.read_finished()
            self.cost_ns += self._clock() - start_ns
            while len(self._pending) > _MAX_PENDING_STEPS:
                self._pending.popleft()
                self.num_given_up += 1
        return num_phases

    def _note_probe(self, event: Any, issued_ns: int) -> None:
        if self._anchor is not None:
            at_ns = self._anchor_device_ns + _elapsed_ns(self._anchor, event)
            self._probe_offset_ns = issued_ns - at_ns

    def read_finished(self) -> None:
        """Writes out the steps whose last mark has been reached."""
        pending = self._pending
        while pending and pending[0].last_event.query():
            self._read(pending.popleft(), self._clock())

    def drain(self, deadline_ns: int) -> None:
        """Polls at the end of a run, without synchronising, until all is read or time is up."""
        self.end_step(self._clock())
        while self._pending and self._clock() < deadline_ns:
            self.read_finished()
        self.num_given_up += len(self._pending)

    def _read(self, step: _PendingStep, seen_ns: int) -> None:
        spans = [span for span in step.spans if span.begin.event is not None]
        if spans:
            self._read_spans(spans, seen_ns)
        for scalar in step.scalars:
            if self.put_scalar is not None:
                self.put_scalar(scalar, float(scalar.cell))
            self._free_cells.append(scalar.cell)
        for span in step.spans:
            if span.begin.event is None:
                self._free_events.append(span.end_event)

    def _read_spans(self, spans: list[_DeviceSpan], seen_ns: int) -> None:
        anchor = spans[0].begin.event
        if self._anchor is not None:
            self._anchor_device_ns += _elapsed_ns(self._anchor, anchor)
            self._free_events.append(self._anchor)
        self._anchor = anchor
        starts = [self._anchor_device_ns + _elapsed_ns(anchor, s.begin.event) for s in spans]
        durations = [_elapsed_ns(s.begin.event, s.end_event) for s in spans]
        offset_min = max(s.begin.host_ns - at for s, at in zip(spans, starts, strict=True))
        if self._probe_offset_ns is not None:
            offset_min = max(offset_min, self._probe_offset_ns)
        last_ns = max(at + length for at, length in zip(starts, durations, strict=True))
        for span, start_ns, duration_ns in zip(spans, starts, durations, strict=True):
            if self.put_span is not None:
                self.put_span(
                    span.begin.name_id | self.device_index << 16,
                    span.begin.host_ns,
                    start_ns,
                    duration_ns,
                    offset_min,
                    seen_ns - last_ns,
                    span.microbatch,
                )
            self._free_events.append(span.end_event)
            if span.begin.event is not anchor:
                self._free_events.append(span.begin.event)


def _elapsed_ns(begin: Any, end: Any) -> int:
    return 0 if begin is end else round(begin.elapsed_time(end) * 1e6)


def find_backend(torch: Any) -> tuple[str, int] | None:
    """The accelerator this process already uses, as (type, device index); never starts one.

    Others than CUDA and XPU are those that a package adds to torch under a name of its own, such as
    `npu`, if their module has what marks need.
    """
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and getattr(backend, "is_initialized", lambda: False)():
            return name, int(backend.current_device())
    find_name = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    name = "" if find_name is None else str(find_name())
    backend = getattr(torch, name, None) if name else None
    if backend is None or not all(hasattr(backend, one) for one in _NEEDED):
        return None
    return (name, int(backend.current_device())) if backend.is_initialized() else None
