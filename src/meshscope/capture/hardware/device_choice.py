"""Which device a rank uses, and which devices its process reads for the whole node.

A device is named by its PCI address, which is the same for all processes of a machine and for all
parts of a partitioned GPU, or by its UUID where torch does not tell the address. Nothing here
starts a device: torch is only asked once the program uses CUDA.
"""

from collections.abc import Mapping
from typing import Any

from meshscope.core.placement import Placement


def name_device(torch: Any, index: int) -> str:
    """`00000000:65:00.0`, else `GPU-` and the UUID; empty where torch says neither."""
    properties = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(properties, name, None) for name in names)
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(device, int):
        return f"{domain:08X}:{bus:02X}:{device:02X}.0"
    uuid = getattr(properties, "uuid", None)
    return "" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def choose_devices(
    torch: Any, own_index: int, placement: Placement, env: Mapping[str, str]
) -> list[str]:
    """The devices this process is to read.

    Local rank 0 reads all that it can use. A rank that is shown only one device, or does not know
    its place on the node, reads its own: nobody else may see it. Ranks that share a device may so
    read it twice; readers count it once.
    """
    if placement.local_rank == 0:
        names = [name_device(torch, index) for index in range(torch.cuda.device_count())]
    elif placement.local_rank is None or _is_shown_one(env):
        names = [name_device(torch, own_index)]
    else:
        names = []
    return [name for name in dict.fromkeys(names) if name]


def _is_shown_one(env: Mapping[str, str]) -> bool:
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible) and "," not in visible
