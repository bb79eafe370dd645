"""SIGKILL against a whole recorder: every step, phase and scalar that was acknowledged is read."""

import random
from pathlib import Path

import kill_recorder
import kill_storm
import pytest
from kill_recorder import KINDS
from kill_storm import Acknowledged

from meshscope.store.read.run import open_run
from meshscope.store.write.now_file import NOW_NAME
from meshscope.store.write.open_step import FIRST_STAMP_WORD


def test_twenty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    (result,) = kill_storm.storm(tmp_path, 20, seed, modes=(kill_storm.RECORDER_MODE,))
    assert (result.num_kills, result.num_opened) == (20, 20)
    assert (result.num_lost, result.num_wrong, result.problems) == (0, 0, []), f"seed {seed}"
    assert result.num_miscounted == 0
    assert result.num_acknowledged > 1000
    assert result.num_open_step_phases > 0  # else the unfinished step was never looked at


class Stop(Exception):
    """Ends the script, which has no end of its own."""


class StoppingCounts(Acknowledged):
    """Ends the script after some phases, as a kill would."""

    def __init__(self, num_phases: int) -> None:
        super().__init__()
        self._num_phases = num_phases

    def set(self, thread: int, table: int, count: int) -> None:
        super().set(thread, table, count)
        if table == KINDS.index("phases") and count == self._num_phases:
            raise Stop


def record_some(run_dir: Path, seed: int, num_phases: int) -> Acknowledged:
    """Follows a script in this process and leaves everything as it stands."""
    acknowledged = StoppingCounts(num_phases)
    try:
        kill_recorder.follow(run_dir, seed, acknowledged)
    except Stop:
        pass
    return acknowledged


def compare(run_dir: Path, seed: int, acknowledged: Acknowledged) -> kill_recorder.Comparison:
    return kill_recorder.compare(open_run(run_dir).last_attempt.ranks[0], seed, acknowledged)


def test_every_moment_of_a_step_is_a_good_one_to_die(tmp_path: Path) -> None:
    """After each of the first phases of a script in turn."""
    for num_phases in range(1, 60):
        acknowledged = record_some(tmp_path / str(num_phases), 3, num_phases)
        found = compare(tmp_path / str(num_phases), 3, acknowledged)
        assert (found.num_lost, found.num_wrong, found.num_miscounted) == (0, 0, 0), num_phases


def test_the_comparison_sees_what_is_lost_of_the_unfinished_step(tmp_path: Path) -> None:
    for num_phases in range(20, 80):
        run_dir = tmp_path / str(num_phases)
        acknowledged = record_some(run_dir, 3, num_phases)
        if compare(run_dir, 3, acknowledged).num_open_step_phases >= 3:
            break
    path = run_dir / "rank00000" / "attempt000" / NOW_NAME
    head = path.read_bytes()[: 8 * FIRST_STAMP_WORD]
    path.write_bytes(head.ljust(path.stat().st_size, b"\0"))
    assert compare(run_dir, 3, acknowledged).num_lost >= 1
    acknowledged.set(0, KINDS.index("steps"), 0)
    assert compare(run_dir, 3, acknowledged).num_miscounted == 1


def test_the_comparison_sees_what_is_there_twice_or_not_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged = record_some(tmp_path, 3, 40)
    rows = kill_recorder.read(open_run(tmp_path).last_attempt.ranks[0])
    assert len(rows["phases"]) == 40
    twice = {**rows, "phases": [*rows["phases"], rows["phases"][7]]}
    monkeypatch.setattr(kill_recorder, "read", lambda recording: twice)
    assert compare(tmp_path, 3, acknowledged).num_wrong == 1
    name, start, duration, self_ns = rows["phases"][7]
    changed = [row for row in rows["phases"] if row != rows["phases"][7]]
    changed.append((name, start, duration, int(str(self_ns)) + 1))
    monkeypatch.setattr(kill_recorder, "read", lambda recording: {**rows, "phases": changed})
    found = compare(tmp_path, 3, acknowledged)
    assert (found.num_wrong, found.num_lost) == (1, 1)
