"""`meshscope import`, and traces given to commands that read runs."""

import json
import tempfile

import pytest

from command_line import invoke
from trace_builders import MS, TRANSFER_NS, write_traces

EXTRA_NS = 5 * MS


@pytest.fixture
def traces(tmp_path):
    write_traces(tmp_path / "traces", num_ranks=4, num_steps=12, extra_ns={2: EXTRA_NS})
    return tmp_path / "traces"


def test_an_imported_run_is_reported(traces, tmp_path):
    made = invoke("import", traces, "-o", tmp_path / "run", "--layout", "dp=4")
    assert made.exit_code == 0
    assert made.output.splitlines() == [f"{tmp_path / 'run'}: traces of 4 of 4 ranks"]
    report = json.loads(invoke("report", tmp_path / "run", "--json").stdout)
    (found, *_) = report["diagnosis"]["findings"]
    assert (found["code"], found["ranks"]) == ("ST001", [{"first": 2, "last": 2}])
    lines = {line["name"]: line["mean_ns"] for line in report["budget"]["lines"]}
    assert lines["exposed transfer dp"] == pytest.approx(TRANSFER_NS, rel=0.01)


def test_traces_are_reported_as_they_are(traces):
    done = invoke("report", traces, "--fail-on", "high")
    assert done.exit_code == 7
    assert "rank 2 is slow in forward" in done.output


def test_traces_are_replayed_as_they_are(traces):
    simulated = json.loads(invoke("simulate", traces, "--edit", "rank=2:ideal", "--json").stdout)
    assert simulated["slowdown"]["worst_workers"] == [2]
    (edit,) = simulated["edits"]
    assert edit["gain"]["saved_ns"] == pytest.approx(EXTRA_NS, rel=0.01)


def test_one_trace_is_reported(traces):
    done = invoke("report", traces / "rank0.pt.trace.json.gz", "--all")
    assert done.exit_code == 0
    assert "there is no trace of ranks 1-3" in done.output


def test_traces_are_compared(traces, tmp_path):
    write_traces(tmp_path / "healthy", num_ranks=4, num_steps=12)
    done = invoke("compare", tmp_path / "healthy", traces, "--fail-on", "5")
    assert done.exit_code == 7


@pytest.mark.parametrize("command", ["report", "simulate", "trace", "sql", "compare"])
def test_commands_that_read_traces_write_nothing_but_columns(
    traces, tmp_path, monkeypatch, command
):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(tmp_path.rglob("*"))
    more = {"sql": ["select count(*) from steps"], "compare": [traces]}.get(command, [])
    assert invoke(command, traces, *more).exit_code == 0
    written = {path for path in set(tmp_path.rglob("*")) - before if path.is_file()}
    kept = {path.with_name(f"{path.name}.meshscope") for path in traces.glob("*.json.gz")}
    assert written == kept
    for path in kept:
        path.unlink()
    if command == "trace":
        assert invoke(command, traces, "--no-cache").exit_code == 0
        assert set(tmp_path.rglob("*")) == before


def test_nothing_is_overwritten(traces, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    done = invoke("import", traces, "-o", tmp_path / "run")
    assert done.exit_code != 0
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_file_that_is_no_trace_is_left_out(traces, tmp_path):
    (traces / "broken.json").write_text("{not a trace")
    done = invoke("import", traces, "-o", tmp_path / "run")
    assert done.exit_code == 0
    assert "left out" in done.output


def test_a_trace_command_over_ranks_has_the_path(traces):
    document = json.loads(invoke("trace", traces, "--json").stdout)
    path = document["critical_path"]
    assert path["total_ns"] == 12 * 41 * MS
    assert {share["rank"] for share in path["shares"][:2]} == {2}
    text = invoke("trace", traces).stdout
    assert "Critical path" in text
    # The one others waited for is shown in full.
    assert "rank2.pt.trace" in text
    assert "rank0.pt.trace" not in text
    assert "rank0.pt.trace" in invoke("trace", traces, "--rank", "0").stdout


def test_without_all_ranks_there_is_no_path(traces):
    paths = [traces / f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)]
    document = json.loads(invoke("trace", *paths, "--json").stdout)
    assert "without a trace" in document["critical_path"]["unavailable"]


def test_several_windows_are_put_together(tmp_path):
    write_traces(tmp_path / "a", num_ranks=2, num_steps=3, first_step=5)
    write_traces(
        tmp_path / "b", num_ranks=2, num_steps=3, first_step=50, skew_ns=lambda rank: 10_000 * MS
    )
    document = json.loads(invoke("trace", tmp_path, "--json").stdout)
    across = document["across_ranks"]
    assert (across["num_matched"], across["num_unmatched"]) == (6, 0)
    assert document["critical_path"]["num_steps"] == 6
