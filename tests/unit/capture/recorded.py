"""Reads a recording back in the words of the tests: which phases each step and gap holds."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from meshscope.capture.recorder import Recorder
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.schema import SpanFlag


@dataclass
class Phase:
    name: str
    start_ns: int
    end_ns: int
    self_ns: int
    microbatch: int
    is_aborted: bool
    is_detail: bool
    thread: int


@dataclass
class Step:
    index: int
    start_ns: int
    end_ns: int
    num_microbatches: int
    flags: int
    input_tokens: int
    phases: list[Phase] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [phase.name for phase in self.phases if not phase.is_detail]

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)

    def total_ns(self, name: str) -> int:
        return sum(phase.self_ns for phase in self.phases if phase.name == name)


@dataclass
class Recorded:
    rank: Recording
    steps: list[Step]
    outside: list[Phase]
    """Phases of gaps, in order."""
    scalars: list[tuple[int, str, float]]
    pauses: list[Phase]
    """Of the garbage collector."""

    def values(self, name: str) -> list[float]:
        return [value for _, scalar, value in self.scalars if scalar == name]


def read_recorded(run_dir: Path, *, attempt: int = -1) -> Recorded:
    """The last attempt of rank 0; phases are in order of their start."""
    rank = open_run(run_dir).attempts[attempt].ranks[0]
    table = rank.read("steps")
    steps = [
        Step(*(int(table[name][row]) for name in _STEP_COLUMNS))
        for row in range(len(table["step"]))
    ]
    spans = rank.read("spans")
    phases = sorted(
        (
            Phase(
                name=rank.name_of(int(spans["name_id"][row])),
                start_ns=int(spans["start_host_mono_ns"][row]),
                end_ns=int(spans["start_host_mono_ns"][row] + spans["duration_ns"][row]),
                self_ns=int(spans["self_ns"][row]),
                microbatch=int(spans["microbatch"][row]),
                is_aborted=bool(spans["flags"][row] & SpanFlag.ABORTED),
                is_detail=bool(spans["flags"][row] & SpanFlag.DETAIL),
                thread=int(spans["thread"][row]),
            )
            for row in range(len(spans["name_id"]))
        ),
        key=lambda phase: phase.start_ns,
    )
    # When Python collects garbage is no test's business, but that of the collector's own.
    pauses = [phase for phase in phases if phase.name.startswith("gc gen")]
    outside = []
    for phase in phases:
        if phase in pauses:
            continue
        home = [s for s in steps if s.start_ns <= phase.start_ns and phase.end_ns <= s.end_ns]
        (home[0].phases if home else outside).append(phase)
    scalars = rank.read("scalars")
    logged = [
        (int(step), rank.name_of(int(name)), float(value))
        for step, name, value in zip(
            scalars["step"], scalars["name_id"], scalars["value"], strict=True
        )
    ]
    assert not rank.problems, rank.problems
    return Recorded(rank, steps, outside, logged, pauses)


_STEP_COLUMNS = (
    "step",
    "start_host_mono_ns",
    "end_host_mono_ns",
    "num_microbatches",
    "flags",
    "input_tokens",
)


def finish(recorder: Recorder, **errors: int) -> Recorded:
    """Ends a recorder that has met these errors."""
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == errors
    assert run_dir is not None
    return read_recorded(run_dir)
