"""Replaces a function of a torch module by a wrapper, and puts it back.

Used only where torch offers no hook: the begin and end of backward, a loader's next batch,
gradient clipping, the gradient scaler. Nothing on the user's own objects is touched. A tap that
someone else has since wrapped cannot be taken out; it then becomes a plain pass-through. So it is
for torch.compile, which is to trace what it would without us.
"""

import functools
from collections.abc import Callable
from typing import Any

from meshscope.capture.steps import hooks

Function = Callable[..., Any]


class Tap:
    """One replaced attribute."""

    def __init__(
        self,
        owner: Any,
        attribute: str,
        begins: Function,
        ends: Function,
        *,
        wants_result: bool,
        aliases: tuple[Any, ...] = (),
        raised: Function | None = None,
    ) -> None:
        """`begins(args, kwargs)` runs before the function, `ends(token)` after it.

        The token is what `begins` returned. With `wants_result`, `ends(token, result)` is called
        instead, with None as result when the function raised. `raised(token)` is called in place of
        `ends(token)` after one that raised. None of them may raise: the caller guards them.
        `aliases` hold the same function under the same name: all get one wrapper, so that it can be
        pickled as the original could.
        """
        self._attribute = attribute
        self.original = getattr(owner, attribute)
        self._is_active = True
        self._raised = raised or ends
        self.stand_in = (self._wrap_with_result if wants_result else self._wrap)(begins, ends)
        self._owners = [
            holder
            for holder in (owner, *aliases)
            if getattr(holder, attribute, None) is self.original
        ]
        for holder in self._owners:
            setattr(holder, attribute, self.stand_in)

    def _wrap(self, begins: Function, ends: Function) -> Function:
        original, raised = self.original, self._raised

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active or hooks.is_compiling():
                return original(*args, **kwargs)
            token = begins(args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                raised(token)
                raise
            ends(token)
            return result

        return tapped

    def _wrap_with_result(self, begins: Function, ends: Function) -> Function:
        original = self.original

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active or hooks.is_compiling():
                return original(*args, **kwargs)
            token = begins(args, kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                ends(token, result)
            return result

        return tapped

    def remove(self) -> None:
        """Puts the original back, or falls silent when another wrapper sits on top."""
        self._is_active = False
        for holder in self._owners:
            if getattr(holder, self._attribute, None) is self.stand_in:
                setattr(holder, self._attribute, self.original)


class OptimizerTap(Tap):
    """Around an optimizer class's step, outside of what torch itself puts around it.

    Torch's own hooks on steps run inside a range for its profiler, whose begin and end take as long
    as a small step. As with those hooks, an end is told only of a step that did not raise.
    """

    def __init__(self, owner: type, begins: Function, ends: Function) -> None:
        super().__init__(owner, "step", begins, ends, wants_result=False)

    def _wrap(self, begins: Function, ends: Function) -> Function:
        original = self.original

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active or not args or hooks.is_compiling():
                return original(*args, **kwargs)
            begins(args[0], args, kwargs)
            result = original(*args, **kwargs)
            ends(args[0], args, kwargs)
            return result

        return tapped
