"""Sees how long FullyShardedDataParallel (`fully_shard`) holds the device's main stream up.

Its operations run on streams of its own, and nothing may be recorded there. What a step loses is
what the main stream waits: for gathered parameters before a block, and for the last gradients at
the end of backward. Both are calls of Python; marks on the main stream around them show the wait,
and the short copies behind it.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.store.schema import MISSING

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_METHODS = ("unshard", "wait_for_unshard", "finalize_backward")


class ShardedWaits:
    """Wraps three methods of torch's parameter groups, once their module has been imported."""

    def __init__(
        self, log: OperationLog, follower: Follower, guard: Guard, clock: Callable[[], int]
    ) -> None:
        self._log = log
        self._follower = follower
        self._guard = guard
        self._clock = clock
        self._originals: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self._gathers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The last operation that gathered the parameters of a group."""

    def install(self) -> None:
        """Does nothing until the program has imported the module, and once it is done."""
        module = sys.modules.get(_MODULE)
        kind = getattr(module, "FSDPParamGroup", None)
        if self._originals or kind is None:
            return
        if not all(callable(getattr(kind, name, None)) for name in _METHODS):
            return
        makers = (self._make_gather, self._make_wait, self._make_finalize)
        for name, make in zip(_METHODS, makers, strict=True):
            original = getattr(kind, name)
            self._originals[name] = original
            self._wrappers[name] = wrapper = functools.update_wrapper(make(original), original)
            setattr(kind, name, wrapper)

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
            key_ns = gathers.pop(group, MISSING)
            if key_ns == MISSING:
                return original(group)
            begin, start_ns = self._begin(), self._clock()
            result = original(group)
            self._end(begin, key_ns, start_ns)
            return result

        return wait_for_unshard

    def _make_finalize(self, original: Any) -> Callable[..., Any]:
        def finalize_backward(group: Any) -> Any:
            if not _is_reducing(group):
                return original(group)
            key_ns, begin, start_ns = self._log.last_enqueue_ns, self._begin(), self._clock()
            result = original(group)
            self._end(begin, key_ns or MISSING, start_ns)
            return result

        return finalize_backward

    def _begin(self) -> Any:
        device = self._follower.device
        if device is None or not self._log.is_on:
            return None
        return self._guard.run("stream wait", device.begin_stream_wait)

    def _end(self, begin: Any, key_ns: int, start_ns: int) -> None:
        device = self._follower.device
        if begin is not None and device is not None:
            self._guard.run("stream wait", device.end_stream_wait, begin, key_ns, start_ns)

    def remove(self) -> None:
        """Puts torch's own methods back, where nobody has put something else there."""
        kind = getattr(sys.modules.get(_MODULE), "FSDPParamGroup", None)
        for name, original in self._originals.items():
            if getattr(kind, name, None) is self._wrappers[name]:
                setattr(kind, name, original)
        self._originals.clear()


def _is_reducing(group: Any) -> bool:
    """Whether gradients of the group, or of any group of its model, are still on their way."""
    if getattr(group, "_post_reduce_event", None) is not None:
        return True
    context = getattr(group, "comm_ctx", None)
    return bool(getattr(context, "_last_post_reduce_events", None))
