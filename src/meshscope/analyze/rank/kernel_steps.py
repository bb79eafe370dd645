"""What a rank's device did in the steps of a kernel sample, to the nanosecond.

    host    |--- step 21 ---|--- step 22 ---|
    device            |------- step 21 -------|------- step 22 -------|

The host runs ahead of the device. A step of the device begins with the first work on its compute
stream that the host launched in the step, and ends where the next one begins; without a next one
in the sample, with the last work. Work whose launch was not seen belongs to the step of the work
before it on its stream: what was launched before the sample began comes before all its steps.

    compute + copies with no compute beside + communication with neither beside + idle = length

Idle time is by cause, as `numerics.idle_gaps` defines them; what is the host's is given to the
phase the host was in, where that is one of `HOST_CAUSES`, or to the profiler that held it up. What
the host launches or waits for in such a phase is that phase's too: a checkpoint's copies are not
the training's, whichever phase they are in within it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.kernel_sample import DeviceWork, KernelSample
from meshscope.analyze.rank.phases import PhaseSpans, StepTimes, assign_phases
from meshscope.numerics.idle_gaps import IdleGaps, explain_gaps
from meshscope.numerics.interval_layers import Layer, make_layer
from meshscope.numerics.intervals import Intervals, intersect, join, own_moments, subtract, unite
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import int64_column, select_rows
from meshscope.store.read.recording import Recording

HOST_CAUSES = ("data", "checkpoint", "eval", "logging", "compile")
"""Phases of the host that idle time is named after."""
NO_PHASE = "(no phase)"
"""Launched outside of any phase."""
NOT_SEEN = "(launch not seen)"
"""Launched before the sample began."""
_DATA = "data"
"""A wait there is the wait that the copy of a batch makes, and holds up the step like any other."""
_BEFORE = -1
_MAX_NS = 1 << 61
"""A later time, or a longer span, is damage."""
_NO_PHASE_ID = -1
_NOT_SEEN_ID = -2
_FIRST_CAUSE_ID = -3
"""And further down, one for each of `HOST_CAUSES`."""

_ByPhase = Callable[[int, int], dict[str, int]]
"""Time per phase from a start to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """One step of one device."""

    rank: int
    step: int
    sample: int
    start_ns: int
    """On the clock of the rank's host."""
    end_ns: int
    is_followed: bool
    """The next step's first work was seen; if not, idle time at the step's end is not in it."""
    compute_ns: int
    """A kernel that computes ran."""
    copy_ns: int
    """A copy or fill ran, and no such kernel."""
    communication_ns: int
    """A kernel that communicates ran, whatever else did."""
    exposed_ns: int
    """It ran, and nothing else."""
    exposed_beside_copy_ns: int
    """It ran beside a copy or fill, and no kernel computed; part of `copy_ns` too."""
    idle_ns: Mapping[str, int]
    """By cause, only those that occurred."""
    compute_by_phase_ns: Mapping[str, int]
    """Sums to `compute_ns`, by the host's phase that launched it."""
    copy_by_phase_ns: Mapping[str, int]
    """Sums to `copy_ns`."""
    num_kernels: int
    """Kernels that compute."""
    num_graph_kernels: int
    """Those of them that a CUDA graph launched."""
    waiting_ns: int
    """How long the host waited for the device, outside of `HOST_CAUSES`."""
    waited_copy_ns: int
    """The part of `copy_ns` in which it did."""
    host_by_phase_ns: Mapping[str, int]
    """Sums to the idle time whose cause is the host, by the phase it was in halfway."""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def total_idle_ns(self) -> int:
        return sum(self.idle_ns.values())

    @property
    def training_compute_ns(self) -> int:
        """Without what evaluation, checkpoints and the like computed."""
        return _leave_out_causes(self.compute_by_phase_ns)

    @property
    def training_copy_ns(self) -> int:
        return _leave_out_causes(self.copy_by_phase_ns)

    @property
    def has_compiled(self) -> bool:
        """What code is tried out with in such a step is none of the training's work."""
        return any("compile" in one for one in (self.idle_ns, self.compute_by_phase_ns))


def _leave_out_causes(by_phase_ns: Mapping[str, int]) -> int:
    return sum(value for name, value in by_phase_ns.items() if name not in HOST_CAUSES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPhases:
    """In which phase a rank's host was."""

    layers: tuple[Layer, ...]
    """One per depth, the outermost first; values are name ids."""
    causes: Mapping[str, Intervals]
    """When it was in each of `HOST_CAUSES`; of two at once, in the inner one."""
    names: Mapping[int, str]

    def find(self, moments: Int64s) -> Int64s:
        """Name id of the innermost phase at each moment; -1 where there is none."""
        found = np.full(len(moments), _NO_PHASE_ID, dtype=np.int64)
        for layer in self.layers:
            value = layer.look_up(moments)
            found = np.where(value >= 0, value, found)
        return found


def read_host_phases(recording: Recording, steps: StepTimes) -> HostPhases:
    """Phases of the training thread that do not cross a step's start or end."""
    columns = recording.read("spans")
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = (start >= 0) & (start < _MAX_NS) & (duration >= 0) & (duration < _MAX_NS)
    spans, _ = assign_phases(steps, select_rows(columns, is_good))
    end = spans.start_ns + spans.duration_ns
    levels = [
        np.flatnonzero((spans.interval >= 0) & (spans.depth == one))
        for one in np.unique(spans.depth)
    ]
    names = {int(one): recording.name_of(int(one)) for one in np.unique(spans.name_id)}
    return HostPhases(
        layers=tuple(
            make_layer(spans.start_ns[rows], end[rows], spans.name_id[rows].astype(np.int64))
            for rows in levels
        ),
        causes=_find_causes(spans, end, levels, names),
        names=names,
    )


def _find_causes(
    spans: PhaseSpans, end: Int64s, levels: list[Int64s], names: Mapping[int, str]
) -> dict[str, Intervals]:
    wanted = {name_id: name for name_id, name in names.items() if name in HOST_CAUSES}
    causes: dict[str, Intervals] = {}
    for rows in levels:
        for name_id, name in wanted.items():
            picked = rows[spans.name_id[rows] == name_id]
            inner = unite(spans.start_ns[picked], end[picked])
            if len(inner):
                causes = {one: subtract(outer, inner) for one, outer in causes.items()}
                causes[name] = join(causes[name], inner) if name in causes else inner
    return causes


def split_sample(
    sample: KernelSample, steps: StepTimes, phases: HostPhases
) -> tuple[DeviceStep, ...]:
    """The steps of a sample whose begin on the device was seen."""
    work = sample.work
    cuts = find_cuts(sample, steps)
    if not cuts:
        return ()
    compute = work.unite(KernelKind.COMPUTE)
    copies = work.unite(KernelKind.COPY, KernelKind.FILL)
    communication = work.unite(KernelKind.COMMUNICATION)
    exposed = subtract(communication, compute)
    sets = (
        compute,
        subtract(copies, compute),
        communication,
        subtract(exposed, copies),
        intersect(exposed, copies),
    )
    waits = sample.synchronising
    for name, one in phases.causes.items():
        waits = waits if name == _DATA else subtract(waits, one)
    causes = {"profiler": sample.profiling}
    causes |= {name: subtract(one, sample.profiling) for name, one in phases.causes.items()}
    causes = {name: subtract(one, waits) for name, one in causes.items()}
    phase, names = _find_phases(work, phases)
    sum_compute = _sum_by_phase(work, phase, names, compute, (KernelKind.COMPUTE,))
    sum_copies = _sum_by_phase(work, phase, names, sets[1], (KernelKind.COPY, KernelKind.FILL))
    busy = unite(work.start_ns, work.end_ns)
    found = []
    for step, start_ns, end_ns, is_followed in cuts:
        lengths = [_measure(one, start_ns, end_ns) for one in sets]
        gaps = explain_gaps(
            busy,
            work.start_ns,
            work.launched_ns,
            first_ns=start_ns,
            last_ns=end_ns,
            synchronising=waits,
        )
        idle_ns, host_ns = _name_causes(gaps, causes)
        halfway = phases.find((gaps.begin_ns + gaps.host_end_ns) // 2)
        found.append(
            DeviceStep(
                rank=sample.rank,
                step=step,
                sample=sample.number,
                start_ns=start_ns,
                end_ns=end_ns,
                is_followed=is_followed,
                compute_ns=lengths[0],
                copy_ns=lengths[1],
                communication_ns=lengths[2],
                exposed_ns=lengths[3],
                exposed_beside_copy_ns=lengths[4],
                idle_ns=idle_ns,
                compute_by_phase_ns=sum_compute(start_ns, end_ns),
                copy_by_phase_ns=sum_copies(start_ns, end_ns),
                num_kernels=_count(work, start_ns, end_ns),
                num_graph_kernels=_count(work, start_ns, end_ns, work.is_graph),
                waiting_ns=_measure(waits, start_ns, end_ns),
                waited_copy_ns=_measure(intersect(sets[1], waits), start_ns, end_ns),
                host_by_phase_ns=_sum_names(halfway, host_ns, names),
            )
        )
    return tuple(found)


def _find_phases(work: DeviceWork, phases: HostPhases) -> tuple[Int64s, dict[int, str]]:
    """Per piece of work an id of the phase that launched it, and what the ids mean."""
    names = {**phases.names, _NO_PHASE_ID: NO_PHASE, _NOT_SEEN_ID: NOT_SEEN}
    phase = phases.find(work.launch_ns)
    for number, (name, inside) in enumerate(phases.causes.items()):
        names[_FIRST_CAUSE_ID - number] = name
        is_inside = inside.within(work.launch_ns, work.launch_ns + 1) > 0
        phase = np.where(is_inside, _FIRST_CAUSE_ID - number, phase)
    return np.where(work.launch_ns >= 0, phase, _NOT_SEEN_ID), names


def find_cuts(sample: KernelSample, steps: StepTimes) -> list[tuple[int, int, int, bool]]:
    """Step, start and end on the device, whether the end is the next one's start."""
    work = sample.work
    rows = np.flatnonzero(work.stream == work.find_compute_stream())
    if not len(rows) or not len(steps):
        return []
    seen, first = np.unique(_find_steps(work, rows, steps), return_index=True)
    start_of = dict(zip(seen.tolist(), work.start_ns[rows[first]].tolist(), strict=True))
    is_sampled = (steps.step >= sample.first_step) & (steps.step <= sample.last_step)
    is_sampled &= (steps.start_ns >= sample.begin_ns) & (steps.start_ns <= sample.end_ns)
    cuts = []
    for index in np.flatnonzero(is_sampled & np.isin(np.arange(len(steps)), seen)).tolist():
        step, start_ns, end_ns = int(steps.step[index]), start_of[index], start_of.get(index + 1)
        is_followed = end_ns is not None and int(steps.step[index + 1]) == step + 1
        if end_ns is None or not is_followed:
            # Without the next step's record, what it launched comes after this one's end.
            later = rows[work.launch_ns[rows] > steps.end_ns[index]]
            end_ns = int(work.start_ns[later[0]] if len(later) else work.end_ns.max())
        if end_ns > start_ns:
            cuts.append((step, start_ns, end_ns, is_followed))
    return cuts


def _find_steps(work: DeviceWork, rows: Int64s, steps: StepTimes) -> Int64s:
    """For work of one stream the index of the step that launched it; -1 of a time before all.

    A stream works in order: what follows a step's work belongs to it or a later one.
    """
    launch = work.launch_ns[rows]
    index = np.searchsorted(steps.start_ns, launch, side="right") - 1
    return np.maximum.accumulate(np.where(launch >= 0, index, _BEFORE))


def _count(
    work: DeviceWork, start_ns: int, end_ns: int, wanted: Bools | np.bool_ = np.True_
) -> int:
    is_inside = (work.start_ns >= start_ns) & (work.start_ns < end_ns) & wanted
    return int(np.count_nonzero(is_inside & (work.kind == KernelKind.COMPUTE)))


def _measure(one: Intervals, start_ns: int, end_ns: int) -> int:
    start, end = np.array([start_ns]), np.array([end_ns])
    return int(one.within(start, end)[0])


def _name_causes(gaps: IdleGaps, causes: Mapping[str, Intervals]) -> tuple[dict[str, int], Int64s]:
    """Idle time by cause, and per gap what remains the host's."""
    host = gaps.host_ns
    found = {}
    for name, one in causes.items():
        inside = np.minimum(one.within(gaps.begin_ns, gaps.host_end_ns), host)
        found[name] = int(inside.sum())
        host = host - inside
    total = gaps.sum_up()
    found |= {
        "host": int(host.sum()),
        "synchronising": total.synchronising_ns,
        "launch": total.launch_ns,
        "dependency": total.dependency_ns,
        "unknown": total.unknown_ns,
    }
    return {name: value for name, value in found.items() if value}, host


def _sum_names(name_id: Int64s, values: Int64s, names: Mapping[int, str]) -> dict[str, int]:
    sums = {one: int(values[name_id == one].sum()) for one in np.unique(name_id).tolist()}
    return {names[one]: value for one, value in sums.items() if value}


def _sum_by_phase(
    work: DeviceWork,
    phase: Int64s,
    names: Mapping[int, str],
    counted: Intervals,
    kinds: tuple[KernelKind, ...],
) -> _ByPhase:
    """What of `counted` belongs to which phase: of two pieces at once, to the one that was first.

    Of `counted` the pieces of these kinds are all that is not beside other work.
    """
    rows = np.flatnonzero(np.isin(work.kind, [int(kind) for kind in kinds]))
    start, end = own_moments(work.start_ns[rows], work.end_ns[rows])

    def sum_up(start_ns: int, end_ns: int) -> dict[str, int]:
        inside = counted.within(np.clip(start, start_ns, end_ns), np.clip(end, start_ns, end_ns))
        found: dict[str, int] = {}
        for name_id in np.unique(phase[rows]).tolist():
            total = int(inside[phase[rows] == name_id].sum())
            if total:
                found[names[name_id]] = found.get(names[name_id], 0) + total
        return found

    return sum_up
