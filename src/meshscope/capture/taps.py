"""Replaces a function of a torch module by a wrapper, and puts it back.

Used only where torch offers no hook: the begin and end of backward, a loader's next batch,
gradient clipping, the gradient scaler. Nothing on the user's own objects is touched. A tap that
someone else has since wrapped cannot be taken out; it then becomes a plain pass-through.
"""

import functools
from collections.abc import Callable
from typing import Any

Before = Callable[..., object]
After = Callable[..., object]


class Tap:
    """One replaced attribute."""

    def __init__(self, owner: Any, attribute: str, before: Before, after: After) -> None:
        """`before(*args, **kwargs)` runs first; `after(token, result)` runs last, errors included.

        The token is what `before` returned; `result` is None when the function raised. Both must
        not raise: they are guarded by the caller.
        """
        self._owner = owner
        self._attribute = attribute
        self._original = original = getattr(owner, attribute)
        self._is_active = True

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active:
                return original(*args, **kwargs)
            token = before(*args, **kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                after(token, result)
            return result

        self._tapped = tapped
        setattr(owner, attribute, tapped)

    def remove(self) -> None:
        """Puts the original back, or falls silent when another wrapper sits on top."""
        self._is_active = False
        if getattr(self._owner, self._attribute, None) is self._tapped:
            setattr(self._owner, self._attribute, self._original)
