"""Which ranks are traced: all, one per pipeline stage, a list, or all at some coordinates.

`stages` is the ranks whose every coordinate but pp is 0. Coordinates need the mesh: where it is not
known, `stages` is rank 0 and coordinates choose no rank, and both are noted.
"""

import re
from dataclasses import dataclass
from typing import Self

from meshscope.core.layout import Axis, Layout
from meshscope.errors import UsageError

ALL = "all"
STAGES = "stages"
NO_MESH = "the mesh is not known"

_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PLACE = re.compile(rf"(?:{'|'.join(Axis)})[0-9]{{1,9}}(?:\.(?:{'|'.join(Axis)})[0-9]{{1,9}})*")
_INDEX = re.compile(r"([a-z]+)([0-9]+)")


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Parts of a selector; a rank that any of them names is chosen."""

    parts: tuple[str, ...] = (STAGES,)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `all`, `stages`, `0,3`, `4-7` or `dp0.tp0`; several with commas between them."""
        parts = tuple(part.strip() for part in text.split(","))
        unknown = [part for part in parts if not is_rank_part(part)]
        if unknown:
            raise UsageError(
                f"{unknown[0]!r} chooses no ranks; expected all, stages, numbers such as 0,3 or "
                "4-7, or coordinates such as dp0.tp0"
            )
        return cls(parts)

    def __str__(self) -> str:
        return ",".join(self.parts)

    @property
    def needs_mesh(self) -> bool:
        """Whether ranks are chosen by coordinates."""
        return any(part == STAGES or _PLACE.fullmatch(part) for part in self.parts)

    def has(self, rank: int, layout: Layout | None) -> bool:
        return any(_has(part, rank, layout) for part in self.parts)


def is_rank_part(text: str) -> bool:
    """Whether this can stand in a selector."""
    return text in (ALL, STAGES) or bool(_RANKS.fullmatch(text) or _PLACE.fullmatch(text))


def _has(part: str, rank: int, layout: Layout | None) -> bool:
    if part == ALL:
        return True
    numbers = _RANKS.fullmatch(part)
    if numbers is not None:
        return int(numbers[1]) <= rank <= int(numbers[2] or numbers[1])
    if layout is None or rank >= layout.world_size:
        return part == STAGES and rank == 0
    here = layout.coordinates(rank)
    if part == STAGES:
        return not any(here.along(axis) for axis in layout.named_axes if axis != Axis.PP)
    wanted = (_INDEX.fullmatch(index) for index in part.split("."))
    return all(found is not None and here.along(found[1]) == int(found[2]) for found in wanted)
