"""Errors that the recorder caught on one rank, which training did not notice."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from meshscope.store.read.recording import JsonFields, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtErrors:
    """Errors at one site of the recorder, which training did not notice."""

    site: str
    """Where in the recorder, such as `scalar` or `open`."""
    count: int
    is_at_least: bool
    """The rank was killed before it wrote its final count."""
    ranks: tuple[int, ...]
    first_message: str

    def join(self, later: Self) -> Self:
        return replace(
            self,
            count=self.count + later.count,
            is_at_least=self.is_at_least or later.is_at_least,
            ranks=self.ranks + later.ranks,
        )


def list_errors(recording: Recording) -> Iterator[CaughtErrors]:
    """Counted from the closing line, or from the journal of a killed rank."""
    closed = recording.closing.get("errors") if recording.closing is not None else None
    if isinstance(closed, dict):
        for site, found in closed.items():
            fields: JsonFields = found if isinstance(found, dict) else {}
            yield CaughtErrors(
                site=str(site),
                count=as_int(fields.get("count")) or 1,
                is_at_least=False,
                ranks=(recording.rank,),
                first_message=str(fields.get("first", "")),
            )
        return
    counts: dict[str, tuple[int, str]] = {}
    for line in recording.health:
        if line.get("cause") == "recorder":
            site = str(line.get("where"))
            count, message = counts.get(site, (0, str(line.get("text", ""))))
            counts[site] = (count + (as_int(line.get("count")) or 1), message)
    for site, (count, message) in counts.items():
        yield CaughtErrors(
            site=site,
            count=count,
            is_at_least=True,
            ranks=(recording.rank,),
            first_message=message,
        )


def as_int(value: object) -> int | None:
    """A JSON number that is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
