"""Numbers on their way into the run: what the program logs, and what the hooks come across.

A number on a device is never waited for: it is copied beside the stream and read later, or, where
that is not possible, refused. A sharded tensor (DTensor) is never read on our own account: its
value may need communication, and ranks do not read at the same moments.
"""

import math
import struct
import sys
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps.device_events import DeviceScalar, DeviceTimeline
from meshscope.capture.steps.marking import Marking
from meshscope.capture.steps.timeline import Timeline
from meshscope.errors import CaptureError
from meshscope.store.schema import ScalarFlag
from meshscope.store.write.segments import AnyTable

_DOUBLE = struct.Struct("<d")
_INT64 = struct.Struct("<q")


class Signal:
    """A number that a hook came across, until it is known which step it belongs to."""

    __slots__ = ("divisor", "flags", "microbatch", "name", "time_ns", "value")

    def __init__(self, name: str, value: Any, time_ns: int, microbatch: int) -> None:
        self.name = name
        self.value = value
        self.time_ns = time_ns
        self.microbatch = microbatch
        self.divisor = 0.0
        self.flags = 0
        """See `ScalarFlag`."""


class ScalarLog:
    """Writes the table `scalars` of one rank; without a table it takes nothing."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Callable[[], int],
        guard: Guard,
        find_id: Callable[[str], int],
        open_table: Callable[[], AnyTable | None],
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._caught = guard.caught
        self._find_id = find_id
        self._open_table = open_table
        self._table: AnyTable | None = None
        self.are_signals_wanted = True
        self.marking: Marking | None = None
        """Where numbers on a device go; set once both exist."""
        self.watch: Callable[[int, float], None] | None = None
        """Called with the name's id and every number that is not finite."""
        self.look_at_loss: Callable[[Any], None] | None = None
        """Called with what backward is called on, when that is taken."""

    def forget_table(self) -> None:
        """Drops the table of an attempt that is over."""
        self._table = None

    def log(self, name: str, value: Any) -> None:
        """Records a number, for the open step or the last one. What is none is counted."""
        try:
            self._log(name, value)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("scalar", error)

    def count(self, name: str, number: float) -> None:
        """Records a number that is added to others of its name, for the open step or the last."""
        try:
            name_id = self._find_id(name)
            table = self._table or self._find_table()
            if table is not None:
                step, now_ns = self._timeline.current_step, self._clock()
                fields = (name_id, step, now_ns, self._timeline.microbatch, 0, ScalarFlag.COUNT)
                self._put(table, float(number), fields)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("count", error)

    def take_signal(self, name: str, step: int, signal: Signal) -> None:
        """Records a value from a hook, if it is a number that is available at once."""
        if not self.are_signals_wanted:
            return
        try:
            value = signal.value
            if isinstance(value, (int, float)) or self._is_readable(value):
                divisor: int = _INT64.unpack(_DOUBLE.pack(signal.divisor))[0]
                name_id = self._find_id(name)
                fields = (name_id, step, signal.time_ns, signal.microbatch, divisor, signal.flags)
                self._write(name, value, fields)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("signal", error)

    def _log(self, name: str, value: Any) -> None:
        name_id, timeline = self._find_id(name), self._timeline  # may open the run
        fields = (name_id, timeline.current_step, self._clock(), timeline.microbatch, 0, 0)
        self._write(name, value, fields)

    def _write(self, name: str, value: Any, fields: tuple[int, ...]) -> None:
        table = self._table or self._find_table()
        if table is None:
            return
        is_tensor = hasattr(value, "is_cuda")
        if is_tensor and value.device.type != "cpu":
            self._send(name, value, fields)
            return
        self._put(table, float(value.detach().item() if is_tensor else value), fields)

    def _send(self, name: str, value: Any, fields: tuple[int, ...]) -> None:
        device = self._device_of(value)
        if device is None or value.numel() != 1:
            raise CaptureError(
                f"{name} is a {tuple(value.shape)} tensor on {value.device.type}; reading it would "
                "make the program wait: log one number, with device_events on"
            )
        device.take_scalar(value, fields)

    def _is_readable(self, value: Any) -> bool:
        torch: Any = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.numel() != 1:
            return False
        if value.device.type == "cpu":
            return True
        return self._device_of(value) is not None

    def _device_of(self, tensor: Any) -> DeviceTimeline | None:
        """Where a number of this tensor's device can be read later."""
        return None if self.marking is None else self.marking.find_for(tensor.device.type)

    def put_from_device(self, scalar: DeviceScalar, value: float) -> None:
        """A number that has arrived from the device."""
        table = self._table or self._find_table()
        if table is not None:
            self._put(table, value, scalar.fields)

    def _find_table(self) -> AnyTable | None:
        self._table = self._open_table()
        return self._table

    def _put(self, table: AnyTable, number: float, fields: tuple[int, ...]) -> None:
        name_id, step, time_ns, microbatch, divisor, flags = fields
        bits: int = _INT64.unpack(_DOUBLE.pack(number))[0]
        table.put(name_id, step, time_ns, bits, microbatch, divisor, flags)
        if self.watch is not None and not math.isfinite(number):
            self.watch(name_id, number)
