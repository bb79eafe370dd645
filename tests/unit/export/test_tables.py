"""Tables of a study as files and for other libraries."""

import csv
import json
import sys

import numpy as np
import pytest

import meshscope
from builders import MS, make_run
from command_line import invoke
from late_runs import LateRun, noisy
from meshscope.core.layout import Layout
from meshscope.export import run_tables
from meshscope.export.run_tables import write_table
from meshscope.export.table_files import FORMATS
from meshscope.report.tables import REPORT_TABLES, StudyTable
from meshscope.store.read.query import QUERY_TABLES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("late") / "run"
    usual = noisy(1)

    def work(rank, step):
        own = usual(rank, step)
        return own | {"forward": own["forward"] + (20 * MS if rank == 2 else 0)}

    LateRun(layout=Layout(dp=4), work=work, num_steps=30).record(path)
    return path


def call(*arguments):
    return invoke("export", *arguments)


def test_every_format_has_the_same_rows(run, tmp_path):
    import duckdb

    study, con = meshscope.study(run), duckdb.connect()
    for name in (*REPORT_TABLES, "collectives", "ranks"):
        paths = [tmp_path / f"{name}.{form}" for form in FORMATS]
        counts = {write_table(study, name, path, path.suffix[1:]) for path in paths}
        with paths[0].open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        whole = json.loads(paths[2].read_text(encoding="utf-8"))
        query = "SELECT count(*) FROM read_parquet(?)"
        (count,) = con.execute(query, [str(paths[1])]).fetchall()[0]
        assert counts == {len(rows)} == {len(whole)} == {count} != {0}
        assert list(rows[0]) == list(whole[0])
    assert not list(tmp_path.glob(".*part*"))


def test_budget_table_adds_up_to_the_periods(run):
    study = meshscope.study(run)
    table, work = study.table("budget"), study.study.work
    for index, rank in enumerate(work.ranks):
        total = table["time_ns"][table["rank"] == rank].sum()
        assert total == pytest.approx(work.period_ns[index].sum())


def test_the_late_rank_is_last_in_matches(run):
    table = meshscope.study(run).table("matches")
    last = table["last_rank"][table["last_rank"] >= 0]
    assert np.bincount(last).argmax() == 2


def test_cells_that_a_spreadsheet_would_run_are_quoted(tmp_path):
    bad = ["=1+1", "+1", "-1", "@x"]
    make_run(tmp_path / "run", world_size=4, num_steps=4, host=lambda rank: bad[rank])
    result = call(tmp_path / "run", "--table", "rank_summaries")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(result.output.splitlines()))
    assert [row["host"] for row in rows] == [f"'{text}" for text in bad]
    assert rows[0]["peak_device_bytes"] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to write"),
        (["--table", "nope", "-o", "x.csv"], "there is no table nope"),
        (["--table", "steps", "-o", "x.txt"], "format of x.txt is not known"),
        (["-o", "x.bin"], "what to write to x.bin is not known"),
        (["--perfetto", "x.pftrace", "--steps", "9-1"], "no range of steps"),
        (["--perfetto", "x.pftrace", "--ranks", "77"], "chooses none of the recorded ranks"),
        (["--perfetto", "/nowhere/x.pftrace"], "cannot be written"),
        (["--table", "steps", "-o", "/nowhere/x.csv"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, said):
    result = call(run, *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_suffix_decides(run, tmp_path):
    result = call(run, "-o", tmp_path / "a.pftrace", "--steps", "3-4")
    assert result.exit_code == 0, result.output
    assert "steps 3 to 4" in result.output
    assert call(run, "-o", tmp_path / "a.json", "--no-diagnosis", "--steps", "3").exit_code == 0
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]


def test_tables_are_listed(run):
    listed = call(run, "--tables").output
    assert all(f"{name} " in listed for name in (*REPORT_TABLES, *QUERY_TABLES))


def test_a_table_is_a_dict_of_arrays_and_speaks_arrow():
    table = StudyTable(a=np.arange(3), b=np.array(["x", "y", "z"]))
    assert (table.num_rows, dict(table)["a"].tolist()) == (3, [0, 1, 2])
    assert "arrow_array_stream" in repr(table.__arrow_c_stream__())


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_a_missing_package_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    table = StudyTable(a=np.arange(3))
    method = {"pandas": table.to_pandas, "polars": table.to_polars, "pyarrow": table.to_arrow}
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        method[package]()


def test_a_notebook_shows_verdict_findings_and_budget(run):
    shown = meshscope.study(run)._repr_html_()
    assert shown.startswith('<div class="meshscope">')
    assert "<script" not in shown
    for text in ("rank 2", "Findings", "Where the time goes"):
        assert text in shown


def test_a_table_of_some_ranks_and_steps(run, tmp_path):
    for name in ("steps", "budget"):
        result = call(run, "--table", name, "--ranks", "1,dp3", "--steps", "5-7")
        assert result.exit_code == 0, result.output
        rows = list(csv.DictReader(result.stdout.splitlines()))
        assert {(row["rank"], row["step"]) for row in rows} == {
            (str(rank), str(step)) for rank in (1, 3) for step in (5, 6, 7)
        }
    result = call(run, "--table", "spans", "--steps", "5-7")
    assert result.exit_code == 2
    assert "table spans has no column step, which --steps needs" in result.output
    result = call(run, "--table", "job_steps", "--ranks", "1")
    assert "table job_steps has no column rank" in result.output


def test_a_table_too_large_for_memory_goes_through_a_file(run, tmp_path, monkeypatch):
    expected = call(run, "--table", "collectives").stdout
    monkeypatch.setattr(run_tables, "_MAX_ROWS_IN_MEMORY", 10)
    output = tmp_path / "out" / "collectives.csv"
    output.parent.mkdir()
    assert call(run, "--table", "collectives", "-o", output).exit_code == 0
    assert output.read_text(encoding="utf-8") == expected
    assert [path.name for path in output.parent.iterdir()] == [output.name]
