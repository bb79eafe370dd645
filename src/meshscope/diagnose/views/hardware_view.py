"""What rules say of a rank's device: its clocks beside its peers', what holds them down, and, by
kernel samples, what it does longer than theirs."""

from collections.abc import Iterable, Mapping

from meshscope.analyze.device.hardware import DeviceUse
from meshscope.analyze.stragglers.sampled_excess import SampledExcess
from meshscope.analyze.timeline.device_parts import describe_evidence
from meshscope.core.unavailable import Unavailable, known
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Estimate, Evidence
from meshscope.diagnose.wording import capitalize, duration, name_ranks
from meshscope.simulate.what_if import Gain

_MIN_SLOWER_RATIO = 0.03
"""Clocks of healthy devices of one product differ less than this."""
_MAIN_RATIO = 0.25
"""Least share of a rank's excess of a phase that is named."""


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


def _find_sampled(context: Context, ranks: Iterable[int]) -> list[SampledExcess]:
    sampled = known(context.study.sampled_excess) or {}
    return [sampled[rank] for rank in ranks if rank in sampled]


def name_cause(context: Context, ranks: Iterable[int]) -> str:
    """What the ranks are slow at, behind a title; empty where samples do not say it alike."""
    found = _find_sampled(context, ranks)
    if not found or len({one.is_host for one in found}) > 1:
        return ""
    if found[0].is_host:
        return f": {'its host launches' if len(found) == 1 else 'their hosts launch'} late"
    return f": {'its' if len(found) == 1 else 'their'} kernels take longer"


def describe_samples(context: Context, rank: int) -> str:
    """A sentence about what a rank's device did longer than its peers'; or nothing."""
    parts = known(context.study.device_parts)
    evidence = None if parts is None else known(describe_evidence(parts))
    found = _find_sampled(context, (rank,))
    if evidence is None or not found:
        return ""
    one, said = found[0], []
    if one.kernels_ns:
        said.append("its kernels take " + _write(one.kernels_ns, "than its peers'"))
    if one.host_ns:
        said.append("its device waits " + _write(one.host_ns, "for its host"))
    said.sort(key=lambda text: text.startswith("its kernels") == one.is_host)
    warning = warn_shared(context, one.rank) if one.is_host else ""
    return f" By {evidence} {' and '.join(said)}.{warning}"


def _write(by_phase_ns: Mapping[str, float], what: str) -> str:
    """`9.5 ms longer than its peers' in forward`."""
    total = sum(by_phase_ns.values())
    main = [name or "no phase" for name, ns in by_phase_ns.items() if ns >= _MAIN_RATIO * total]
    return f"{duration(total)} longer {what} in {' and '.join(main)}"


def warn_shared(context: Context, rank: int) -> str:
    """A sentence about the price of a rank that leaves its device idle; empty where it is alone."""
    device = find_device(context, rank)
    if device is None or len(device.ranks) < 2:
        return ""
    ranks = capitalize(name_ranks(device.ranks))
    return f" {ranks} share its device, which is faster while one idles: less may be saved."


def list_sampled(context: Context, ranks: Iterable[int]) -> Iterable[Evidence]:
    for one in _find_sampled(context, list(ranks)[:8]):
        kernels, host = sum(one.kernels_ns.values()), sum(one.host_ns.values())
        if kernels:
            yield Evidence(name=f"excess of rank {one.rank}'s kernels", value=kernels, unit="ns")
        if host:
            yield Evidence(name=f"excess of rank {one.rank}'s late launches", value=host, unit="ns")
        yield Evidence(
            name=f"longer waits of rank {one.rank}'s peers", value=one.waiting_ns, unit="ns"
        )


def price_slow(
    context: Context, ranks: Iterable[int], replayed: Gain | Unavailable
) -> Gain | Estimate | Unavailable:
    """The replay's price of slow ranks, or that of kernel samples where a replay cannot know it.

    Kernels of ranks that share a device are slower while others run, so the peers' work is longer
    than without the slow rank's; what several slow ranks run there adds up.
    """
    step_ns = known(context.study.step_ns)
    found = _find_sampled(context, ranks)
    if not found or step_ns is None:
        return replayed
    by_device: dict[str, list[SampledExcess]] = {}
    is_shared = False
    for one in found:
        device = find_device(context, one.rank)
        is_shared |= device is not None and len(device.ranks) > 1
        name = f"rank {one.rank}" if device is None else device.device
        by_device.setdefault(name, []).append(one)
    kernels = max(sum(map(_price_kernels, ones)) for ones in by_device.values())
    if isinstance(replayed, Unavailable):
        host = max(min(one.own_ns, one.waiting_ns) - _price_kernels(one) for one in found)
        return Estimate(saved_ns=kernels + host, step_ns=step_ns, basis=_BASIS)
    if is_shared and kernels > replayed.saved_ns:
        return Estimate(saved_ns=kernels, step_ns=step_ns, basis=_BASIS)
    return replayed


_BASIS = "kernel samples: what the ranks have more than their peers, if these wait as much longer"


def _price_kernels(one: SampledExcess) -> float:
    return min(sum(one.kernels_ns.values()), one.waiting_ns)
