"""Both scanners against `json`, against each other, and against text that is cut or wrong; and the
traces that are made of what they find."""

import json
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.native_scanner import NativeScanner
from meshscope.ingest.kineto.python_scanner import PythonScanner, read_time_ns, scale_number
from meshscope.ingest.kineto.scan import (
    KEYS,
    MISSING,
    TEXT_IDENTITY,
    ScanError,
    Scanner,
    ScanState,
    ValueType,
)
from meshscope.ingest.kineto.trace_columns import Trace, ValueKind
from meshscope.ingest.native import load_library


def make_native() -> Scanner:
    library = load_library()
    if library is None:
        pytest.skip("meshscope was installed without a C compiler")
    return NativeScanner(library, is_raw=True)


SCANNERS = pytest.mark.parametrize("make", [make_native, PythonScanner], ids=["native", "python"])


def feed_all(scanner: Scanner, text: bytes, piece: int) -> list[dict[str, object]]:
    """The events as dictionaries, fed in pieces of that size."""
    rest, events = b"", []
    for begin in range(0, len(text), piece):
        data = rest + text[begin : begin + piece]
        rest = data[scanner.feed(data) :]
        events += take(scanner)
    return events


def take(scanner: Scanner) -> list[dict[str, object]]:
    batch, symbols = scanner.take(), scanner.symbols()

    def identity(value: int) -> object:
        if value == MISSING:
            return None
        return symbols[value - TEXT_IDENTITY] if value < TEXT_IDENTITY + len(symbols) else value

    events: list[dict[str, object]] = [
        {
            "ph": chr(batch.phase[row]),
            "cat": symbols[batch.category[row]] if batch.category[row] >= 0 else None,
            "name": symbols[batch.name[row]] if batch.name[row] >= 0 else None,
            "pid": identity(int(batch.pid[row])),
            "tid": identity(int(batch.tid[row])),
            "ts": int(batch.ts_ns[row]),
            "dur": int(batch.dur_ns[row]),
            "args": {},
        }
        for row in range(len(batch))
    ]
    for event, key, kind, value in zip(
        batch.argument_event.tolist(),
        batch.argument_key.tolist(),
        batch.argument_type.tolist(),
        batch.argument_value.tolist(),
        strict=True,
    ):
        arguments = events[event]["args"]
        assert isinstance(arguments, dict)
        if kind == ValueType.FLOAT:
            arguments[KEYS[key]] = struct.unpack("<d", struct.pack("<q", value))[0]
        else:
            arguments[KEYS[key]] = value if kind == ValueType.INT else symbols[value]
    return events


TRACE = b"""{"schemaVersion": 1, "distributedInfo": {"rank": 3, "x": ["}", "\\""]},
 "traceEvents": [
  {"ph": "X", "cat": "kernel", "name": "a \\"b\\" {", "pid": 0, "tid": "stream 7",
   "ts": 1700000000000001.234, "dur": 0.5,
   "args": {"stream": 7, "unknown": {"deep": [1, {"x": "]"}]}, "Input Dims": [[2, 3], []],
            "Process Group Ranks": "[0, 1]", "bytes": 1.5, "correlation": -4}},
  {"ph": "s", "id": 1, "pid": 0, "tid": 7, "ts": 1},
  {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "python"}}
 ], "traceName": "x"}"""


@SCANNERS
@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10_000])
def test_an_event_is_read_whole_however_the_text_is_cut(make, piece) -> None:
    scanner = make()
    events = feed_all(scanner, TRACE, piece)
    assert events == [
        {
            "ph": "X",
            "cat": b"kernel",
            "name": b'a \\"b\\" {',
            "pid": 0,
            "tid": b"stream 7",
            "ts": 1_700_000_000_000_001_234,
            "dur": 500,
            "args": {
                "stream": 7,
                "Input Dims": b"[[2, 3], []]",
                "Process Group Ranks": b"[0, 1]",
                "bytes": 1.5,
                "correlation": -4,
            },
        },
        {
            "ph": "M",
            "cat": None,
            "name": b"process_name",
            "pid": 5,
            "tid": None,
            "ts": MISSING,
            "dur": MISSING,
            "args": {"name": b"python"},
        },
    ]
    assert scanner.state == ScanState.END
    assert scanner.counts.num_skipped == 1
    assert [name for name, _ in scanner.fields()] == [
        b"schemaVersion",
        b"distributedInfo",
        b"traceName",
    ]


@SCANNERS
def test_a_bare_list_of_events_is_a_trace(make) -> None:
    scanner = make()
    assert len(feed_all(scanner, b'[{"ph":"X","ts":1,"dur":2},{"ph":"X"}]', 5)) == 2
    assert scanner.state == ScanState.END


@SCANNERS
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"hello", ScanError.NOT_A_TRACE),
        (b'{"traceEvents": [{"ph" "X"}]}', ScanError.SYNTAX),
        (b'{"traceEvents": [{"ph": "X", 3: 4}]}', ScanError.SYNTAX),
        (b'{"traceEvents" [', ScanError.SYNTAX),
    ],
)
def test_what_is_no_trace_is_said(make, text, error) -> None:
    scanner = make()
    scanner.feed(text)
    assert (scanner.state, scanner.error) == (ScanState.BROKEN, error)


@SCANNERS
@pytest.mark.parametrize("cut", range(0, len(TRACE), 11))
def test_a_cut_text_gives_what_was_whole(make, cut) -> None:
    scanner = make()
    num_done = scanner.feed(TRACE[:cut])
    assert 0 <= num_done <= cut
    assert len(take(scanner)) <= 2
    assert scanner.state != ScanState.BROKEN


@SCANNERS
def test_deep_nesting_costs_no_stack(make) -> None:
    scanner = make()
    deep = b"[" * 20_000 + b"]" * 20_000
    scanner.feed(b'{"deep": ' + deep + b', "traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}')
    assert scanner.state == ScanState.END
    assert len(take(scanner)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1", 1_000),
        (b"1.2345", 1_235),
        (b"1.2344", 1_234),
        (b"-2.5", -2_500),
        (b"1682725898236590", 1_682_725_898_236_590_000),
        (b"1700000000000001.234", 1_700_000_000_000_001_234),
        (b"1e3", 1_000_000),
        (b'"7.5"', 7_500),
        (b"99999999999999999999", MISSING),
        (b"true", MISSING),
        (b"", MISSING),
        (b".", MISSING),
        (b"1e400", MISSING),
    ],
)
def test_times_are_read_from_their_digits(text, expected) -> None:
    assert read_time_ns(text) == expected
    scanner = make_native()
    scanner.feed(b'[{"ph": "X", "dur": 1, "ts": ' + (text or b'""') + b"}]")
    assert int(scanner.take().ts_ns[0]) == expected


def test_a_number_that_does_not_fit_is_none() -> None:
    assert scale_number(b"9223372036854775807", 0) == 9223372036854775807
    assert scale_number(b"9223372036854775808", 0) is None


KEY_NAMES = st.sampled_from(["stream", "correlation", "Input Dims", "dtype", "other"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M", "s", "B", "E", ""]) | VALUES,
        "cat": st.sampled_from(["kernel", "cpu_op"]) | VALUES,
        "name": VALUES,
        "pid": VALUES,
        "tid": VALUES,
        "ts": VALUES,
        "dur": VALUES,
        "args": st.dictionaries(KEY_NAMES, VALUES, max_size=3) | VALUES,
        "else": VALUES,
    },
)


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=5),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    piece=st.integers(1, 400),
)
def test_the_two_scanners_agree(events, indent, is_ascii, piece) -> None:
    document = {"traceEvents": events, "z": {"a": [1]}}
    text = json.dumps(document, indent=indent, ensure_ascii=is_ascii).encode(errors="replace")
    native, python = make_native(), PythonScanner()
    assert feed_all(native, text, piece) == feed_all(python, text, piece)
    assert (native.state, native.counts) == (python.state, python.counts)
    assert native.fields() == python.fields()


@pytest.mark.parametrize(
    "event",
    [
        b'{"ph": "X", "name": "a", "name": 7, "cat": "kernel", "cat": null}',
        b'{"ph": "X", "args": {"stream": 1}, "args": {"device": 2}}',
        b'{"ph": "X", "args": {"stream": 1}, "args": true}',
        b'{"ph": "X", "args": {"stream": NaN, "device": -Infinity, "bytes": Infinity}}',
        b'{"ph": "X",, "ts": 1, "args": {"stream": 7,}, }',
        b'{"ph": "X", "name": "\xff\xfe", "args": {"dtype": "\xed\xa0\x80"}}',
        b'{"ph": "X", "pid": 3.0, "tid": -7.0, "args": {"stream": 0x10, "device": 1_0}}',
        b'{"ph": "X", "pid": 3.5, "tid": 1e300, "ts": 0x10, "dur": nan}',
        b'{"ph": "X", "ts": 1.0005e0, "dur": -2.5e-3, "args": {"bytes": 00012, "stream": --1}}',
        b'{"ph": "X", "args": {"bytes": ' + b"7" * 70 + b', "stream": 1.' + b"3" * 70 + b"}}",
        b'{"ph": "X", "ts": ' + b"0" * 5_000 + b'7, "args": {"bytes": ' + b"0" * 5_000 + b"7}}",
        b'{"ph": 5, "ts": 1}',
    ],
)
def test_the_two_scanners_agree_on_what_is_not_quite_json(event) -> None:
    text = b'{"traceEvents": [{"ph": "X", "ts": 1}, ' + event + b', {"ph": "X", "ts": 2}]}'
    native, python = make_native(), PythonScanner()
    # By their text, as NaN equals nothing.
    assert repr(feed_all(native, text, 13)) == repr(feed_all(python, text, 13))
    assert (native.state, native.counts) == (python.state, python.counts)
    assert native.state == ScanState.END


def describe(trace: Trace) -> dict[str, object]:
    """All of a trace, with texts for their numbers, which each scanner gives in an order of its
    own."""
    events, arguments = trace.events, trace.arguments
    texts = (*trace.strings, None)
    return {
        "counts": trace.counts,
        "warnings": trace.warnings,
        "tracks": trace.tracks,
        "names": [texts[place] for place in events.name.tolist()],
        "arguments": [
            (event, trace.keys[key], kind, texts[value] if kind >= ValueKind.STRING else value)
            for event, key, kind, value in zip(
                arguments.event.tolist(),
                arguments.key.tolist(),
                arguments.kind.tolist(),
                arguments.value.tolist(),
                strict=True,
            )
        ],
        **{
            column.name: getattr(events, column.name).tolist()
            for column in fields(events)
            if column.name != "name"
        },
    }


def read_both(path: Path, text: bytes, *, with_python: bool = False) -> dict[str, object]:
    """What both ways to read it give, which has to be the same."""
    make_native()
    path.write_bytes(text)
    found = []
    for use_native in (True, False):
        try:
            trace = read_trace(path, with_python=with_python, use_native=use_native)
            found.append(describe(trace))
        except TraceError as error:
            found.append({"error": str(error)})
    assert found[0] == found[1]
    return found[0]


TIMED = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXXBEMi"),
        "ts": st.integers(0, 20) | st.floats(0, 20).map(lambda us: round(us, 4)),
        "dur": st.integers(-1, 9) | st.sampled_from([1.5, "2", None]),
    },
    optional={
        "cat": st.sampled_from(["kernel", "cpu_op", "cuda_runtime", "python_function", "else", ""]),
        "name": st.sampled_from(["a", "b", "nn.Module: A_0", "process_name", "thread_name"]),
        "pid": st.integers(0, 3) | st.sampled_from(["Traces", 1.0, 2.5]),
        "tid": st.integers(0, 3) | st.sampled_from(["stream 7"]),
        "args": st.dictionaries(
            st.sampled_from(["stream", "device", "correlation", "External id", "name", "bytes"]),
            st.integers(-(1 << 40), 1 << 63) | st.sampled_from([7.0, 7.5, "7", None, [7]]),
            max_size=4,
        ),
    },
)


@settings(max_examples=120, deadline=None)
@given(events=st.lists(TIMED, max_size=12), with_python=st.booleans())
def test_the_two_ways_to_read_a_trace_agree(tmp_path_factory, events, with_python) -> None:
    path = tmp_path_factory.getbasetemp() / "both.json"
    read_both(path, json.dumps({"traceEvents": events}).encode(), with_python=with_python)


def test_events_are_in_order_of_begin_with_their_own_arguments(tmp_path) -> None:
    """Long enough that columns grow, ids outgrow four bytes, and begins go back again and again."""
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"k{number % 7}",
            "pid": number % 3,
            "tid": 7,
            "ts": (number * 7919) % 5_000 + 0.25,
            "dur": 1,
            "args": {"stream": 7, "correlation": number << 20, "bytes": number},
        }
        for number in range(5_000)
    ]
    found = read_both(tmp_path / "trace.json", json.dumps({"traceEvents": events}).encode())
    ordered = sorted(events, key=lambda event: event["ts"])
    assert found["begin_ns"] == [round(event["ts"] * 1000) for event in ordered]
    assert found["correlation"] == [event["args"]["correlation"] for event in ordered]
    assert found["names"] == [event["name"] for event in ordered]
    assert found["arguments"] == [
        (place, "bytes", ValueKind.INT, event["args"]["bytes"])
        for place, event in enumerate(ordered)
    ]
    assert [track.process for track in found["tracks"]] == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_changed_bytes_never_do_harm(data) -> None:
    text = bytearray(TRACE)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.integers(0, 255))
    for make in (make_native, PythonScanner):
        scanner = make()
        feed_all(scanner, bytes(text), data.draw(st.integers(1, 600)))
        assert scanner.state in ScanState
