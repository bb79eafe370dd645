"""Attempts of a job: every recording is with those it ran beside, whatever numbers it carries."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.compact import compact_run
from meshscope.store.read.query import connect
from meshscope.store.read.run import open_run
from meshscope.store.write.attempts import next_attempt
from meshscope.store.write.writer import RankWriter

UNIX_NS = 1_763_200_000_000_000_000
SECOND = 1_000_000_000


def write(
    run_dir: Path,
    rank: int,
    start_s: float,
    *,
    steps: Iterable[int] = (0,),
    is_closed: bool = False,
    **header: object,
) -> None:
    """A recording of ten seconds; without a closing line unless asked, as kills leave it."""
    start_ns = int(start_s * SECOND)
    fields: dict[str, object] = {
        "rank": rank,
        "world_size": 4,
        "host": f"node{rank // 2}",
        "start_unix_ns": UNIX_NS + start_ns,
        "start_host_mono_ns": start_ns,
    }
    writer = RankWriter(run_dir, rank, header={**fields, **header})
    for step in steps:
        writer.table("steps").put(step, start_ns, start_ns + 10 * SECOND, 1, -1, -1, 0)
    if is_closed:
        writer.close(end_host_mono_ns=start_ns + 10 * SECOND)


def starts(run_dir: Path) -> list[dict[int, float]]:
    """When each rank's recording began, in seconds, by attempt."""
    return [
        {rank: (r.start_unix_ns - UNIX_NS) / SECOND for rank, r in attempt.ranks.items()}
        for attempt in open_run(run_dir).attempts
    ]


def test_a_rank_that_died_before_its_first_record_is_with_its_restart(tmp_path: Path) -> None:
    """Without a launch id (torchrun's default) recordings are numbered rank by rank."""
    for attempt in range(3):
        for rank in range(4):
            if (rank, attempt) != (3, 0):
                write(tmp_path, rank, 20 * attempt, launch_id=None, restart_count=attempt)
    assert starts(tmp_path) == [
        dict.fromkeys((0, 1, 2), 0.0),
        dict.fromkeys((0, 1, 2, 3), 20.0),
        dict.fromkeys((0, 1, 2, 3), 40.0),
    ]
    assert [list(a.missing_ranks) for a in open_run(tmp_path).attempts] == [[3], [], []]


def test_nodes_whose_restart_counts_differ_are_in_one_attempt(tmp_path: Path) -> None:
    """torchrun counts a restart on the node that failed, and not on those that follow it."""
    counts = {0: [0, 0, 1], 1: [0, 1, 1]}  # by node: the second fails first, then the first
    for attempt in range(3):
        for rank in range(4):
            count = counts[rank // 2][attempt]
            write(tmp_path, rank, 20 * attempt + rank / 10, launch_id="job", restart_count=count)
    assert starts(tmp_path) == [
        {rank: 20 * attempt + rank / 10 for rank in range(4)} for attempt in range(3)
    ]


def test_only_some_ranks_came_back(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, 0, launch_id=None)
    for rank in (1, 2):
        write(tmp_path, rank, 20, launch_id=None)
    write(tmp_path, 2, 40, launch_id=None)
    assert starts(tmp_path) == [
        dict.fromkeys(range(4), 0.0),
        {1: 20.0, 2: 20.0},
        {2: 40.0},
    ]


def test_ranks_that_never_recorded_side_by_side_stay_where_their_numbers_put_them(
    tmp_path: Path,
) -> None:
    """A rank whose first record comes when another is done: no other attempt claims it."""
    write(tmp_path, 0, 0, launch_id="job", is_closed=True)
    write(tmp_path, 1, 30, launch_id="job", is_closed=True)
    assert starts(tmp_path) == [{0: 0.0, 1: 30.0}]


def test_a_stated_attempt_is_believed_whatever_else_is_there(tmp_path: Path) -> None:
    """Clocks of hosts an hour apart, counts that differ, a rank that is missing."""
    for attempt in range(3):
        for rank in range(4):
            if (rank, attempt) == (3, 0):
                continue
            skew_s = 3600 if rank >= 2 else 0
            count = attempt if rank >= 2 else 0
            write(
                tmp_path,
                rank,
                20 * attempt + skew_s,
                launch_id="job",
                restart_count=count,
                job_attempt=attempt,
            )
    found = starts(tmp_path)
    assert [sorted(ranks) for ranks in found] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [ranks[2] - ranks[0] for ranks in found] == [3600.0] * 3


@pytest.mark.parametrize("nonsense", [-1, True, "1", 1 << 40])
def test_a_stated_attempt_that_is_no_number_counts_as_none(
    tmp_path: Path, nonsense: object
) -> None:
    write(tmp_path, 0, 0, launch_id="job", job_attempt=nonsense)
    write(tmp_path, 1, 0, launch_id="job")
    assert starts(tmp_path) == [{0: 0.0, 1: 0.0}]


def test_the_next_attempt_is_one_that_nobody_has(tmp_path: Path) -> None:
    assert next_attempt(tmp_path / "none") == 0
    assert next_attempt(tmp_path) == 0
    write(tmp_path, 1, 0)
    assert next_attempt(tmp_path) == 1
    write(tmp_path, 0, 20, job_attempt=1)  # its first folder, but the job's second attempt
    assert next_attempt(tmp_path) == 2
    (tmp_path / "rank00007" / "attempt004").mkdir(parents=True)
    (tmp_path / "rank00008").write_text("no folder")
    assert next_attempt(tmp_path) == 5


def record(run_dir: Path, rank: int, attempt: int, steps: Iterable[int], ends: bool) -> None:
    """Steps by their numbers, as a job that resumes from a checkpoint marks them."""
    made = Recorder(run_dir, config=RecorderConfig(provenance=False), attempt=attempt)
    for step in steps:
        with made.step(step):
            pass
    if ends:
        made.close()
        return
    made.disarm_after_fork()  # leaves everything as a kill does


def test_a_job_that_resumes_at_step_7_has_two_attempts_and_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 8, with a checkpoint after step 6: 7 really ran twice."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for attempt, steps in enumerate((range(8), range(7, 12))):
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("MESHSCOPE_ATTEMPT", "99")  # the argument comes first
            record(tmp_path, rank, attempt, steps, ends=attempt == 1)
    expected = [
        (attempt, rank, step)
        for attempt, steps in enumerate((range(8), range(7, 12)))
        for rank in range(2)
        for step in steps
    ]
    for _ in range(2):  # as recorded, then compacted
        run = open_run(tmp_path)
        found = [
            (attempt.index, rank.rank, step)
            for attempt in run.attempts
            for rank in attempt
            for step in rank.read("steps")["step"].tolist()
        ]
        assert found == expected
        with connect(run) as con:
            sql = "select attempt, rank, step from steps order by all"
            assert con.execute(sql).fetchall() == expected
        compact_run(tmp_path, remove_raw=True, include_unfinished=True)


def test_the_environment_states_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 died early in attempt 0; torchrun without a run id tells the restart."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, attempt in ((0, 0), (0, 1), (1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.setenv("MESHSCOPE_ATTEMPT", str(attempt))
        made = Recorder(tmp_path, config=RecorderConfig(provenance=False))
        with made.step(5 * attempt):
            pass
        made.close()
    found = [
        {rank.rank: rank.read("steps")["step"].tolist() for rank in attempt}
        for attempt in open_run(tmp_path).attempts
    ]
    assert found == [{0: [0]}, {0: [5], 1: [5]}]
