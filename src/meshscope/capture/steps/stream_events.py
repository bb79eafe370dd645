"""Timing events on the streams of an accelerator, recorded with as little Python as possible."""

import sys
from collections.abc import Callable
from typing import Any


class StreamEvents:
    """A pool of timing events, recorded on the current stream with as little Python as possible."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.free: list[Any] = []
        self.num_recorded = 0
        self._streams: dict[Any, Any] = {}
        c = sys.modules["torch"]._C
        self._find_stream = getattr(c, "_cuda_getCurrentStream", None)
        self._base = getattr(c, "_CudaEventBase", None)
        self._find_device = getattr(c, "_cuda_getDevice", None)
        self._set_stream: Any = getattr(c, "_cuda_setStream", None)
        self._side_streams: dict[int, Any] = {}
        is_cuda = getattr(backend, "__name__", "") == "torch.cuda"
        self._is_short = is_cuda and None not in (
            self._find_stream, self._base, self._find_device, self._set_stream,
        )  # fmt: skip
        ask: Any = getattr(c, "_cuda_isCurrentStreamCapturing", None) if is_cuda else None
        self.is_capturing: Callable[[], bool] = ask or getattr(
            backend, "is_current_stream_capturing", lambda: False
        )

    def record(self) -> Any:
        """An event on the current stream."""
        self.num_recorded += 1
        event = self.free.pop() if self.free else self._backend.Event(enable_timing=True)
        if not self._is_short:
            event.record()
            return event
        key = self._find_stream(self._find_device())  # type: ignore[misc]
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._backend.current_stream()
        self._base.record(event, stream)  # type: ignore[union-attr]
        return event

    def is_on_main_stream(self) -> bool:
        """Whether the current stream is the device's default one."""
        if not self._is_short:
            return bool(self._backend.current_stream() == self._backend.default_stream())
        stream_id: int = self._find_stream(self._find_device())[0]  # type: ignore[misc]
        return stream_id == 0

    def record_beside(self, queue_wait: Callable[[], Any]) -> Any:
        """An event on a stream of our own, behind what `queue_wait` makes that stream wait for."""
        index = self._find_device() if self._is_short else self._backend.current_device()  # type: ignore[misc]
        side = self._side_streams.get(index)
        if side is None:
            side = self._side_streams[index] = self._backend.Stream()
        if not self._is_short:
            with self._backend.stream(side):
                queue_wait()
                return self.record()
        # What `torch.cuda.stream` does, without its questions.
        stream_id, device_index, device_type = self._find_stream(index)  # type: ignore[misc]
        self._set_stream(
            stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type
        )
        try:
            queue_wait()
            return self.record()
        finally:
            self._set_stream(
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )
