"""Opening runs: live ones, broken ones, hostile ones; one bad rank costs only itself."""

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from builders import flip_byte, lose_table, table_path
from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunEmpty, RunError, RunNotFound, SchemaTooNew
from meshscope.store.read.columns import Problem, ProblemKind
from meshscope.store.read.run import MAX_WORLD_SIZE, Attempt, open_run
from meshscope.store.write.manifest import seal
from meshscope.store.write.writer import RankWriter

UNIX_NS = 1_763_200_000_000_000_000


def write_rank(
    run_dir: Path,
    rank: int,
    *,
    num_steps: int = 3,
    is_closed: bool = True,
    begin_ns: int = 0,
    end_ns: int = 1_000,
    **header: object,
) -> RankWriter:
    fields: dict[str, object] = {
        "rank": rank,
        "world_size": 2,
        "launch_id": "job",
        "restart_count": 0,
        "start_unix_ns": UNIX_NS + begin_ns,
        "start_host_mono_ns": begin_ns,
        **header,
    }
    writer = RankWriter(run_dir, rank, header=fields)
    for step in range(num_steps):
        writer.table("steps").put(step, end_ns - 1, end_ns, 1, -1, -1, 0)
    if is_closed:
        writer.close(end_host_mono_ns=end_ns)
    return writer


def kinds(problems: tuple[Problem, ...] | list[Problem]) -> list[ProblemKind]:
    return [problem.kind for problem in problems]


def test_a_copied_run_reads_the_same(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path / "a", rank)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    attempt = open_run(tmp_path / "elsewhere" / "b").last_attempt
    assert [len(rank.read("steps")["step"]) for rank in attempt] == [3, 3]
    assert attempt.problems == ()


def test_missing_ranks_are_listed(tmp_path: Path) -> None:
    write_rank(tmp_path, 1, world_size=4)
    attempt = open_run(tmp_path).last_attempt
    assert list(attempt.missing_ranks) == [0, 2, 3]
    assert [p.text for p in attempt.problems] == ["3 of 4 ranks recorded nothing: 0, 2-3"]


def test_a_world_size_beyond_belief_costs_no_memory(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, world_size=10**12)
    write_rank(tmp_path, 1, world_size=2)
    (tmp_path / "rank999999999999").mkdir()
    attempt = open_run(tmp_path).last_attempt
    assert attempt.world_size == 2
    assert kinds(attempt.problems) == [ProblemKind.MISPLACED, ProblemKind.MISPLACED]
    assert str(MAX_WORLD_SIZE) in attempt.problems[0].text


def test_ranks_beyond_five_digits_are_read_in_order(tmp_path: Path) -> None:
    for rank in (99_999, 100_000, 7):
        write_rank(tmp_path, rank, world_size=100_001)
    assert list(open_run(tmp_path).last_attempt.ranks) == [7, 99_999, 100_000]


def test_one_bad_rank_folder_costs_only_itself(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, world_size=6)
    (tmp_path / "rank00001").write_text("a file", encoding="utf-8")
    (tmp_path / "rank00002").symlink_to(tmp_path / "nowhere")
    (tmp_path / "rank00003").symlink_to(tmp_path / "rank00003")
    (tmp_path / "rank00004" / "attempt000").mkdir(parents=True)
    os.mkfifo(tmp_path / "rank00004" / "attempt000" / "journal.jsonl")
    (tmp_path / "rank00005").mkdir()
    (tmp_path / "rank00005" / "attempt000").write_text("a file", encoding="utf-8")
    run = open_run(tmp_path)
    assert [(p.kind, p.rank) for p in run.problems] == [
        (ProblemKind.UNREADABLE, rank) for rank in (1, 2, 3)
    ]
    recordings = [rank for attempt in run.attempts for rank in attempt]
    assert {rank.rank: kinds(rank.problems) for rank in recordings} == {
        0: [],
        4: [ProblemKind.UNREADABLE],
        5: [ProblemKind.UNREADABLE],
    }


def test_a_rank_without_permission_is_listed() -> None:
    """In a child that is not root, since root may read everything."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        run_dir.chmod(0o755)
        for rank in range(2):
            write_rank(run_dir, rank)
        (run_dir / "rank00001").chmod(0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setuid(65_534)
                run = open_run(run_dir)
                is_told = kinds(run.problems) == [ProblemKind.UNREADABLE]
                status = 0 if is_told and list(run.last_attempt.ranks) == [0] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (run_dir / "rank00001").chmod(0o755)


def test_a_linked_rank_folder_is_followed(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", 0)
    write_rank(tmp_path / "other", 1)
    (tmp_path / "run" / "rank00001").symlink_to(tmp_path / "other" / "rank00001")
    assert list(open_run(tmp_path / "run").last_attempt.ranks) == [0, 1]


def test_a_renamed_rank_folder_is_told(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    (tmp_path / "rank00000").rename(tmp_path / "rank00001")
    recording = open_run(tmp_path).last_attempt.ranks[1]
    recording.read("steps")
    assert set(kinds(recording.problems)) == {ProblemKind.MISPLACED}


def attempts_of(run_dir: Path) -> tuple[Attempt, ...]:
    return open_run(run_dir).attempts


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_two_processes_as_one_rank_at_the_same_time_are_duplicates(
    tmp_path: Path, is_closed: bool
) -> None:
    write_rank(tmp_path, 0, begin_ns=1_000, end_ns=9_000, is_closed=is_closed, world_size=1)
    write_rank(tmp_path, 0, begin_ns=5_000, end_ns=12_000, is_closed=is_closed, world_size=1)
    for attempt in attempts_of(tmp_path):
        assert kinds(attempt.problems) == [ProblemKind.DUPLICATE_RANK]
        assert "check the RANK each was given" in attempt.problems[0].text


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_one_after_the_other_under_one_launch_id_are_two_attempts(
    tmp_path: Path, is_closed: bool
) -> None:
    write_rank(tmp_path, 0, begin_ns=1_000, end_ns=4_000, is_closed=is_closed, world_size=1)
    write_rank(tmp_path, 0, begin_ns=5_000, end_ns=9_000, is_closed=is_closed, world_size=1)
    assert [kinds(attempt.problems) for attempt in attempts_of(tmp_path)] == [[], []]


def test_a_restart_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, rank, restart_count=0, begin_ns=1)
    write_rank(tmp_path, 0, restart_count=1, begin_ns=10_000)
    first, second = attempts_of(tmp_path)
    assert (first.restart_count, list(first.ranks)) == (0, [0, 1])
    assert (second.restart_count, list(second.ranks)) == (1, [0])
    assert list(second.missing_ranks) == [1]


def lose_header(run_dir: Path, rank: int, attempt: int = 0) -> None:
    """Damages the header line of a journal: its second line, after the extent."""
    path = run_dir / f"rank{rank:05d}" / f"attempt{attempt:03d}" / "journal.jsonl"
    flip_byte(path, path.read_bytes().index(b'"header"'))


def grouping(run_dir: Path) -> list[list[tuple[int, int]]]:
    """Rank and folder number of every recording, by attempt."""
    return [[(r.rank, r.attempt) for r in attempt] for attempt in attempts_of(run_dir)]


def test_a_rank_without_a_header_stays_with_the_other_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank(tmp_path, rank, world_size=3)
    lose_header(tmp_path, 1)
    (attempt,) = attempts_of(tmp_path)
    assert list(attempt.ranks) == [0, 1, 2]
    assert (attempt.launch_id, attempt.world_size) == ("job", 3)
    assert not attempt.missing_ranks
    assert attempt.problems == ()
    assert "no readable header" in attempt.ranks[1].problems[0].text
    assert attempt.ranks[1].read("steps")["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("bad_attempt", [0, 1])
def test_a_restarted_rank_without_a_header_is_placed_by_its_number(
    tmp_path: Path, bad_attempt: int
) -> None:
    for restart in range(2):
        for rank in range(3):
            write_rank(tmp_path, rank, world_size=3, restart_count=restart, begin_ns=1 + restart)
    lose_header(tmp_path, 2, bad_attempt)
    assert grouping(tmp_path) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert [attempt.restart_count for attempt in attempts_of(tmp_path)] == [0, 1]


def test_a_header_lost_in_both_attempts_leaves_two_attempts(tmp_path: Path) -> None:
    for restart in range(2):
        for rank in range(2):
            write_rank(tmp_path, rank, restart_count=restart, begin_ns=1 + restart)
    for attempt in range(2):
        lose_header(tmp_path, 0, attempt)
    assert grouping(tmp_path) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_a_number_of_its_own_goes_to_the_only_attempt_without_that_rank(tmp_path: Path) -> None:
    write_rank(tmp_path, 1, restart_count=0, begin_ns=1)
    for rank in range(2):  # rank 0 joined with the first restart, where its number is 0
        write_rank(tmp_path, rank, restart_count=1, begin_ns=2)
    for rank in range(2):
        write_rank(tmp_path, rank, restart_count=2, begin_ns=3)
    lose_header(tmp_path, 1, 2)
    assert grouping(tmp_path) == [[(1, 0)], [(0, 0), (1, 1)], [(0, 1), (1, 2)]]


def test_a_rank_whose_journal_was_never_written_is_with_the_others(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    (tmp_path / "rank00001" / "attempt000").mkdir(parents=True)
    (attempt,) = attempts_of(tmp_path)
    assert list(attempt.ranks) == [0, 1]
    assert kinds(attempt.ranks[1].problems) == [ProblemKind.TORN_TAIL]


def test_without_any_header_recordings_go_by_their_number(tmp_path: Path) -> None:
    for rank in range(2):
        for attempt in range(2):
            write_rank(tmp_path, rank, restart_count=attempt)
            lose_header(tmp_path, rank, attempt)
    assert grouping(tmp_path) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_recordings_that_do_not_say_when_they_began_are_no_duplicates(tmp_path: Path) -> None:
    for _ in range(2):
        write_rank(tmp_path, 0, world_size=1, start_unix_ns=None, start_host_mono_ns=None)
    assert [kinds(attempt.problems) for attempt in attempts_of(tmp_path)] == [[], []]


def test_a_table_file_that_got_lost_is_missed(tmp_path: Path) -> None:
    lose_table(table_path(write_rank(tmp_path, 0).directory, "steps"))
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert len(recording.read("steps")["step"]) == 0
    assert [p.text for p in recording.problems] == [
        "the file is missing; the journal says that it was made"
    ]


def test_hostile_headers_do_not_stop_the_reading(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    write_rank(tmp_path, 0, layout=deep, launch_id={"x": 1}, restart_count=True, pid="\x1b[31m")
    write_rank(tmp_path, 1, layout={"dp": 10**40}, start_unix_ns=10**400, world_size=-5)
    run = open_run(tmp_path)
    assert sum(len(attempt.ranks) for attempt in run.attempts) == 2
    assert all(isinstance(attempt.layout, Unavailable) for attempt in run.attempts)


def test_a_live_run_shows_no_damage_while_threads_write(tmp_path: Path) -> None:
    writer = write_rank(tmp_path, 0, num_steps=0, is_closed=False, world_size=1)
    is_over = threading.Event()

    def work() -> None:
        number = 0
        while not is_over.is_set():
            writer.table("spans").put(2, number, 1, 1, -1, 0, 0)
            number += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 1.5
        last = -1
        while time.monotonic() < deadline:
            recording = open_run(tmp_path).last_attempt.ranks[0]
            count = len(recording.read("spans")["depth"])
            bad = [p for p in recording.problems if p.kind is not ProblemKind.TORN_TAIL]
            assert bad == []
            assert count >= last
            last = count
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    writer.close()
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert len(recording.read("spans")["depth"]) >= last
    assert recording.problems == []


def test_a_damaged_manifest_is_told_and_the_run_is_read(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, world_size=1)
    (tmp_path / "run.json").write_text('{"format": "meshsc', encoding="utf-8")
    run = open_run(tmp_path)
    assert kinds(run.problems) == [ProblemKind.DAMAGED]
    assert run.last_attempt.problems == run.problems
    (tmp_path / "run.json").unlink()
    assert open_run(tmp_path).problems == ()


def test_what_is_no_run_says_why_in_one_line(tmp_path: Path) -> None:
    cases: list[tuple[Path, type[RunError]]] = [(tmp_path / "none", RunNotFound)]
    (tmp_path / "file").write_text("x", encoding="utf-8")
    cases.append((tmp_path / "file", RunNotFound))
    (tmp_path / "empty").mkdir()
    cases.append((tmp_path / "empty", RunNotFound))
    for name, document, error in (
        ("started", {"format": "meshscope-run", "schema_version": 1}, RunEmpty),
        ("future", {"format": "meshscope-run", "schema_version": 99}, SchemaTooNew),
        ("other", {"format": "something"}, RunNotFound),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(seal(document))
        cases.append((tmp_path / name, error))
    (tmp_path / "handmade").mkdir()
    (tmp_path / "handmade" / "run.json").write_text(json.dumps([1]), encoding="utf-8")
    cases.append((tmp_path / "handmade", RunError))
    for path, error in cases:
        with pytest.raises(error) as caught:
            open_run(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
