"""FLOPs and peaks out of journals, hostile ones included."""

from pathlib import Path

import pytest

from builders import make_writer, put_step
from meshscope.analyze.budget.model_flops import RankFlops, read_flops
from meshscope.core.config.given_flops import check_given
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

SAID = {"model_flops": 3e12, "hardware_flops": 4e12, "per": "step", "dtype": "bfloat16"}


def read(path: Path, *updates: dict[str, object], given=None, **header: object):
    writer = make_writer(path, **header)
    put_step(writer, 0, 10, 20)
    for fields in updates:
        writer.journal.write("update", **fields)
    writer.close()
    return read_flops(open_run(path).last_attempt, given)


def one(found) -> RankFlops:
    assert not isinstance(found, Unavailable), found
    return found[0]


def test_the_peak_is_looked_up_by_the_name_of_the_device(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "device": "NVIDIA H200", "source": "counted"}}))
    assert (found.model_flops, found.hardware_flops) == (3e12, 4e12)
    assert found.peak_flops_per_s == pytest.approx(989.4e12)
    assert found.peak_source == "table, NVIDIA H200, dense bfloat16"


def test_the_device_may_be_in_the_provenance(tmp_path):
    devices = [{"name": "NVIDIA L40S"}, {"name": "NVIDIA L40S"}]
    header = {"provenance": {"torch": {"devices": devices}}}
    found = one(read(tmp_path, {"flops": SAID}, **header))
    assert found.peak_flops_per_s == pytest.approx(362.05e12)


def test_a_declared_peak_of_the_same_dtype_comes_first(tmp_path):
    said = {"flops": {**SAID, "device": "NVIDIA H200"}}
    other = {"peak": {"flops_per_s": 5e12, "dtype": "float32"}}
    same = {"peak": {"flops_per_s": 9e14, "dtype": "bfloat16", "source": "measured"}}
    assert one(read(tmp_path / "a", said, other)).peak_source.startswith("table")
    found = one(read(tmp_path / "b", said, same))
    assert (found.peak_flops_per_s, found.peak_source) == (9e14, "measured")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_flops": "many"},
        {"model_flops": None},
        {"model_flops": -1},
        {"model_flops": True},
        {"model_flops": 10**400},
        {},
        None,
        [],
        "x",
    ],
)
def test_strange_numbers_are_no_flops(tmp_path, fields):
    assert isinstance(read(tmp_path, {"flops": fields}), Unavailable)


@pytest.mark.parametrize("dtype", [None, 7, "", "unknown"])
def test_a_strange_dtype_has_no_peak(tmp_path, dtype):
    found = one(read(tmp_path, {"flops": {**SAID, "dtype": dtype, "device": "NVIDIA H200"}}))
    assert found.peak_flops_per_s == Unavailable(
        "no peak: the dtype was not said; give the peak with --peak-tflops"
    )


def test_an_unknown_device_has_no_peak(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "device": "NVIDIA X1"}}))
    assert isinstance(found.peak_flops_per_s, Unavailable)
    assert "NVIDIA X1" in found.peak_flops_per_s.reason


def test_hardware_flops_are_never_less_than_the_models(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "hardware_flops": 1.0}}))
    assert found.hardware_flops == 3e12


LAUNCHED = {"given_flops": {"flops_per_step": 8e12, "peak_flops_per_s": 2e14}}


def test_what_was_given_stands_above_what_was_counted(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "device": "NVIDIA H200"}}, LAUNCHED))
    assert (found.model_flops, found.source) == (8e12, "given")
    assert (found.peak_flops_per_s, found.peak_source) == (2e14, "given")
    assert isinstance(found.hardware_flops, Unavailable)


def test_what_is_given_afterwards_stands_above_the_launch_and_is_of_all_ranks(tmp_path):
    given = check_given("4e12", None)
    found = one(read(tmp_path, LAUNCHED, given=given, world_size=4))
    assert (found.model_flops, found.peak_flops_per_s) == (1e12, 2e14)


@pytest.mark.parametrize("value", ["many", -1, 0, True, 10**400, [], None])
def test_strange_given_numbers_are_none(tmp_path, value):
    assert isinstance(read(tmp_path, {"given_flops": {"flops_per_step": value}}), Unavailable)
