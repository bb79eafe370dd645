"""What the communication profiler keeps."""

from dataclasses import dataclass

from meshscope.errors import UsageError

_SWITCHES = ("enabled", "per_operation", "per_rank", "per_axis", "per_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig:
    """Settings. Change them while it runs with `CommunicationProfiler.configure`."""

    enabled: bool = True
    """False: nothing is recorded; every call still works."""
    max_events: int = 10_000
    """Events in the ring; statistics cover the evicted ones too."""
    per_operation: bool = True
    """Statistics per kind, and per name of custom operations."""
    per_rank: bool = True
    """Statistics per rank and operation."""
    per_axis: bool = True
    """Statistics per axis of the mesh."""
    per_size: bool = True
    """Statistics per operation and power-of-four bucket of sizes."""
    sampling_rate: float = 1.0
    """Share of operations that is sampled, above 0 and at most 1. Give every rank the same."""
    min_duration_ns: int = 0
    """Shorter operations are in the statistics, but not among the events."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}, but True or False is expected; give one of them"
            for name in _SWITCHES
            if not isinstance(getattr(self, name), bool)
        ]
        for name, meaning in (
            ("max_events", "to keep statistics and no events"),
            ("min_duration_ns", "to keep events of any length"),
        ):
            if not _is_count(getattr(self, name)):
                problems.append(
                    f"{name} is {getattr(self, name)!r}, but a whole number of at least 0 is "
                    f"expected; give 0 {meaning}"
                )
        if not _is_share(self.sampling_rate):
            problems.append(
                f"sampling_rate is {self.sampling_rate!r}, but a number above 0 and at most 1 is "
                "expected; give 1.0 to look at every operation, or enabled=False to look at none"
            )
        if problems:
            raise UsageError("\n".join(problems))


def _is_count(value: object) -> bool:
    # bool is an int to Python; True as a number of events is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= 1  # type: ignore[operator]
