"""Where a device's time went is one set of numbers: in `trace`, in `report`, in the table of the
traces that another program made."""

import json
from pathlib import Path

import pytest

from command_line import invoke
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.ingest.kineto.kineto import read_trace
from trace_builders import MS, write_traces

NCCL = Path(__file__).parents[4] / "shared" / "data" / "nccl"
TABLE = {
    ("ddp", 0): (32.0, 95.3, 76.1, 19.2, 18.6, 126.7),
    ("ddp", 1): (32.8, 94.6, 75.4, 19.2, 20.6, 128.8),
    ("ddp", 2): (32.7, 95.9, 76.5, 19.5, 19.0, 128.1),
    ("ddp", 3): (32.8, 100.8, 79.1, 21.7, 17.2, 129.1),
    ("fsdp2", 0): (34.2, 122.8, 104.0, 18.8, 16.0, 154.2),
    ("fsdp2", 3): (33.9, 121.9, 101.8, 20.2, 17.2, 152.8),
    ("tp2dp2", 0): (32.7, 277.9, 269.3, 8.6, 28.0, 329.9),
    ("tp2dp2", 3): (32.5, 270.3, 261.8, 8.5, 30.0, 324.3),
    ("pp4", 0): (8.6, 23.4, 23.4, 0.0, 20.7, 52.6),
    ("pp4", 1): (7.7, 28.1, 28.1, 0.0, 18.2, 53.9),
    ("pp4", 2): (8.1, 41.8, 41.8, 0.0, 4.4, 54.4),
    ("pp4", 3): (11.1, 23.7, 23.7, 0.0, 18.9, 53.7),
}
"""By set and rank, ms a step: compute with copies and fills, communication, exposed with neither
beside it, overlapped, idle, and from the first work to the last; unions of kernels by another
program."""
NUM_STEPS = 3
AXES = {"ddp": {"world"}, "fsdp2": {"world"}, "tp2dp2": {"dp", "tp"}, "pp4": {"pp"}}
needs_traces = pytest.mark.skipif(
    not NCCL.exists(), reason="the shared traces are not on this machine"
)


@needs_traces
@pytest.mark.parametrize(("name", "rank"), TABLE)
def test_a_devices_time_is_that_of_the_table(name, rank) -> None:
    trace = read_trace(NCCL / name / f"rank{rank}.json.gz")
    time = summarize_trace(trace).devices[0].breakdown.time
    parts = (
        time.work_ns,
        time.communication_ns,
        time.exposed_alone_ns,
        time.communication_ns - time.exposed_alone_ns,
        time.idle_ns,
        time.total_ns,
    )
    expected = TABLE[name, rank]
    assert [part / NUM_STEPS / MS for part in parts] == pytest.approx(expected, abs=0.06)


def call(*arguments) -> dict:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0
    return json.loads(done.stdout)


def traced_ns(folder) -> dict[int, dict[str, int]]:
    """Exposed communication by rank and axis, as `trace` says of the device."""
    found: dict[int, dict[str, int]] = {}
    for one in call("trace", folder, "--no-cache")["traces"]:
        own = found.setdefault(one["rank"], {})
        for row in one["devices"][0]["communication"]:
            own[row["axis"]] = own.get(row["axis"], 0) + row["exposed_ns"]
    return found


EXPOSED = ("exposed transfer", "exposed wait", "exposed communication", "exposed, not waited for")


@needs_traces
@pytest.mark.parametrize("name", AXES)
def test_trace_and_report_say_the_same_of_real_traces(name) -> None:
    traced, report = traced_ns(NCCL / name), call("report", NCCL / name)
    communication, lines = report["communication"], report["budget"]["lines"]
    ranks = {one["rank"]: one["total"]["exposed_ns"] for one in communication["ranks"]}
    assert ranks == pytest.approx(
        {rank: sum(own.values()) for rank, own in traced.items()}, abs=0.03 * MS
    )
    axes = {one["axis"]: one["total"]["exposed_ns"] for one in communication["axes"]}
    assert set(axes) == AXES[name]
    for axis, exposed_ns in axes.items():
        by_trace = sum(own[axis] for own in traced.values())
        # What a stage waits for its neighbours is the pipeline's bubble, not the link's.
        shares = {"pipeline bubble"} if axis == "pp" else set()
        mean_ns = sum(
            one["mean_ns"] for one in lines if one["axis"] == axis or one["share"] in shares
        )
        assert exposed_ns == pytest.approx(by_trace, abs=0.03 * MS)
        assert mean_ns == pytest.approx(by_trace / len(traced) / NUM_STEPS, abs=0.03 * MS)
    assert {one["share"] for one in lines if one["axis"]} <= set(EXPOSED)
    # All ranks were on one machine: their clocks are not apart.
    for clock in communication["clocks"]:
        limit_ns = (2 if name == "pp4" else 1) * MS
        assert abs(clock["offset_ns"]) <= clock["uncertainty_ns"] < limit_ns


def test_exposed_communication_is_the_same_in_both_commands(tmp_path) -> None:
    write_traces(tmp_path, num_ranks=4, num_steps=12, extra_ns={2: 5 * MS})
    ranks = call("report", tmp_path)["communication"]["ranks"]
    reported = {one["rank"]: {"world": one["total"]["exposed_ns"]} for one in ranks}
    assert reported == traced_ns(tmp_path)
