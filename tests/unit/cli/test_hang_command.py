"""`meshscope hang` from the outside: what it prints, its exit codes, what it loads."""

import json
import pickle
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ended_process import run_process
from hang_builders import CONNECTION_LOST, Job, JobGroup
from meshscope.cli import main
from meshscope.core.layout import Layout
from meshscope.store.write.now_file import FIXED_BYTES, NOW_NAME

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\u202e\n\r"


def invoke(*arguments, width: int = 100):
    return CliRunner().invoke(
        main, ["hang", *map(str, arguments)], env={"COLUMNS": str(width)}, catch_exceptions=False
    )


def make_stuck(path: Path, waiter, sleeper, **header: object) -> Job:
    """Rank 3 of four sleeps in its data loader."""
    job = Job(path, layout=Layout(dp=2, tp=2))
    for rank in range(4):
        job.rank(rank, sleeper if rank == 3 else waiter, **header)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=9)
    job.rank(2).enters("all_reduce", job.axis_group("tp", 2), ago_s=8, size_bytes=4 << 20)
    job.rank(1).enters("all_reduce", job.axis_group("dp", 1), ago_s=7)
    job.rank(0).enters("all_reduce", job.axis_group("dp", 0), ago_s=6)
    job.rank(3).is_in_phase("data", ago_s=8.5)
    return job


def test_the_verdict_comes_first_then_what_it_rests_on(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper)
    result = invoke(tmp_path / "run")
    assert result.exit_code == 5
    first, *rest = result.stdout.splitlines()
    assert first.startswith(
        "Rank 3 (dp1.tp1) has not entered all_reduce #0 of the tp group (ranks 2-3, mesh_tp), "
        "4.00 MiB; rank 2 waits since 8."
    )
    assert first.endswith("2 more ranks are held up behind.")
    text = "\n".join(rest)
    assert f"process {sleeper.pid} on " in text
    assert "sleeping in clock_nanosleep" in text
    assert "in phase data since 8." in text
    assert "last finished all_reduce #0 world 9." in text
    rows = [line.split() for line in rest if line.strip()[:1] in "012" and "all_reduce" in line]
    assert [(row[0], row[-2:]) for row in rows] == [
        ("2", ["rank", "3"]),
        ("1", ["rank", "3"]),
        ("0", ["rank", "2"]),
    ]


def test_a_run_may_be_a_folder_with_one_run_below(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "runs" / "mine", waiter, sleeper)
    assert invoke(tmp_path).exit_code == 5


def test_as_json(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper)
    result = invoke(tmp_path / "run", "--json")
    assert result.exit_code == 5
    found = json.loads(result.stdout)
    assert (found["document_version"], found["kind"], found["is_stuck"]) == (2, "missing", True)
    assert [(c["rank"], c["reason"]) for c in found["culprits"]] == [(3, "not_entered")]
    operation = found["operation"]
    assert {key: operation[key] for key in ("kind", "axis", "sequence", "ranks", "missing")} == {
        "kind": "all_reduce",
        "axis": "tp",
        "sequence": 0,
        "ranks": [2, 3],
        "missing": [3],
    }
    assert [entry["rank"] for entry in found["waiting"]] == [2, 1]
    assert [entry["rank"] for entry in found["cascade"]] == [0]
    assert found["cascade"][0]["waits_for"] == [2]
    assert [state["rank"] for state in found["ranks"]] == [0, 1, 2, 3]


def test_nothing_hangs(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=0.01)
    result = invoke(tmp_path / "run", "--all-ranks")
    assert result.exit_code == 0
    assert result.stdout.startswith("Nothing hangs: no rank waits unusually long; ")
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["rank", "0", "1"]
    for rank in range(2):
        job.rank(rank).closes(0)
    assert invoke(tmp_path / "run").stdout == (
        "The job is over: all 2 ranks ended; nothing hangs.\n"
    )


def test_when_a_wait_is_a_hang_can_be_said(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper)
    patient = invoke(tmp_path / "run", "--after", "100")
    assert patient.exit_code == 0
    assert patient.stdout.startswith("Nothing hangs yet: rank 2 has waited 8.")
    assert "longer than usual, for rank 3." in patient.stdout


def test_every_kind_has_its_sentence(tmp_path, waiter, sleeper, processes):
    def say(name: str, build) -> str:
        job = Job(tmp_path / name, world_size=3)
        for rank in range(3):
            job.rank(rank, processes.killed() if (name, rank) == ("killed", 1) else waiter)
            job.rank(rank).finishes("barrier", job.world, ago_s=20)
        build(job)
        return invoke(tmp_path / name).stdout.splitlines()[0]

    def killed(job):
        for rank in (0, 2):
            job.rank(rank).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)

    def left(job):
        job.rank(1).closes(2)
        job.rank(0).enters("all_reduce", job.world, ago_s=1)

    def raised(job):
        job.rank(1).closes(2, exception="ValueError: no")
        job.rank(0).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)

    def transfer(job):
        for rank in range(3):
            job.rank(rank).enters("all_reduce", job.world, ago_s=10)

    def cycle(job):
        job.rank(0).enters("all_reduce", JobGroup("a", (0, 1)), ago_s=9)
        job.rank(1).enters("all_reduce", JobGroup("b", (0, 1)), ago_s=8)

    def mismatch(job):
        for rank, kind in enumerate(("all_reduce", "all_reduce", "broadcast")):
            job.rank(rank).enters(kind, job.world, ago_s=10)

    operation = "all_reduce #1 of all 3 ranks, 4.00 KiB"
    assert say("killed", killed) == (
        "Rank 1 died: its process is gone and its recording has no end; "
        f"ranks 0, 2 failed in {operation}."
    )
    assert say("left", left).startswith(f"Rank 1 ended without an error before {operation}; rank 0")
    assert say("raised", raised).startswith("Rank 1 failed first: ValueError: no; rank 0 failed in")
    assert say("transfer", transfer).startswith(f"All 3 ranks are in {operation}, and it has not")
    assert say("cycle", cycle).startswith("Ranks 0-1 wait for each other since 8.")
    assert say("mismatch", mismatch) == (
        "Ranks disagree on operation #1 of all 3 ranks: ranks 0-1 all_reduce, rank 2 broadcast; "
        "it can never finish."
    )


def test_text_from_a_run_cannot_act_on_a_terminal(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=2)
    group = JobGroup(HOSTILE, (0, 1), f"mesh_{HOSTILE}", backend=HOSTILE)
    job.rank(0, None, host=HOSTILE).fails("all_reduce", group, 1.0, f"{HOSTILE} reset by peer")
    job.rank(1, processes.killed()).knows(group)
    for arguments in ((), ("--all-ranks",), ("--json",)):
        text = invoke(tmp_path / "run", *arguments).stdout
        assert not set(text) & set("\x1b\x07\r\u202e")
        assert "red" in text


def test_narrow_terminals_lose_columns_and_no_rank(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper)
    lines = invoke(tmp_path / "run", "--all-ranks", width=50).stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("  rank ")) :]
    assert table[0].split() == ["rank", "in", "for", "waits", "for"]
    assert [line.split()[0] for line in table[1:]] == ["0", "1", "2", "3"]


def test_other_exit_codes(tmp_path, waiter):
    assert invoke(tmp_path / "nowhere").exit_code == 3
    Job(tmp_path / "run", world_size=1).rank(0, waiter)
    assert invoke(tmp_path / "run", "--attempt", "1").exit_code == 2
    assert invoke(tmp_path / "run", "--after", "-1").exit_code == 2
    assert invoke(tmp_path / "run", "--flight-recorder", tmp_path / "nowhere").exit_code == 2


def test_earlier_attempts_can_be_asked_about(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper, start_unix_ns=1)
    job = Job(tmp_path / "run", world_size=4)
    for rank in range(4):
        job.rank(rank, waiter, restart_count=1).closes(0)
    assert invoke(tmp_path / "run").exit_code == 0
    assert invoke(tmp_path / "run", "--attempt", "0").exit_code == 5


PROGRAM = """
import faulthandler, signal, time
file = open({path!r}, "a")
faulthandler.register(signal.SIGRTMAX - 6, file=file, all_threads=True)
def load_shard():
    open({ready!r}, "w").close()
    time.sleep(600)
load_shard()
"""


def test_stacks_of_culprits_are_asked_for_unless_they_are_not_wanted(tmp_path, waiter, processes):
    directory = tmp_path / "run" / "rank00001" / "attempt000"
    ready = tmp_path / "ready"
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, waiter).enters("barrier", job.world, ago_s=8)
    directory.mkdir(parents=True)
    (directory / NOW_NAME).write_bytes(bytes(FIXED_BYTES))
    culprit = processes.start(PROGRAM.format(path=str(directory / NOW_NAME), ready=str(ready)))
    deadline = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    (directory / NOW_NAME).rename(tmp_path / "kept")  # a writer wants its folder for itself
    directory.rmdir()
    rank = job.rank(1, culprit)
    (tmp_path / "kept").rename(rank.directory / NOW_NAME)
    rank.knows(job.world)
    rank.writer.journal.write("update", stack_signal=64 - 6)
    quiet = invoke(tmp_path / "run", "--no-stacks").stdout
    assert "stack:" not in quiet
    assert (rank.directory / NOW_NAME).stat().st_size == FIXED_BYTES
    assert "stack: <string>:7 in load_shard ← <string>:8 in <module>" in invoke(
        tmp_path / "run"
    ).stdout.replace("~", "←")


def test_dumps_of_the_flight_recorder_add_evidence(tmp_path, waiter, sleeper):
    make_stuck(tmp_path / "run", waiter, sleeper)

    def dump(sequence: int, state: str) -> bytes:
        entry = {
            "process_group": ("tp2", "mesh_tp"),
            "collective_seq_id": sequence,
            "profiling_name": "nccl:all_reduce",
            "state": state,
            "frames": [{"name": "step", "filename": "/home/me/train.py", "line": 88}],
        }
        return pickle.dumps({"version": "2.10", "entries": [entry]})

    folder = tmp_path / "run" / "flight_recorder"
    folder.mkdir()
    (folder / "nccl_trace_rank_2").write_bytes(dump(5, "started"))
    (folder / "nccl_trace_rank_3").write_bytes(dump(4, "completed"))
    (folder / "nccl_trace_rank_1").write_bytes(b"\x80\x02")
    text = invoke(tmp_path / "run").stdout
    called = "called at train.py:88 in step"
    assert f"flight recorder: nccl:all_reduce #3 is its last of this group, over, {called}" in text
    assert f"nccl:all_reduce #4 is its last of this group, started, {called}" in text
    assert "! nccl_trace_rank_1 is no dump of the flight recorder" in text


@pytest.mark.parametrize(
    ("flags", "not_needed"),
    [((), {"torch", "duckdb"}), (("--json",), {"torch", "duckdb", "rich"})],
)
def test_it_loads_neither_torch_nor_duckdb(tmp_path, waiter, sleeper, flags, not_needed):
    make_stuck(tmp_path / "run", waiter, sleeper)
    command = [sys.executable, "-X", "importtime", "-m", "meshscope", "hang", *flags]
    done = run_process([*command, str(tmp_path / "run")])
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 5
    assert not names & not_needed
