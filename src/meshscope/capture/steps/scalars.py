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
from meshscope.store.write.table_file import TableWriter

_DOUBLE = struct.Struct("<d")
_INT64 = struct.Struct("<q")
BACKWARD_LOSS = "backward_loss"


class ScalarLog:
    """Writes the table `scalars` of one rank; without a table it takes nothing."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Callable[[], int],
        guard: Guard,
        find_id: Callable[[str], int],
        open_table: Callable[[], TableWriter | None],
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._caught = guard.caught
        self._find_id = find_id
        self._open_table = open_table
        self._table: TableWriter | None = None
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

    def take_signal(self, name: str, value: Any) -> None:
        """Records a value from a hook, if it is a number that is available at once."""
        if not self.are_signals_wanted:
            return
        try:
            if self.look_at_loss is not None and name == BACKWARD_LOSS:
                self.look_at_loss(value)
            if isinstance(value, (list, tuple)):
                value = value[0] if len(value) == 1 else None
            if isinstance(value, (int, float)) or self._is_readable(value):
                self._log(name, value)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("signal", error)

    def _log(self, name: str, value: Any) -> None:
        name_id = self._find_id(name)  # may open the run
        table = self._table or self._find_table()
        if table is None:
            return
        is_tensor = hasattr(value, "is_cuda")
        if is_tensor and value.device.type != "cpu":
            self._send(name, name_id, value)
            return
        number = float(value.detach().item() if is_tensor else value)
        timeline = self._timeline
        step, now_ns = timeline.current_step, self._clock()
        self._put(table, name_id, step, now_ns, number, timeline.microbatch)

    def _send(self, name: str, name_id: int, value: Any) -> None:
        device = self._device_of(value)
        if device is None or value.numel() != 1:
            raise CaptureError(
                f"{name} is a {tuple(value.shape)} tensor on {value.device.type}; reading it would "
                "make the program wait: log one number, with device_events on"
            )
        timeline = self._timeline
        device.take_scalar(
            value, name_id, timeline.current_step, self._clock(), timeline.microbatch
        )

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
            microbatch = scalar.microbatch
            self._put(table, scalar.name_id, scalar.step, scalar.time_ns, value, microbatch)

    def _find_table(self) -> TableWriter | None:
        self._table = self._open_table()
        return self._table

    def _put(
        self,
        table: TableWriter,
        name_id: int,
        step: int,
        time_ns: int,
        number: float,
        microbatch: int,
    ) -> None:
        bits: int = _INT64.unpack(_DOUBLE.pack(number))[0]
        table.put(name_id, step, time_ns, bits, microbatch, 0, 0)
        if self.watch is not None and not math.isfinite(number):
            self.watch(name_id, number)
