"""What sampled stacks add to a finding: the line of the program where time goes."""

from collections.abc import Callable, Collection, Iterable

from meshscope.analyze.rank.stacks import (
    NO_LINES,
    SampledLines,
    StackSamples,
    count_lines,
    read_stacks,
)
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.finding import Evidence
from meshscope.store.read.arrays import Bools

_MAX_RANKS = 8
MIN_SAMPLES = 3
"""Fewer are chance."""
_SHOWN_LINES = 3


def find_lines(
    study: Study, ranks: Collection[int], choose: Callable[[StackSamples], Bools]
) -> SampledLines:
    """The lines that samples of some ranks show where `choose` says; none where none are enough."""

    def read(study: Study) -> dict[int, StackSamples | Unavailable]:
        shown = sorted(ranks or study.attempt.ranks)[:_MAX_RANKS]
        return {rank: read_stacks(study.attempt.ranks[rank]) for rank in shown}

    made = study.make(read)
    read_ranks = () if isinstance(made, Unavailable) else made.values()
    found = count_lines((one, choose(one)) for one in read_ranks if isinstance(one, StackSamples))
    return found if found.num_samples >= MIN_SAMPLES else NO_LINES


def write_lines(found: SampledLines) -> str:
    """A clause with the most frequent line, or nothing."""
    if not found.lines:
        return ""
    first = found.lines[0]
    return (
        f" A stack sampled there shows {first.text} ({first.num_samples} of "
        f"{found.num_samples} samples)."
    )


def list_evidence(found: SampledLines) -> Iterable[Evidence]:
    """The most frequent lines with their share of the samples."""
    for line in found.lines[:_SHOWN_LINES]:
        yield Evidence(
            name=f"samples at {line.text}", value=line.num_samples / found.num_samples, unit="ratio"
        )
