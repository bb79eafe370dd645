import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from builders import MS, Faults, make_run
from command_line import invoke
from ended_process import run_process
from meshscope.cli.terminal_screen import tell_work
from meshscope.core.layout import Layout
from meshscope.pool.pool import progress
from meshscope.store.write import table_file, writer


def assert_one_line(result, exit_code, *words):
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("meshscope: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=6)


def test_a_run_is_explained(run_dir):
    result = invoke("report", run_dir)
    assert result.exit_code == 0, result.output
    assert "\n6 steps on 2 ranks (dp2), one every 101 ms (median).\n" in result.stdout
    everything = invoke("report", run_dir, "--all").stdout
    assert everything.startswith("6 steps on 2 ranks (dp2), median step 100 ms;")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--section", "problems"], "Problems\n  none\n"),
        (["--section", "traces"], "Traces\n  none\n"),
        (["--section", "pipeline"], "Pipeline\n  the layout has one pipeline stage\n"),
        (["--section", "budget", "--no-diagnosis"], "Budget\n  left out by --no-diagnosis\n"),
    ],
)
def test_a_section_without_content_says_so(run_dir, options, text):
    assert invoke("report", run_dir, *options).stdout == text


def test_json_holds_the_numbers_of_the_terminal(run_dir):
    document = json.loads(invoke("report", run_dir, "--json").stdout)
    assert document["document"] == "meshscope-report"
    assert document["steps"]["time"]["median_ns"] == 100 * MS


def test_output_goes_to_a_file(run_dir, tmp_path):
    result = invoke("report", run_dir, "--json", "-o", tmp_path / "out.json")
    assert (result.exit_code, result.output) == (0, "")
    assert json.loads((tmp_path / "out.json").read_bytes())["steps"]["num_steps"] == 6
    assert invoke("report", run_dir, "-o", tmp_path / "out.txt").exit_code == 0
    assert "rules ran" in (tmp_path / "out.txt").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_is_a_usage_error(run_dir, tmp_path):
    result = invoke("report", run_dir, "-o", tmp_path / "no" / "such" / "folder.txt")
    assert_one_line(result, 2, "cannot be written")


def test_attempts_are_chosen_by_number_and_the_last_is_the_default(tmp_path):
    make_run(tmp_path / "run", num_steps=2)
    make_run(tmp_path / "run", num_steps=4, restart_count=1)
    assert "4 steps on 1 rank" in invoke("report", tmp_path / "run").stdout
    assert "2 steps on 1 rank" in invoke("report", tmp_path / "run", "--attempt", 0).stdout
    assert_one_line(invoke("report", tmp_path / "run", "--attempt", 2), 2, "no attempt 2", "0 to 1")


def test_warm_up_is_chosen(run_dir):
    assert "without the first 3 steps" in invoke("report", run_dir, "--warmup", 3, "--all").stdout
    assert "without the first" not in invoke("report", run_dir, "--warmup", 0, "--all").stdout
    assert "all 6 steps count as warm-up" in invoke("report", run_dir, "--warmup", 6).stdout


def test_strict_fails_only_when_the_recording_has_problems(run_dir, tmp_path):
    assert invoke("report", run_dir, "--strict").exit_code == 0
    faulty = make_run(tmp_path / "faulty", faults=Faults(errors={0: {"scalar": 1}}))
    assert invoke("report", faulty).exit_code == 0
    assert invoke("report", faulty, "--strict").exit_code == 1
    killed = make_run(tmp_path / "killed", faults=Faults(killed={0: 3}))
    assert invoke("report", killed, "--strict", "--json").exit_code == 1


def test_a_folder_with_one_run_below_it_will_do(tmp_path):
    make_run(tmp_path / "runs" / "train" / "one", num_steps=2)
    (tmp_path / "runs" / ".hidden" / "rank00000").mkdir(parents=True)
    assert invoke("report", tmp_path).exit_code == 0


def test_a_folder_with_several_runs_lists_them(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, num_steps=1)
    result = invoke("report", tmp_path)
    assert_one_line(result, 2, "holds 2 runs", str(tmp_path / "a"), str(tmp_path / "b"))


# --- bad input ------------------------------------------------------------------------------


def test_nothing_there(tmp_path):
    assert_one_line(invoke("report", tmp_path / "nowhere"), 3, "does not exist")


def test_not_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    assert_one_line(invoke("report", tmp_path), 3, "is not a run")


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert_one_line(invoke("report", tmp_path / "file"), 3, "a run is a directory")


def test_an_empty_run(tmp_path):
    make_run(tmp_path / "run", num_steps=1, faults=Faults(missing=frozenset({0})))
    (tmp_path / "run" / "rank00000").mkdir(parents=True)
    assert_one_line(invoke("report", tmp_path / "run"), 3, "no rank has recorded anything")


def test_a_damaged_manifest_is_reported_and_the_ranks_are_still_read(run_dir):
    (run_dir / "run.json").write_bytes(b'{"format": "meshsc')
    result = invoke("report", run_dir, "--strict")
    assert result.exit_code == 1
    assert "run.json: the manifest is not valid JSON" in result.stdout


def test_a_damaged_manifest_without_ranks(tmp_path):
    (tmp_path / "run.json").write_bytes(b'{"format": "meshsc')
    assert_one_line(invoke("report", tmp_path), 3, "run.json")


def test_a_manifest_of_something_else(run_dir):
    (run_dir / "run.json").write_text('{"format": "other"}', encoding="utf-8")
    assert_one_line(invoke("report", run_dir), 3, "not a meshscope manifest")


def test_a_path_with_control_characters_is_still_one_line(tmp_path):
    assert_one_line(invoke("report", tmp_path / "a\n\x1b[31mb"), 3, "does not exist")


def make_future_run(path: Path, monkeypatch: pytest.MonkeyPatch, *, only_tables: bool) -> Path:
    """A run as a later version would write it."""
    with monkeypatch.context() as patch:
        patch.setattr(table_file, "SCHEMA_VERSION", 99)
        if not only_tables:
            patch.setattr(writer, "SCHEMA_VERSION", 99)
        return make_run(path / "run", num_steps=2)


def test_a_manifest_from_the_future(tmp_path, monkeypatch):
    run = make_future_run(tmp_path, monkeypatch, only_tables=False)
    assert_one_line(invoke("report", run), 3, "run.json", "schema version 99", "upgrade meshscope")


def test_a_journal_from_the_future(tmp_path, monkeypatch):
    run = make_future_run(tmp_path, monkeypatch, only_tables=False)
    (run / "run.json").unlink()
    assert_one_line(
        invoke("report", run), 3, "journal.jsonl", "schema version 99", "upgrade meshscope"
    )


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("html", "<!doctype html>"), ("md", "### Budget"), ("json", "{\n"), ("txt", "Budget")],
)
def test_the_suffix_chooses_the_form(tmp_path, suffix, start):
    make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=6)
    page = tmp_path / f"page.{suffix}"
    assert invoke("report", tmp_path / "run", "--section", "budget", "-o", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(start)
    assert "<script" not in text


def test_sections_are_chosen_by_name_and_come_in_their_order(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=6)
    text = invoke("report", tmp_path, "--section", "ranks", "--section", "phases").stdout
    assert text.startswith("Where a step's time goes")
    assert text.count("\n\n") == 1
    assert "Ranks  in order of rank" in text
    everything = invoke("report", tmp_path, "--all").stdout
    assert text.strip().splitlines()[-1] in everything
    assert invoke("report", tmp_path, "--section", "nonsense").exit_code == 2


def test_a_table_from_the_future(tmp_path, monkeypatch):
    run = make_future_run(tmp_path, monkeypatch, only_tables=True)
    assert_one_line(invoke("report", run), 3, "steps.tbl", "schema version 99", "upgrade meshscope")


def run_without_privileges(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a user that file modes apply to."""
    code = (
        "import os, sys\n"
        "from meshscope.cli import main\n"
        "import meshscope.cli.commands.report, meshscope.report.contents\n"
        "import meshscope.report.render.terminal\n"  # while all can be read
        "if os.geteuid() == 0:\n"
        "    os.setegid(65534); os.seteuid(65534)\n"
        "main(sys.argv[1:], prog_name='meshscope')\n"
    )
    return run_process(
        [sys.executable, "-c", code, *map(str, arguments)], env={**os.environ, "COLUMNS": "100"}
    )


@pytest.fixture
def shared_run():
    """A run that every user may read, outside pytest's folders, which only their owner enters."""
    folder = Path(tempfile.mkdtemp(prefix="meshscope-test-"))
    run = make_run(folder / "run", layout=Layout(dp=2), num_steps=6)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield run
    for path in [run, *run.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("place", ["", "run.json"])
def test_no_permission(shared_run, place):
    (shared_run / place).chmod(0)
    done = run_without_privileges("report", shared_run)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "permission denied" in done.stderr


@pytest.mark.parametrize("place", ["rank00001", "rank00001/attempt000/tables.pack"])
def test_what_may_not_be_read_of_one_rank_costs_only_that_rank(shared_run, place):
    (shared_run / place).chmod(0)
    done = run_without_privileges("report", shared_run, "--strict")
    assert done.returncode == 1, done.stderr
    assert f"rank 1, {place}: cannot be read" in done.stdout


def test_a_compacted_run_gives_the_same_report(run_dir):
    before = invoke("report", run_dir, "--json").stdout
    assert invoke("compact", run_dir, "--remove-raw").exit_code == 0
    assert invoke("report", run_dir, "--json").stdout == before


# --- findings ---------------------------------------------------------------------------------


@pytest.fixture
def dead_rank(tmp_path):
    return make_run(
        tmp_path / "dead", layout=Layout(dp=2), num_steps=20, faults=Faults(killed={1: 9})
    )


def test_a_finding_leads_the_report_and_is_in_the_document(dead_rank):
    result = invoke("report", dead_rank)
    assert result.exit_code == 0
    assert result.stdout.startswith("Rank 1 stopped without an end.\n20 steps on 2 ranks")
    document = json.loads(invoke("report", dead_rank, "--json").stdout)
    assert document["diagnosis"]["findings"][0]["code"] == "HE002"


def test_fail_on_exits_with_7_from_that_severity_on(dead_rank, run_dir):
    for word, exit_code in (("low", 7), ("medium", 7), ("high", 7), ("critical", 0)):
        assert invoke("report", dead_rank, "--fail-on", word).exit_code == exit_code
    assert invoke("report", run_dir, "--fail-on", "medium").exit_code == 0
    assert invoke("report", dead_rank, "--fail-on", "high", "--strict").exit_code == 1
    assert invoke("report", dead_rank, "--fail-on", "worse").exit_code == 2


def test_without_a_diagnosis_there_is_the_report_alone(dead_rank):
    result = invoke("report", dead_rank, "--no-diagnosis")
    assert result.stdout.startswith("20 steps on 2 ranks")
    assert "Findings" not in result.stdout
    document = json.loads(invoke("report", dead_rank, "--no-diagnosis", "--json").stdout)
    assert document["diagnosis"] is None
    refused = invoke("report", dead_rank, "--no-diagnosis", "--fail-on", "low")
    assert_one_line(refused, 2, "--no-diagnosis makes no findings")


def test_thresholds_come_from_a_file_and_from_flags(run_dir, tmp_path):
    def codes(*options):
        document = json.loads(invoke("report", run_dir, "--json", *options).stdout)
        return [finding["code"] for finding in document["diagnosis"]["findings"]]

    limits = tmp_path / "limits.toml"
    limits.write_text("[thresholds]\ndiagnosis_min_steps = 3\n", encoding="utf-8")
    assert "HE008" in codes()
    assert "HE008" not in codes("--thresholds", limits)
    assert "HE008" in codes("--thresholds", limits, "--threshold", "diagnosis_min_steps=30")
    result = invoke("report", run_dir, "--threshold", "diagnosis_min_step=3")
    assert_one_line(result, 2, "nearest is 'diagnosis_min_steps'")


def test_work_that_takes_long_is_told_and_short_work_is_not(capsys):
    with tell_work("reading", silent_s=60):
        pass
    assert capsys.readouterr().err == ""
    with tell_work("reading", silent_s=0.01):
        time.sleep(0.2)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "meshscope: still reading, 0 s so far"
    assert 2 <= len(told) <= 5  # at 10, 20, 40, 80 and 160 ms


def test_what_was_counted_before_is_not_said_of_the_next_work(capsys):
    progress.num_done = progress.num_items = 4
    with tell_work("reading", silent_s=60), tell_work("explaining 4 ranks"):
        assert str(progress) == ""
        progress.num_done, progress.num_items = 1, 4
        assert str(progress) == "1 of 4"
    assert str(progress) == ""


def test_some_ranks_can_be_looked_at(tmp_path):
    layout = Layout(dp=4, tp=2)
    run = make_run(tmp_path, layout=layout, num_steps=20, faults=Faults(slow={1: 2.0}))
    shown = invoke("report", run, "--ranks", "1,4-5", "--section", "run", "--section", "ranks")
    assert "3 of 8 chosen (--ranks 1,4-5), all finished" in shown.stdout
    rows = shown.stdout.partition("Ranks  in order")[2].splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["1", "4", "5"]
    document = json.loads(invoke("report", run, "--ranks", "tp1.dp0", "--json").stdout)
    assert [one["rank"] for one in document["ranks"]] == [1]
    assert document["steps"]["time"]["median_ns"] == 2 * 97 * MS + 3 * MS
    assert document["diagnosis"] is None  # findings compare all ranks
    assert document["health"]["is_complete"]
    left_out = invoke("report", run, "--ranks", "0", "--section", "findings").stdout
    assert left_out == "Findings\n  left out by --ranks\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "7"], ["'7'", "(ranks 0-1)"]),
        (["--ranks", "first"], ["'first'", "0,3 or 4-7"]),
        (["--ranks", "0", "--fail-on", "low"], ["--ranks makes no findings"]),
    ],
)
def test_a_choice_of_ranks_that_makes_no_sense_is_refused(run_dir, options, words):
    assert_one_line(invoke("report", run_dir, *options), 2, *words)
