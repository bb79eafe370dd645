"""Sees how long FullyShardedDataParallel (`fully_shard`) holds the device's main stream up.

Its operations run on streams of its own, and nothing may be recorded there. What a step loses is
what the main stream waits: for gathered parameters before a block, for buffers of gradients in
backward and for the last gradients at its end. All of these are `wait_event` of a stream, called in
Python inside three methods of torch's parameter groups; marks on the main stream around them show
the waits. Outside of these methods `wait_event` is passed on.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.operations.stand_ins import StandIns

_Clock = Callable[[], int]
_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_NO_KEY = 0


class ShardedWaits:
    """Wraps methods of torch's parameter groups, once their module has been imported."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        follower: Follower,
        guard: Guard,
        clock: _Clock,
        stand_ins: StandIns,
    ) -> None:
        self._stream_type = getattr(torch.cuda, "Stream", None)
        self._log = log
        self._follower = follower
        self._guard = guard
        self._clock = clock
        self._stand_ins = stand_ins
        self._is_installed = False
        self._key_ns = _NO_KEY
        """The operation that the main stream is about to wait for; one thread trains."""
        self._last_reduction_ns = _NO_KEY
        self._gathers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The last operation that gathered the parameters of a group."""

    def install(self) -> None:
        """Does nothing until the program has imported the module, and once it is done."""
        if self._is_installed or _MODULE not in sys.modules:
            return
        kind = getattr(sys.modules[_MODULE], "FSDPParamGroup", None)
        if not all(callable(getattr(kind, name, None)) for name in _METHODS):
            return
        if not callable(vars(self._stream_type or object).get("wait_event")):
            return
        makers = (self._make_gather, self._make_wait, self._make_reduce, self._make_finalize)
        for name, make in zip(_METHODS, makers, strict=True):
            self._stand_ins.add(kind, name, _like_original(make))
        self._stand_ins.add(self._stream_type, "wait_event", _like_original(self._make_stream_wait))
        self._is_installed = True

    def _make_gather(self, original: Any) -> Callable[..., Any]:
        log, gathers = self._log, self._gathers

        def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            before_ns = log.last_enqueue_ns
            result = original(group, *args, **kwargs)
            if log.last_enqueue_ns != before_ns:
                gathers[group] = log.last_enqueue_ns
            return result

        return unshard

    def _make_wait(self, original: Any) -> Callable[..., Any]:
        gathers = self._gathers

        def wait_for_unshard(group: Any) -> Any:
            self._key_ns = gathers.pop(group, _NO_KEY)
            try:
                return original(group)
            finally:
                self._key_ns = _NO_KEY

        return wait_for_unshard

    def _make_reduce(self, original: Any) -> Callable[..., Any]:
        log = self._log

        def post_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._key_ns, before_ns = self._last_reduction_ns, log.last_enqueue_ns
            try:
                return original(group, *args, **kwargs)
            finally:
                self._key_ns = _NO_KEY
                if log.last_enqueue_ns != before_ns:
                    self._last_reduction_ns = log.last_enqueue_ns

        return post_backward

    def _make_finalize(self, original: Any) -> Callable[..., Any]:
        def finalize_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._key_ns = self._last_reduction_ns
            try:
                return original(group, *args, **kwargs)
            finally:
                self._key_ns = _NO_KEY

        return finalize_backward

    def _make_stream_wait(self, original: Any) -> Callable[..., Any]:
        def wait_event(stream: Any, event: Any) -> Any:
            key_ns, device = self._key_ns, self._follower.device
            if not key_ns or device is None or not self._log.is_on or stream.stream_id:
                return original(stream, event)
            begin = self._guard.run("stream wait", device.begin_stream_wait)
            start_ns = self._clock()
            result = original(stream, event)
            if begin is not None:
                self._guard.run("stream wait", device.end_stream_wait, begin, key_ns, start_ns)
            return result

        return wait_event


def _like_original(make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    def make_like(original: Any) -> Any:
        return functools.update_wrapper(make(original), original)

    return make_like
