"""Where saved-tensor hooks must be out, for as long as a profiled step runs.

`torch.func` refuses to run while there are any, and raises into the program; a custom Function that
saves a parameter is given a copy of it in backward. Torch offers no hook for either, so three of
its functions are replaced for the step, and put back.
"""

import threading
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.memory.saved_tensors import SavedTensors
from meshscope.capture.steps.taps import Tap

SITE = "memory profile"


class HookExemptions:
    """Takes the hooks of `saved` out where they would disturb."""

    def __init__(self, torch: Any, saved: SavedTensors, guard: Guard) -> None:
        self._torch = torch
        self._saved = saved
        self._guard = guard
        self._local = threading.local()
        self._taps: list[Tap] = []
        self._original_apply: Any = None
        self._own_apply: Any = None

    def install(self) -> None:
        if self._own_apply is not None:
            return
        core, protect = self._torch._C._autograd, self._guard.protect
        for name, begins, ends in (
            ("_saved_tensors_hooks_disable", self._refuse, _do_nothing),
            ("_saved_tensors_hooks_enable", _do_nothing, self._allow),
        ):
            begins, ends = protect(SITE, begins), protect(SITE, ends)
            self._taps.append(Tap(core, name, begins, ends, wants_result=False))
        kind = self._torch.autograd.Function
        self._original_apply = kind.__dict__["apply"]
        self._own_apply = classmethod(self._make_apply(self._original_apply.__func__))
        kind.apply = self._own_apply

    def remove(self) -> None:
        """Puts torch's own functions back, unless the program has replaced ours since."""
        for tap in self._taps:
            tap.remove()
        self._taps.clear()
        kind = self._torch.autograd.Function
        if self._own_apply is not None and kind.__dict__.get("apply") is self._own_apply:
            kind.apply = self._original_apply
        self._own_apply = None

    def _refuse(self, args: Any, _kwargs: Any) -> None:
        # With False as its second argument torch does not mind hooks.
        if args[1:2] != (False,) and self._saved.suspend():
            self._local.is_out = True

    def _allow(self, _token: Any) -> None:
        if getattr(self._local, "is_out", False):
            self._local.is_out = False
            self._saved.resume()

    def _make_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        saved, guard = self._saved, self._guard

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not guard.run(SITE, saved.suspend):
                return original(cls, *args, **kwargs)
            try:
                outputs = original(cls, *args, **kwargs)
            finally:
                guard.run(SITE, saved.resume)
            guard.run(SITE, lambda: saved.watch_function(outputs))
            return outputs

        return apply


def _do_nothing(*_: Any) -> None:
    """A tap needs a function for both ends."""
