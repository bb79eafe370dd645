"""The devices of a job as their driver saw them: clocks, power, heat, errors, energy per step.

Readings come about once a second (table `hardware`), from one process per node; each rank's journal
names its device. A device is one device, however many ranks use it and however many processes read
it. Clocks, power and temperature are of the steady steps of its lowest rank, as far as readings
cover them; clocks only of readings in which it was not idle. Energy is the driver's counter, else
power over time, at the start of the first covered step and at the end of the last, gaps included.
Errors are what the counters rose by between the first reading and the last.

Wrong where another job uses the same device: the driver does not tell whose energy it is. What
falls between two readings is not seen, except by counters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.core.unavailable import Missing, Unavailable, known, need, or_unavailable
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import JsonFields, Recording, as_int
from meshscope.store.read.run import Attempt
from meshscope.store.schema import CLOCK_LIMITS, TABLES, ClockLimit

_MIN_WINDOW_NS = 1_000_000_000
"""Steps over which energy is measured: the driver renews its counter about every 0.1 s."""
_MAX_NAME = 200
_NOT_SAID = Unavailable("the driver does not say")
_Key = tuple[str, str]
"""A machine and a device of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One device over the run."""

    device: str
    """Its PCI address, or its UUID."""
    product: str | Unavailable
    ranks: tuple[int, ...]
    num_readings: int
    """In steady steps."""
    sm_clock_mhz: float | Unavailable
    """Median while it was not idle."""
    peer_sm_clock_mhz: float | Unavailable
    """The median of that over the job's other devices of the same product."""
    max_sm_clock_mhz: int | Unavailable
    memory_clock_mhz: float | Unavailable
    max_memory_clock_mhz: int | Unavailable
    power_watts: float | Unavailable
    """Mean."""
    power_limit_watts: float | Unavailable
    temperature_celsius: int | Unavailable
    """Highest."""
    limited_ratio: Mapping[str, float] | Unavailable
    """Share of readings in which something held its clocks down, by what it was."""
    joules_per_step: float | Unavailable
    num_ecc_corrected: int | Unavailable
    """In the whole run, as the following."""
    num_ecc_uncorrected: int | Unavailable
    num_pcie_replays: int | Unavailable
    num_nvlink_errors: int | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of a job."""

    devices: tuple[DeviceUse, ...]
    """Those that ranks used, by their lowest rank."""
    joules_per_step: float | Unavailable
    """Of all devices together."""
    joules_per_token: float | Unavailable
    reading_cost_ns: float
    """Processor time of a reading, median."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Readings:
    """All readings of one device, in order of time."""

    columns: Columns
    facts: JsonFields
    """What does not change of it."""

    @property
    def time_ns(self) -> Int64s:
        return int64_column(self.columns, "time_host_mono_ns")

    def read(self, name: str, rows: slice = slice(None)) -> Int64s:
        """The known values of a column."""
        values = int64_column(self.columns, name)[rows]
        return values[values >= 0]


@or_unavailable
def measure_hardware(
    attempt: Attempt,
    *,
    first_step: int,
    steps_per_s: float | Unavailable,
    tokens_per_s: float | Unavailable,
) -> Hardware:
    """The devices over the steps from `first_step` on, the first after warm-up."""
    users = _find_users(attempt)
    readings = _collect_readings(attempt)
    if not readings or not users:
        raise Missing(_explain_none(attempt, has_users=bool(users)))
    devices = []
    for key, ranks in users.items():
        if key in readings:
            steps = _read_steps(attempt.ranks[ranks[0]], first_step)
            devices.append(_measure_device(key[1], tuple(ranks), readings[key], steps))
    if not devices:
        raise Missing("none of the devices that ranks used was read")
    joules = _sum_energy(devices, num_used=len(users))
    costs = np.concatenate([one.read("cost_ns") for one in readings.values()])
    return Hardware(
        devices=tuple(_compare_clocks(devices)),
        joules_per_step=joules,
        joules_per_token=_divide_tokens(joules, steps_per_s, tokens_per_s),
        reading_cost_ns=float(np.median(costs)),
    )


def _find_users(attempt: Attempt) -> dict[_Key, list[int]]:
    """Ranks by the device they said they use."""
    users: dict[_Key, list[int]] = {}
    for rank, recording in attempt.ranks.items():
        named = [update.get("hardware_device") for update in recording.updates]
        texts = [name for name in named if isinstance(name, str) and name]
        if texts:
            users.setdefault((_name_machine(recording), texts[-1]), []).append(rank)
    return users


def _name_machine(recording: Recording) -> str:
    """Processes of one machine share its boot and its clock."""
    header = recording.header
    found = header.get("clock_id") or header.get("host")
    return found if isinstance(found, str) else f"rank {recording.rank}"


def _collect_readings(attempt: Attempt) -> dict[_Key, _Readings]:
    parts: dict[_Key, list[Columns]] = {}
    facts: dict[_Key, JsonFields] = {}
    for recording in attempt:
        if not recording.has_table("hardware"):
            continue
        machine = _name_machine(recording)
        columns = recording.read("hardware")
        ids = columns["name_id"]
        for name_id in np.unique(ids).tolist():
            key = (machine, recording.name_of(int(name_id)))
            rows = {name: values[ids == name_id] for name, values in columns.items()}
            parts.setdefault(key, []).append(rows)
        for one in _list_facts(recording):
            facts[machine, str(one.get("device"))] = one
    return {
        key: _Readings(columns=_join_by_time(found), facts=facts.get(key, {}))
        for key, found in parts.items()
    }


def _join_by_time(parts: Sequence[Columns]) -> Columns:
    joined = {
        column.name: np.concatenate([part[column.name] for part in parts])
        for column in TABLES["hardware"].columns
    }
    order = np.argsort(joined["time_host_mono_ns"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _list_facts(recording: Recording) -> Iterable[JsonFields]:
    for update in recording.updates:
        fields = update.get("hardware")
        listed = fields.get("devices") if isinstance(fields, dict) else None
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict):
                yield one


def _explain_none(attempt: Attempt, *, has_users: bool) -> Unavailable:
    for recording in attempt:
        for update in recording.updates:
            fields = update.get("hardware")
            reason = fields.get("reason") if isinstance(fields, dict) else None
            if isinstance(reason, str):
                return Unavailable(f"the driver's library could not be used: {reason[:_MAX_NAME]}")
    if has_users:
        return Unavailable("the devices were not read: recorded with hardware=False, or too short")
    return Unavailable("no rank was seen to use a CUDA device")


def _read_steps(recording: Recording, first_step: int) -> tuple[Int64s, Int64s]:
    """Starts and ends of the rank's steady steps."""
    columns = recording.read("steps")
    is_steady = int64_column(columns, "step") >= first_step
    start_ns = int64_column(columns, "start_host_mono_ns")[is_steady]
    return start_ns, int64_column(columns, "end_host_mono_ns")[is_steady]


def _measure_device(
    name: str, ranks: tuple[int, ...], readings: _Readings, steps: tuple[Int64s, Int64s]
) -> DeviceUse:
    inside = _find_rows(readings.time_ns, steps)
    power = readings.read("power_milliwatts", inside)
    heat = readings.read("temperature_celsius", inside)
    facts, no_steps = readings.facts, Unavailable("no reading in steady steps")
    product = facts.get("name")
    limit_mw = _read_fact(facts, "power_limit_milliwatts")
    return DeviceUse(
        device=name[:_MAX_NAME],
        product=product[:_MAX_NAME] if isinstance(product, str) and product else _NOT_SAID,
        ranks=ranks,
        num_readings=len(readings.time_ns[inside]),
        sm_clock_mhz=_measure_clock(readings, "sm_clock_mhz", inside),
        peer_sm_clock_mhz=Unavailable("it has no peer"),
        max_sm_clock_mhz=_read_fact(facts, "max_sm_clock_mhz"),
        memory_clock_mhz=_measure_clock(readings, "memory_clock_mhz", inside),
        max_memory_clock_mhz=_read_fact(facts, "max_memory_clock_mhz"),
        power_watts=float(power.mean()) / 1000 if len(power) else no_steps,
        power_limit_watts=limit_mw if isinstance(limit_mw, Unavailable) else limit_mw / 1000,
        temperature_celsius=int(heat.max()) if len(heat) else no_steps,
        limited_ratio=_share_limits(readings, inside),
        joules_per_step=_measure_energy(readings, steps),
        num_ecc_corrected=_count_growth(readings, "num_ecc_corrected"),
        num_ecc_uncorrected=_count_growth(readings, "num_ecc_uncorrected"),
        num_pcie_replays=_count_growth(readings, "num_pcie_replays"),
        num_nvlink_errors=_count_growth(readings, "num_nvlink_errors"),
    )


def _find_rows(time_ns: Int64s, steps: tuple[Int64s, Int64s]) -> slice:
    """Readings from the first steady step's start to the last one's end."""
    start_ns, end_ns = steps
    if not len(start_ns):
        return slice(0, 0)
    first = int(np.searchsorted(time_ns, start_ns[0], side="left"))
    return slice(first, int(np.searchsorted(time_ns, end_ns[-1], side="right")))


def _read_fact(facts: JsonFields, name: str) -> int | Unavailable:
    value = as_int(facts.get(name))
    return value if value > 0 else _NOT_SAID


def _measure_clock(readings: _Readings, name: str, rows: slice) -> float | Unavailable:
    clock = int64_column(readings.columns, name)[rows]
    limits = int64_column(readings.columns, "clock_limits")[rows]
    is_idle = (limits >= 0) & ((limits & ClockLimit.IDLE) != 0)
    busy = clock[(clock >= 0) & ~is_idle]
    if not len(busy):
        return Unavailable("idle at every reading" if is_idle.any() else "not read in steady steps")
    return float(np.median(busy))


def _share_limits(readings: _Readings, rows: slice) -> Mapping[str, float] | Unavailable:
    limits = readings.read("clock_limits", rows)
    if not len(limits):
        return Unavailable("the driver does not say what limits its clocks")
    shares = {word: float(np.mean((limits & bit) != 0)) for bit, word in CLOCK_LIMITS.items()}
    return {word: share for word, share in shares.items() if share}


@or_unavailable
def _measure_energy(readings: _Readings, steps: tuple[Int64s, Int64s]) -> float:
    """Joules per step over the whole steps between the first and the last reading."""
    time_ns, joules = need(_read_energy(readings))
    start_ns, end_ns = steps
    is_covered = (start_ns >= time_ns[0]) & (end_ns <= time_ns[-1])
    if not is_covered.any():
        raise Missing("no step lies between two readings of the device")
    window = np.array([start_ns[is_covered].min(), end_ns[is_covered].max()])
    if window[1] - window[0] < _MIN_WINDOW_NS:
        raise Missing("readings cover less than a second of steady steps")
    # From the first reading on: float64 would not hold a nanosecond of the clock itself.
    used = np.interp(window - time_ns[0], time_ns - time_ns[0], joules)
    return float(used[1] - used[0]) / int(np.count_nonzero(is_covered))


@or_unavailable
def _read_energy(readings: _Readings) -> tuple[Int64s, Floats]:
    """Moments, and joules used until each: of the counter, or power added up."""
    for name in ("energy_millijoules", "power_milliwatts"):
        values = int64_column(readings.columns, name)
        is_known = values >= 0
        time_ns, values = readings.time_ns[is_known], values[is_known]
        if len(values) < 2:
            continue
        if name == "power_milliwatts":
            watts = values / 1000
            parts = (watts[1:] + watts[:-1]) / 2 * np.diff(time_ns) / 1e9
            return time_ns, np.concatenate([[0.0], np.cumsum(parts)])
        if (np.diff(values) < 0).any():
            raise Missing("the driver's counter of energy went back")
        return time_ns, (values - values[0]) / 1000
    raise Missing("the driver tells neither energy nor power")


def _count_growth(readings: _Readings, name: str) -> int | Unavailable:
    counts = readings.read(name)
    if not len(counts):
        return Unavailable("the driver does not count them")
    growth = int(counts[-1]) - int(counts[0])
    return growth if growth >= 0 else Unavailable("the driver's counter went back")


def _compare_clocks(devices: Sequence[DeviceUse]) -> Iterable[DeviceUse]:
    """Each with what the others of its product ran at."""
    for device in devices:
        peers = [
            clock
            for other in devices
            if other is not device
            and (other.product, other.max_sm_clock_mhz) == (device.product, device.max_sm_clock_mhz)
            and (clock := known(other.sm_clock_mhz)) is not None
        ]
        yield replace(device, peer_sm_clock_mhz=float(np.median(peers))) if peers else device


def _sum_energy(devices: Sequence[DeviceUse], *, num_used: int) -> float | Unavailable:
    joules = [device.joules_per_step for device in devices]
    known_joules = [one for one in joules if not isinstance(one, Unavailable)]
    if len(known_joules) == num_used:
        return float(sum(known_joules))
    reasons = [one.reason for one in joules if isinstance(one, Unavailable)]
    reason = reasons[0] if reasons else "not all were read"
    lacking = num_used - len(known_joules)
    return Unavailable(f"{lacking} of {num_used} device(s) have no energy: {reason}")


@or_unavailable
def _divide_tokens(
    joules: float | Unavailable,
    steps_per_s: float | Unavailable,
    tokens_per_s: float | Unavailable,
) -> float:
    tokens_per_step = need(tokens_per_s) / need(steps_per_s)
    if tokens_per_step <= 0:
        raise Missing("no tokens were counted")
    return need(joules) / tokens_per_step
