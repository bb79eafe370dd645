"""The storm's mode `recorder`: a whole recorder is killed, not only its writer.

A script that is the same for the same seed says what the program does: steps of the usual course,
with several microbatches, with phases nested in others, with work between steps, and scalars. The
child follows it through the recorder's explicit API under a clock that the script moves, so that
the parent, which follows it with a plain stack, knows every record to the nanosecond. Counts of
what had returned stand in shared memory: the phases of the step that was not finished count too.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.recording import Recording

KINDS = ("steps", "phases", "scalars")
START_NS = 10**12
LONGEST_WAIT_NS = 50_000
USUAL = ("data", "forward", "backward", "optimizer")

Event = tuple[str, str, int]
"""What happens (begin, end, enter, leave, log), the name, and how long it took to come."""


class Counts(Protocol):
    """Where finished things are counted: by thread and by kind."""

    def set(self, thread: int, table: int, count: int) -> None: ...
    def get(self, thread: int, table: int) -> int: ...


def make_script(seed: int) -> Iterator[Event]:
    """What the program does, without end."""
    rng = random.Random(seed)
    for step in itertools.count():
        for action, name in _script_step(rng, step):
            yield action, name, rng.randrange(1, LONGEST_WAIT_NS)


def _script_step(rng: random.Random, step: int) -> Iterator[tuple[str, str]]:
    kind = rng.choice(("usual", "usual", "microbatches", "nested", "no-data", "with-gap"))
    if kind == "with-gap":
        yield from _phase("checkpoint")
        yield from _phase("data")  # of the next step, and before it begins
    yield "begin", ""
    for _ in range(3 if kind == "microbatches" else 1):
        if kind != "no-data":
            yield from _phase("data", "augment" if kind == "nested" else "")
        yield from _phase("forward")
        yield from _phase("backward", "comm" if rng.random() < 0.1 else "")
    yield "log", "loss"
    yield from _phase("optimizer", "clip" if kind == "nested" else "")
    if rng.random() < 0.2:
        yield from _phase("forward")  # once more, after the optimizer
    yield "end", ""


def _phase(name: str, inside: str = "") -> Iterator[tuple[str, str]]:
    yield "enter", name
    if inside:
        yield from _phase(inside)
    yield "leave", name


def follow(run_dir: Path, seed: int, acknowledged: Counts) -> None:
    """Records without end."""
    now_ns = START_NS
    # Real collections would be timed by the script's clock, from whichever thread sets one off.
    # A test follows the script in a process that lives on: no profiler of torch may be left there.
    config = RecorderConfig(provenance=False, signals=False, gc_pauses=False, flop_counts=False)
    recorder = Recorder(run_dir, config=config, clock=lambda: now_ns)
    counts = [0] * len(KINDS)
    for action, name, elapsed_ns in make_script(seed):
        now_ns += elapsed_ns
        done = None
        if action == "enter":
            recorder.phase(name).__enter__()
        elif action == "leave":
            recorder.phase(name).__exit__(None, None, None)
            done = KINDS.index("phases")
        elif action == "begin":
            recorder.begin_step()
        elif action == "end":
            recorder.end_step()
            done = KINDS.index("steps")
        else:
            recorder.log(**{name: now_ns})
            done = KINDS.index("scalars")
        if done is not None:
            counts[done] += 1
            acknowledged.set(0, done, counts[done])


Record = tuple[object, ...]


@dataclass(slots=True)
class Expected:
    """What the script comes to, in the order in which things end."""

    steps: list[Record] = field(default_factory=list)
    """Number, start, end."""
    phases: list[Record] = field(default_factory=list)
    """Name, start, duration, self time."""
    scalars: list[Record] = field(default_factory=list)
    """Name, step, value."""


def expect(seed: int, num_steps: int, num_phases: int, num_scalars: int) -> Expected:
    """The script's records, up to one more of each kind than was counted."""
    found = Expected()
    now_ns = START_NS
    stack: list[tuple[str, int, int]] = []
    step_start_ns = 0
    script = make_script(seed)
    while (
        len(found.steps) <= num_steps
        or len(found.phases) <= num_phases
        or len(found.scalars) <= num_scalars
    ):
        action, name, elapsed_ns = next(script)
        now_ns += elapsed_ns
        if action == "enter":
            stack.append((name, now_ns, 0))
        elif action == "leave":
            _, start_ns, inside_ns = stack.pop()
            duration_ns = now_ns - start_ns
            found.phases.append((name, start_ns, duration_ns, duration_ns - inside_ns))
            if stack:
                outer, outer_start_ns, outer_inside_ns = stack.pop()
                stack.append((outer, outer_start_ns, outer_inside_ns + duration_ns))
        elif action == "begin":
            step_start_ns = now_ns
        elif action == "end":
            found.steps.append((len(found.steps), step_start_ns, now_ns))
        else:
            found.scalars.append((name, len(found.steps), float(now_ns)))
    return found


def read(recording: Recording) -> dict[str, list[Record]]:
    """What a reader finds, in the form of `Expected`."""
    steps, spans, scalars = (recording.read(name) for name in ("steps", "spans", "scalars"))
    return {
        "steps": _rows(steps["step"], steps["start_host_mono_ns"], steps["end_host_mono_ns"]),
        "phases": [
            (recording.name_of(int(name_id)), *rest)
            for name_id, *rest in _rows(
                spans["name_id"], spans["start_host_mono_ns"], spans["duration_ns"],
                spans["self_ns"],
            )
        ],
        "scalars": [
            (recording.name_of(int(name_id)), *rest)
            for name_id, *rest in _rows(scalars["name_id"], scalars["step"], scalars["value"])
        ],
    }  # fmt: skip


def _rows(*columns: "object") -> list[tuple]:  # type: ignore[type-arg]
    return list(zip(*(column.tolist() for column in columns), strict=True))  # type: ignore[attr-defined]


@dataclass(slots=True)
class Comparison:
    """What was read against what had been acknowledged, all kinds together."""

    num_acknowledged: int = 0
    num_read: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    """Read twice, or not what the script says."""
    num_unacknowledged: int = 0
    num_miscounted: int = 0
    num_open_step_phases: int = 0
    """Acknowledged phases of the step that was not finished."""


def compare(recording: Recording, seed: int, acknowledged: Counts) -> Comparison:
    """Every acknowledged step, phase and scalar, one by one."""
    counts = {kind: acknowledged.get(0, index) for index, kind in enumerate(KINDS)}
    expected = expect(seed, *counts.values())
    result = Comparison()
    for kind, found in read(recording).items():
        count = counts[kind]
        wanted: list[Record] = getattr(expected, kind)
        result.num_acknowledged += count
        result.num_read += len(found)
        result.num_lost += len(set(wanted[:count]) - set(found))
        extra = len(found) - count
        # One more may be there that had not been acknowledged yet.
        result.num_wrong += len(found) - len(set(found) & set(wanted[: count + 1]))
        result.num_unacknowledged += max(0, extra)
        result.num_miscounted += extra > 1
    last_end = max((int(str(step[2])) for step in expected.steps[: counts["steps"]]), default=0)
    result.num_open_step_phases = sum(
        int(str(phase[1])) >= last_end for phase in expected.phases[: counts["phases"]]
    )
    return result
