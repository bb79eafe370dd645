"""Perfetto's own format: a stream of protobuf packets.

Written by hand: a trace needs six messages with three kinds of fields. The packages that could do
it (`protobuf`, `perfetto`) would be a dependency of every installation, and build an object per
packet. Numbers of fields are those of Perfetto's `trace_packet.proto`, which never change.

Names and words are written once and then by number (interned), up to a limit, so that hostile names
cannot make this process grow.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO

from meshscope.export.trace_sink import Argument, Arrow, Track, Written, show_name, show_text

_MAX_INTERNED = 50_000
_CLEARED, _NEEDS_STATE = 1, 2
"""Flags of packets: interned words begin anew; interned words are used."""
_SEQUENCE = 1
_BEGIN, _END, _MARK, _VALUE = 1, 2, 3, 4
"""Types of track events."""
_EXPLICIT_ORDER = 3
_BYTES_UNIT = 3
_FIXED = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
_FLOW, _FLOW_ENDS = b"\xf9\x02", b"\x81\x03"
"""Fields 47 and 48, of eight bytes."""


def varint(value: int) -> bytes:
    """A number as protobuf writes it; negative ones as 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, body: bytes) -> bytes:
    """Also for text."""
    return varint(field << 3 | 2) + varint(len(body)) + body


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + _DOUBLE.pack(value)


class _Words:
    """Interned words of one kind, and those that no packet has carried yet."""

    def __init__(self, field: int) -> None:
        self._field = field
        self._numbers: dict[str, int] = {}

    def find(self, word: str, pending: bytearray) -> int:
        """Its number; 0 where there are too many."""
        known = self._numbers.get(word)
        if known is not None:
            return known
        if len(self._numbers) >= _MAX_INTERNED:
            return 0
        new = self._numbers[word] = len(self._numbers) + 1
        text = word.encode("utf-8", "replace")
        pending += message(self._field, number(1, new) + message(2, text))
        return new


class PerfettoSink:
    """Writes packets to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.written = Written()
        self._file = file
        self._num_tracks = 0
        self._categories = _Words(1)
        self._names = _Words(2)
        self._keys = _Words(3)
        self._texts = _Words(29)
        self._pending = bytearray()
        """Interned words to go with the next packet."""
        self._tail = number(10, _SEQUENCE) + number(13, _NEEDS_STATE)
        self._write(number(10, _SEQUENCE) + number(13, _CLEARED))
        # The root of all tracks has number 0.
        self._write(message(60, number(1, 0) + number(11, _EXPLICIT_ORDER)) + self._tail)

    def add_process(self, number_: int, name: str) -> Track:
        """A root of the tree of tracks. Not one of Perfetto's processes: its viewer orders those by
        how many slices they have, and shows nothing of a closed one."""
        track = self._new_track(number_, name)
        shown = message(2, show_name(name).encode())
        self._describe(track, shown + number(12, number_ + 1) + number(11, _EXPLICIT_ORDER))
        self.written.processes += 1
        return track

    def add_track(self, process: Track, name: str, order: int) -> Track:
        return self._add_child(process, name, order, b"")

    def add_counter(self, process: Track, name: str, unit: str, order: int) -> Track:
        is_bytes = unit == "bytes"
        shown = number(3, _BYTES_UNIT) if is_bytes else message(6, unit.encode())
        return self._add_child(process, name, order, message(8, shown))

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
        event = self._make_event(_BEGIN, track, category, name, arguments)
        for flow, ends_here in arrows:
            event += (_FLOW_ENDS if ends_here else _FLOW) + _FIXED.pack(flow)
            self.written.arrows += ends_here
        self._put(start_ns, event)
        if end_ns is not None:
            self._put(end_ns, number(9, _END) + number(11, track.uuid))
        self.written.slices += 1

    def put_mark(
        self,
        track: Track,
        category: str,
        name: str,
        time_ns: int,
        arguments: Sequence[Argument] = (),
    ) -> None:
        self._put(time_ns, self._make_event(_MARK, track, category, name, arguments))
        self.written.marks += 1

    def put_value(self, counter: Track, time_ns: int, value: float) -> None:
        event = number(9, _VALUE) + number(11, counter.uuid)
        exact = int(value)
        event += number(30, exact) if exact == value else double(44, value)
        self._put(time_ns, event)
        self.written.values += 1

    def close(self) -> None:
        self._file.flush()

    def _make_event(
        self, kind: int, track: Track, category: str, name: str, arguments: Sequence[Argument]
    ) -> bytes:
        pending = self._pending
        event = number(9, kind) + number(11, track.uuid)
        event += number(3, self._categories.find(category, pending))
        shown = show_name(name)
        known = self._names.find(shown, pending)
        event += number(10, known) if known else message(23, shown.encode())
        for key, value in arguments:
            event += message(4, number(1, self._keys.find(key, pending)) + self._encode(value))
        return event

    def _encode(self, value: float | str) -> bytes:
        if isinstance(value, int):
            return number(4, value)
        if isinstance(value, float):
            return double(5, value)
        shown = show_text(value)
        known = self._texts.find(shown, self._pending)
        return number(17, known) if known else message(6, shown.encode())

    def _new_track(self, process: int, name: str) -> Track:
        self._num_tracks += 1
        return Track(self._num_tracks, process, name)

    def _add_child(self, process: Track, name: str, order: int, more: bytes) -> Track:
        track = self._new_track(process.process, name)
        shown = message(2, show_name(name).encode())
        self._describe(track, shown + number(5, process.uuid) + number(12, order) + more)
        self.written.tracks += 1
        return track

    def _describe(self, track: Track, body: bytes) -> None:
        self._write(message(60, number(1, track.uuid) + body) + self._tail)

    def _put(self, time_ns: int, event: bytes) -> None:
        packet = number(8, time_ns) + message(11, event) + self._tail
        if self._pending:
            packet += message(12, bytes(self._pending))
            self._pending.clear()
        self._write(packet)

    def _write(self, packet: bytes) -> None:
        self._file.write(message(1, packet))
