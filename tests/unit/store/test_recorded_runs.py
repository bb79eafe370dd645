"""Runs that were recorded under each schema version, and what is read of them ever after."""

import json
import tarfile
import zlib
from pathlib import Path

import pytest

from command_line import invoke
from meshscope.store.read.run import open_run
from meshscope.store.schema import SCHEMA_VERSION, TABLES

RUNS = Path(__file__).parents[2] / "golden" / "runs"
EXPECTED = json.loads((RUNS / "expected.json").read_text(encoding="utf-8"))
"""Written once, with the runs. What is read of these runs must not change: never made anew."""


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(RUNS / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def read_tables(run_dir: Path) -> dict[str, dict[str, list[int]]]:
    """Per rank and table, of each column with a number of rows: that and a checksum of values."""
    return {
        str(recording.rank): {
            f"{name}.{column}": [len(values), zlib.crc32(json.dumps(values.tolist()).encode())]
            for name in TABLES
            for column, values in recording.read(name).items()
            if len(values)
        }
        for recording in open_run(run_dir).last_attempt
    }


def read_report(run_dir: Path) -> dict[str, object]:
    """The numbers of a report that rest on nothing but the recording."""
    done = invoke("report", run_dir, "--json", "--warmup", "1")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    communication = report["communication"]
    return {
        "ranks": report["run"]["num_ranks"],
        "layout": report["layout"]["degrees"],
        "problems": [problem["text"] for problem in report["health"]["problems"]],
        "steps": report["steps"]["num_steps"],
        "lines": {line["name"]: line["mean_ns"] for line in report["budget"]["lines"]},
        "wall_ns": report["budget"]["mean_wall_ns"],
        "communication": (communication or {}).get("total"),
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_any_version_is_read_as_ever(name: str, tmp_path: Path) -> None:
    run_dir = unpack(name, tmp_path)
    found = read_tables(run_dir)
    for rank, tables in EXPECTED[name]["tables"].items():
        # Columns may be added; none that was there may read otherwise.
        assert {key: found[rank].get(key) for key in tables} == tables
    assert read_report(run_dir) == EXPECTED[name]["report"]


def test_compacting_changed_nothing(tmp_path: Path) -> None:
    raw, compacted = unpack("phases", tmp_path), unpack("compacted", tmp_path)
    assert not list(compacted.rglob("*.tbl"))
    assert read_tables(raw) == read_tables(compacted)


def test_the_version_is_frozen() -> None:
    """A later version reads this one: keep these runs, add runs of the new version beside them."""
    assert SCHEMA_VERSION == 2


@pytest.mark.parametrize("name", EXPECTED)
def test_runs_are_of_the_version_that_they_are_kept_for(name: str, tmp_path: Path) -> None:
    found = {
        recording.header["schema_version"]
        for recording in open_run(unpack(name, tmp_path)).last_attempt
    }
    assert found == {2 if name.endswith("_2") else 1}
