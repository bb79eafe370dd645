"""A guard under which modes and tensor types of the program do not see what we ask tensors for."""

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

from meshscope.capture.guard import Guard

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class QuietGuard(Guard):
    """Hands errors to another guard. A `TorchFunctionMode` of the program sees even a tensor's
    device being read, and could count it, log it or change the answer."""

    def __init__(self, torch: Any, guard: Guard) -> None:
        super().__init__()
        self.counts, self.first_messages = guard.counts, guard.first_messages
        self._guard = guard
        self._no_overrides = torch._C.DisableTorchFunction

    def caught(self, site: str, error: BaseException) -> None:
        self._guard.caught(site, error)

    def protect(self, site: str, function: Callable[..., R]) -> Callable[..., R | None]:
        no_overrides = self._no_overrides

        def quiet(*args: Any) -> R:
            with no_overrides():
                return function(*args)

        return super().protect(site, quiet)

    def run(
        self, site: str, function: Callable[[Unpack[Arguments]], R], *args: *Arguments
    ) -> R | None:
        return self.protect(site, function)(*args)
