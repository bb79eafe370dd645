"""When something costly is due again, so that it takes at most a given share of a core."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic


@dataclass(slots=True, kw_only=True)
class Pace:
    """At most every `least_s`, and at most one part in `cpu_ratio` of a core."""

    least_s: float
    cpu_ratio: float
    clock: Callable[[], float] = field(default=monotonic, repr=False)
    _next: float = field(default=float("-inf"), init=False)

    @property
    def is_due(self) -> bool:
        return self.clock() >= self._next

    def note(self, begun: float, cpu_s: float) -> None:
        """It was begun then, by `clock`, and took so much CPU time."""
        self._next = begun + max(self.least_s, self.cpu_ratio * cpu_s)
