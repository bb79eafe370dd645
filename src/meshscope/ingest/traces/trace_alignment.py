"""Steps that were found, and not numbered by the profiler, get the same number on all ranks.

Windows of ranks may begin at different steps. What ranks did together lies in one step: a rank's
numbers are shifted by what most of its operations say.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshscope.ingest.traces.trace_numbers import Numbered, number_operations
from meshscope.ingest.traces.trace_recording import TraceRecording
from meshscope.ingest.traces.trace_steps import StepSource

_ByRank = dict[int, list[TraceRecording]]


def align_steps(by_rank: _ByRank) -> _ByRank:
    """The recordings with steps numbered alike, as far as operations tell; from 0."""
    is_found = all(
        one.steps.source not in (StepSource.PROFILER, StepSource.NONE)
        for own in by_rank.values()
        for one in own
    )
    if not is_found or len(by_rank) < 2:
        return by_rank
    numbered = number_operations(by_rank)
    first = min(by_rank)
    shifts = {rank: _find_shift(numbered[first], own) for rank, own in numbered.items()}
    lowest = min(shifts.values())
    return {
        rank: [shift_steps(one, shifts[rank] - lowest) for one in own]
        for rank, own in by_rank.items()
    }


def _find_shift(reference: Sequence[Numbered], own: Sequence[Numbered]) -> int:
    """What is to be added to a rank's steps so that most operations are in the reference's."""
    known = {
        (one.channel, number): one.recorded.step for trace in reference for one, number in trace
    }
    votes = Counter(
        known[one.channel, number] - one.recorded.step
        for trace in own
        for one, number in trace
        if (one.channel, number) in known
    )
    return votes.most_common(1)[0][0] if votes else 0


def shift_steps(recording: TraceRecording, by: int) -> TraceRecording:
    """The same with other numbers of its steps."""
    if not by:
        return recording
    return replace(
        recording,
        steps=replace(recording.steps, number=recording.steps.number + by),
        collectives=tuple(replace(one, step=one.step + by) for one in recording.collectives),
    )
