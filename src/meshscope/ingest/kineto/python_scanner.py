"""The scanner without compiled code: the same answers, several times slower.

Where an event ends is found by its brackets; msgspec takes it apart and leaves every value as its
text, so that numbers are read from digits and lists stay as they were written. What msgspec
refuses (NaN, a comma too many, bytes that are not UTF-8) is taken apart here, slower still.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from meshscope.ingest.kineto.scan import (
    KEPT_PHASES,
    KEYS,
    MISSING,
    TEXT_IDENTITY,
    ScanBatch,
    ScanCounts,
    ScanError,
    ScanState,
    ValueType,
)

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
"""A whole string, a bracket, or the quote of a string that is cut off."""
_BARE_END = re.compile(rb'[\s,:"\[\]{}]')
_KEY_IDS = {key: offset for offset, key in enumerate(KEYS)}
_DECIMAL = re.compile(rb"([+-]?)(\d*)(?:\.(\d*))?")
_FLOAT = re.compile(rb"[0-9+\-.eE]+|NaN|-?Infinity")
_MAX_INT64 = (1 << 63) - 1
_MAX_INTEGER_BYTES = 64
"""More digits, without zeros before them, are not converted: none of these numbers fits."""
_MAX_FLOAT_BYTES = 63
_MAX_WHOLE_FLOAT = 1 << 53
_MAX_FLOAT_US = 9e15
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_Raw = msgspec.Raw | bytes
Members = Mapping[str, _Raw]

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_all = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _MoreError(Exception):
    """The buffer ends inside a value."""


class _SyntaxError(Exception):
    """What is there is no JSON."""


def scale_number(text: bytes, shift: int) -> int | None:
    """A decimal number times 10^shift, rounded half up; None when it is none or does not fit."""
    found = _DECIMAL.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return None
    fraction = found[3] or b""
    kept = fraction[:shift].ljust(shift, b"0")
    digits = (found[2] + kept).lstrip(b"0")
    if len(digits) > _MAX_INTEGER_BYTES:
        return None
    value = int(digits or b"0")
    value += fraction[shift : shift + 1] >= b"5"
    if value > _MAX_INT64:
        return None
    return -value if found[1] == b"-" else value


def read_time_ns(text: bytes) -> int:
    """Microseconds as nanoseconds, or MISSING."""
    text = text.strip(b'"')
    value = scale_number(text, 3)
    if value is None and (b"e" in text or b"E" in text):
        number = _to_float(text)
        if number is not None and abs(number) < _MAX_FLOAT_US:
            value = _round_away(number * 1000.0)
    return MISSING if value is None else value


def _round_away(number: float) -> int:
    """To the nearest whole number, and halves away from zero."""
    whole = math.trunc(number)
    return whole + (-1 if number < 0 else 1) * (abs(number - whole) >= 0.5)


def _to_float(text: bytes) -> float | None:
    if len(text) > _MAX_FLOAT_BYTES or not _FLOAT.fullmatch(text):
        return None
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(slots=True)
class _Rows:
    events: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    arguments: list[tuple[int, int, int, int]] = field(default_factory=list)


class PythonScanner:
    def __init__(self) -> None:
        self.state = ScanState.START
        self.error = ScanError.NONE
        self._is_list = False
        self._rows = _Rows()
        self._symbol_ids: dict[bytes, int] = {}
        self._fields: list[tuple[bytes, bytes]] = []
        self._num_skipped = self._num_event_lists = 0

    @property
    def counts(self) -> ScanCounts:
        return ScanCounts(
            num_skipped=self._num_skipped,
            num_event_lists=self._num_event_lists,
        )

    def columns(self) -> None:
        """Complete events are in the batches."""

    def put_in_order(self) -> None:
        """There are none."""

    def symbols(self) -> list[bytes]:
        return list(self._symbol_ids)

    def fields(self) -> list[tuple[bytes, bytes]]:
        return self._fields

    def feed(self, data: bytes | memoryview) -> int:
        return self._feed(bytes(data))

    def _feed(self, data: bytes) -> int:
        offset, last = 0, _find_last_event(data)
        try:
            while self.state not in (ScanState.END, ScanState.BROKEN):
                if self.state == ScanState.IN_EVENTS and offset < last:
                    offset = self._take_many(data, offset, last)
                    last = offset
                offset = self._advance(data, offset)
        except _MoreError:
            pass
        except _SyntaxError:
            self.state = ScanState.BROKEN
            self.error = self.error or ScanError.SYNTAX
        return offset

    def take(self) -> ScanBatch:
        events = np.array(self._rows.events, dtype=np.int64).reshape(-1, 7)
        arguments = np.array(self._rows.arguments, dtype=np.int64).reshape(-1, 4)
        self._rows = _Rows()
        return ScanBatch(
            phase=events[:, 0].astype(np.uint8),
            category=events[:, 1].astype(np.int32),
            name=events[:, 2].astype(np.int32),
            pid=events[:, 3],
            tid=events[:, 4],
            ts_ns=events[:, 5],
            dur_ns=events[:, 6],
            argument_event=arguments[:, 0].astype(np.int32),
            argument_key=arguments[:, 1].astype(np.uint8),
            argument_type=arguments[:, 2].astype(np.uint8),
            argument_value=arguments[:, 3],
        )

    def _advance(self, data: bytes, offset: int) -> int:
        if self.state == ScanState.START and data.startswith(_BYTE_ORDER_MARK, offset):
            offset += len(_BYTE_ORDER_MARK)
        offset = _skip_space(data, offset)
        letter = data[offset : offset + 1]
        if self.state == ScanState.START:
            return self._open(letter, offset)
        if letter == b",":
            return offset + 1
        if self.state == ScanState.IN_OBJECT:
            return self._take_field(data, offset, letter)
        if letter == b"]":
            self.state = ScanState.END if self._is_list else ScanState.IN_OBJECT
            return offset + 1
        end = _find_end(data, offset)
        if letter == b"{":
            self._take_event(data[offset:end])
        return end

    def _open(self, letter: bytes, offset: int) -> int:
        if letter == b"{":
            self.state = ScanState.IN_OBJECT
        elif letter == b"[":
            self.state, self._is_list = ScanState.IN_EVENTS, True
            self._num_event_lists += 1
        else:
            self.error = ScanError.NOT_A_TRACE
            raise _SyntaxError
        return offset + 1

    def _take_field(self, data: bytes, offset: int, letter: bytes) -> int:
        if letter == b"}":
            self.state = ScanState.END
            return offset + 1
        if letter != b'"':
            raise _SyntaxError
        key_end = _find_end(data, offset)
        colon = _skip_space(data, key_end)
        if data[colon : colon + 1] != b":":
            raise _SyntaxError
        begin = _skip_space(data, colon + 1)
        key = data[offset + 1 : key_end - 1]
        if key == b"traceEvents" and data[begin : begin + 1] == b"[":
            self.state = ScanState.IN_EVENTS
            self._num_event_lists += 1
            return begin + 1
        end = _find_end(data, begin)
        self._fields.append((key, data[begin:end]))
        return end

    def _take_many(self, data: bytes, offset: int, end: int) -> int:
        """Takes the events before `end` at once, if that is where one begins; how far it came."""
        try:
            events = _decode_all(b"[" + data[offset:end].strip(b" \n\r\t,") + b"]")
        except _DECODE_ERRORS:
            return offset
        for event in events:
            self._put_event(event)
        return end

    def _take_event(self, text: bytes) -> None:
        self._put_event(_split_object(text))

    def _put_event(self, found: Members) -> None:
        phase = _string(found.get("ph"))
        category = _string(found.get("cat"))
        letter = phase[0] if phase else 0
        if phase is not None and chr(letter) not in KEPT_PHASES:
            self._num_skipped += 1
            return
        offset = len(self._rows.events)
        self._take_arguments(found.get("args"), offset)
        name = _string(found.get("name"))
        self._rows.events.append(
            (
                letter,
                -1 if category is None else self._intern(category),
                -1 if name is None else self._intern(name),
                self._identity(found.get("pid")),
                self._identity(found.get("tid")),
                self._time(found.get("ts")),
                self._time(found.get("dur")),
            )
        )

    def _take_arguments(self, raw: _Raw | None, event: int) -> None:
        text = b"" if raw is None else bytes(raw)
        if not text.startswith(b"{"):
            return
        for key, value in _split_object(text).items():
            offset = _KEY_IDS.get(key)
            if offset is not None:
                kind, number = self._read_value(bytes(value))
                self._rows.arguments.append((event, offset, kind, number))

    def _read_value(self, text: bytes) -> tuple[ValueType, int]:
        if text.startswith(b'"'):
            return ValueType.STRING, self._intern(text[1:-1])
        if text.startswith((b"{", b"[")):
            return ValueType.RAW, self._intern(text)
        if text.lstrip(b"-").isdigit():
            whole = scale_number(text, 0)
            if whole is not None:
                return ValueType.INT, whole
        number = _to_float(text)
        if number is not None:
            return ValueType.FLOAT, int.from_bytes(struct.pack("<d", number), "little", signed=True)
        return ValueType.WORD, self._intern(text)

    def _identity(self, raw: _Raw | None) -> int:
        if raw is None:
            return MISSING
        kind, value = self._read_value(bytes(raw))
        if kind == int(ValueType.STRING):
            return TEXT_IDENTITY + value
        if kind == int(ValueType.FLOAT):
            number = float(bytes(raw))
            is_whole = abs(number) < _MAX_WHOLE_FLOAT and number.is_integer()
            return int(number) if is_whole else MISSING
        return value if kind == int(ValueType.INT) else MISSING

    def _time(self, raw: _Raw | None) -> int:
        return MISSING if raw is None else read_time_ns(bytes(raw))

    def _intern(self, text: bytes) -> int:
        return self._symbol_ids.setdefault(text, len(self._symbol_ids))


def _find_last_event(data: bytes) -> int:
    """Where the last event of the buffer seems to begin, as Kineto writes them; 0 without one."""
    key = data.rfind(b'"ph"')
    brace = data.rfind(b"{", 0, max(key, 0))
    return brace if brace >= 0 and not data[brace + 1 : key].strip() else 0


def _split_object(text: bytes) -> Members:
    """The members of an object, each as its text."""
    try:
        return _decode(text)
    except _DECODE_ERRORS:
        pass
    try:
        return _split_slowly(text)
    except _MoreError as error:
        raise _SyntaxError from error


def _split_slowly(text: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    offset = 1
    while True:
        offset = _skip_space(text, offset)
        letter = text[offset : offset + 1]
        if letter == b"}":
            return found
        if letter == b",":
            offset += 1
            continue
        if letter != b'"':
            raise _SyntaxError
        key_end = _find_end(text, offset)
        colon = _skip_space(text, key_end)
        if text[colon : colon + 1] != b":":
            raise _SyntaxError
        begin = _skip_space(text, colon + 1)
        end = _find_end(text, begin)
        found[text[offset + 1 : key_end - 1].decode(errors="replace")] = text[begin:end]
        offset = end


def _string(raw: _Raw | None) -> bytes | None:
    text = b"" if raw is None else bytes(raw)
    return text[1:-1] if text.startswith(b'"') else None


def _skip_space(data: bytes, offset: int) -> int:
    while data[offset : offset + 1] in (b" ", b"\n", b"\r", b"\t"):
        offset += 1
    if offset >= len(data):
        raise _MoreError
    return offset


def _find_end(data: bytes, offset: int) -> int:
    """The offset after the value that starts at `offset`."""
    letter = data[offset : offset + 1]
    if letter in b'"{[':
        depth = 0
        for token in _TOKEN.finditer(data, offset):
            mark = token[0]
            if mark == b'"':
                raise _MoreError
            depth += (mark in (b"{", b"[")) - (mark in (b"}", b"]"))
            if depth == 0:
                return token.end()
        raise _MoreError
    found = _BARE_END.search(data, offset)
    if found is None:
        raise _MoreError
    if found.start() == offset:
        raise _SyntaxError
    return found.start()
