"""The JSON that chrome://tracing, Perfetto and other viewers read; for small runs."""

import json
from collections.abc import Sequence
from typing import Any, BinaryIO

from meshscope.export.rank_slices import STEPS
from meshscope.export.trace_sink import Argument, Arrow, Track, Written, show_name, show_text

_JOB_PROCESS = 1_000_000_000
"""A number that no rank has; viewers know none below 0."""


class ChromeSink:
    """Writes one event per line."""

    def __init__(self, file: BinaryIO) -> None:
        self.written = Written()
        self._file = file
        self._num_tracks = 0
        self._file.write(b'{"displayTimeUnit":"ns","traceEvents":[')
        self._separator = b"\n"

    def add_process(self, number: int, name: str) -> Track:
        order, number = number, number if number >= 0 else _JOB_PROCESS
        self._describe("process_name", number, 0, {"name": show_name(name)})
        self._describe("process_sort_index", number, 0, {"sort_index": order})
        self.written.processes += 1
        return self._add_row(number, STEPS if order >= 0 else "findings", 0)

    def add_track(self, process: Track, name: str, order: int) -> Track:
        self.written.tracks += 1
        return self._add_row(process.process, name, order)

    def _add_row(self, process: int, name: str, order: int) -> Track:
        self._num_tracks += 1
        number = self._num_tracks
        self._describe("thread_name", process, number, {"name": show_name(name)})
        self._describe("thread_sort_index", process, number, {"sort_index": order})
        return Track(number, process, name)

    def add_counter(self, process: Track, name: str, unit: str, order: int) -> Track:
        self.written.tracks += 1
        return Track(0, process.process, f"{name} ({unit})")

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
        event = self._make("B" if end_ns is None else "X", track, category, name, start_ns)
        if end_ns is not None:
            event["dur"] = (end_ns - start_ns) / 1000
        self._write({**event, "args": _show(arguments)})
        self.written.slices += 1
        for flow, ends_here in arrows:
            event = self._make("f" if ends_here else "s", track, "flow", "waits for", start_ns)
            self._write({**event, "id": f"{flow:x}", **({"bp": "e"} if ends_here else {})})
            self.written.arrows += ends_here

    def put_mark(
        self,
        track: Track,
        category: str,
        name: str,
        time_ns: int,
        arguments: Sequence[Argument] = (),
    ) -> None:
        event = self._make("i", track, category, name, time_ns)
        self._write({**event, "s": "t", "args": _show(arguments)})
        self.written.marks += 1

    def put_value(self, counter: Track, time_ns: int, value: float) -> None:
        event = {"ph": "C", "pid": counter.process, "tid": 0, "name": show_name(counter.name)}
        self._write({**event, "ts": time_ns / 1000, "args": {"value": value}})
        self.written.values += 1

    def close(self) -> None:
        self._file.write(b"\n]}\n")
        self._file.flush()

    def _make(
        self, phase: str, track: Track, category: str, name: str, time_ns: int
    ) -> dict[str, Any]:
        return {
            "ph": phase,
            "pid": track.process,
            "tid": track.uuid,
            "cat": category,
            "name": show_name(name),
            "ts": time_ns / 1000,
        }

    def _describe(self, what: str, process: int, thread: int, arguments: dict[str, Any]) -> None:
        self._write({"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")).encode())
        self._separator = b",\n"


def _show(arguments: Sequence[Argument]) -> dict[str, int | float | str]:
    return {key: show_text(value) if isinstance(value, str) else value for key, value in arguments}
