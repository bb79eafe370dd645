"""What devices did in the time of a timeline that no operation and no phase of the host explains.

A phase's span on a stream is a bound: the device may have computed, copied, communicated or done
nothing in it. Two kinds of evidence divide it:

- Traces of a profiler count. Their phases have no gaps; what lies between is idle, and the table
  `device_gaps` has its causes, step by step.
- Kernel samples count in a few steps, and the others are estimated: a step computes and copies as
  long as a sampled one, apart from what it does in phases that have lines of their own. Of the
  rest, communication is exposed as in the samples, in proportion to the length, where that is more
  than hold-ups show; what remains is idle, for the causes seen in the samples, in their proportion.
  Without communication the gaps between kernels that had been launched in time (`dependency`) are
  the device's own, as long as in the samples however long the host takes. What a step in which code
  was compiled idles longer than the usual one is the first run of that code, which loads its
  kernels. The interval is half the range of the sampled steps.

Without evidence a rank's time is `SPAN` where its stream was in a phase, and `BETWEEN` elsewhere.
Wrong where steps differ in what they compute: each is taken for the mean of the sampled ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.kernel_operations import match_kernels, measure_operations
from meshscope.analyze.job.operations import MAX_SPAN_NS, Operations, load_operations
from meshscope.analyze.rank.kernel_sample import KernelSample, narrow_to_samples, read_samples
from meshscope.analyze.rank.kernel_steps import DeviceStep, read_host_phases, split_sample
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.layout import Axis
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

SPAN = "span"
BETWEEN = "between"
COMPUTE = "compute"
COPY = "copy"
EXPOSED = "exposed"
"""With an axis."""
FIRST_RUN = "first run"
"""Of compiled code."""
CAUSES: Mapping[str, str] = {
    "host": "the host was at something else",
    "synchronising": "behind a wait of the host for the device",
    "communicating": "the host was in a collective's call",
    "launch": "the launch was on its way",
    "dependency": "launched, and waiting for other work",
    "unknown": "not known",
}
"""Why a device idled, in words; also columns of table `device_gaps`."""
_COMPILE = "compile"
_DEPENDENCY = list(CAUSES).index("dependency")
OWN_PHASES = frozenset(("data", "checkpoint", "eval", "logging", "compile", "copy", "earlier"))
"""Phases that have lines of their own: nothing in them is divided."""

Part = tuple[str, str]
"""What it did, and for `EXPOSED` along which axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The kernel samples of one rank, summed up."""

    steps: tuple[DeviceStep, ...]
    exposed_ns: Mapping[str, Floats]
    """By axis, per sampled step."""

    @property
    def step_numbers(self) -> tuple[int, ...]:
        return tuple(one.step for one in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceParts:
    """The divided time of every rank and step, in parts that sum to it."""

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    time_ns: Int64s
    """[rank, step, part]"""
    spread_ns: Floats
    """[rank, part]: half the range of the sampled steps, per step; 0 where it was counted."""
    is_divided: Bools
    """Per piece of the timeline: its time is in `time_ns`."""
    sampled: Mapping[int, Sampled]
    """By rank; empty where traces count, or nothing does."""

    def ns_by_rank(self, part: str) -> Int64s:
        """[rank]: all steps of the timeline together, along all axes."""
        wanted = [index for index, (name, _) in enumerate(self.parts) if name == part]
        return np.asarray(self.time_ns[:, :, wanted].sum(axis=(1, 2)), dtype=np.int64)

    def total_ns(self, *names: str) -> int:
        return sum(int(self.ns_by_rank(name).sum()) for name in names)

    def remove(self, timeline: Timeline, *names: str, ratio: Floats | float = 1.0) -> Int64s:
        """Per piece its work without these parts, which are taken evenly from a rank's step; of
        each rank only this ratio of them."""
        share = np.broadcast_to(ratio, (len(self.ranks),))[:, None]
        return self.shorten(timeline, self.time_of(*names) * share)

    def time_of(self, *names: str) -> Int64s:
        """[rank, step]: these parts together."""
        wanted = [index for index, (name, _) in enumerate(self.parts) if name in names]
        return np.asarray(self.time_ns[:, :, wanted].sum(axis=2), dtype=np.int64)

    def shorten(self, timeline: Timeline, removed_ns: Floats) -> Int64s:
        """Per piece its work if a rank's step is shorter by so much, [rank, step]."""
        pieces = timeline.pieces
        left = np.maximum(1 - removed_ns / np.maximum(self.time_ns.sum(axis=2), 1), 0.0)
        index = np.searchsorted(np.array(timeline.ranks), pieces.rank)
        work = np.rint(pieces.duration_ns * left[index, pieces.step]).astype(np.int64)
        return np.where(self.is_divided, work, pieces.duration_ns)


def divide_device_time(attempt: Attempt, timeline: Timeline) -> DeviceParts:
    pieces = timeline.pieces
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank)
    is_divided = timeline.on_device[index] & (pieces.kind == PieceKind.WORK) & (pieces.row < 0)
    own = [number for number, name in enumerate(timeline.phases) if name in OWN_PHASES]
    is_divided &= ~np.isin(pieces.phase, own)
    if attempt.is_from_traces:
        is_divided &= pieces.phase == 0
    table = _PartTable(timeline)
    for number, rank in enumerate(timeline.ranks):
        mine = is_divided & (index == number)
        if not timeline.on_device[number]:
            continue
        if attempt.is_from_traces:
            table.add_counted(number, mine, attempt.ranks[rank])
        else:
            table.add_estimated(number, mine, sum_samples(attempt, rank, timeline))
    return table.make(is_divided)


class _PartTable:
    """Collects the parts of one rank after another."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._time_ns: dict[Part, Int64s] = {}
        self._spread_ns: dict[Part, Floats] = {}
        self._sampled: dict[int, Sampled] = {}
        self._shape = (len(timeline.ranks), len(timeline.steps))

    def _add(self, part: Part, rank: int, time_ns: Int64s, spread_ns: float = 0.0) -> None:
        if part not in self._time_ns:
            self._time_ns[part] = np.zeros(self._shape, dtype=np.int64)
            self._spread_ns[part] = np.zeros(self._shape[0])
        self._time_ns[part][rank] += time_ns
        self._spread_ns[part][rank] = spread_ns

    def _sum(self, chosen: Bools) -> Int64s:
        pieces = self._timeline.pieces
        sums = np.bincount(
            pieces.step[chosen], pieces.duration_ns[chosen], minlength=self._shape[1]
        )
        return np.rint(sums).astype(np.int64)

    def add_counted(self, rank: int, mine: Bools, recording: Recording) -> None:
        """Idle time of a trace, by the causes of each step."""
        causes = _read_gaps(recording, self._timeline.steps)
        self._spread_idle(rank, self._sum(mine), causes)

    def _spread_idle(self, rank: int, idle_ns: Int64s, causes: Floats, spread: float = 0.0) -> None:
        """`causes` are weights, [step, cause]; without any the cause is not known."""
        total = causes.sum(axis=1)
        causes = causes.copy()
        causes[total <= 0, list(CAUSES).index("unknown")] = 1
        before = np.zeros(len(idle_ns), dtype=np.int64)
        edges = np.cumsum(causes / causes.sum(axis=1, keepdims=True), axis=1)
        edges[:, -1] = 1
        for column, cause in enumerate(CAUSES):
            until = np.rint(idle_ns * edges[:, column]).astype(np.int64)
            if (until > before).any():
                self._add((cause, ""), rank, until - before, spread)
            before = until

    def add_estimated(self, rank: int, mine: Bools, sampled: Sampled | None) -> None:
        """A device without a profiler, from kernel samples."""
        pieces = self._timeline.pieces
        if sampled is None or not sampled.steps:
            for name, chosen in ((SPAN, pieces.phase != 0), (BETWEEN, pieces.phase == 0)):
                time_ns = self._sum(mine & chosen)
                if time_ns.any():
                    self._add((name, ""), rank, time_ns)
            return
        self._sampled[self._timeline.ranks[rank]] = sampled
        whole = self._sum(mine)
        steps = sampled.steps
        busy = {
            (COMPUTE, ""): np.array([float(one.training_compute_ns) for one in steps]),
            (COPY, ""): np.array([float(one.training_copy_ns) for one in steps]),
        }
        means = {part: float(values.mean()) for part, values in busy.items()}
        scale = np.minimum(1.0, whole / max(sum(means.values()), 1.0))
        rest = whole.copy()
        for part, values in busy.items():
            time_ns = np.minimum(np.rint(means[part] * scale).astype(np.int64), rest)
            self._add(part, rank, time_ns, _half_range(values))
            rest = rest - time_ns
        shares = self._share_rest(rank, sampled, float(rest.mean()))
        idle, spread = rest.copy(), 0.0
        for axis, (ratio, off) in shares.items():
            time_ns = np.minimum(np.rint(rest * ratio).astype(np.int64), idle)
            self._add((EXPOSED, axis), rank, time_ns, off)
            idle, spread = idle - time_ns, max(spread, off)
        first_ns = self._find_first_runs(rank, idle)
        if first_ns.any():
            self._add((FIRST_RUN, ""), rank, first_ns, spread)
            idle = idle - first_ns
        weights = _sum_causes(steps)
        if self._timeline.communication is None:
            own_ns = float(np.median([one.idle_ns.get("dependency", 0) for one in steps]))
            time_ns = np.minimum(round(own_ns), idle)
            self._add(("dependency", ""), rank, time_ns, spread)
            idle = idle - time_ns
            if weights.sum() > weights[_DEPENDENCY]:
                weights[_DEPENDENCY] = 0
        self._spread_idle(rank, idle, np.repeat(weights[None], self._shape[1], axis=0), spread)

    def _find_first_runs(self, rank: int, idle_ns: Int64s) -> Int64s:
        """What steps with a compilation idle longer than the others."""
        timeline = self._timeline
        has_compiled = np.zeros(len(idle_ns), dtype=np.bool_)
        if _COMPILE in timeline.phases:
            own = timeline.pieces.rank == timeline.ranks[rank]
            own &= timeline.pieces.phase == timeline.phases.index(_COMPILE)
            has_compiled[timeline.pieces.step[own]] = True
        if has_compiled.all() or not has_compiled.any():
            return np.zeros_like(idle_ns)
        usual_ns = int(np.median(idle_ns[~has_compiled]))
        return np.where(has_compiled, np.maximum(idle_ns - usual_ns, 0), 0)

    def _share_rest(
        self, rank: int, sampled: Sampled, rest_ns: float
    ) -> dict[str, tuple[float, float]]:
        """Which part of the time that is neither compute nor copies was communication that no
        hold-up shows, by axis; and how far off that may be, in ns a step.

        Where steps are longer than the sampled ones, communication and idle time both are.
        """
        timeline = self._timeline
        period = timeline.period_end_ns[rank] - timeline.period_start_ns[rank]
        busy = np.array([float(one.compute_ns + one.copy_ns) for one in sampled.steps])
        length = np.array([float(one.length_ns) for one in sampled.steps])
        stretch = (float(period.mean()) - float(busy.mean())) / max(
            float((length - busy).mean()), 1
        )
        held = _measure_held(timeline, rank)
        found = {}
        for axis, exposed in sampled.exposed_ns.items():
            unseen = max(float(exposed.mean()) * stretch - held.get(axis, 0.0), 0.0)
            if unseen:
                found[axis] = (min(unseen / max(rest_ns, 1.0), 1.0), _half_range(exposed))
        total = sum(ratio for ratio, _ in found.values())
        return {axis: (ratio / max(total, 1.0), off) for axis, (ratio, off) in found.items()}

    def make(self, is_divided: Bools) -> DeviceParts:
        order = [COMPUTE, COPY, EXPOSED, FIRST_RUN, *CAUSES, SPAN, BETWEEN]
        parts = sorted(self._time_ns, key=lambda part: (order.index(part[0]), part[1]))
        return DeviceParts(
            ranks=self._timeline.ranks,
            parts=tuple(parts),
            time_ns=_stack([self._time_ns[part] for part in parts], self._shape),
            spread_ns=np.array([self._spread_ns[part] for part in parts])
            .reshape(len(parts), self._shape[0])
            .T,
            is_divided=is_divided,
            sampled=self._sampled,
        )


def _half_range(values: Floats) -> float:
    return float(values.max() - values.min()) / 2


def _stack(columns: list[Int64s], shape: tuple[int, int]) -> Int64s:
    return np.stack(columns, axis=2) if columns else np.zeros((*shape, 0), dtype=np.int64)


def _read_gaps(recording: Recording, steps: Int64s) -> Floats:
    """[step, cause] of a trace."""
    sums = np.zeros((len(steps), len(CAUSES)))
    if not recording.has_table("device_gaps") or not len(steps):
        return sums
    columns = recording.read("device_gaps")
    step = int64_column(columns, "step")
    at = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
    for column, cause in enumerate(CAUSES):
        values = int64_column(columns, f"{cause}_ns")
        is_good = (steps[at] == step) & (values >= 0) & (values < MAX_SPAN_NS)
        np.add.at(sums[:, column], at[is_good], values[is_good])
    return sums


def _sum_causes(steps: Sequence[DeviceStep]) -> Floats:
    """Idle time of sampled steps by cause; what the host's phases explain has lines of its own."""
    return np.array([float(sum(one.idle_ns.get(cause, 0) for one in steps)) for cause in CAUSES])


def _measure_held(timeline: Timeline, rank: int) -> Mapping[str, float]:
    """How long operations held a rank up, by axis, per step of the timeline."""
    pieces, job = timeline.pieces, timeline.communication
    mine = (pieces.rank == timeline.ranks[rank]) & (pieces.row >= 0)
    held: dict[str, float] = {}
    if job is not None:
        group = job.operations.rows.group[pieces.row[mine]]
        for one in np.unique(group).tolist():
            axis = job.operations.groups[one].axis if one >= 0 else OTHER
            time_ns = float(pieces.duration_ns[mine][group == one].sum())
            held[axis] = held.get(axis, 0.0) + time_ns / max(len(timeline.steps), 1)
    # A wait without an operation is for the input of a pipeline action.
    waits = (pieces.rank == timeline.ranks[rank]) & (pieces.row < 0)
    waits &= pieces.kind == PieceKind.WAIT
    if waits.any():
        time_ns = float(pieces.duration_ns[waits].sum()) / max(len(timeline.steps), 1)
        held[str(Axis.PP)] = held.get(str(Axis.PP), 0.0) + time_ns
    return held


def sum_samples(attempt: Attempt, rank: int, timeline: Timeline) -> Sampled | None:
    """The sampled steps of one rank; None without any."""
    samples = read_samples(attempt.ranks[rank])
    if not samples:
        return None
    around = narrow_to_samples(attempt.ranks[rank], samples)
    times = order_steps(around.read("steps"))
    phases = read_host_phases(around, times)
    has_operations = timeline.communication is not None
    operations = load_operations(replace(attempt, ranks={rank: around})) if has_operations else None
    steps: list[DeviceStep] = []
    exposed: dict[str, list[float]] = {}
    for sample in samples:
        for one in keep_usual(split_sample(sample, times, phases)):
            for axis, value in _sum_exposed(sample, one, around, operations).items():
                exposed.setdefault(axis, [0.0] * len(steps)).append(value)
            steps.append(one)
            for values in exposed.values():
                values += [0.0] * (len(steps) - len(values))
    arrays = {axis: np.array(values) for axis, values in exposed.items()}
    return Sampled(steps=tuple(steps), exposed_ns=arrays)


def keep_usual(steps: tuple[DeviceStep, ...]) -> tuple[DeviceStep, ...]:
    """Without steps in which code was compiled, where there are others."""
    usual = tuple(one for one in steps if not one.has_compiled)
    return usual or steps


def _sum_exposed(
    sample: KernelSample, step: DeviceStep, recording: Recording, operations: Operations | None
) -> dict[str, float]:
    """Exposed communication of one sampled step by axis, copies beside it left out."""
    if not step.exposed_ns:
        return {}
    if operations is None:
        return {OTHER: float(step.exposed_ns)}
    rows, groups = operations.rows, operations.groups
    names = {int(one): recording.name_of(int(one)) for one in np.unique(sample.work.name_id)}
    match = match_kernels(sample, rows, names)
    found = measure_operations(sample, match, step.start_ns, step.end_ns)
    by_axis: dict[str, float] = {}
    for row, exposed, beside in zip(
        found.row.tolist(), found.exposed_ns.tolist(), found.beside_copy_ns.tolist(), strict=True
    ):
        group = int(rows.group[row]) if row >= 0 else -1
        axis = groups[group].axis if group >= 0 else OTHER
        by_axis[axis] = by_axis.get(axis, 0.0) + exposed - beside
    if len(by_axis) > 1 and OTHER in by_axis:
        # Kernels whose operation is not known are taken to be like the others.
        unknown = by_axis.pop(OTHER)
        total = sum(by_axis.values())
        if total:
            by_axis = {axis: value * (1 + unknown / total) for axis, value in by_axis.items()}
        else:
            by_axis[OTHER] = unknown
    return by_axis


def describe_evidence(parts: DeviceParts) -> str | Unavailable:
    """Where the division comes from, in words."""
    if not parts.sampled:
        return Unavailable("no kernel sample")
    steps = sorted({step for one in parts.sampled.values() for step in one.step_numbers})
    noun = "step" if len(steps) == 1 else "steps"
    return f"kernel samples of {noun} {_list_ranges(steps)}"


def _list_ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in ranges)
