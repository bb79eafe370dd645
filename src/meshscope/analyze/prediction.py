"""What was predicted before a run, against what it did: step, lines of the budget, memory.

The residual is shown as it is. Nothing here changes the prediction, which was stored before the
first step (`core.prediction`).

Predicted lines are those of the busiest rank, measured ones are means over ranks, so ranks that do
unequal work differ from their prediction by that alone. Measured memory is tensor bytes at the peak
of a memory profile, the fullest rank of each stage; on a device without a profile, the most that
its allocator handed out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshscope.analyze.budget.budget import Budget
from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.memory.memory import JobMemory, Place
from meshscope.analyze.memory.memory_attribution import find_peak
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.prediction import LINES, Prediction, read_prediction
from meshscope.core.unavailable import Unavailable, known, need, or_unavailable
from meshscope.store.read.memory_points import MemoryRecording
from meshscope.store.read.recording import JsonFields

COMPUTE_SHARES = (Share.USEFUL, Share.INEFFICIENCY, Share.COMPUTE, Share.SPAN)
_COMMUNICATION = (Share.TRANSFER, Share.WAIT, Share.UNSPLIT)
NOT_PREDICTED = Unavailable(
    "nothing was predicted of this run; meshscope train stores a prediction with what it records"
)
_NO_BYTES = Unavailable(
    "the tensors of this stage were not measured: record with --profiling, or on a device"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTime:
    """A line of the budget, or the whole step."""

    name: str
    predicted_ns: float
    measured_ns: float

    @property
    def residual_ns(self) -> float:
        """Measured minus predicted."""
        return self.measured_ns - self.predicted_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMemory:
    """The fullest rank of one pipeline stage."""

    pp_rank: int
    predicted_bytes: int
    measured_bytes: int | Unavailable
    rank: int | Unavailable
    """The one that was measured."""

    @property
    def residual_bytes(self) -> int | Unavailable:
        """Measured minus predicted."""
        measured = self.measured_bytes
        return measured if isinstance(measured, Unavailable) else measured - self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    step: CheckedTime | Unavailable
    """Median of steps after warm-up."""
    is_within: bool | Unavailable
    """Whether the step lies in the predicted interval."""
    interval_ratio: float | Unavailable
    calibrated_on: str | Unavailable
    fitted: tuple[str, ...]
    lines: tuple[CheckedTime, ...]
    """Of a mean step, in the order of `core.prediction.LINES`; empty without a budget."""
    memory: tuple[CheckedMemory, ...]


def has_prediction(study: Study) -> bool:
    return _find_fields(study) is not None


@or_unavailable
def check_prediction(study: Study, profiles: Sequence[MemoryRecording]) -> PredictionCheck:
    """Unavailable where nothing was predicted; `profiles` are the run's memory profiles, if any."""
    fields = _find_fields(study)
    prediction = read_prediction(need(NOT_PREDICTED if fields is None else fields))
    time, step_ns = prediction.time, study.step_ns
    memory = _check_memory(prediction, study, profiles)
    if isinstance(time, Unavailable) or isinstance(step_ns, Unavailable):
        missing = next(one for one in (time, step_ns) if isinstance(one, Unavailable))
        return PredictionCheck(
            step=missing, is_within=missing, interval_ratio=missing, calibrated_on=missing,
            fitted=(), lines=(), memory=memory,
        )  # fmt: skip
    step = CheckedTime(name="step", predicted_ns=time.step_ns, measured_ns=step_ns)
    measured = measure_lines(study.budget)
    return PredictionCheck(
        step=step,
        is_within=_is_within(step, time.interval_ratio),
        interval_ratio=time.interval_ratio,
        calibrated_on=time.calibrated_on,
        fitted=time.fitted,
        lines=tuple(
            CheckedTime(name=name, predicted_ns=time.lines_ns[name], measured_ns=found)
            for name, found in measured.items()
            if name in time.lines_ns
        ),
        memory=memory,
    )


def _find_fields(study: Study) -> JsonFields | None:
    """Of the lowest rank that has any."""
    for rank in sorted(study.attempt.ranks):
        recording = study.attempt.ranks[rank]
        for fields in (*reversed(recording.updates), recording.header):
            found = fields.get("prediction")
            if isinstance(found, dict):
                return found
    return None


def _is_within(step: CheckedTime, ratio: float) -> bool:
    low, high = step.predicted_ns / (1 + ratio), step.predicted_ns * (1 + ratio)
    return low <= step.measured_ns <= high


def measure_lines(budget: Budget | Unavailable) -> dict[str, float]:
    """Means over ranks and steps by the planner's lines, in ns; empty without a budget."""
    found = known(budget)
    if found is None or not found.wall_ns.size:
        return {}
    sums = dict.fromkeys(LINES, 0.0)
    for line, mean in zip(found.lines, found.time_ns.mean(axis=(0, 1)).tolist(), strict=True):
        if line.share in COMPUTE_SHARES:
            sums["compute"] += mean
        elif line.share is Share.BUBBLE:
            sums["bubble"] += mean
        elif line.share in _COMMUNICATION and line.axis in sums:
            sums[line.axis] += mean
        else:
            sums["other"] += mean
    return sums


def _check_memory(
    prediction: Prediction, study: Study, profiles: Sequence[MemoryRecording]
) -> tuple[CheckedMemory, ...]:
    layout = known(study.layout)
    peaks = list(_list_profiled(profiles)) or list(_list_allocated(known(study.memory)))
    found = []
    for pp_rank, parts in sorted(prediction.memory_bytes.items()):
        own = [(size, rank) for rank, size in peaks if _find_stage(layout, rank) == pp_rank]
        found.append(
            CheckedMemory(
                pp_rank=pp_rank,
                predicted_bytes=sum(parts.values()),
                measured_bytes=max(own)[0] if own else _NO_BYTES,
                rank=max(own)[1] if own else _NO_BYTES,
            )
        )
    return tuple(found)


def _find_stage(layout: Layout | None, rank: int) -> int | None:
    if layout is None or not 0 <= rank < layout.world_size:
        return None
    return layout.coordinates(rank).pp


def _list_profiled(profiles: Sequence[MemoryRecording]) -> Iterable[tuple[int, int]]:
    for one in profiles:
        peak = find_peak(one.points)
        if not isinstance(peak, Unavailable):
            yield one.rank, peak.attributed_bytes


def _list_allocated(memory: JobMemory | None) -> Iterable[tuple[int, int]]:
    for one in () if memory is None else memory.ranks:
        if one.place is Place.DEVICE:
            yield one.rank, one.peak_bytes
