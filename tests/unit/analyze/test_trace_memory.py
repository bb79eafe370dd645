"""Memory of a trace: what its allocators said, by hand and from a real profiler."""

import json

import pytest

from meshscope.analyze.device.trace_memory import MAX_POINTS
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_cache import load_trace, read_stamp, store_trace
from meshscope.ingest.native import load_library
from meshscope.report.trace_tables import build_trace_table

MIB = 1 << 20


def event(ts, allocated, changed, *, kind=1, device=0, **more):
    said = {
        "Total Allocated": allocated,
        "Bytes": changed,
        "Device Type": kind,
        "Device Id": device,
        "Addr": 1,
        **more,
    }
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1,
            "tid": 1, "ts": ts, "args": said}  # fmt: skip


def write(tmp_path, events):
    path = tmp_path / "t.json"
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1,
         "ts": 100 * step, "dur": 100} for step in (3, 4)
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": [*steps, *events]}), encoding="utf-8")
    return path


@pytest.mark.parametrize("use_native", [True, False])
def test_what_allocators_said_is_a_timeline_of_each(tmp_path, use_native):
    if use_native and load_library() is None:
        pytest.skip("meshscope was installed without a C compiler")
    events = [
        event(310, 8 * MIB, 8 * MIB, **{"Total Reserved": 20 * MIB}),
        event(410, 12 * MIB, 4 * MIB, **{"Total Reserved": 22 * MIB}),
        event(405, 9 * MIB, 1 * MIB, **{"Total Reserved": 22 * MIB}),
        event(420, 2 * MIB, -10 * MIB, **{"Total Reserved": 22 * MIB}),
        event(330, 5, 5, kind=0, device=-1),
        {"ph": "i", "name": "something else", "pid": 1, "tid": 1, "ts": 300, "s": "g"},
    ]
    trace = read_trace(write(tmp_path, events), use_native=use_native)
    assert trace.counts.num_skipped == 1
    host, device = summarize_trace(trace).memory
    assert (host.device_type, host.peak_bytes, host.peak_step) == ("cpu", 5, 3)
    assert isinstance(host.peak_reserved_bytes, Unavailable)
    assert (device.device_type, device.device, device.num_events) == ("cuda", 0, 4)
    assert (device.first_bytes, device.peak_bytes, device.last_bytes) == (
        8 * MIB,
        12 * MIB,
        2 * MIB,
    )
    assert (device.peak_time_ns, device.peak_step) == (410_000, 4)
    assert (device.peak_reserved_bytes, device.requested_bytes) == (22 * MIB, 13 * MIB)
    points = [(one.time_ns, one.allocated_bytes) for one in device.timeline]
    assert points == [
        (310_000, 8 * MIB),
        (405_000, 9 * MIB),
        (410_000, 12 * MIB),
        (420_000, 2 * MIB),
    ]


def test_a_long_timeline_keeps_its_peak_and_its_ends(tmp_path):
    events = [event(300 + place / 100, place % 977, 1) for place in range(5_000)]
    (use,) = summarize_trace(read_trace(write(tmp_path, events))).memory
    assert len(use.timeline) <= MAX_POINTS + 3
    sizes = [one.allocated_bytes for one in use.timeline]
    assert (max(sizes), sizes[0], sizes[-1]) == (976, 0, 4_999 % 977)


def test_memory_is_kept_with_a_trace_and_is_a_table(tmp_path):
    path = write(tmp_path, [event(310, 7, 7), event(311, 0, -7)])
    trace, stamp = read_trace(path), read_stamp(path)
    assert store_trace(path, trace, stamp)
    kept = load_trace(path, stamp)
    assert kept is not None
    table = build_trace_table("trace_memory", [summarize_trace(kept)])
    assert not isinstance(table, Unavailable)
    assert table["allocated_bytes"].tolist() == [7, 0]
    assert table["device"].tolist() == [0, 0]


def test_a_real_profilers_peak_is_the_programs(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = torch.empty(3 * MIB, dtype=torch.uint8)
        more = torch.empty(5 * MIB, dtype=torch.uint8)
        del more
        last = torch.empty(MIB, dtype=torch.uint8)
    profiler.export_chrome_trace(str(tmp_path / "real.json"))
    (use,) = summarize_trace(read_trace(tmp_path / "real.json")).memory
    assert kept.numel() + last.numel() == 4 * MIB
    assert use.device_type == "cpu"
    assert use.peak_bytes - (use.first_bytes - 3 * MIB) == pytest.approx(8 * MIB, rel=0.01)
    assert use.last_bytes - (use.first_bytes - 3 * MIB) == pytest.approx(4 * MIB, rel=0.01)
