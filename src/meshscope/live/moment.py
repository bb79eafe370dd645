"""A run at one moment: what `poll` tells."""

from dataclasses import dataclass

from meshscope.page.run_state import RunState, StateKind
from meshscope.store.read.arrays import Floats, Int64s

OVER = frozenset((StateKind.FINISHED, StateKind.FAILED))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewPoints:
    """Values of one signal in steps that are new; the same as the report's curves of this key."""

    key: str
    """`loss`, `grad_norm`, `lr`, `loss 2`."""
    step: Int64s
    value: Floats
    """Median over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """A run now, and what is new since the last look."""

    attempt: int
    """Counted from 0."""
    is_other_attempt: bool
    """The job was launched again since the last look: what was told before is of another one."""
    state: RunState
    num_ranks: int
    """Ranks that have recorded anything."""
    world_size: int
    step: int | None
    """Last step that every rank finished (of those that keep up); None before the first."""
    age_ns: int | None
    """Since that step ended on the last rank, by the wall clocks of its host and of this one; None
    before the first step."""
    read_unix_ns: int
    """When this was read, by this machine's clock."""
    pace_ns: int | None
    """From one step's end to the next one's, mean of the last ones; None before the second."""
    tokens_per_s: float | None
    """Input tokens of the first rank, at that pace; ranks of a tensor-parallel group share theirs.
    None where they were not counted."""
    steps: Int64s
    """Numbers of the steps that are new, ascending."""
    job_ns: Int64s
    """How long each took: median over ranks, as in `Study.steps`."""
    series: tuple[NewPoints, ...]

    @property
    def is_over(self) -> bool:
        """Every rank wrote its end: nothing will be new, unless the job is launched again."""
        return self.state.kind in OVER
