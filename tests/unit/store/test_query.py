"""SQL over a run: what the tables say, and that they cannot change it."""

import json
import math
import struct
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshscope.cli import main
from meshscope.errors import UsageError
from meshscope.store.read.query import connect
from meshscope.store.read.run import open_run
from meshscope.store.schema import TABLES
from meshscope.store.write.writer import RankWriter


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for rank in range(2):
        header = {"rank": rank, "world_size": 2, "host": "a\ud800b", "pid": 10**30}
        writer = RankWriter(directory, rank, header={**header, "start_unix_ns": 1})
        loss = writer.name_id("loss\x1b[31m")
        for step in range(3):
            writer.table("steps").put(step, 10 * step, 10 * step + 7, 1, -1, -1, 0)
            writer.table("spans").put(2, 10 * step, 5 + rank, 5, 0, 0, 0)
        for value in (1.5, math.nan, math.inf):
            writer.table("scalars").put(loss, -1, 5, bits(value), -1, 0, 0)
        writer.table("scalars").put(999, 1, 5, bits(2.0), -1, 0, 0)
        writer.close()
    return directory


def test_rows_carry_rank_attempt_and_names_and_missing_is_null(run_dir: Path) -> None:
    con = connect(open_run(run_dir))
    rows = con.execute(
        "select rank, attempt, name, sum(duration_ns) from spans group by all order by rank"
    ).fetchall()
    assert rows == [(0, 0, "forward", 15), (1, 0, "forward", 18)]
    assert con.execute("select count(*), count(recorder_ns) from steps").fetchall() == [(6, 0)]
    assert con.execute(
        "select distinct step, microbatch from scalars where value = 1.5"
    ).fetchall() == [(None, None)]


def test_nan_is_not_missing(run_dir: Path) -> None:
    con = connect(open_run(run_dir), tables=["scalars"])
    rows = con.execute(
        "select count(*), count(value), count(*) filter (isnan(value)), "
        "count(*) filter (isinf(value)) from scalars"
    ).fetchall()
    assert rows == [(8, 8, 2, 2)]
    names = con.execute("select distinct name from scalars order by name").fetchall()
    assert names == [("(unnamed 999)",), ("loss\x1b[31m",)]


def test_what_a_header_lies_about_is_null_or_escaped(run_dir: Path) -> None:
    con = connect(open_run(run_dir))
    rows = con.execute("select rank, host, pid, world_size, is_closed from ranks").fetchall()
    assert rows == [(0, "a\\ud800b", None, 2, True), (1, "a\\ud800b", None, 2, True)]


def test_every_table_can_be_asked_even_when_it_is_empty(run_dir: Path) -> None:
    con = connect(open_run(run_dir))
    for name in TABLES:
        if name != "phases":
            con.execute(f"select * from {name}").fetchnumpy()


def test_an_attempt_that_is_not_there_is_a_usage_error(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="no attempt 7; it has 0 to 0"):
        connect(open_run(run_dir), 7)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_prints_a_table_csv_and_json(run_dir: Path) -> None:
    query = "select rank, max(value) as v from scalars where name_id = 999 group by 1 order by 1"
    assert invoke("sql", run_dir, query).output == "rank    v\n   0  2.0\n   1  2.0\n"
    assert invoke("sql", run_dir, query, "--csv").output == "rank,v\n0,2.0\n1,2.0\n"
    assert json.loads(invoke("sql", run_dir, query, "--json").stdout)["rows"] == [
        {"rank": 0, "v": 2.0},
        {"rank": 1, "v": 2.0},
    ]


def test_json_has_no_bare_nan(run_dir: Path) -> None:
    output = invoke("sql", run_dir, "select value from scalars where rank = 0", "--json").output
    values = [row["value"] for row in json.loads(output, parse_constant=pytest.fail)["rows"]]
    assert sorted(map(str, values)) == ["1.5", "2.0", "inf", "nan"]


def test_a_name_cannot_reach_the_terminal_as_an_escape(run_dir: Path) -> None:
    assert "\x1b" not in invoke("sql", run_dir, "select distinct name from scalars").output


def test_without_a_query_the_tables_are_described(run_dir: Path) -> None:
    output = invoke("sql", run_dir).output
    for table in TABLES.values():
        if table.name != "phases":
            assert f"{table.name}: {table.meaning}" in output
    assert "ranks:" in output


@pytest.mark.parametrize(
    "query",
    [
        "copy steps to '{run}/rank00000/attempt000/tables.pack'",
        "explain analyze copy steps to '{run}/rank00000/attempt000/tables.pack'",
        "export database '{run}'",
        "select 1; copy steps to '{run}/run.json'",
        "attach '{run}/x.db' as x",
        "insert into _steps select * from _steps",
        "select wrong from steps",
        "selec 1",
        "",
    ],
)
def test_what_is_no_query_is_one_line_and_exit_2_and_the_run_is_unchanged(
    run_dir: Path, query: str
) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    result = invoke("sql", run_dir, query.format(run=run_dir))
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_operations_have_the_texts_of_their_codes_beside_them(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, header={"rank": 0, "world_size": 2})
    writer.journal.write(
        "group", id=3, name="1", description="mesh_tp", backend="gloo", ranks=[0, 1]
    )
    all_reduce, ok, by_wait, backward = 1, 1, 1, 3
    word = all_reduce | ok << 8 | by_wait << 16 | 3 << 32 | backward << 48
    writer.table("collectives").put(word, 7 | 2 << 32, 10, 10, 30, 4096, 5 | 1 << 48)
    writer.close()
    query = (
        "select kind_name, outcome_name, end_source_name, group_description, phase, sequence, peer,"
        " step, microbatch, dtype_name, g.ranks from collectives c join groups g"
        " on (c.rank = g.rank and c.group_id = g.group_id)"
    )
    con = connect(open_run(tmp_path / "run"))
    expected = (
        "all_reduce", "ok", "wait", "mesh_tp", "backward", 7, 1, 4, None, "float32", "0,1",
    )  # fmt: skip
    assert con.execute(query).fetchall() == [expected]


@pytest.mark.parametrize(
    "source",
    [
        "read_csv('{file}')",
        "'{file}'",
        "read_text('{file}')",
        "glob('{folder}/*')",
        "sniff_csv('{file}')",
        "read_parquet('https://nowhere.invalid/a.parquet')",
        "'s3://bucket/a.parquet'",
        "duckdb_secrets()",
        "query_table('rows')",
        "limits",
    ],
)
def test_a_query_sees_the_run_and_nothing_else(run_dir: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "a.csv").write_text("a\nhunter2\n")
    query = f"select * from {source.format(file=tmp_path / 'a.csv', folder=tmp_path)}"
    result = invoke("sql", run_dir, query)
    assert result.exit_code == 2
    assert "hunter2" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_other_files_can_be_read_when_asked(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\nhunter2\n")
    query = f"select a from read_csv('{tmp_path / 'a.csv'}'), (select count(*) from steps)"
    assert "hunter2" in invoke("sql", run_dir, query, "--allow-files").output


SLOW = "select sum(a.range * b.range) from range(10000000) a, range(100000) b"
LONG = "select range from range(10000000000)"
LARGE = "select list(range) from range(1000000000)"


@pytest.mark.parametrize(
    ("query", "option", "said"),
    [
        (SLOW, "--time-limit", "longer than 0.3 s"),
        (LONG, "--time-limit", "longer than 0.3 s"),
        (LARGE, "--memory-limit", "more than 0.3 GiB"),
        (LONG, "--memory-limit", "more than 0.3 GiB"),
    ],
)
def test_a_query_ends(run_dir: Path, query: str, option: str, said: str) -> None:
    result = invoke("sql", run_dir, query, option, "0.3")
    assert result.exit_code == 2
    assert said in result.output
    assert option in result.output
