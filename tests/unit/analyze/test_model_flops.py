"""FLOPs and peaks out of journals, hostile ones included."""

from pathlib import Path

import pytest

from builders import make_writer, put_step
from meshscope.analyze.budget.model_flops import RankFlops, read_flops
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

SAID = {"model_flops": 3e12, "hardware_flops": 4e12, "per": "step", "dtype": "bfloat16"}


def read(path: Path, *updates: dict[str, object], **header: object):
    writer = make_writer(path, **header)
    put_step(writer, 0, 10, 20)
    for fields in updates:
        writer.journal.write("update", **fields)
    writer.close()
    return read_flops(open_run(path).last_attempt)


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
    assert found.peak_flops_per_s == Unavailable("the dtype was not said")


def test_an_unknown_device_has_no_peak(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "device": "NVIDIA X1"}}))
    assert isinstance(found.peak_flops_per_s, Unavailable)
    assert "NVIDIA X1" in found.peak_flops_per_s.reason


def test_hardware_flops_are_never_less_than_the_models(tmp_path):
    found = one(read(tmp_path, {"flops": {**SAID, "hardware_flops": 1.0}}))
    assert found.hardware_flops == 3e12
