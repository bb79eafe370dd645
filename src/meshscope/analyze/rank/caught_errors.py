"""Errors that the recorder caught on one rank, which training did not notice."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.store.read.recording import JsonFields, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class RankErrors:
    """Errors at one site of a rank's recorder."""

    site: str
    """Where in the recorder, such as `scalar` or `open`."""
    count: int
    first_message: str
    is_at_least: bool
    """The rank was killed before it wrote its final count."""


def list_errors(recording: Recording) -> Iterator[RankErrors]:
    """Counted from the closing line, or from the journal of a killed rank."""
    closed = recording.closing.get("errors") if recording.closing is not None else None
    if isinstance(closed, dict):
        for site, found in closed.items():
            fields: JsonFields = found if isinstance(found, dict) else {}
            yield RankErrors(
                site=str(site),
                count=as_int(fields.get("count")) or 1,
                first_message=str(fields.get("first", "")),
                is_at_least=False,
            )
        return
    counts: dict[str, tuple[int, str]] = {}
    for line in recording.health:
        if line.get("cause") == "recorder":
            site = str(line.get("where"))
            count, message = counts.get(site, (0, str(line.get("text", ""))))
            counts[site] = (count + (as_int(line.get("count")) or 1), message)
    for site, (count, message) in counts.items():
        yield RankErrors(site=site, count=count, first_message=message, is_at_least=True)


def as_int(value: object) -> int | None:
    """A JSON number that is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
