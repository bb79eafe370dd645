"""Phases as the timeline records them are those of a plain stack, whichever way they went.

The usual course of a step takes a short cut (one packed record, stamps until then), everything
else the stack and the span table. The model below knows of neither: a list of open phases, and for
every interval of time the innermost of them.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshscope.analyze.rank.phases import assign_phases, order_steps
from meshscope.capture.native_steps import choose_timeline
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.schema import SpanFlag, StepFlag
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import OpenStepWriter
from meshscope.store.write.writer import RankWriter

EPOCH = 7_000_000_000
NAMES = ("data", "forward", "backward", "optimizer", "clip", "augment")
HEADER: dict[str, object] = {"rank": 0, "world_size": 1, "start_host_mono_ns": EPOCH}

Operation = tuple[str, int, int]
"""What happens, an argument (which name), and how long after the operation before."""

Span = tuple[str, int, int, int, int, int, int]
"""Name, start, duration, self time, depth, flags, microbatch. An optimizer is of no microbatch:
packed it has 0, on the stack the number of those before it, and here always 0."""

ACTIONS = ("enter",) * 3 + ("leave",) * 3 + ("begin", "end", "abort", "again", "microbatch")
SHORT = st.integers(1, 5)
ANY_LENGTH = st.sampled_from([0, 0, 1, 2, 1000, 2_200_000_000, 4_300_000_000])
USUAL: list[tuple[str, int]] = [
    ("begin", 0),
    *((action, name) for name in range(4) for action in ("enter", "leave")),
    ("end", 0),
]


def operations(lengths: st.SearchStrategy[int]) -> st.SearchStrategy[list[Operation]]:
    """Anything at all, and between it the usual course of a step, or the start of one."""
    anything = st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(NAMES) - 1))
    usual = st.integers(1, len(USUAL)).map(lambda count: USUAL[:count])
    pieces = st.lists(st.one_of(anything.map(lambda one: [one]), usual), max_size=12)
    flat = pieces.map(lambda parts: [one for part in parts for one in part])
    return flat.flatmap(
        lambda ones: st.lists(lengths, min_size=len(ones), max_size=len(ones)).map(
            lambda dts: [(*one, dt) for one, dt in zip(ones, dts, strict=True)]
        )
    )


@dataclass(eq=False)
class Frame:
    """A phase of the model."""

    name: int
    start: int
    depth: int
    self_ns: int = 0
    end: int | None = None
    flags: int = 0
    microbatch: int = 0


@dataclass
class Model:
    """A plain stack, and who had each interval of time."""

    now: int = EPOCH
    stack: list[Frame] = field(default_factory=list)
    finished: list[Frame] = field(default_factory=list)
    intervals: list[tuple[int, int, Frame | None]] = field(default_factory=list)
    step_start: int | None = None
    microbatch: int = 0
    steps: list[tuple[int, int, bool]] = field(default_factory=list)

    def do(self, action: str, name: int, elapsed: int) -> None:
        innermost = self.stack[-1] if self.stack else None
        self.intervals.append((self.now, self.now + elapsed, innermost))
        self.now += elapsed
        if innermost is not None:
            innermost.self_ns += elapsed
        if action == "enter":
            self.stack.append(Frame(name, self.now, len(self.stack)))
        elif action == "leave" and name in [frame.name for frame in self.stack]:
            while self.stack[-1].name != name:
                self._pop(SpanFlag.ABORTED)
            self._pop(0)
        elif action == "microbatch" and not self.stack:
            self.microbatch = name
        elif action == "begin" and self.step_start is None:
            self.step_start = self.now
        elif action == "end":
            self._end_step(is_aborted=False)
        elif action == "abort":
            while self.stack:
                self._pop(SpanFlag.ABORTED)
            self._end_step(is_aborted=True)

    def _pop(self, flags: int) -> None:
        frame = self.stack.pop()
        frame.end, frame.flags, frame.microbatch = self.now, flags, self.microbatch
        self.finished.append(frame)

    def _end_step(self, *, is_aborted: bool) -> None:
        if self.step_start is not None:
            self.steps.append((self.step_start, self.now, is_aborted))
            self.step_start = None
            self.microbatch = 0

    def spans(self) -> list[Span]:
        """What has ended."""
        return sorted(
            (NAMES[f.name], f.start, (f.end or 0) - f.start, f.self_ns, f.depth, f.flags,
             f.microbatch if NAMES[f.name] != "optimizer" else 0)
            for f in self.finished
        )  # fmt: skip

    def unattributed(self, start: int, end: int) -> int:
        """Time of a step that belongs to no phase that lies wholly inside it."""
        return sum(
            max(0, min(b, end) - max(a, start))
            for a, b, frame in self.intervals
            if frame is None or frame.end is None or frame.start < start or frame.end > end
        )


def drive(timeline: Timeline, ids: list[int], index: OpenStepWriter | None, now: int, what: str,
          name: int) -> None:  # fmt: skip
    """The same operation on the real thing."""
    stack = timeline.stack_here()
    if what == "enter":
        timeline.enter(stack, ids[name], now)
    elif what == "leave":
        timeline.leave(stack, ids[name], now)
    elif what == "begin" and not timeline.step_start_ns:
        timeline.begin_step(now)
    elif what == "microbatch" and not (stack.name_id or timeline.open_phase >= 0):
        timeline.microbatch = name
    elif what == "end":
        timeline.end_step(now)
    elif what == "abort":
        timeline.abort_step(now)
    elif what == "again":  # what `Recorder.resume` does, whether it was paused or not
        timeline.store_stamps(index)


def record(
    run_dir: Path,
    script: list[Operation],
    *,
    timeline_type: type[Timeline],
    has_short_cut: bool,
    is_killed: bool,
) -> tuple[Model, Recording]:
    writer = RankWriter(run_dir, 0, header=HEADER)
    ids = [writer.name_id(name) for name in NAMES]
    model = Model()
    timeline = timeline_type(lambda: model.now)
    timeline.spans, timeline.steps = writer.table("spans"), writer.table("steps")
    timeline.phases = writer.table("phases")
    index = (
        OpenStepWriter(NowFile(writer.directory / NOW_NAME, mapped=True), EPOCH)
        if has_short_cut
        else None
    )
    timeline.store_stamps(index)
    for action, name, elapsed in script:
        model.do(action, name, elapsed)
        drive(timeline, ids, index, model.now, action, name)
    if not is_killed:
        timeline.flush_stamps()
        timeline.store_stamps(None)
        writer.close(end_host_mono_ns=model.now)
    return model, open_run(run_dir).last_attempt.ranks[0]


def read_spans(recording: Recording) -> list[Span]:
    spans = recording.read("spans")
    columns = ("start_host_mono_ns", "duration_ns", "self_ns", "depth", "flags", "microbatch")
    names = [recording.name_of(i) for i in spans["name_id"].tolist()]
    found = zip(names, *(spans[column].tolist() for column in columns), strict=True)
    return sorted((*row[:6], 0 if row[0] == "optimizer" else row[6]) for row in found)


def check(script: list[Operation], *, way: str, is_killed: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, recording = record(
            Path(directory),
            script,
            timeline_type=choose_timeline() if way == "native" else Timeline,
            has_short_cut=way != "stack",
            is_killed=is_killed,
        )
        assert read_spans(recording) == model.spans()
        table = recording.read("steps")
        steps = order_steps(table)
        found = zip(
            steps.start_ns.tolist(),
            steps.end_ns.tolist(),
            ((table["flags"] & StepFlag.ABORTED) != 0).tolist(),
            strict=True,
        )
        assert list(found) == model.steps
        placed, _ = assign_phases(steps, recording.read("spans"))
        for index, (start, end, _) in enumerate(model.steps):
            in_phases = int(placed.self_ns[placed.interval == 2 * index + 1].sum(dtype=np.int64))
            assert in_phases + model.unattributed(start, end) == end - start
        assert recording.problems == []


LATE_MICROBATCH: list[Operation] = [("microbatch", 2, 1), ("enter", 1, 1), ("leave", 1, 1)]
TWO_MICROBATCHES: list[Operation] = [
    ("begin", 0, 1),
    *[(action, name, 3) for _ in range(2) for name in range(3) for action in ("enter", "leave")],
]


@pytest.mark.parametrize("way", ["native", "short-cut", "stack"])
@settings(max_examples=200, deadline=None)
@given(script=operations(ANY_LENGTH))
@example(script=[(*one, 3) for one in USUAL])
@example(script=LATE_MICROBATCH)
@example(script=[("begin", 0, 1), ("enter", 0, 1), ("leave", 0, 1), ("again", 0, 1), ("end", 0, 1)])
@example(
    script=[
        ("enter", 0, 1), ("leave", 0, 1), ("again", 0, 1), ("enter", 0, 1), ("leave", 0, 1),
    ]
)  # fmt: skip
def test_phases_are_those_of_a_plain_stack(way: str, script: list[Operation]) -> None:
    check(script, way=way, is_killed=False)


@pytest.mark.parametrize("way", ["native", "short-cut", "stack"])
@settings(max_examples=200, deadline=None)
@given(script=operations(SHORT))
@example(script=[(*one, 3) for one in USUAL[:-1]])
@example(script=TWO_MICROBATCHES)
@example(script=TWO_MICROBATCHES[:8])
def test_a_killed_process_leaves_every_phase_that_had_ended(
    way: str, script: list[Operation]
) -> None:
    """Clocks that stand still are left out: an end stamp and the next begin could be the same."""
    check(script, way=way, is_killed=True)
