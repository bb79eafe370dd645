"""Intervals of a rank's time and what it did in them: the vocabulary of the timeline."""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Self

import numpy as np

from meshscope.store.read.arrays import Bools, Int32s, Int64s, Uint8s


class PieceKind(IntEnum):
    WORK = 0
    """It computed, or did something no operation explains. With a row: it had nothing to do while
    that operation ran, and did not wait for it."""
    WAIT = 1
    """Held up by an operation, or a pipeline action's input, that others had not joined yet."""
    TRANSFER = 2
    """Held up by an operation that every needed rank had joined."""
    UNSPLIT = 3
    """Held up by an operation whose wait and transfer cannot be separated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """One entry per interval; sorted by rank and start, without a gap inside a period."""

    rank: Int32s
    step: Int32s
    """Index in `Timeline.steps`."""
    start_ns: Int64s
    """On the reference clock."""
    end_ns: Int64s
    kind: Uint8s
    """A `PieceKind`."""
    phase: Int32s
    """Index in `Timeline.phases`; 0: in none."""
    row: Int64s
    """Row of `Timeline.communication.operations`: the operation that holds the rank up, or for
    WORK the one that ran with nothing beside it; -1 for none."""
    action: Int64s
    """Row of `Timeline.actions`: the action it is in or waits to start; -1 for none."""
    is_between: Bools
    """In the gap before the step's start, which the step owns."""

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def duration_ns(self) -> Int64s:
        return self.end_ns - self.start_ns

    def select(self, rows: Bools | Int64s) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def join(cls, parts: "list[Pieces]") -> Self:
        names = [field.name for field in fields(cls)]
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )
