"""Curves of a trace: memory, rates and hardware by rank; step time and training of the job."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from meshscope.analyze.job.operations import MAX_TIME_NS
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.export.trace_sink import TraceSink, Track
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording

StepTimes = Mapping[int, tuple[int, int]]
"""Start and end on the aligned clock by step."""

_MEMORY = {
    "rss_bytes": "memory, resident",
    "allocated_bytes": "memory, allocated",
    "reserved_bytes": "memory, reserved",
    "peak_allocated_bytes": "memory, peak allocated",
}
_HARDWARE = {
    "sm_clock_mhz": ("clock", "MHz", 1.0),
    "power_milliwatts": ("power", "W", 1e-3),
    "temperature_celsius": ("temperature", "°C", 1.0),
}
_FIRST_ORDER = 10_000

Points = list[tuple[int, float]]
"""Moment and value."""


class RankCounters:
    """The curves of one rank."""

    def __init__(self, sink: TraceSink, process: Track, recording: Recording) -> None:
        self._sink = sink
        self._process = process
        self._recording = recording
        self._counters: dict[str, Track] = {}
        self._last_end: tuple[int, int] | None = None
        """The last step and its end."""
        self._first_ns: int | None = None
        self._last_ns = 0
        self._longest_ns = 0

    def put_rates(self, times: StepTimes) -> None:
        """Of a window's steps: at each one's end, over its period."""
        if not times:
            return
        columns = self._recording.read_steps([(min(times), max(times))])
        steps = int64_column(columns, "step").tolist()
        tokens = dict(zip(steps, int64_column(columns, "input_tokens").tolist(), strict=True))
        for step, (start, end) in sorted(times.items()):
            last = self._last_end
            period_ns = end - (last[1] if last is not None and last[0] == step - 1 else start)
            self._last_end = (step, end)
            self._first_ns = start if self._first_ns is None else min(self._first_ns, start)
            self._last_ns = max(self._last_ns, end)
            self._longest_ns = max(self._longest_ns, period_ns)
            if period_ns > 0:
                self._put("steps per second", "1/s", end, 1e9 / period_ns)
                if tokens.get(step, -1) >= 0:
                    self._put("tokens per second", "1/s", end, tokens[step] * 1e9 / period_ns)

    def put_read(self, study: Study) -> None:
        """What was read now and then, in the time of the exported steps; of a run without steps,
        all."""
        for name, unit, points in _list_read(study, self._recording):
            for moment, value in points:
                is_inside = self._first_ns is None or (
                    # What is read at a step's end is read just after it.
                    self._first_ns <= moment <= self._last_ns + self._longest_ns // 20
                )
                if is_inside:
                    self._put(name, unit, moment, value)

    def _put(self, name: str, unit: str, moment: int, value: float) -> None:
        if name not in self._counters:
            order = _FIRST_ORDER + len(self._counters)
            self._counters[name] = self._sink.add_counter(self._process, name, unit, order)
        self._sink.put_value(self._counters[name], moment, value)


def _list_read(study: Study, recording: Recording) -> Iterator[tuple[str, str, Points]]:
    """What was read now and then."""
    memory = recording.read("memory")
    for column, name in _MEMORY.items():
        yield name, "bytes", _pick(study, recording, memory, column, 1.0)
    if not recording.has_table("hardware"):
        return
    hardware = recording.read("hardware")
    for device in np.unique(hardware["name_id"]).tolist():
        own = {name: values[hardware["name_id"] == device] for name, values in hardware.items()}
        for column, (name, unit, scale) in _HARDWARE.items():
            points = _pick(study, recording, own, column, scale)
            yield f"{name} of {recording.name_of(device)}", unit, points


def _pick(study: Study, recording: Recording, columns: Columns, name: str, scale: float) -> Points:
    """Values that are there."""
    value = int64_column(columns, name)
    read = int64_column(columns, "time_host_mono_ns")
    row = np.flatnonzero((value >= 0) & (read >= 0) & (read < MAX_TIME_NS))
    moment = study.job.alignment.to_reference(recording.rank, read[row])
    values = value[row].tolist()
    if scale != 1.0:
        values = [one * scale for one in values]
    return list(zip(moment.tolist(), values, strict=True))


def put_job_counters(sink: TraceSink, job: Track, study: Study, ends: Mapping[int, int]) -> None:
    """Step time, loss, gradient norm and learning rate, at the steps' ends."""
    steps = study.steps
    curves: list[tuple[str, str, Iterable[int], Iterable[float]]] = [
        ("step time", "ms", steps.step.tolist(), (steps.duration_ns / 1e6).tolist())
    ]
    found = known(study.convergence)
    if found is not None:
        named = {
            "loss": found.loss,
            "gradient norm": found.grad_norm,
            "learning rate": found.learning_rate,
            **found.further,
        }
        curves += [
            (name, "", series.step.tolist(), series.value.tolist())
            for name, series in named.items()
            if not isinstance(series, Unavailable)
        ]
    for order, (name, unit, numbers, values) in enumerate(curves):
        points = [(ends[s], v) for s, v in zip(numbers, values, strict=True) if s in ends]
        if points:
            counter = sink.add_counter(job, name, unit, _FIRST_ORDER + order)
            for moment, value in points:
                sink.put_value(counter, moment, value)
