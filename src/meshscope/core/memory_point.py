"""A memory point: what one rank's memory was used for at one moment.

`capture` takes it, `memory.jsonl` keeps it, analyses read it: one type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.core.unavailable import Unavailable, known, need, or_unavailable

POINTS_NAME = "memory.jsonl"
COUNTERS = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "sampled_peak_bytes",
    "inactive_split_bytes",
    "num_retries",
    "num_ooms",
    "rss_bytes",
)
"""Fields that not every device and allocator has; in the file such a number is -1."""
NOT_KNOWN = Unavailable("not known on this device")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    name: str
    step: int
    """-1 outside of a profiled step."""
    microbatch: int
    seconds: float
    """Monotonic seconds since construction."""
    during: str = ""
    """What ran at a peak; else empty."""
    modules_bytes: Mapping[str, Mapping[str, int]]
    """Category to path to bytes, on the model's device."""
    elsewhere_bytes: Mapping[str, int]
    """Category to bytes on other devices."""
    allocated_bytes: int | Unavailable = NOT_KNOWN
    reserved_bytes: int | Unavailable = NOT_KNOWN
    peak_allocated_bytes: int | Unavailable = NOT_KNOWN
    sampled_peak_bytes: int | Unavailable = NOT_KNOWN
    """The most that was in use after any operator of this step so far."""
    inactive_split_bytes: int | Unavailable = NOT_KNOWN
    num_retries: int | Unavailable = NOT_KNOWN
    num_ooms: int | Unavailable = NOT_KNOWN
    rss_bytes: int | Unavailable = NOT_KNOWN

    @property
    def categories_bytes(self) -> dict[str, int]:
        return {name: sum(paths.values()) for name, paths in self.modules_bytes.items()}

    @property
    def attributed_bytes(self) -> int:
        return sum(self.categories_bytes.values())

    @property
    @or_unavailable
    def residual_bytes(self) -> int:
        """Allocated and not attributed; negative where storages are not the allocator's."""
        return need(self.allocated_bytes) - self.attributed_bytes

    def to_json(self) -> dict[str, Any]:
        counters = {
            name: -1 if (value := known(getattr(self, name))) is None else value
            for name in COUNTERS
        }
        return {
            "kind": "point",
            "point": self.name,
            "step": self.step,
            "microbatch": self.microbatch,
            "during": self.during,
            "seconds": round(self.seconds, 6),
            "categories_bytes": self.categories_bytes,
            "modules_bytes": {k: dict(paths) for k, paths in self.modules_bytes.items()},
            "elsewhere_bytes": dict(self.elsewhere_bytes),
            "attributed_bytes": self.attributed_bytes,
            "allocated_bytes": counters.pop("allocated_bytes"),
            "residual_bytes": known(self.residual_bytes),
            **counters,
        }
