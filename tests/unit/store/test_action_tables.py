"""Actions and faults as stored: SQL shows their texts, files and Parquet the same rows."""

from pathlib import Path

import pytest

from builders import table_path
from meshscope.core.schedule import ActionKind
from meshscope.store.read.compact import compact_run
from meshscope.store.read.query import connect
from meshscope.store.read.run import open_run
from meshscope.store.read.tail import read_last_records
from meshscope.store.schema import ACTION_KINDS, ACTIONS, FAULTS
from meshscope.store.write.writer import RankWriter

LARGE = (1 << 31) - 1


def action(code: int, stage: int, chunk: int = 0, flags: int = 0) -> int:
    """Word 1, as the page on columns says."""
    return code | flags << 8 | chunk << 16 | stage << 32


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for rank in range(2):
        writer = RankWriter(
            tmp_path, rank, header={"rank": rank, "world_size": 2, "start_unix_ns": 1}
        )
        table = writer.table("actions")
        table.put(action(0, 2, 1), 7, 0, 100, 10, 95, 5)
        table.put(action(1, LARGE, 0xFFFF, 1), 7, 3, 120, 11, -1, -1)
        table.put(action(2, 0), -1, 1, 140, 12, -1, -1)
        table.put(action(3, 0), 8, 1, 160, 13, 158, 0)
        faults = writer.table("faults")
        slow, detail = writer.name_id("slow rank"), writer.name_id("by 5 ms")
        faults.put(slow | detail << 16, 3, 50, -1, 0, 0, 0)
        faults.put(writer.name_id("crash"), -1, 70, -1, 0, 0, 0)
        faults.put(slow | detail << 16, 3, 50, 90, 0, 0, 0)
        writer.close(end_host_mono_ns=200)
    return tmp_path


def test_the_letters_are_those_of_the_schedules() -> None:
    assert tuple(kind.value for kind in ActionKind) == ACTION_KINDS


def test_sql_shows_letters_names_and_nothing_for_what_is_missing(run_dir: Path) -> None:
    with connect(open_run(run_dir)) as con:
        actions = con.execute(
            "select kind_name, stage, chunk, flags, step, microbatch, begin_host_mono_ns, "
            "duration_ns, wait_begin_host_mono_ns, wait_ns from actions where rank = 1 "
            "order by begin_host_mono_ns"
        ).fetchall()
        faults = con.execute(
            "select kind, detail, step, begin_host_mono_ns, end_host_mono_ns from faults "
            "where rank = 0 order by begin_host_mono_ns"
        ).fetchall()
    assert actions == [
        ("F", 2, 1, 0, 7, 0, 100, 10, 95, 5),
        ("B", LARGE, 0xFFFF, 1, 7, 3, 120, 11, None, None),
        ("I", 0, 0, 0, None, 1, 140, 12, None, None),
        ("W", 0, 0, 0, 8, 1, 160, 13, 158, 0),
    ]
    assert faults == [("slow rank", "by 5 ms", 3, 50, 90), ("crash", None, None, 70, None)]


def test_compacting_changes_nothing_that_is_read(run_dir: Path) -> None:
    def everything() -> list[dict[str, list[object]]]:
        return [
            {name: values.tolist() for name, values in rank.read(table).items()}
            for rank in open_run(run_dir).last_attempt
            for table in (ACTIONS.name, FAULTS.name)
        ]

    before = everything()
    compact_run(run_dir, remove_raw=True)
    assert not list(run_dir.glob("rank*/attempt*/*.pack"))
    assert everything() == before
    assert before[0]["kind"] == [0, 1, 2, 3]
    assert before[1]["end_host_mono_ns"] == [90, -1]


@pytest.mark.parametrize("mapped", [True, False])
def test_the_end_of_a_live_table_is_found(tmp_path: Path, mapped: bool) -> None:
    writer = RankWriter(tmp_path, 0, header={"rank": 0}, mapped=mapped)
    for microbatch in range(100):
        writer.table("actions").put(action(0, 1), 0, microbatch, 10, 1, -1, -1)
    writer.flush()
    place = ACTIONS.column("microbatch").word - 1
    last = read_last_records(table_path(writer.directory, "actions"), 3)
    assert [words[place] for words in last] == [97, 98, 99]
    live = open_run(tmp_path).last_attempt.ranks[0]
    assert live.read("actions")["microbatch"].tolist() == list(range(100))
    assert live.problems == []
