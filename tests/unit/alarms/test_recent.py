"""The last steps, cut out of the files: the same rows as those of the whole run."""

from pathlib import Path

import numpy as np
from synthetic_run import WORDS_PER_STEP, Fault, Job, write_run

from meshscope.alarms.rank_choice import choose_ranks
from meshscope.alarms.recent import take_recent
from meshscope.alarms.screening import Screening
from meshscope.store.read.run import open_run
from meshscope.store.read.table_tails import TableTails

NUM_RANKS, NUM_STEPS = 16, 80


def test_recent_rows_are_the_last_of_the_whole_run(tmp_path: Path) -> None:
    write_run(tmp_path, Job(num_ranks=NUM_RANKS), NUM_STEPS)
    attempt = open_run(tmp_path).last_attempt
    recent = take_recent(attempt, (3, 5), 30)
    assert recent is not None
    assert list(recent.ranks) == [3, 5]
    for name, per_step in WORDS_PER_STEP.items():
        whole, part = attempt.ranks[3].read(name), recent.ranks[3].read(name)
        for column, values in part.items():
            assert len(values) == 30 * per_step
            np.testing.assert_array_equal(values, whole[column][-len(values) :])


def test_tails_give_every_record_once_as_files_grow(tmp_path: Path) -> None:
    from synthetic_run import append_steps, rank_folder

    job = Job(num_ranks=8)
    paths = [rank_folder(tmp_path, rank) / "steps.tbl" for rank in range(8)]
    tails = TableTails(paths, num_before=10_000)
    seen: list[tuple[int, int]] = []
    assert not list(tails.read())  # no file yet
    for _ in append_steps(tmp_path, job, 600, chunk_steps=200):
        for index, words in tails.read():
            seen += zip(index.tolist(), words[:, 1].tolist(), strict=True)
    assert sorted(seen) == [(rank, step) for rank in range(8) for step in range(600)]
    with paths[2].open("r+b") as file:  # a torn record is waited for, and passed over at last
        file.seek(4096 + 600 * 64)
        file.write(b"\x01" * 64)
    for _ in append_steps(tmp_path, job, 0):
        raise AssertionError
    assert not list(tails.read())


def test_who_stands_out_is_whom_others_wait_for(tmp_path: Path) -> None:
    write_run(tmp_path, Job(num_ranks=NUM_RANKS, faults=(Fault(rank=11, ratio=1.3),)), NUM_STEPS)
    screening = Screening(open_run(tmp_path).last_attempt)
    screening.look()
    assert screening.find_suspects() == (11,)
    assert (screening.step, screening.find_behind(64)) == (NUM_STEPS - 1, ())


def test_every_rank_has_its_turn_and_the_wanted_are_always_there(tmp_path: Path) -> None:
    write_run(tmp_path, Job(num_ranks=256), 1)
    attempt = open_run(tmp_path).last_attempt
    turns = [choose_ranks(attempt, (200,), max_ranks=64, turn=turn) for turn in range(8)]
    assert all(len(ranks) <= 64 and 200 in ranks for ranks in turns)
    assert set().union(*turns) == set(range(256))
    assert choose_ranks(attempt, (), max_ranks=256, turn=3) == tuple(range(256))
