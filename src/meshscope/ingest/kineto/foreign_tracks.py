"""Device work in traces whose events have no category of Kineto's: torch_npu's, XLA's, TensorFlow's
and Nsight Systems'; merged traces.

There the names of processes and threads tell what a line of events is. torch_npu puts each stream
of `Ascend Hardware` on a line, and collectives as a whole on lines of `Communication` (formerly
`HCCL`). XLA has a process for each device: with a line for each stream on a GPU, and on a TPU one
with the operators, `XLA Ops`, where a loop spans those of its body: only the innermost count. The
other lines (modules, name scopes, asynchronous copies, analyses) tell the same time again.
TensorFlow's timeline makes a process of each stream, and `stream:all`, which tells them all again.
Converters of Nsight Systems' files write a process `Device 0` with threads `Stream 7`, events of
category `cuda` (a kernel or a copy), and ranges of category `nvtx`.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, TraceEvents, Track
from meshscope.store.read.arrays import find_true

_ASCEND_DEVICE = "Ascend Hardware"
_ASCEND_COLLECTIVES = ("Communication", "HCCL")
_ASCEND_STREAM = re.compile(r"Stream (\d{1,9})$")
_ASCEND_GROUP = re.compile(r"Group \d+ Communication$")
_XLA_DEVICE = re.compile(r"/device:[A-Za-z_]+:(\d{1,4})\b")
_XLA_STREAM = re.compile(r"Stream #(\d{1,9})")
_XLA_OPERATORS = "XLA Ops"
_TENSORFLOW_STREAM = re.compile(
    r".*/device:[A-Za-z_]+:(\d{1,4})/(?:stream:(\d{1,9})|(memcpy))\b", re.IGNORECASE
)
_TENSORFLOW_COPIES = _COLLECTIVE_STREAM = 1 << 20
"""Numbers of lines that are no stream begin here."""
_NSIGHT_DEVICE, _NSIGHT_STREAM = re.compile(r"Device (\d{1,4})$"), re.compile(r"Stream (\d{1,9})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adopted:
    """A line that is device work."""

    track: int
    device: int
    stream: int
    is_nested: bool = False


def adopt_tracks(events: TraceEvents, tracks: Sequence[Track]) -> TraceEvents:
    """The events, with category, stream and device where only the line tells them."""
    found = [
        *_find_ascend(tracks),
        *_find_xla(tracks),
        *_find_tensorflow(tracks),
        *_find_nsight(tracks),
    ]
    if not found:
        return events
    category, stream = events.category.copy(), events.stream.copy()
    device = events.device.copy()
    for line in found:
        rows = find_true((events.track == line.track) & (category == int(Category.OTHER)))
        if line.is_nested:
            rows = rows[_is_innermost(events, rows)]
        category[rows] = Category.KERNEL
        stream[rows] = line.stream
        device[rows] = line.device
    return replace(events, category=category, stream=stream, device=device)


def _find_ascend(tracks: Sequence[Track]) -> list[_Adopted]:
    """The devices are numbered in the order of their processes."""
    found = []
    for names, pattern in (
        ((_ASCEND_DEVICE,), _ASCEND_STREAM),
        (_ASCEND_COLLECTIVES, _ASCEND_GROUP),
    ):
        own = [number for number, track in enumerate(tracks) if track.process_name in names]
        processes = sorted({str(tracks[number].process) for number in own})
        for number in own:
            matched = pattern.match(tracks[number].thread_name)
            if matched is None:
                continue
            is_stream = pattern is _ASCEND_STREAM
            found.append(
                _Adopted(
                    track=number,
                    device=processes.index(str(tracks[number].process)),
                    stream=int(matched[1]) if is_stream else _COLLECTIVE_STREAM + number,
                )
            )
    has_device = any(line.stream < _COLLECTIVE_STREAM for line in found)
    return found if has_device else []


def _find_xla(tracks: Sequence[Track]) -> list[_Adopted]:
    of_device: dict[int, list[int]] = defaultdict(list)
    for index, track in enumerate(tracks):
        matched = _XLA_DEVICE.match(track.process_name)
        if matched is not None:
            of_device[int(matched[1])].append(index)
    found = []
    for device, indices in of_device.items():
        streams = [
            _Adopted(track=index, device=device, stream=int(matched[1]))
            for index in indices
            if (matched := _XLA_STREAM.match(tracks[index].thread_name))
        ]
        found += streams or [
            _Adopted(track=index, device=device, stream=0, is_nested=True)
            for index in indices
            if tracks[index].thread_name == _XLA_OPERATORS
        ]
    return found


def _find_tensorflow(tracks: Sequence[Track]) -> list[_Adopted]:
    """Streams by number, and copies, which have a process of their own."""
    found = []
    for index, track in enumerate(tracks):
        matched = _TENSORFLOW_STREAM.match(track.process_name)
        if matched is not None:
            stream = _TENSORFLOW_COPIES if matched[3] else int(matched[2])
            found.append(_Adopted(track=index, device=int(matched[1]), stream=stream))
    return found


def _find_nsight(tracks: Sequence[Track]) -> list[_Adopted]:
    """Told by what stands in place of numbers of processes and threads."""
    found = []
    for index, track in enumerate(tracks):
        device = _NSIGHT_DEVICE.match(str(track.process))
        stream = _NSIGHT_STREAM.match(str(track.thread))
        if device is not None and stream is not None:
            found.append(_Adopted(track=index, device=int(device[1]), stream=int(stream[1])))
    return found


def _is_innermost(events: TraceEvents, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether no other of the rows, which are in order of begin, begins before this one ends."""
    order = np.lexsort((-events.duration_ns[rows], events.begin_ns[rows]))
    begin, end = events.begin_ns[rows[order]], events.end_ns[rows[order]]
    is_innermost = np.ones(len(rows), dtype=np.bool_)
    is_innermost[order[:-1]] = begin[1:] >= end[:-1]
    return is_innermost


def split_devices(events: TraceEvents, tracks: Sequence[Track]) -> tuple[TraceEvents, list[str]]:
    """Gives processes that use the same device number separate ones, with a warning.

    A profiler gives each device a process. Two with one number are traces of two ranks, put
    together into a file."""
    is_work = (events.category >= int(Category.KERNEL)) & (events.category <= int(Category.MEMSET))
    rows = find_true(is_work & (events.device >= 0))
    number_of = {track.process: index for index, track in enumerate(tracks)}
    process_of = np.array([number_of[track.process] for track in tracks], dtype=np.int64)
    # Few lines have device work: pairs of line and device come before those of process and device.
    keys = events.track.take(rows).astype(np.int64) << 16 | events.device.take(rows)
    is_other = keys[1:] != keys[:-1]  # most are as the one before
    keys = np.append(keys[:1], keys[1:][is_other])
    pairs = sorted({(key & 0xFFFF, int(process_of[key >> 16])) for key in np.unique(keys).tolist()})
    numbers = [device for device, _ in pairs]
    if len(set(numbers)) == len(numbers):
        return events, []
    device, unused = events.device.copy(), max(numbers) + 1
    for index, (number, process) in enumerate(pairs):
        if number not in numbers[:index]:
            continue
        own = rows[(events.device[rows] == number) & (process_of[events.track[rows]] == process)]
        device[own] = min(unused, np.iinfo(np.int16).max)
        unused += 1
    note = (
        f"{len(pairs)} processes use {len(set(numbers))} device numbers, as in traces of several "
        "ranks put together: each is a device here; what launched what may be mixed up"
    )
    return replace(events, device=device), [note]


def note_processes(events: TraceEvents, tracks: Sequence[Track]) -> list[str]:
    """A warning where several processes opened ranges: a profiler sees one."""
    rows = find_true(events.category == int(Category.ANNOTATION))
    processes = {tracks[track].process for track in set(events.track[rows].tolist())}
    if len(processes) < 2:
        return []
    return [
        f"ranges of {len(processes)} processes are in it, as in traces of several ranks put "
        "together: what its host did, and its steps, are of all of them mixed up; read the trace "
        "of each rank"
    ]
