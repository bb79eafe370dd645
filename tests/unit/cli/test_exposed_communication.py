"""Exposed communication is one number: in `trace`, in `report`, and in the table of the traces."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshscope.cli import main
from trace_builders import MS, write_traces

NCCL = Path(__file__).parents[4] / "shared" / "data" / "nccl"
EXPOSED_MS = {
    "ddp": {0: 76.1, 1: 75.4, 2: 76.5, 3: 79.1},
    "fsdp2": {0: 104.0, 3: 101.8},
    "tp2dp2": {0: 269.3, 3: 261.8},
    "pp4": {0: 23.4, 1: 28.1, 2: 41.8, 3: 23.7},
}
"""By rank, per step: the union of communication kernels less that of all other work, measured by
another program. Copies count as other work there; here they hide nothing."""
NUM_STEPS = 3


def call(*arguments) -> dict:
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == 0
    return json.loads(done.stdout)


def traced_ns(folder) -> dict[int, int]:
    """By rank, as `trace` says of the device."""
    traces = call("trace", folder, "--no-cache")["traces"]
    return {one["rank"]: one["devices"][0]["breakdown"]["time"]["exposed_ns"] for one in traces}


def beside_copies_ns(folder) -> dict[int, int]:
    """By rank, the part of it in which a copy ran."""
    traces = call("trace", folder, "--no-cache")["traces"]
    return {
        one["rank"]: one["devices"][0]["breakdown"]["time"]["exposed_beside_copy_ns"]
        for one in traces
    }


def outside_ns(folder) -> dict[int, int]:
    """By rank, of collectives that belong to no step: the step before the window launched them."""
    return {
        one["rank"]: sum(
            found["exposed_ns"]
            for found in one["devices"][0]["collectives"]
            if found["step"] is None
        )
        for one in call("trace", folder, "--no-cache")["traces"]
    }


def reported_ns(folder) -> dict[int, int]:
    """By rank, as `report` says in its table of communication."""
    ranks = call("report", folder)["communication"]["ranks"]
    return {one["rank"]: one["total"]["exposed_ns"] for one in ranks}


def budgeted_ns(folder) -> float:
    """Mean of a rank and step, summed over the budget's lines."""
    lines = call("report", folder)["budget"]["lines"]
    shares = ("exposed transfer", "exposed wait", "exposed communication", "exposed, not waited")
    return sum(line["mean_ns"] for line in lines if line["name"].startswith(shares))


@pytest.mark.parametrize("name", EXPOSED_MS)
def test_trace_and_report_say_what_the_kernels_say(name) -> None:
    folder = NCCL / name
    if not folder.exists():
        pytest.skip("the shared traces are not on this machine")
    traced, outside = traced_ns(folder), outside_ns(folder)
    reported, beside_copies = reported_ns(folder), beside_copies_ns(folder)
    for rank, expected_ms in EXPOSED_MS[name].items():
        alone_ns = traced[rank] - beside_copies[rank]
        assert alone_ns / NUM_STEPS / MS == pytest.approx(expected_ms, abs=0.06)
    for rank, exposed_ns in reported.items():
        assert exposed_ns + outside[rank] == pytest.approx(traced[rank], abs=0.02 * MS)
    mean_ns = sum(reported.values()) / len(reported) / NUM_STEPS
    assert budgeted_ns(folder) == pytest.approx(mean_ns, abs=0.2 * MS)


def test_exposed_communication_is_the_same_in_both_commands(tmp_path) -> None:
    write_traces(tmp_path, num_ranks=4, num_steps=12, extra_ns={2: 5 * MS})
    reported = reported_ns(tmp_path)
    assert reported == pytest.approx(traced_ns(tmp_path), abs=100)
