"""Which lines of the program sampled stacks show: by phase, in gaps, or in given intervals.

A sample names the innermost of the program's own frames, and what that called. Samples are few, of
a few steps: their shares say where time goes, not how long anything takes. A program that holds the
interpreter's lock is seen where it gives it up, so a line of pure Python may be off by 5 ms.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.phases import PhaseSpans, assign_phases, order_steps
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording

_MAX_TEXT = 160
_CALLS = " > "
_CALLED_BY = " < "
_PACKAGE = "~"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLine:
    """One line of the program, and how often it was seen."""

    text: str
    """`train.py:88 in log_metrics, which calls item`."""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLines:
    """Lines by how often they were seen, most often first."""

    lines: tuple[SampledLine, ...]
    num_samples: int
    """Of all lines."""


NO_LINES = SampledLines(lines=(), num_samples=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackSamples:
    """The samples of one rank, in order of time."""

    rank: int
    time_ns: Int64s
    """Host monotonic clock of the rank."""
    step: Int64s
    """The step whose period, with the gap before it, holds the sample; -1 in none."""
    is_between: Bools
    """In a gap between two steps."""
    phases: tuple[str, ...]
    """The innermost phase of each sample; empty in none."""
    texts: tuple[str, ...]
    """Its frames, as recorded."""

    def __len__(self) -> int:
        return len(self.time_ns)

    def find_in_phase(self, phase: str, *, is_between: bool | None = None) -> Bools:
        """Which samples lie in a phase ("" is none), in gaps, in steps, or in both."""
        found = np.array([one == phase for one in self.phases], dtype=np.bool_)
        return found if is_between is None else found & (self.is_between == is_between)

    def find_in_intervals(self, start_ns: Int64s, end_ns: Int64s) -> Bools:
        """Which samples lie in one of some intervals of the rank's clock; they may overlap."""
        order = np.argsort(start_ns, kind="stable")
        latest_end = np.maximum.accumulate(end_ns[order]) if len(order) else end_ns
        before = np.searchsorted(start_ns[order], self.time_ns, side="right") - 1
        found: Bools = before >= 0
        found[found] &= self.time_ns[found] < latest_end[before[found]]
        return found


def read_stacks(recording: Recording) -> StackSamples | Unavailable:
    if not recording.has_table("stacks"):
        return Unavailable("no stack of this rank was sampled")
    columns = recording.read("stacks")
    time_ns = int64_column(columns, "time_host_mono_ns")
    order = np.argsort(time_ns, kind="stable")
    time_ns = time_ns[order]
    steps = order_steps(recording.read("steps"))
    spans, _ = assign_phases(steps, recording.read("spans"))
    following = np.searchsorted(steps.end_ns, time_ns, side="right")
    has_step = following < len(steps)
    in_period = np.where(has_step, following, 0)
    is_between = np.zeros(len(time_ns), dtype=np.bool_)
    step = np.full(len(time_ns), -1, dtype=np.int64)
    if len(steps):
        is_between = has_step & (time_ns < steps.start_ns[in_period]) & (following > 0)
        step = np.where(has_step, steps.step[in_period], -1)
    name_ids = columns["name_id"][order].tolist()
    return StackSamples(
        rank=recording.rank,
        time_ns=time_ns,
        step=step,
        is_between=is_between,
        phases=_find_phases(spans, time_ns, recording),
        texts=tuple(recording.name_of(int(one)) for one in name_ids),
    )


def _find_phases(spans: PhaseSpans, time_ns: Int64s, recording: Recording) -> tuple[str, ...]:
    """The innermost phase at each time."""
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for depth in np.unique(spans.depth).tolist():
        rows = np.flatnonzero((spans.depth == depth) & (spans.interval >= 0))
        rows = rows[np.argsort(spans.start_ns[rows], kind="stable")]
        if not len(rows):
            continue
        start, end = spans.start_ns[rows], (spans.start_ns + spans.duration_ns)[rows]
        last = np.searchsorted(start, time_ns, side="right") - 1
        is_inside = (last >= 0) & (time_ns < end[last])
        found[is_inside] = spans.name_id[rows[last[is_inside]]]
    return tuple("" if one < 0 else recording.name_of(one) for one in found.tolist())


def count_lines(chosen: Iterable[tuple[StackSamples, Bools]]) -> SampledLines:
    """The lines of the chosen samples of some ranks together."""
    counts: Counter[str] = Counter()
    for samples, rows in chosen:
        counts.update(describe_frame(samples.texts[row]) for row in np.flatnonzero(rows).tolist())
    lines = tuple(
        SampledLine(text=text, num_samples=number) for text, number in counts.most_common()
    )
    return SampledLines(lines=lines, num_samples=sum(counts.values()))


def describe_frame(text: str) -> str:
    """The innermost frame in words: `train.py:88 in log_metrics, which calls item`; one of a
    package with the program's line that led there: `…, from train.py:88`."""
    first, *others = text.split(_CALLED_BY)
    frame, _, calls = first.partition(_CALLS)
    line, _, function = frame.removeprefix(_PACKAGE).partition(" ")
    words = f"{line} in {function}" if function else line
    if calls:
        words = f"{words}, which calls {calls}"
    own = next((one for one in others if not one.startswith(_PACKAGE)), "")
    if first.startswith(_PACKAGE) and own:
        words = f"{words}, from {own.partition(' ')[0]}"
    return words[:_MAX_TEXT]
