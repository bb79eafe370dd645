"""What stands in for functions of torch, and can be out while nothing is to be seen.

A stand-in that only passes on costs about a microsecond of host time, and a pipeline's step has
hundreds of calls. So while operations are not recorded (`operation_stride`) torch has its own
functions back. Where somebody has put something over ours meanwhile, ours stays below it and passes
on; where somebody has put something over torch's own, ours comes back on top of that.
"""

from collections.abc import Callable
from typing import Any

_INHERITED = object()


class _StandIn:
    """One replaced attribute."""

    __slots__ = ("make", "name", "own", "owner", "stays", "stored")

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any], *, stays: bool) -> None:
        self.owner = owner
        self.name = name
        self.make = make
        self.stays = stays
        self.stored: Any = None
        """As it stands in the class: asking the class for it would lose how it takes its object."""
        self.own: Any = None

    def put_in(self) -> None:
        current = vars(self.owner).get(self.name, _INHERITED)
        if self.own is None or current is not self.stored:
            self.stored, self.own = current, self.make(getattr(self.owner, self.name))
        setattr(self.owner, self.name, self.own)

    def take_out(self) -> bool:
        """False where somebody has wrapped ours since: it stays."""
        if vars(self.owner).get(self.name) is not self.own:
            return False
        if self.stored is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.stored)
        return True


class StandIns:
    """Those of one recorder."""

    def __init__(self) -> None:
        self._all: list[_StandIn] = []
        self._resting: list[_StandIn] = []

    def add(
        self, owner: Any, name: str, make: Callable[[Any], Any], *, stays: bool = False
    ) -> None:
        """Puts `make(torch's function)` in its place; `stays`: also while others rest."""
        if getattr(owner, name, None) is not None:
            found = _StandIn(owner, name, make, stays=stays)
            found.put_in()
            self._all.append(found)

    def rest(self) -> None:
        """Takes them out for a while."""
        if not self._resting:
            self._resting = [one for one in self._all if not one.stays and one.take_out()]

    def go_on(self) -> None:
        """Puts those that rest back."""
        resting, self._resting = self._resting, []
        for one in resting:
            one.put_in()

    def remove(self, is_wanted: Callable[[Any, str], bool] = lambda owner, name: True) -> None:
        """Takes them out for good, in the opposite order."""
        for one in [one for one in reversed(self._all) if is_wanted(one.owner, one.name)]:
            self._all.remove(one)
            if one in self._resting:
                self._resting.remove(one)
            else:
                one.take_out()
