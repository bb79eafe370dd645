"""A clock for tests, in the place of time.monotonic_ns."""

from dataclasses import dataclass


@dataclass(eq=False)
class FakeClock:
    """Moves only when told to."""

    now_ns: int = 1_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
