"""What rules say of a rank's device: its clocks beside its peers', and what holds them down."""

from meshscope.analyze.device.hardware import DeviceUse
from meshscope.core.unavailable import known
from meshscope.diagnose.context import Context

_MIN_SLOWER_RATIO = 0.03
"""Clocks of healthy devices of one product differ less than this."""


def find_device(context: Context, rank: int) -> DeviceUse | None:
    """The device that the rank used, where it was read."""
    hardware = known(context.study.hardware)
    devices = () if hardware is None else hardware.devices
    return next((device for device in devices if rank in device.ranks), None)


def is_behind_peers(device: DeviceUse) -> bool:
    """Whether its clocks were lower than those of the job's other devices of its product."""
    clock, peers = known(device.sm_clock_mhz), known(device.peer_sm_clock_mhz)
    return clock is not None and peers is not None and clock <= (1 - _MIN_SLOWER_RATIO) * peers


def find_main_limit(device: DeviceUse) -> tuple[str, float]:
    """What held its clocks down most often, and in which share of readings; empty without any."""
    limits = known(device.limited_ratio) or {}
    # The first of equals: it is the more specific one.
    return max(limits.items(), key=lambda item: item[1], default=("", 0.0))


def describe_clocks(device: DeviceUse) -> str:
    """`1,245 of 1,980 MHz, power cap`; empty where its clocks are not known."""
    clock, highest = known(device.sm_clock_mhz), known(device.max_sm_clock_mhz)
    if clock is None:
        return ""
    limit, _ = find_main_limit(device)
    of = f" of {highest:,}" if highest is not None else ""
    return f"{clock:,.0f}{of} MHz{f', {limit}' if limit else ''}"


def describe_slow_device(context: Context, rank: int) -> str:
    """The clocks of a slow rank's device, if they are behind its peers'; else empty."""
    device = find_device(context, rank)
    if device is None or not is_behind_peers(device):
        return ""
    peers = known(device.peer_sm_clock_mhz)
    return f"{describe_clocks(device)} (its peers' {peers:,.0f})"
