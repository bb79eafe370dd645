"""Many runs: what became of their time, the index, trends, and what may be deleted."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from builders import (
    MS,
    SECOND,
    START_MONO_NS,
    START_UNIX_NS,
    Faults,
    make_run,
    make_writer,
    put_step,
)
from command_line import invoke
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.fleet.index import Index
from meshscope.fleet.summary import describe_run
from meshscope.fleet.trend import add_regressions
from meshscope.report.goodput import measure_goodput
from meshscope.report.listings import Listing
from meshscope.store.read.run import open_run
from meshscope.store.write.journal import EXIT_LINE

DAY_S = 86_400


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def launch(path: Path, restart: int, start_s: float, steps: range, end_s: float) -> None:
    """Two ranks; steps of 8 s, 10 s apart, the first 30 s after the launch."""
    start_ns = int(start_s * SECOND)
    for rank in range(2):
        writer = make_writer(
            path,
            rank,
            2,
            launch_id="job",
            restart_count=restart,
            start_host_mono_ns=START_MONO_NS + start_ns,
            start_unix_ns=START_UNIX_NS + start_ns,
        )
        for index, step in enumerate(steps):
            begin = START_MONO_NS + start_ns + (30 + 10 * index) * SECOND
            put_step(writer, step, begin, begin + 8 * SECOND)
        writer.close(end_host_mono_ns=START_MONO_NS + int(end_s * SECOND), num_errors=0, errors={})


def test_steps_that_were_thinned_away_count_like_those_around_them(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, start_host_mono_ns=START_MONO_NS, start_unix_ns=START_UNIX_NS)
    for step in (*range(10), *range(90, 100)):  # 80 of 100 are gone
        begin = START_MONO_NS + (30 + 10 * step) * SECOND
        put_step(writer, step, begin, begin + 8 * SECOND)
    end_ns = START_MONO_NS + (30 + 10 * 99 + 8) * SECOND
    writer.close(end_host_mono_ns=end_ns, num_errors=0, errors={})
    goodput = measure_goodput(open_run(tmp_path))
    assert not isinstance(goodput, Unavailable)
    parts = (goodput.startup_ns, goodput.useful_ns, goodput.waiting_ns)
    assert sum(parts) == goodput.allocated_ns
    # In whole: 800 s in 100 steps, 198 s in 99 gaps.
    assert parts == pytest.approx((30 * SECOND, 800 * SECOND, 198 * SECOND), rel=0.01)


def test_the_parts_of_an_allocation_are_those_of_its_launches_and_sum_to_it(tmp_path: Path) -> None:
    # Launch 0: 0 to 200 s, steps 0 to 9. Launch 1 from 260 s on goes back to step 6.
    launch(tmp_path, 0, 0, range(10), 200)
    launch(tmp_path, 1, 260, range(6, 16), 400)
    found = measure_goodput(open_run(tmp_path))
    assert not isinstance(found, Unavailable)
    assert found.allocated_ns == 400 * SECOND
    assert found.startup_ns == 2 * 30 * SECOND
    assert found.restart_ns == 60 * SECOND
    assert found.rework_ns == 4 * 8 * SECOND  # steps 6 to 9 of the first launch
    assert found.useful_ns == 16 * 8 * SECOND
    assert found.waiting_ns == (200 - 30 - 80) * SECOND + (140 - 30 - 80) * SECOND
    parts = (
        found.startup_ns, found.restart_ns, found.rework_ns, found.useful_ns, found.waiting_ns,
    )  # fmt: skip
    assert sum(parts) == found.allocated_ns
    assert found.rank_ns == 2 * found.allocated_ns
    assert found.useful_ratio == 128 / 400


def test_a_launch_without_a_step_is_start_up(tmp_path: Path) -> None:
    launch(tmp_path, 0, 0, range(0), 50)
    found = measure_goodput(open_run(tmp_path))
    assert not isinstance(found, Unavailable)
    assert (found.allocated_ns, found.startup_ns) == (50 * SECOND, 50 * SECOND)


def test_runs_that_ended_are_read_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, layout=Layout(dp=2), num_steps=30)
    paths = [tmp_path / "a", tmp_path / "b"]

    def read(*, with_report: bool = False) -> tuple[list[Listing], int]:
        index = Index(tmp_path)
        found = [index.describe(path, with_report=with_report) for path in paths]
        index.save(paths)
        return found, index.num_read

    first, num_first = read()
    again, num_again = read()
    assert (num_first, num_again) == (2, 0)
    assert again == first
    deep, _ = read(with_report=True)
    assert read(with_report=True) == (deep, 0)
    assert not isinstance(deep[0].report, Unavailable)
    with (tmp_path / "a" / "run.json").open("ab") as file:
        file.write(b"\n")
    assert read()[1] == 1
    (cache,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.msgpack")
    cache.write_bytes(b"\x81garbage")
    assert read()[1] == 2


def make_listing(number: int, step_ms: float, **fields: object) -> Listing:
    given = {
        "path": f"runs/train/{number}", "job": "train", "started_unix_ns": number,
        "world_size": 8, "num_steps": 100, "state": "finished", "step_ns": step_ms * MS,
        "step_error_ns": 0.1 * MS,
    }  # fmt: skip
    return Listing(**{**given, **fields})  # type: ignore[arg-type]


def test_a_run_is_compared_with_the_last_good_one_of_its_job() -> None:
    runs = [
        make_listing(1, 100),
        make_listing(2, 101),
        make_listing(3, 120),  # slower: not good
        make_listing(4, 121, state="ended with ValueError"),
        make_listing(5, 100, world_size=16),  # other ranks: nothing to compare with
        make_listing(6, 107, step_error_ns=2 * MS),  # more than 5 %, but not for sure
        make_listing(7, 100, job="other"),
    ]
    found = {one.path.rpartition("/")[2]: one.regression for one in add_regressions(runs)}
    told = {
        key: (one.against.rpartition("/")[2], round(one.slower_ratio, 3), one.is_slower)
        for key, one in found.items()
        if not isinstance(one, Unavailable)
    }
    assert told == {
        "2": ("1", 0.01, False),
        "3": ("2", 0.188, True),
        "4": ("2", 0.198, True),
        "6": ("2", 0.059, False),
    }


def age(path: Path, seconds: float) -> None:
    old = time.time() - seconds
    for file in path.rglob("*"):
        os.utime(file, (old, old))


def expire(*words: object) -> tuple[int, str, str]:
    done = invoke("expire", *words)
    return done.exit_code, done.stdout, done.stderr


def test_nothing_is_deleted_without_being_told_to(tmp_path: Path) -> None:
    make_run(tmp_path / "old", num_steps=5)
    code, output, errors = expire(tmp_path, "--older-than", "30d")
    assert (code, output) == (0, f"delete  {tmp_path / 'old'}  finished\n")
    assert errors == "1 run of 1 would be deleted; add --delete\n"
    assert open_run(tmp_path / "old").attempts
    code, output, _ = expire(tmp_path, "--older-than", "30d", "--delete")
    assert (code, output) == (0, f"deleted {tmp_path / 'old'}\n")
    assert not (tmp_path / "old").exists()


def test_a_run_that_may_go_on_is_never_deleted(tmp_path: Path) -> None:
    make_run(tmp_path / "open", num_steps=5, faults=Faults(killed={0: 3}))
    _, output, _ = expire(tmp_path, "--older-than", "1h", "--delete")
    assert output.startswith(f"keep    {tmp_path / 'open'}  a rank wrote no end and a file changed")
    age(tmp_path / "open", 2 * DAY_S)
    _, output, _ = expire(tmp_path, "--older-than", "1h", "--delete")
    assert output == f"deleted {tmp_path / 'open'}\n"


def test_a_run_whose_process_lives_is_running_and_stays_however_old_its_files(
    tmp_path: Path,
) -> None:
    run = tmp_path / "hung"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
        ticks = int(stat.rpartition(")")[2].split()[19])
        for rank in range(2):
            writer = make_writer(
                run, rank, 2, host=socket.gethostname(), pid=process.pid, process_start_ticks=ticks
            )
            put_step(writer, 0, START_MONO_NS, START_MONO_NS + SECOND)
            writer.disarm()
        age(run, 2 * DAY_S)
        assert describe_run(run, "hung").state == "running"
        _, output, _ = expire(tmp_path, "--older-than", "1h", "--delete")
        assert output == f"keep    {run}  process {process.pid} of rank 0 lives\n"
        process.kill()
    assert describe_run(run, "hung").state == "killed"
    _, output, _ = expire(tmp_path, "--older-than", "1h", "--delete")
    assert output == f"deleted {run}\n"


def test_a_run_that_has_just_failed_stays_for_its_launcher(tmp_path: Path) -> None:
    run = tmp_path / "failed"
    writer = make_writer(run, 0, 1)
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + SECOND)
    writer.journal.write(EXIT_LINE, exception="ValueError: x")
    writer.close(end_host_mono_ns=START_MONO_NS + SECOND, num_errors=0, errors={})
    assert describe_run(run, "failed").state == "ended with ValueError"
    _, output, _ = expire(tmp_path, "--state", "failed", "--delete")
    assert output.startswith(f"keep    {run}  it failed 0.")
    age(run, 3600)
    _, output, _ = expire(tmp_path, "--state", "failed", "--delete")
    assert output == f"deleted {run}\n"


def test_the_newest_of_a_job_and_files_of_others_stay(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        make_run(tmp_path / "train" / f"2025110{day}-120000-x", num_steps=5)
        journal = tmp_path / "train" / f"2025110{day}-120000-x"
        (journal / "notes.txt").write_text("mine", encoding="utf-8")
    _, output, _ = expire(tmp_path, "--state", "finished", "--keep-last", "2", "--delete")
    assert len(output.splitlines()) == 1
    assert "its folder stays: 1 other files are in it (notes.txt)" in output
    assert len(list(tmp_path.rglob("notes.txt"))) == 3
    assert len(list(tmp_path.rglob("run.json"))) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), "give --older-than or --state"), (("--older-than", "soon"), "'soon' is no age")],
)
def test_a_rule_that_says_nothing_is_refused(
    tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    code, _, errors = expire(tmp_path, *words)
    assert code == 2
    assert expected in errors


def test_jobs_are_searched_and_listed_with_their_trend(tmp_path: Path) -> None:
    make_run(tmp_path / "train" / "20251101-120000-a", num_steps=40)
    make_run(
        tmp_path / "train" / "20251102-120000-b",
        num_steps=40,
        phases=(("forward", 60 * MS), ("backward", 60 * MS)),
        header={"start_unix_ns": START_UNIX_NS + 3600 * SECOND},
    )
    make_run(tmp_path / "eval", num_steps=40)
    done = invoke("ls", tmp_path, "--job", "train", "--trend", "--json")
    first, second = json.loads(done.stdout)["runs"]
    assert first["job"] == second["job"] == "train"
    assert "unavailable" in first["regression"]
    assert second["regression"]["is_slower"]
    done = invoke("ls", tmp_path, "--search", "eval finished")
    assert len(done.stdout.splitlines()) == 2
    assert replace(make_listing(1, 1)).path == "runs/train/1"
