"""Compaction: the same columns and the same problems afterwards, and no way to lose a record."""

import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import flip_byte
from command_line import invoke
from meshscope.errors import UsageError
from meshscope.store.read import compact
from meshscope.store.read.columns import Columns, Problem, ProblemKind
from meshscope.store.read.compact import compact_run
from meshscope.store.read.query import connect
from meshscope.store.read.run import open_run
from meshscope.store.schema import SCHEMA_VERSION, TABLES
from meshscope.store.write.pack import PACK_NAME
from meshscope.store.write.writer import RankWriter

INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
RECORDS = st.lists(st.tuples(*[INT64] * 7), max_size=12)
NAN_PATTERNS = (0x7FF8000000000001, 0x7FF0000000000001, -1, 0x7FF8000000000000)


def write(
    run_dir: Path, rank: int, tables: dict[str, list[tuple[int, ...]]], *, is_closed: bool = True
) -> Path:
    header = {"rank": rank, "world_size": 3, "start_unix_ns": 1, "start_host_mono_ns": 1}
    writer = RankWriter(run_dir, rank, header=header)
    for name, records in tables.items():
        for words in records:
            writer.table(name).put(*words)
    if is_closed:
        writer.close(end_host_mono_ns=1)
    return writer.directory


def read_everything(run_dir: Path) -> tuple[dict[tuple[int, int, str], Columns], list[Problem]]:
    columns, problems = {}, []
    for attempt in open_run(run_dir).attempts:
        for recording in attempt:
            for name in TABLES:
                columns[recording.rank, recording.attempt, name] = recording.read(name)
            problems += recording.problems
    return columns, problems


def assert_same(left: dict[tuple[int, int, str], Columns], right: object) -> None:
    assert isinstance(right, dict)
    assert left.keys() == right.keys()
    for key, columns in left.items():
        assert columns.keys() == right[key].keys()
        for name, array in columns.items():
            assert array.dtype == right[key][name].dtype, (key, name)
            assert array.tobytes() == right[key][name].tobytes(), (key, name)


@settings(max_examples=12, deadline=None)
@given(
    attempts=st.lists(
        st.tuples(
            st.integers(0, 2), st.dictionaries(st.sampled_from(sorted(TABLES)), RECORDS, max_size=3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_compacted_run_reads_the_same(
    attempts: list[tuple[int, dict[str, list[tuple[int, ...]]]]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "it's a run"
        for rank, tables in attempts:
            write(run_dir, rank, tables)
        before, problems = read_everything(run_dir)
        compact_run(run_dir, remove_raw=True)
        assert list(run_dir.rglob("*.pack")) == []
        after, problems_after = read_everything(run_dir)
        assert_same(before, after)
        assert problems_after == problems


def test_every_nan_keeps_its_bits(tmp_path: Path) -> None:
    records = [
        (64, 1, 1, pattern - (1 << 64) if pattern >> 63 == 1 else pattern, -1, 0, 0)
        for pattern in NAN_PATTERNS
    ]
    records.append((64, 1, 1, struct.unpack("<q", struct.pack("<d", -0.0))[0], -1, 0, 0))
    write(tmp_path, 0, {"scalars": records})
    before, _ = read_everything(tmp_path)
    compact_run(tmp_path, remove_raw=True)
    after, _ = read_everything(tmp_path)
    assert_same(before, after)
    con = connect(open_run(tmp_path))
    assert con.execute("select count(*) filter (isnan(value)) from scalars").fetchall() == [(4,)]


def steps(count: int) -> list[tuple[int, ...]]:
    return [(number, number, number + 1, 1, -1, -1, 0) for number in range(count)]


def test_compacting_again_after_a_new_attempt_keeps_both(tmp_path: Path) -> None:
    write(tmp_path, 0, {"steps": steps(5)})
    compact_run(tmp_path, remove_raw=True)
    write(tmp_path, 0, {"steps": steps(7)})
    before, _ = read_everything(tmp_path)
    compact_run(tmp_path, remove_raw=True)
    after, _ = read_everything(tmp_path)
    assert_same(before, after)
    assert len(list((tmp_path / "compact").glob("steps*.parquet"))) == 1


def test_an_interrupted_second_compaction_leaves_the_first_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, {"steps": steps(5)})
    compact_run(tmp_path, remove_raw=True)
    before, _ = read_everything(tmp_path)

    def stop(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compact, "replace_whole", stop)
    with pytest.raises(KeyboardInterrupt):
        compact_run(tmp_path, remove_raw=True)
    after, problems = read_everything(tmp_path)
    assert_same(before, after)
    assert problems == []


def test_problems_are_still_told_and_damaged_files_are_kept(tmp_path: Path) -> None:
    damaged = write(tmp_path, 0, {"steps": steps(50), "scalars": steps(5)}) / PACK_NAME
    flip_byte(damaged / "steps.tbl", 4096 + 64 * 10 + 9)
    before, problems = read_everything(tmp_path)
    done = compact_run(tmp_path, remove_raw=True)
    assert done.kept_raw == [damaged]
    assert [path.name for path in tmp_path.rglob("*.pack")] == [PACK_NAME]
    after, problems_after = read_everything(tmp_path)
    assert_same(before, after)
    assert problems_after == problems
    damaged.unlink()
    after, problems_after = read_everything(tmp_path)
    assert_same(before, after)
    assert problems_after == problems


def test_a_changed_parquet_file_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, 0, {"steps": steps(50)})
    compact_run(tmp_path, remove_raw=True)
    path = tmp_path / "compact" / "steps.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert len(recording.read("steps")["step"]) == 0
    assert [(p.kind, p.path) for p in recording.problems] == [(ProblemKind.DAMAGED, path)]


def test_a_changed_manifest_is_told(tmp_path: Path) -> None:
    write(tmp_path, 0, {"steps": steps(5)})
    compact_run(tmp_path)
    path = tmp_path / "compact" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"num_rows": 5', b'"num_rows": 6'))
    run = open_run(tmp_path)
    assert [(p.kind, p.path) for p in run.problems] == [(ProblemKind.DAMAGED, path)]
    assert len(run.last_attempt.ranks[0].read("steps")["step"]) == 5  # from the raw file


def test_what_may_still_be_written_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 0, {"steps": steps(5)}, is_closed=False)
    with pytest.raises(UsageError, match="--include-unfinished"):
        compact_run(tmp_path)
    write(tmp_path, 1, {"steps": steps(5)})
    done = compact_run(tmp_path, remove_raw=True)
    assert done.skipped == [(0, 0)]
    assert (tmp_path / "rank00000" / "attempt000" / PACK_NAME).exists()
    assert compact_run(tmp_path, include_unfinished=True).skipped == []


def test_a_killed_recording_counts_as_finished_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, {"steps": steps(5)}, is_closed=False)
    monkeypatch.setattr(compact, "QUIET_SECONDS", 0.01)
    time.sleep(0.03)
    assert compact_run(tmp_path).skipped == []


def test_the_file_says_its_version_and_units(tmp_path: Path) -> None:
    import duckdb

    write(tmp_path, 0, {"steps": steps(5)})
    compact_run(tmp_path)
    path = str(tmp_path / "compact" / "steps.parquet")
    rows = (
        duckdb.connect()
        .execute("select key::varchar, value::varchar from parquet_kv_metadata(?)", [path])
        .fetchall()
    )
    metadata = dict(rows)
    assert metadata["meshscope_schema_version"] == str(SCHEMA_VERSION)
    assert metadata["recorder_ns"].endswith("[ns]; -1 is missing")
    codecs = (
        duckdb.connect()
        .execute("select distinct compression from parquet_metadata(?)", [path])
        .fetchall()
    )
    assert codecs == [("ZSTD",)]


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    write(tmp_path, 0, {"steps": steps(5)})
    result = invoke("compact", tmp_path, "--remove-raw")
    assert result.exit_code == 0, result.output
    assert "1 recordings, 5 rows" in result.output
    np.testing.assert_array_equal(
        open_run(tmp_path).last_attempt.ranks[0].read("steps")["step"], np.arange(5)
    )
