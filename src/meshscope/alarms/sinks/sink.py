"""What every sink is. None of them may hold the watcher up or end it."""

from typing import Protocol

from meshscope.alarms.sample import Sample
from meshscope.report.alarm_event import AlarmEvent


class Sink(Protocol):
    """Takes events and samples; each call returns at once. Slow receivers have a thread."""

    name: str
    """`webhook`; of its settings' table."""

    def tell(self, event: AlarmEvent) -> None:
        """An alarm was raised, changed or cleared."""

    def measure(self, sample: Sample) -> None:
        """A look was made."""

    def close(self) -> None:
        """The watcher ends; waits a few seconds at most for what is under way."""

    def problems(self) -> list[str]:
        """What went wrong since the last call, for the log."""
