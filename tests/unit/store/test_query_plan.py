"""A query reads only what it needs of a run, and says the same as if all had been read."""

import struct
from pathlib import Path

import pytest

from command_line import invoke
from meshscope.store.read.query import connect, open_planner
from meshscope.store.read.query_plan import plan_scans
from meshscope.store.read.recording import FolderRecording
from meshscope.store.read.run import open_run
from meshscope.store.write.writer import RankWriter

NUM_RANKS, NUM_STEPS = 6, 40

QUERIES = [
    "select count(*), max(step) from steps where rank = 3",
    "select * from steps where rank in (1, 4) and step between 5 and 9 order by rank, step",
    "select * from steps where rank = 2 order by step desc limit 3",
    "select rank, name, sum(duration_ns) from spans where rank < 3 group by all order by all",
    "select rank, name, avg(value) from scalars where value > 1.03 group by all order by all",
    "select a.step, b.rank from steps a join steps b on a.step = b.step "
    "where a.rank = 1 and b.rank = 5 and a.step % 7 = 0 order by all",
    "select rank, (select max(step) from steps u where u.rank = t.rank) m from steps t "
    "where step = 3 and rank >= 4 order by all",
    "with slow as (select rank, step from steps where rank = 4) "
    "select count(*) from slow x, slow y where x.step = y.step",
    "select count(*) from steps where rank = 1 and rank = 2",
    "select count(*) from steps where rank = (select max(rank) from ranks)",
    "select rank, count(*) from steps where rank = 2 or step > 37 group by all order by all",
    "select name from spans where name = 'forward' and rank = 1 limit 1",
    "select count(*) from names where rank = 0",
    "select step, row_number() over (order by step) from steps where rank = 2 qualify "
    "row_number() over (order by step) < 4",
    "select count(recorder_ns), count(*) from steps where recorder_ns is null and rank != 0",
    "select count(*) from scalars where step is null",
    "select count(*) from steps where step > 1e1 and rank = 0",
    "select count(*) from steps union all select count(*) from spans where rank = 0",
    "select sum(size) from groups",
    "select * from steps limit 5",
    "select rank, name, duration_ns from spans where rank >= 1 limit 10 offset 2",
    "select rank, step from steps where step > 35 limit 8",
    "(select rank, step from steps limit 3) union all (select rank, step from steps limit 50)",
    "select distinct rank from steps limit 5",
    "select rank, step from steps order by step desc, rank limit 5",
    "select rank, unnest([1, 2]) from steps limit 90",
    "select count(*) from (select * from steps limit 100)",
    "select rank, name from scalars where value > 1.03 limit 4",
    "select a.rank, b.rank from steps a left join spans b on a.step = b.duration_ns limit 99",
    "select rank, count(*) from steps where (rank + step) % 5 = 2 group by all order by all",
    "select count(*) > 0 from steps where random() >= 0 and rank = 1",
    "select count(*) from steps where rank in (select rank from ranks where rank > 3)",
    "select count(*) from STEPS where RANK = 5",
    "select 1; select count(*) from steps where rank = 1",
    "from steps where attempt = 0 and rank = 3 and step < 2",
    "summarize select step from steps where rank = 1",
    "select rank, sum(n) from (select rank, step, 1 as n from steps union all by name "
    "select rank, 2 as n from spans) where rank = 2 group by rank",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan") / "run"
    for rank in range(NUM_RANKS):
        writer = RankWriter(directory, rank, header={"rank": rank, "world_size": NUM_RANKS})
        loss = writer.name_id("loss")
        for step in range(NUM_STEPS):
            writer.table("steps").put(step, 10 * step, 10 * step + 7, 1, -1 + step % 2, -1, 0)
            writer.table("spans").put(2, 10 * step, 5 + rank, 5, 0, 0, 0)
            value = int(struct.unpack("<q", struct.pack("<d", 1 + step / 1000))[0])
            writer.table("scalars").put(loss, step - 1, 5, value, -1, 0, 0)
        writer.close()
    return directory


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_says_the_same_of_what_it_reads_as_of_everything(run_dir: Path, query: str) -> None:
    run = open_run(run_dir)
    with connect(run) as con:
        expected = con.execute(query).fetchall()
    with open_planner() as planner:
        scans = plan_scans(planner, query)
    with connect(run, scans=scans) as con:
        assert con.execute(query).fetchall() == expected


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    seen: list[tuple[int, str]] = []
    whole, part = FolderRecording.read, FolderRecording.read_steps

    def read(self: FolderRecording, name: str) -> object:
        seen.append((self.rank, name))
        return whole(self, name)

    def read_steps(self: FolderRecording, numbers: list[tuple[int, int]]) -> object:
        seen.append((self.rank, f"steps {numbers[0][0]} to {numbers[0][1]}"))
        return part(self, numbers)

    monkeypatch.setattr(FolderRecording, "read", read)
    monkeypatch.setattr(FolderRecording, "read_steps", read_steps)
    return seen


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select max(step) from steps where rank = 3", [(3, "steps")]),
        ("select * from spans where rank in (0, 5)", [(0, "spans"), (5, "spans")]),
        ("select 1 from steps where step between 5 and 9 and rank = 1", [(1, "steps 5 to 9")]),
        ("select 1 from steps where step > 37 and rank < 1", [(0, "steps 38 to 39")]),
        ("select 1 from steps where rank = 1 and rank = 2", []),
        ("select * from ranks", []),
        ("select 1 from spans where rank = 2 order by duration_ns limit 1", [(2, "spans")]),
        ("select * from steps limit 30", [(0, "steps")]),
        ("select * from spans where rank > 2 limit 30 offset 20", [(3, "spans"), (4, "spans")]),
        ("select rank from steps where step > 38 limit 1", [(0, "steps 39 to 39")]),
        ("select 1 from steps where rank % 4 = 1", [(1, "steps"), (5, "steps")]),
    ],
)
def test_only_ranks_and_steps_that_are_asked_for_are_read(
    run_dir: Path,
    reads: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    expected: list[tuple[int, str]],
) -> None:
    monkeypatch.setattr("meshscope.store.read.query._BATCH_ROWS", 1)
    run = open_run(run_dir)
    with open_planner() as planner:
        scans = plan_scans(planner, query)
    reads.clear()
    connect(run, scans=scans).close()
    assert reads == expected


def test_columns_that_nobody_asks_for_are_not_kept(run_dir: Path) -> None:
    with open_planner() as planner:
        scans = plan_scans(planner, "select sum(duration_ns) from spans where rank = 1")
    with connect(open_run(run_dir), tables=["spans"], scans=scans) as con:
        columns = [name for name, *_ in con.execute("describe _spans").fetchall()]
        names = con.execute("select distinct rank from names").fetchall()
    assert set(columns) <= {"attempt", "rank", "duration_ns", "name_id", "phase_id"}
    assert names == [(1,)]


@pytest.mark.parametrize("query", ["select nothing from steps", "select", "drop table steps"])
def test_a_wrong_query_is_refused_before_anything_is_read(
    run_dir: Path, reads: list[tuple[int, str]], query: str
) -> None:
    done = invoke("sql", run_dir, query)
    assert done.exit_code == 2, done.output
    assert reads == []
