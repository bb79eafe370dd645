"""The block and decorator that time one communication operation. Reusable and re-entrant.

What is open stands in a context variable, not in these objects, so one object serves any nesting,
any thread and any number of tasks. Nothing here raises, and nothing here touches the exception of
the block: it is noted, and goes on.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from meshscope.capture.communication.events import Details
from meshscope.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


class OpenOperation:
    """The operation a block is in. Still to be filled in by it."""

    __slots__ = ("is_open", "notes", "owner", "size_bytes", "start_ns")

    def __init__(self, owner: "TimedOperation", size_bytes: Any) -> None:
        self.owner = owner
        self.size_bytes = size_bytes
        """May be set inside the block, when only it knows."""
        self.notes: list[tuple[object, object]] = []
        self.is_open = True
        self.start_ns: int | None = None
        """None: not recorded, because the profiler was off when it began."""

    def note(self, key: str, value: object) -> None:
        """Adds an entry to the event's metadata."""
        self.notes.append((key, value))


_open_operations: ContextVar[tuple[OpenOperation, ...]] = ContextVar(
    "meshscope_open_operations", default=()
)

Finish = Callable[[Details, OpenOperation, int, BaseException | None], object]
"""Called at the end with the operation, the time and what the block raised; must not raise."""


class TimedOperation:
    """Times a block, or a function (`async` or not) when used as a decorator."""

    __slots__ = ("_clock", "_details", "_finish", "_is_enabled", "_last")

    def __init__(
        self,
        details: Details,
        clock: Callable[[], int],
        is_enabled: Callable[[], bool],
        finish: Finish,
    ) -> None:
        self._details = details
        self._clock = clock
        self._is_enabled = is_enabled
        self._finish = finish
        self._last: OpenOperation | None = None

    def __enter__(self) -> OpenOperation:
        self._last = operation = OpenOperation(self, self._details.size_bytes)
        # One that was left in another context is still here; without this they would pile up.
        still_open = [other for other in _open_operations.get() if other.is_open]
        _open_operations.set((*still_open, operation))
        if self._is_enabled():
            operation.start_ns = self._clock()
        return operation

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = self._clock()
        operation = self._take_open()
        if operation is None or not operation.is_open:
            return
        operation.is_open = False
        if operation.start_ns is not None:
            self._finish(self._details, operation, end_ns, error)

    def _take_open(self) -> OpenOperation | None:
        """The one entered last in this context, else the one entered last.

        An async generator may be entered by one task and left by another, in its own context.
        """
        operations = _open_operations.get()
        for index in range(len(operations) - 1, -1, -1):
            if operations[index].owner is self:
                _open_operations.set(operations[:index] + operations[index + 1 :])
                return operations[index]
        return self._last

    def __call__(self, function: F) -> F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(function, "__name__", "it")
            raise UsageError(
                f"timed got the generator function {name}, but a generator runs between its "
                "items, not when it is called; put a `with` block around the operation inside it"
            )
        if inspect.iscoroutinefunction(function):
            return self._wrap_async(function)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]

    def _wrap_async(self, function: F) -> F:
        @functools.wraps(function)
        async def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return timed  # type: ignore[return-value]
