"""One communication operation: what a program says of it, and what it gets back.

`Details` go in, a `CommunicationEvent` comes out. In between they are tuples of `NUM_FIELDS`
numbers, those of `CommunicationProfiler.observe`, with the details as one more item.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshscope.capture.communication.groups import GroupInfo
from meshscope.capture.guard import safe_text
from meshscope.core.operations import DTYPES, Kind, Outcome, bus_factor, kind_from_label

NUM_FIELDS = 11
MAX_TEXT = 500
"""Characters of a message or of a metadata value that are kept."""
MAX_NOTES = 32
"""Metadata of one event: more is left out."""
_MAX_INT64 = (1 << 63) - 1
_TIMED_OUT = re.compile(r"\btime(d[ -]?|[ -]?)out", re.IGNORECASE)
FAILED: frozenset[int] = frozenset((Outcome.ERROR, Outcome.TIMEOUT))


@dataclass(slots=True, kw_only=True)
class Details:
    """What a program says about an operation it times; see `plain_details`.

    Never changed once made; not frozen, because making a frozen one takes four times as long.
    """

    kind: Kind | str
    name: str = ""
    size_bytes: int = 0
    group: str = ""
    axis: str = ""
    group_size: int | None = None
    rank: int | None = None
    """None: this process's own."""
    sequence: int | None = None
    """None: counted here."""
    dtype: object = ""
    is_async: bool = False
    peer: int | None = None
    step: int | None = None
    message: str = ""
    metadata: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationEvent:
    event_id: int
    """From 1, in the order in which operations ended."""
    kind: Kind
    name: str
    """Given by the program; the name of the operation when `kind` is CUSTOM."""
    rank: int | None
    group: str
    axis: str
    group_size: int | None
    sequence: int | None
    """Index among the operations of its group, the same on every rank that takes part."""
    size_bytes: int
    """Size as `meshscope.core.operations` counts it; 0 where nothing moves or it is not known."""
    dtype: str
    is_async: bool
    peer: int | None
    """The other rank of a send or recv."""
    step: int | None
    start_unix_ns: int
    start_host_mono_ns: int
    duration_ns: int | None
    """None when no end was seen."""
    outcome: Outcome
    message: str
    """Message of the exception, when it failed."""
    metadata: dict[str, Any]

    @property
    def operation(self) -> str:
        """Under which name statistics hold it."""
        return operation_label(self.kind, self.name)

    @property
    def is_failed(self) -> bool:
        """Whether it ended in an error or a timeout; never judged by how long it took."""
        return self.outcome in FAILED

    @property
    def latency_ms(self) -> float | None:
        return None if self.duration_ns is None else self.duration_ns / 1e6

    @property
    def algbw_bytes_per_s(self) -> float | None:
        """Size over duration; None unless it succeeded, took time and had a size."""
        if self.outcome is not Outcome.OK or not self.duration_ns or self.size_bytes <= 0:
            return None
        return self.size_bytes / self.duration_ns * 1e9

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth times the kind's factor; None where that is not known."""
        algbw, factor = self.algbw_bytes_per_s, known_bus_factor(self.kind, self.group_size)
        return None if algbw is None or factor is None else algbw * factor

    def with_metadata(self, key: str, value: object) -> "CommunicationEvent":
        """The same event with one more entry in its metadata."""
        return replace(self, metadata=_plain_metadata([*self.metadata.items(), (key, value)]))

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived numbers in JSON's types; None for what is not known."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "kind": self.kind.label,
            "operation": self.operation,
            "outcome": self.outcome.label,
            "latency_ms": self.latency_ms,
            "algbw_bytes_per_s": self.algbw_bytes_per_s,
            "busbw_bytes_per_s": self.busbw_bytes_per_s,
        }


def make_event(
    event_id: int,
    record: tuple[Any, ...],
    group: GroupInfo,
    own_rank: int | None,
    unix_offset_ns: int,
) -> CommunicationEvent:
    """Builds an event from its record."""
    (kind, _, sequence, size_bytes, start_ns, duration_ns, outcome,
     step, dtype_code, is_async, peer) = record[:NUM_FIELDS]  # fmt: skip
    details: Details | None = record[NUM_FIELDS] if len(record) > NUM_FIELDS else None
    known_kind, name = resolve_kind(kind, details.name if details else "")
    return CommunicationEvent(
        event_id=event_id,
        kind=known_kind,
        name=name,
        rank=own_rank if details is None or details.rank is None else details.rank,
        group=group.name,
        axis=group.axis,
        group_size=group.size,
        sequence=sequence if sequence >= 0 else None,
        size_bytes=max(size_bytes, 0),
        dtype=str(details.dtype) if details else _dtype_name(dtype_code),
        is_async=bool(is_async),
        peer=peer if peer >= 0 else None,
        step=step if step >= 0 else None,
        start_unix_ns=start_ns + unix_offset_ns,
        start_host_mono_ns=start_ns,
        duration_ns=duration_ns if duration_ns >= 0 else None,
        outcome=_known_outcome(outcome),
        message=details.message if details else "",
        metadata=dict(details.metadata or {}) if details else {},
    )


def _known_outcome(outcome: int) -> Outcome:
    try:
        return Outcome(outcome)
    except ValueError:  # of a version that knows more
        return Outcome.UNSEEN


def _dtype_name(code: int) -> str:
    return DTYPES[code] if 0 <= code < len(DTYPES) else "(other)"


# --- names ------------------------------------------------------------------------------------


def resolve_kind(kind: Kind | int | str, name: str = "") -> tuple[Kind, str]:
    """Kind and name of an operation; what is no known kind is CUSTOM under that name."""
    if isinstance(kind, str):
        known = _kind_of_text(kind)
        return (Kind.CUSTOM, name or kind) if known is None else (known, name)
    try:
        return Kind(kind), name
    except ValueError:
        return Kind.CUSTOM, name or f"kind {kind}"


@functools.lru_cache(maxsize=1024)
def _kind_of_text(text: str) -> Kind | None:
    try:
        return kind_from_label(text)
    except ValueError:
        return None


def operation_label(kind: Kind, name: str) -> str:
    """What an operation is called in statistics: its kind, or its own name if that is CUSTOM."""
    if kind is not Kind.CUSTOM or not name:
        return kind.label
    return name if _kind_of_text(name) is None else f"custom {name}"


def known_bus_factor(kind: Kind, group_size: int | None) -> float | None:
    """`bus_factor`, or None where it has no meaning.

    That is: for a barrier, for a group of one, for a kind this version knows nothing about, and
    for one whose factor depends on a number of ranks that is not known.
    """
    if kind in (Kind.CUSTOM, Kind.BARRIER) or (group_size is not None and group_size < 2):
        return None
    if group_size is None:
        factor = bus_factor(kind, 2)
        return factor if factor == bus_factor(kind, 3) else None
    return bus_factor(kind, group_size)


# --- what a program hands over ------------------------------------------------------------------


def plain_details(
    given: Details, size_bytes: int, message: str, notes: Iterable[tuple[object, object]] = ()
) -> Details:
    """What a program gave, in plain types and with what only the end of the operation knows.

    Holds no object of the program's.
    """
    kind, name = resolve_kind(given.kind, _text_or_empty(given.name))
    metadata = [*given.metadata.items(), *notes] if given.metadata else notes
    return Details(
        kind=kind,
        name=name[:MAX_TEXT],
        size_bytes=max(whole_number(size_bytes), 0),
        group=_text_or_empty(given.group),
        axis=_text_or_empty(given.axis),
        group_size=None if given.group_size is None else whole_number(given.group_size),
        rank=None if given.rank is None else whole_number(given.rank),
        sequence=given.sequence,
        dtype=_text_or_empty(given.dtype).removeprefix("torch."),
        is_async=bool(given.is_async),
        peer=given.peer,
        step=given.step,
        message=message,
        metadata=_plain_metadata(metadata) if metadata else None,
    )


def _text_or_empty(value: object) -> str:
    return "" if value is None else short_text(value)


def describe_failure(error: BaseException) -> tuple[Outcome, str]:
    """Timeout or error, and the exception's text. torch raises RuntimeErrors for timeouts."""
    text = short_text(error)
    is_timeout = isinstance(error, TimeoutError) or (
        isinstance(error, RuntimeError) and _TIMED_OUT.search(text) is not None
    )
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome.TIMEOUT if is_timeout else Outcome.ERROR, message[:MAX_TEXT]


def short_text(value: object) -> str:
    """`str(value)`, cut; never an exception."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    return safe_text(value)[:MAX_TEXT]  # type: ignore[arg-type]  # any object will do


def _plain_metadata(notes: Iterable[tuple[object, object]]) -> dict[str, Any]:
    """Metadata in JSON's types under string keys. Keeps no object of the program alive."""
    found: dict[str, Any] = {}
    for key, value in notes:
        text = short_text(key)
        if text in found or len(found) < MAX_NOTES:
            found[text] = _plain_value(value)
    return found


def _plain_value(value: object) -> Any:
    if isinstance(value, (list, tuple)):  # a shape, mostly
        return [_plain_scalar(item) for item in value[:MAX_NOTES]]
    return _plain_scalar(value)


def _plain_scalar(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else short_text(float(value))
    if hasattr(value, "__array__"):  # the text of a tensor would be waited for on its device
        return f"<{type(value).__name__}>"
    return short_text(value)


def whole_number(value: Any) -> int:
    """An integer that fits a column of a run."""
    if type(value) is int and -_MAX_INT64 <= value <= _MAX_INT64:
        return value
    return max(-_MAX_INT64, min(int(value), _MAX_INT64))


def number_or_missing(value: Any) -> int:
    """An integer, -1 for None."""
    return -1 if value is None else whole_number(value)
