"""The memory strategies by name, and what they cannot do: without torch."""

from enum import StrEnum
from pathlib import Path

from meshscope.engine.memory.spool_file import find_folder_problems


class MemoryStrategyName(StrEnum):
    """See `engine.memory.strategy`."""

    BASIC = "basic"
    STANDARD = "standard"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"
    CPU_OFFLOAD = "cpu_offload"


def find_memory_problems(
    name: str,
    device_type: str,
    *,
    offload_dir: Path | str | None = None,
    needed_bytes: int | None = None,
) -> list[str]:
    """Everything that keeps the strategy from working here, one sentence each.

    `needed_bytes`: what extreme will have on disk at once, if it is known.
    """
    if name not in list(MemoryStrategyName):
        allowed = ", ".join(MemoryStrategyName)
        return [f"the memory strategy is {name!r}, expected one of {allowed}"]
    if name == MemoryStrategyName.CPU_OFFLOAD and device_type == "cpu":
        return [
            "cpu_offload moves activations from a device to the host's memory, but the device is "
            "cpu, where they already are; use standard, aggressive or extreme"
        ]
    if name != MemoryStrategyName.EXTREME:
        return []
    if offload_dir is None:
        return ["extreme needs offload_dir, a folder on a local disk; set it"]
    return find_folder_problems(Path(offload_dir), needed_bytes)
