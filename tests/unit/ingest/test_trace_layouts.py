"""One trace in many layouts gives one answer; what is no trace is told by name."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshscope.errors import TraceError
from meshscope.ingest.compressed import ByteStream, make_zstd_unit
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.native import load_library

EVENTS: list[dict[str, object]] = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 9,
        "tid": 9,
        "ts": 5700001.125,
        "dur": 2.5,
        "args": {"correlation": 4, "External id": 3},
    },
    {
        "ph": "X",
        "cat": "kernel",
        "name": 'void gemm<"é">',
        "pid": 0,
        "tid": 7,
        "ts": 5700007.25,
        "dur": 10,
        "args": {"stream": 7, "device": 0, "correlation": 4, "External id": 3},
    },
]
DOCUMENT = {"distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": EVENTS}
TEXT = json.dumps(DOCUMENT, ensure_ascii=False)


def facts(trace: Trace) -> list[tuple[object, ...]]:
    events = trace.events
    columns = (events.category, events.begin_ns, events.duration_ns)
    more = (events.correlation, events.external_id, events.stream, events.device)
    names = [trace.strings[place] for place in events.name.tolist()]
    return list(zip(names, *(column.tolist() for column in columns + more), strict=True))


EXPECTED = [
    ("cudaLaunchKernel", Category.RUNTIME, 5700001125, 2500, 4, 3, -1, -1),
    ('void gemm<"é">', Category.KERNEL, 5700007250, 10000, 4, 3, 7, 0),
]


def with_times(convert: Callable[[object], object]) -> str:
    changed = [
        {key: convert(value) if key in ("ts", "dur") else value for key, value in event.items()}
        for event in EVENTS
    ]
    return json.dumps({**DOCUMENT, "traceEvents": changed})


def as_floats(value: object) -> object:
    """As a table writes a trace again: every whole number with `.0`."""
    if isinstance(value, dict):
        return {key: as_floats(entry) for key, entry in value.items()}
    return float(value) if isinstance(value, int) else value


def as_pairs() -> str:
    """Begins and ends instead of complete events; nothing is said at the end."""
    changed: list[dict[str, object]] = []
    for event in EVENTS:
        if event["ph"] == "X":
            begin = {key: value for key, value in event.items() if key != "dur"}
            changed.append({**begin, "ph": "B"})
            end_us = event["ts"] + event["dur"]  # type: ignore[operator]
            changed.append({"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": end_us})
        else:
            changed.append(event)
    return json.dumps({**DOCUMENT, "traceEvents": changed})


def zstd(data: bytes) -> bytes:
    """One raw block of a frame: 4 bytes of magic, its header, the block's size and the bytes."""
    assert len(data) < 1 << 16
    header = b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little")
    return header + ((len(data) << 3) | 1).to_bytes(3, "little") + data


RAW = TEXT.encode()
HALF = len(RAW) // 2
LAYOUTS = {
    "one line": RAW,
    "indented": json.dumps(DOCUMENT, indent=4).encode(),
    "sorted": json.dumps(DOCUMENT, sort_keys=True).encode(),
    "lines of Windows": json.dumps(DOCUMENT, indent=1).replace("\n", "\r\n").encode(),
    "events first": json.dumps({"traceEvents": EVENTS, "z": {}}).encode(),
    "a list": json.dumps(EVENTS).encode(),
    "mark of UTF-8": TEXT.encode("utf-8-sig"),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16, big end first": b"\xfe\xff" + TEXT.encode("utf-16-be"),
    "UTF-32": TEXT.encode("utf-32"),
    "gzip": gzip.compress(RAW),
    "gzip of two members": gzip.compress(RAW[:HALF]) + gzip.compress(RAW[HALF:]),
    "gzip with zeros behind it": gzip.compress(RAW) + bytes(512),
    "bzip2": bz2.compress(RAW),
    "xz": lzma.compress(RAW),
    "zstd": zstd(RAW),
    "zstd of two frames": zstd(RAW[:HALF]) + zstd(RAW[HALF:]),
    "zstd behind a skipped frame": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(RAW),
    "gzip of UTF-16": gzip.compress(TEXT.encode("utf-16")),
    "times as text": with_times(str).encode(),
    "times with three decimals": with_times(lambda value: f"@{value:.3f}@")
    .replace('"@', "")
    .replace('@"', "")
    .encode(),
    "ids as floats": json.dumps({"traceEvents": [as_floats(event) for event in EVENTS]}).encode(),
    "begins and ends": as_pairs().encode(),
    "a comma at the end": json.dumps({"traceEvents": EVENTS}).encode()[:-2] + b",]}",
    "an empty list before": b'{"traceEvents": [], ' + RAW[1:],
    "NaN in an argument": RAW.replace(b'"stream": 7', b'"stream": 7, "bytes": NaN, "x": Infinity'),
    "a byte that is no UTF-8": RAW.replace(b'"stream": 7', b'"stream": 7, "x": "\xff"'),
}
SCANNERS = pytest.mark.parametrize("use_native", [True, False], ids=["native", "python"])


@SCANNERS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(tmp_path, layout, use_native) -> None:
    if use_native and load_library() is None:
        pytest.skip("meshscope was installed without a C compiler")
    path = tmp_path / "any.name"
    path.write_bytes(LAYOUTS[layout])
    trace = read_trace(path, use_native=use_native)
    assert facts(trace) == EXPECTED
    assert trace.warnings == ()


def pour_out(stream: ByteStream) -> bytes:
    """All of it, through little room."""
    room = memoryview(bytearray(100))
    return b"".join(bytes(room[:num]) for num in stream.pour(lambda: room))


def test_the_next_member_is_found_though_its_beginning_is_cut(tmp_path, monkeypatch) -> None:
    first, second = gzip.compress(RAW[:HALF]), gzip.compress(RAW[HALF:])
    for num_read in range(len(first) - 3, len(first) + 4):
        monkeypatch.setattr("meshscope.ingest.compressed.READ_BYTES", num_read)
        (tmp_path / "t.gz").write_bytes(first + second)
        stream = ByteStream(tmp_path / "t.gz")
        assert (pour_out(stream), stream.problem) == (RAW, "")


def test_zstds_own_decoder_takes_the_frames_made_here() -> None:
    assert make_zstd_unit().decompress(zstd(RAW)) == RAW


def tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        entry = tarfile.TarInfo("rank0.json")
        entry.size = len(RAW)
        archive.addfile(entry, io.BytesIO(RAW))
    return target.getvalue()


def packed_zip() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("rank0.json", RAW)
    return target.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar(), "a tar archive"),
        (packed_zip(), "a zip archive"),
        (gzip.compress(gzip.compress(RAW)), "compressed twice"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"SQLite format 3\0", "SQLite"),
        (b"\x80\x04\x95\0", "a pickle"),
        (TEXT.encode("utf-16-le"), "UTF-16 without a mark"),
        (b"\x0a\x10\x08\x01\0\0", "binary"),
        (b'{"rocprofiler-sdk-tool": []}', "rocprofv3"),
        (b'{"schema": "1.1.0", "nodes": []}', "execution graph"),
        (b'[{"bs": 32}, {"bs": 64}]', "no events"),
        (b"{}", "without `traceEvents`"),
        (b"", "empty"),
        (b"hello", "no event"),
    ],
)
def test_what_is_no_trace_is_told_by_name(tmp_path, content, message) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.json")


def test_a_second_document_behind_the_first_is_said(tmp_path) -> None:
    (tmp_path / "t.json").write_bytes(RAW + b"\n" + RAW)
    trace = read_trace(tmp_path / "t.json")
    assert facts(trace) == EXPECTED
    assert trace.warnings == (f"the JSON ends at byte {len(RAW):,}; what follows is left out",)


def test_a_text_full_of_escapes_takes_no_longer_than_another(tmp_path) -> None:
    """Looking for its end at each escape would take 10^12 steps here."""
    event = b'[{"ph":"X","ts":1,"dur":1,"args":{"x":"' + b"\\n" * 1_000_000 + b'"}}]'
    (tmp_path / "t.json").write_bytes(event)
    assert len(read_trace(tmp_path / "t.json").events) == 1


@SCANNERS
def test_thousands_of_digits_are_no_number(tmp_path, use_native) -> None:
    if use_native and load_library() is None:
        pytest.skip("meshscope was installed without a C compiler")
    (tmp_path / "t.json").write_bytes(b'[{"ph":"X","ts":' + b"1" * 5_000 + b',"dur":1,"pid":1}]')
    assert read_trace(tmp_path / "t.json", use_native=use_native).counts.num_incomplete == 1


def test_the_last_of_many_names_stands(tmp_path) -> None:
    names = [
        {"ph": "M", "name": kind, "pid": 0, "tid": 7, "args": {key: f"{kind} {number}"}}
        for number in range(3)
        for kind, key in (("process_name", "name"), ("process_labels", "labels"))
    ]
    names.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "s 7"}})
    (tmp_path / "t.json").write_text(json.dumps([*names, EVENTS[2]]), encoding="utf-8")
    (track,) = read_trace(tmp_path / "t.json").tracks
    assert track.process_name == "process_name 2"
    assert track.process_labels == "process_labels 2"
    assert track.thread_name == "s 7"


def test_nested_pairs_keep_what_their_begins_say(tmp_path: Path) -> None:
    def event(phase: str, ts: float, name: str = "", **arguments: object) -> dict[str, object]:
        fields: dict[str, object] = {"ph": phase, "pid": 1, "tid": 1, "ts": ts, "cat": "kernel"}
        return {**fields, "name": name, "args": arguments}

    pairs = [
        event("B", 1, "outer", stream=7, correlation=1),
        event("B", 2, "inner", stream=8, correlation=2),
        event("E", 3, bytes=5),
        event("E", 6),
        event("E", 7),
    ]
    (tmp_path / "t.json").write_text(json.dumps(pairs), encoding="utf-8")
    trace = read_trace(tmp_path / "t.json")
    assert [row[0] for row in facts(trace)] == ["outer", "inner"]
    assert trace.events.duration_ns.tolist() == [5000, 1000]
    assert trace.events.stream.tolist() == [7, 8]
    assert trace.events.correlation.tolist() == [1, 2]
    assert trace.counts.num_incomplete == 1
    assert np.all(trace.events.category == Category.KERNEL)


def test_times_that_do_not_fit_are_loud(tmp_path: Path) -> None:
    """Nanoseconds of an epoch where microseconds belong: 10^21 ns do not fit."""
    events = [{"ph": "X", "pid": 1, "tid": 1, "ts": 1700000000000000000, "dur": 1}] * 2
    (tmp_path / "t.json").write_text(json.dumps(events), encoding="utf-8")
    (warning,) = read_trace(tmp_path / "t.json").warnings
    assert warning.startswith("2 events")


def test_a_key_with_escapes_is_a_reason_why_an_event_is_left_out(tmp_path: Path) -> None:
    """The compiled scanner compares keys as they are written, and the warning says so."""
    text = json.dumps({"traceEvents": [{"ph": "X", "name": "f", "pid": 1, "tid": 1, "ts": 1,
                                        "dur": 2}] * 3})  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(text.replace('"ts"', '"t\\u0073"', 1), encoding="utf-8")
    read_right = read_trace(path, use_native=False)
    assert (len(read_right.events), read_right.warnings) == (3, ())
    if load_library() is None:
        pytest.skip("meshscope was installed without a C compiler")
    (warning,) = read_trace(path, use_native=True).warnings
    assert warning.startswith("1 event is left out")
    assert "keys written with escapes" in warning
