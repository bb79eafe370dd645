"""Which recordings belong to one launch of the job, where numbers alone do not say.

Two numbers are at hand: how many recordings of a rank came before, and how often the launcher says
that it restarted. The first is too small for a rank that died before its first record, the second
differs between nodes (torchrun counts only the failures of its own node). So time decides: ranks of
one launch run side by side, and a launcher ends all of them before it starts the next ones.
Recordings that carry one number are split where some were over before others began, and parts that
ran side by side and share no rank are put together. What no other part claims stays as numbered.

A job that states its attempt (`MESHSCOPE_ATTEMPT`, `Recorder(attempt=…)`, numbers as `next_attempt`
gives them) is believed. Wrong where clocks of hosts differ by more than the pause between two
launches, and where ranks of one launch record one after the other. Standard library only.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Generic, TypeVar

from meshscope.store.write.journal import JOURNAL_NAME, read_journal

CLOCK_SKEW_NS = 1_000_000_000
"""How far wall clocks of two hosts may differ before recordings count as simultaneous."""
_MAX_ATTEMPT = (1 << 31) - 1
_HEADER_READ_BYTES = 1 << 20
"""Bytes of a journal that are searched for its header, which comes first."""

_RANK_DIR = re.compile(r"rank[0-9]{5,12}")
_ATTEMPT_DIR = re.compile(r"attempt([0-9]{3,9})")

K = TypeVar("K")
R = TypeVar("R")
Groups = dict[K, dict[int, R]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """When a recording was made, by the wall clock of its host."""

    host: object
    start_unix_ns: int
    end_unix_ns: int

    def is_beside(self, other: "Extent") -> bool:
        """Whether the two ran at the same time for sure."""
        return self._overlap_ns(other) >= (0 if self.host == other.host else CLOCK_SKEW_NS)

    def is_apart_from(self, other: "Extent") -> bool:
        """Whether one was over for sure when the other began."""
        return self._overlap_ns(other) < -(0 if self.host == other.host else CLOCK_SKEW_NS)

    def _overlap_ns(self, other: "Extent") -> int:
        end_ns = min(self.end_unix_ns, other.end_unix_ns)
        return end_ns - max(self.start_unix_ns, other.start_unix_ns)


def settle_by_time(
    groups: Groups[K, R], extent_of: Callable[[R], Extent | None]
) -> list[tuple[K, dict[int, R]]]:
    """`groups`, with recordings moved to the attempt they ran in; a key may come twice then.

    All of one launch and none with a stated attempt. A recording whose extent is None stays.
    """
    ranks = {rank for group in groups.values() for rank in group}
    if all(group.keys() == ranks for group in groups.values()):
        return list(groups.items())  # the usual case, without asking when anything was
    extents = {id(r): extent_of(r) for group in groups.values() for r in group.values()}

    def extent(recording: R) -> Extent | None:
        return extents[id(recording)]

    if not _come_one_after_the_other(groups.values(), extent):
        return list(groups.items())  # two processes as one rank: the times tell nothing
    units = [
        _Unit(origins={key}, first=key, ranks=part)
        for key, group in groups.items()
        for part in _split(group, extent)
    ]
    units.sort(key=lambda unit: _start_of(unit.ranks.values(), extent))
    placed: list[_Unit[K, R]] = []
    for unit in units:
        homes = (home for home in placed if _belong_together(unit, home, extent))
        _join(unit, next(homes, None), placed)
    return [(unit.first, unit.ranks) for unit in _rejoin(placed)]


@dataclass(slots=True, kw_only=True)
class _Unit(Generic[K, R]):
    """Recordings that ran side by side, and the groups they come from."""

    origins: set[K]
    first: K
    ranks: dict[int, R]


def _join(unit: _Unit[K, R], home: _Unit[K, R] | None, placed: list[_Unit[K, R]]) -> None:
    if home is None:
        placed.append(unit)
        return
    home.ranks.update(unit.ranks)
    home.origins |= unit.origins


def _rejoin(placed: list[_Unit[K, R]]) -> list[_Unit[K, R]]:
    """Parts of one group that no other group claimed are together again."""
    found: list[_Unit[K, R]] = []
    for unit in placed:
        alike = (
            other for other in found if len(unit.origins) == 1 and other.origins == unit.origins
        )
        _join(unit, next(alike, None), found)
    return found


def _split(group: dict[int, R], extent: Callable[[R], Extent | None]) -> Iterator[dict[int, R]]:
    """Parts of a group that were over when the next began; what has no extent is in the first."""
    part = {rank: recording for rank, recording in group.items() if extent(recording) is None}
    known = [(own, rank) for rank, r in group.items() if (own := extent(r)) is not None]
    last: dict[object, Extent] = {}  # of each host, what ended last
    for own, rank in sorted(known, key=lambda item: item[0].start_unix_ns):
        if last and all(own.is_apart_from(mate) for mate in last.values()):
            yield part
            part, last = {}, {}
        part[rank] = group[rank]
        if own.host not in last or own.end_unix_ns > last[own.host].end_unix_ns:
            last[own.host] = own
    yield part


def _start_of(recordings: Iterable[R], extent: Callable[[R], Extent | None]) -> int:
    found = (extent(recording) for recording in recordings)
    return min((known.start_unix_ns for known in found if known is not None), default=0)


def _belong_together(
    unit: _Unit[K, R], home: _Unit[K, R], extent: Callable[[R], Extent | None]
) -> bool:
    """Whether two units share no rank and some of their ranks ran side by side."""
    if unit.ranks.keys() & home.ranks.keys():
        return False
    return any(
        one.is_beside(other)
        for one in map(extent, unit.ranks.values())
        for other in map(extent, home.ranks.values())
        if one is not None and other is not None
    )


def _come_one_after_the_other(
    groups: Iterable[dict[int, R]], extent: Callable[[R], Extent | None]
) -> bool:
    """Whether no rank has two recordings at the same time."""
    by_rank: dict[int, list[Extent]] = {}
    for group in groups:
        for rank, recording in group.items():
            found = extent(recording)
            if found is not None:
                by_rank.setdefault(rank, []).append(found)
    for extents in by_rank.values():
        extents.sort(key=lambda found: found.start_unix_ns)
    pairs = chain.from_iterable(map(pairwise, by_rank.values()))
    return not any(first.is_beside(second) for first, second in pairs)


def next_attempt(run_dir: Path) -> int:
    """The first attempt number that no recording in `run_dir` has, 0 where there is none.

    For a launcher, or for rank 0 before any rank of the launch records, to tell to all ranks.
    """
    numbers = [-1]
    for rank_dir in _list(run_dir, _RANK_DIR):
        for directory in _list(rank_dir, _ATTEMPT_DIR):
            stated = _read_stated_attempt(directory / JOURNAL_NAME)
            ordinal = int(directory.name.removeprefix("attempt"))
            numbers.append(ordinal if stated is None else stated)
    return max(numbers) + 1


def stated_attempt(header: Mapping[str, object]) -> int | None:
    """The attempt a recording's header states, if it does."""
    number = header.get("job_attempt")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 <= number <= _MAX_ATTEMPT else None


def _list(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_stated_attempt(journal: Path) -> int | None:
    try:
        with journal.open("rb") as file:
            lines, _ = read_journal(file.read(_HEADER_READ_BYTES))
    except OSError:
        return None
    return next((stated_attempt(line) for line in lines if line["kind"] == "header"), None)
