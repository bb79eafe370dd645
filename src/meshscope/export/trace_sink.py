"""What a trace is made of, whatever its format: tracks with slices, marks and values on one clock.

A sink writes as it is told, in any order of time, and keeps no event: a trace may be larger than
memory. Slices of a track must nest or lie apart, which `lanes` sees to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshscope.report.format import clean_text

MAX_NAME = 80
"""Characters of a name that are shown."""
MAX_TEXT = 600
"""Characters of what is said about a slice."""

Argument = tuple[str, int | float | str]
"""Name and value of something a reader sees when they select a slice."""
Arrow = tuple[int, bool]
"""A number that two slices share, and whether the arrow ends here; it must end at the later one."""


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the trace."""

    uuid: int
    process: int
    """Number of the process it belongs to."""
    name: str


@dataclass(slots=True)
class Written:
    """How many of each a trace has."""

    processes: int = 0
    tracks: int = 0
    slices: int = 0
    arrows: int = 0
    values: int = 0
    marks: int = 0


class TraceSink(Protocol):
    """A format."""

    written: Written

    def add_process(self, number: int, name: str) -> Track:
        """A group of tracks; shown in order of `number`."""

    def add_track(self, process: Track, name: str, order: int) -> Track:
        """A row for slices and marks; shown in order of `order`."""

    def add_counter(self, process: Track, name: str, unit: str, order: int) -> Track:
        """A curve; `unit` is `bytes` or a word to show."""

    def put_slice(
        self,
        track: Track,
        category: str,
        name: str,
        start_ns: int,
        end_ns: int | None,
        arguments: Sequence[Argument] = (),
        arrows: Sequence[Arrow] = (),
    ) -> None:
        """An interval; without an end where it never ended."""

    def put_mark(
        self,
        track: Track,
        category: str,
        name: str,
        time_ns: int,
        arguments: Sequence[Argument] = (),
    ) -> None:
        """A moment."""

    def put_value(self, counter: Track, time_ns: int, value: float) -> None:
        """A point of a curve."""

    def close(self) -> None:
        """Writes what is missing for the trace to be whole."""


def show_name(text: str) -> str:
    """A name from a run as a viewer shows it: one short line, nothing that acts."""
    return clean_text(text, MAX_NAME) or "(no name)"


def show_text(text: str) -> str:
    """A longer text of that kind."""
    return clean_text(text, MAX_TEXT)
