"""Reads a Perfetto trace by the rules of protobuf alone: nothing of the writer is used."""

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def read_fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = read_varint(data, at)
        elif wire == 1:
            value, at = data[at : at + 8], at + 8
        elif wire == 2:
            length, at = read_varint(data, at)
            value, at = data[at : at + length], at + length
            assert len(value) == length
        else:
            raise AssertionError(f"wire type {wire}")
        yield number, wire, value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields_of(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for number, _, value in read_fields(data):
        found[number].append(value)
    return found


@dataclass
class Trace:
    """What a viewer would make of a trace."""

    tracks: dict[int, dict[str, Any]] = field(default_factory=dict)
    slices: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    values: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def path(self, uuid: int) -> tuple[str, ...]:
        track = self.tracks[uuid]
        above = self.path(track["parent"]) if track["parent"] else ()
        return (*above, track["name"])

    def of(self, *path: str) -> list[dict[str, Any]]:
        return [one for one in self.slices if self.path(one["track"]) == path]

    @property
    def arrows(self) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        """From and to: the root's name and the start of both slices."""
        begins = {f: one for one in self.slices for f in one["flows"]}
        ends = {f: one for one in self.slices for f in one["flow_ends"]}
        assert begins.keys() == ends.keys()

        def name(one):
            return self.path(one["track"])[0], one["start"]

        return {(name(begins[f]), name(ends[f])) for f in begins}


def read_trace(data: bytes) -> Trace:
    trace = Trace()
    words: dict[int, dict[int, str]] = defaultdict(dict)
    events = []
    for number, wire, packet in read_fields(data):
        assert (number, wire) == (1, 2)
        found = fields_of(packet)
        assert found[10] == [1]
        for interned in found[12]:
            for kind, _, entry in read_fields(interned):
                one = fields_of(entry)
                words[kind][one[1][0]] = one[2][0].decode()
        for described in found[60]:
            one = fields_of(described)
            trace.tracks[one[1][0]] = {
                "name": one[2][0].decode() if one[2] else "",
                "parent": one[5][0] if one[5] else 0,
                "is_counter": bool(one[8]),
            }
        for event in found[11]:
            events.append((found[8][0], len(events), event))
    open_: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for time, _, event in sorted(events):
        _apply(trace, words, open_, time, fields_of(event))
    for stack in open_.values():
        for one in stack:
            one["end"] = None
            trace.slices.append(one)
    return trace


def _apply(trace: Trace, words, open_, time: int, event: dict[int, list[Any]]) -> None:
    kind, track = event[9][0], event[11][0]
    if kind == 4:
        value = struct.unpack("<d", event[44][0])[0] if event[44] else event[30][0]
        trace.values[track].append((time, value))
    elif kind == 2:
        one = open_[track].pop()
        one["end"] = time
        trace.slices.append(one)
    else:
        one = {
            "track": track,
            "start": time,
            "name": words[2][event[10][0]] if event[10] else event[23][0].decode(),
            "category": words[1][event[3][0]],
            "args": dict(_argument(words, fields_of(raw)) for raw in event[4]),
            "flows": [struct.unpack("<Q", raw)[0] for raw in event[47]],
            "flow_ends": [struct.unpack("<Q", raw)[0] for raw in event[48]],
            "depth": len(open_[track]),
        }
        if kind == 1:
            open_[track].append(one)
        else:
            trace.marks.append(one)


def _argument(words, found: dict[int, list[Any]]) -> tuple[str, Any]:
    name = words[3][found[1][0]]
    if found[4]:
        return name, found[4][0]
    if found[5]:
        return name, struct.unpack("<d", found[5][0])[0]
    return name, words[29][found[17][0]] if found[17] else found[6][0].decode()
