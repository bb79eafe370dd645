"""The run in numbers, for those who draw curves: what every sink of metrics gets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshscope.core.verdict.severity import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingAlarm:
    """An alarm that stands, in labels and a price."""

    code: str
    severity: Severity
    rank: int | None
    """The first culprit."""
    saved_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a run. What is not known is None, or not there."""

    name: str
    unix_ns: int
    state: str
    attempt: int
    step: int | None
    step_ns: float | None
    """Median of the steps that are new; None where none is."""
    steps_per_s: float | None
    tokens_per_s: float | None
    """Of the first rank."""
    age_s: float | None
    """Since a step was last new, on the watcher's clock."""
    num_ranks: int
    world_size: int
    signals: Mapping[str, float]
    """`loss`, `grad_norm`, `lr`: their newest values."""
    alarms: tuple[StandingAlarm, ...]
    watcher_cpu_s: float
    """CPU time of the watcher since it began."""

    def values(self) -> Iterator[tuple[str, float]]:
        """Name and number of everything that is one curve; names end in their unit."""
        named = {
            "step_seconds": None if self.step_ns is None else self.step_ns / 1e9,
            "steps_per_second": self.steps_per_s,
            "tokens_per_second_of_one_rank": self.tokens_per_s,
            "last_step_age_seconds": self.age_s,
            "ranks": float(self.num_ranks),
            "alarms": float(len(self.alarms)),
            "largest_saved_ratio": max(
                (one.saved_ratio for one in self.alarms if one.saved_ratio is not None),
                default=0.0,
            ),
        }
        for name, value in named.items():
            if value is not None:
                yield name, value
        yield from self.signals.items()
