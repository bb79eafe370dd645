"""Reads a trace of torch.profiler, or anything else in Chrome's JSON form, into columns.

Any layout of the text will do: Kineto's own, re-dumped, on one line, a bare list of events. What is
cut off or damaged costs only itself: what came before is given with a warning. A file in which
nothing could be read is an error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.compressed import ByteStream
from meshscope.ingest.file_kinds import describe_beginning, describe_fields
from meshscope.ingest.kineto.foreign_tracks import adopt_tracks, note_processes, split_devices
from meshscope.ingest.kineto.native_scanner import NativeScanner
from meshscope.ingest.kineto.scan import KEYS, MISSING, TEXT_IDENTITY, ScanError, Scanner, ScanState
from meshscope.ingest.kineto.trace_batches import TraceBatches
from meshscope.ingest.kineto.trace_columns import (
    CATEGORIES,
    Trace,
    TraceCounts,
    TraceGroup,
    Track,
)
from meshscope.ingest.native import load_library

_MAX_VALUE_BYTES = 1 << 26
"""One event or one entry of the header may be this long; a longer one ends the reading."""
_PIECE_BYTES = 1 << 20
"""Read at a time, at most: as much as stays in a processor's cache."""
_FIRST_BYTES = 1 << 16
"""Read at first: many files have no more, and memory costs where it is touched."""
_KNOWN_TEXTS = {text.encode(): text for text in (*KEYS, *map(bytes.decode, CATEGORIES))}
MAX_WORLD_SIZE = 1 << 24
_MAX_BASE_NS = 1 << 62
_PADDING = b" \t\r\n\0"

JsonFields = Mapping[str, Any]


def make_scanner(*, with_python: bool = False, use_native: bool | None = None) -> Scanner:
    """The compiled scanner where there is one; True insists on it, False on the Python one."""
    library = None if use_native is False else load_library()
    if library is not None:
        return NativeScanner(library, with_python=with_python)
    if use_native:
        raise TraceError(
            "the compiled scanner is not there: install meshscope where a C compiler is"
        )
    from meshscope.ingest.kineto.python_scanner import PythonScanner

    return PythonScanner()


def read_trace(path: Path, *, with_python: bool = False, use_native: bool | None = None) -> Trace:
    """The whole of one file; TraceError when nothing of it can be read."""
    scanner = make_scanner(with_python=with_python, use_native=use_native)
    batches = TraceBatches(with_python=with_python)
    stream = ByteStream(path)
    warnings: list[str] = []
    left = bytearray()
    try:
        for _ in _feed(scanner, stream, warnings, left):
            batch = scanner.take()
            if len(batch):
                batches.add(batch, scanner.symbols())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    warnings += _explain_end(scanner, stream, left)
    counts = scanner.counts
    is_empty = not batches.num_events and not counts.num_complete and not counts.num_skipped
    is_list = _is_bare_list(scanner, stream)
    if is_empty and (not counts.num_event_lists or batches.num_other or warnings or is_list):
        raise TraceError(f"{path}: {_explain_nothing(scanner, stream)}")
    if is_empty:
        warnings.append("there is no event in it")
    return _make_trace(path, scanner, batches, stream, warnings)


def _feed(
    scanner: Scanner, stream: ByteStream, warnings: list[str], left: bytearray
) -> Iterator[None]:
    """Feeds the scanner; yields after each piece that moved it. Afterwards `left` is what it did
    not take.

    Pieces are read behind what was left of the one before, into the same memory.
    """
    window, num_left, num_fed = bytearray(_FIRST_BYTES), 0, 0

    def find_room() -> memoryview:
        nonlocal window
        if num_fed and len(window) < _PIECE_BYTES:
            window = window[:num_left] + bytes(_PIECE_BYTES - num_left)
        elif 2 * num_left > len(window):
            window = window[:num_left] + bytes(3 * num_left)
        return memoryview(window)[num_left:]

    for num_new in stream.pour(find_room):
        data = memoryview(window)[: num_left + num_new]
        num_done = scanner.feed(data)
        num_fed += num_done
        rest = bytes(data[num_done:])
        num_left = len(rest)
        window[:num_left] = rest
        left[:] = rest
        if num_done:
            yield
        if scanner.state == ScanState.END and rest.strip(_PADDING):
            warnings.append(f"the JSON ends at byte {num_fed:,}; what follows is left out")
        if scanner.state in (ScanState.END, ScanState.BROKEN):
            return
        if num_left > _MAX_VALUE_BYTES:
            warnings.append(
                f"an event or entry of more than {_MAX_VALUE_BYTES >> 20} MiB ends the reading "
                f"at byte {num_fed:,}"
            )
            return


OPEN_LIST = (
    "the list of events is not closed, as Chrome's form allows: whether more were to follow is "
    "not known"
)
_ENDINGS = ("cut off", "reading ended", "ends the reading", "damaged after", "expands more")
"""Words of all warnings about a rest that was not read."""


def lacks_end(warning: str) -> bool:
    """Whether a trace's warning says that its rest is missing: most of a device's work, perhaps."""
    return any(words in warning for words in _ENDINGS)


def _explain_end(scanner: Scanner, stream: ByteStream, left: bytearray) -> list[str]:
    found = []
    is_open = _is_bare_list(scanner, stream) and not left.strip(_PADDING + b",")
    if stream.problem:
        found.append(stream.problem)
    if scanner.state == ScanState.BROKEN:
        reasons = {
            ScanError.SYNTAX: "what follows is no JSON",
            ScanError.NOT_A_TRACE: "it is no JSON object or list",
            ScanError.MEMORY: "memory ran out",
        }
        found.append(
            f"reading ended before byte {stream.num_given:,}: "
            f"{reasons.get(scanner.error, 'it is damaged')}"
        )
    elif scanner.state != ScanState.END and not stream.problem:
        found.append(OPEN_LIST if is_open else f"the JSON is cut off at byte {stream.num_given:,}")
    return found


def _is_bare_list(scanner: Scanner, stream: ByteStream) -> bool:
    """Whether it is a bare list of events, nothing else."""
    return not scanner.fields() and stream.first.lstrip(_PADDING + b"\xef\xbb\xbf")[:1] == b"["


def _explain_nothing(scanner: Scanner, stream: ByteStream) -> str:
    if stream.problem:
        return f"{stream.problem}, and no event came before"
    if not stream.num_given:
        return "the file is empty; expected a JSON trace, plain, gzip, zstd, bzip2 or xz"
    if scanner.counts.num_event_lists:
        return "a list with no events in it; expected a trace of torch.profiler"
    names = [_decode_text(key) for key, _ in scanner.fields()]
    known = describe_beginning(stream.first) or describe_fields(names)
    if known:
        return f"{known}; expected a trace of torch.profiler"
    if scanner.state == ScanState.END:
        return "JSON without `traceEvents`; expected a trace of torch.profiler"
    return "no event in it; expected a JSON trace of torch.profiler"


def _make_trace(
    path: Path,
    scanner: Scanner,
    batches: TraceBatches,
    stream: ByteStream,
    warnings: list[str],
) -> Trace:
    fields = _decode_fields(scanner.fields(), warnings)
    symbols = scanner.symbols()
    counts = scanner.counts
    events, arguments = batches.join(scanner)
    strings = tuple(_KNOWN_TEXTS.get(raw) or _decode_text(raw) for raw in symbols)
    tracks = _name_tracks(batches, strings)
    events, notes = split_devices(events, tracks)
    events = adopt_tracks(events, tracks)
    warnings += notes or note_processes(events, tracks)
    num_incomplete = counts.num_incomplete + batches.num_incomplete
    if num_incomplete:
        are = "event is" if num_incomplete == 1 else "events are"
        warnings.append(
            f"{num_incomplete:,} {are} left out: without a start or a duration, with times "
            "in µs that do not fit, or with keys written with escapes"
        )
    distributed = _object(fields.get("distributedInfo"))
    return Trace(
        source=str(path),
        rank=_read_count(distributed.get("rank"), "the trace does not say its rank"),
        world_size=_read_count(
            distributed.get("world_size"), "the trace does not say its world size"
        ),
        backend=_text_of(distributed.get("backend"), "the trace does not say its backend"),
        groups=_read_groups(distributed.get("pg_config")),
        device_names=_read_devices(fields.get("deviceProperties")),
        base_ns=_read_base(fields.get("baseTimeNanoseconds")),
        strings=strings,
        keys=KEYS,
        tracks=tracks,
        events=events,
        arguments=arguments,
        counts=TraceCounts(
            num_bytes=stream.num_given,
            num_events=len(events),
            num_skipped=counts.num_skipped + batches.num_skipped,
            num_incomplete=num_incomplete,
        ),
        warnings=tuple(warnings),
        memory=batches.join_memory(),
    )


def _decode_fields(fields: list[tuple[bytes, bytes]], warnings: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in fields:
        try:
            found[_decode_text(key)] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            warnings.append(f"the entry `{_decode_text(key)[:40]}` of the header is no JSON")
    return found


def _decode_text(raw: bytes) -> str:
    if b"\\" in raw:
        try:
            text = msgspec.json.decode(b'"' + raw + b'"', type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = raw.decode(errors="replace")
    else:
        text = raw.decode(errors="replace")
    return text


def _name_tracks(batches: TraceBatches, strings: tuple[str, ...]) -> tuple[Track, ...]:
    def text(index: int | None) -> str:
        return "" if index is None else strings[index]

    def identity(value: int) -> int | str:
        if TEXT_IDENTITY <= value < TEXT_IDENTITY + len(strings):
            return strings[value - TEXT_IDENTITY]
        return -1 if value == MISSING else value

    names = batches.metadata
    return tuple(
        Track(
            process=identity(process),
            thread=identity(thread),
            process_name=text(names.process_name.get(process)),
            process_labels=text(names.process_labels.get(process)),
            thread_name=text(names.thread_name.get((process, thread))),
        )
        for process, thread in batches.tracks
    )


def _object(value: object) -> JsonFields:
    return value if isinstance(value, dict) else {}


def _read_count(value: object, reason: str) -> int | Unavailable:
    if isinstance(value, str) and value.isdecimal():
        value = int(value[:20])
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_WORLD_SIZE:
        return value
    return Unavailable(reason)


def _text_of(value: object, reason: str) -> str | Unavailable:
    return value if isinstance(value, str) else Unavailable(reason)


def _read_base(value: object) -> int:
    is_known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_BASE_NS
    return value if is_known and isinstance(value, int) else 0


def _read_devices(value: object) -> dict[int, str]:
    found = {}
    for index, entry in enumerate(value if isinstance(value, list) else []):
        fields = _object(entry)
        name, number = fields.get("name"), fields.get("id", index)
        if isinstance(name, str) and isinstance(number, int):
            found[number] = name
    return found


def _read_groups(value: object) -> tuple[TraceGroup, ...]:
    """`pg_config` is a list of groups, or in older traces an object by name."""
    entries: list[JsonFields]
    if isinstance(value, dict):
        entries = [{"pg_name": name, **_object(entry)} for name, entry in value.items()]
    else:
        entries = [_object(entry) for entry in (value if isinstance(value, list) else [])]
    groups = []
    for entry in entries:
        ranks = entry.get("ranks")
        known = ranks if isinstance(ranks, list) else []
        groups.append(
            TraceGroup(
                name=str(entry.get("pg_name", "")),
                description=str(entry.get("pg_desc", "")),
                backend=str(entry.get("backend_config", "")),
                ranks=tuple(rank for rank in known if isinstance(rank, int) and rank >= 0),
            )
        )
    return tuple(groups)
