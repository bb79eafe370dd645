"""The short version of benchmarks/kill_storm.py, and that it can fail."""

import random
from pathlib import Path

import kill_storm
from kill_storm import Acknowledged, ModeResult, check_run, record_words

from builders import flip_byte, table_path
from meshscope.store.write.writer import RankWriter


def test_nothing_acknowledged_is_lost_in_twenty_kills(tmp_path: Path) -> None:
    results = kill_storm.storm(tmp_path, 20, seed=random.SystemRandom().randrange(1 << 30))
    assert sum(result.num_kills for result in results) == 20
    for result in results:
        assert result.num_opened == result.num_kills
        assert (result.num_lost, result.num_wrong, result.problems) == (0, 0, [])
        assert result.num_miscounted == 0
    assert sum(result.num_acknowledged for result in results) > 1000


def test_the_storm_sees_lost_wrong_and_damaged_records(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, header={"rank": 0, "world_size": 1})
    for number in (0, 1, 3):  # 2 is missing
        writer.table("steps").put(*record_words("steps", 0, number))
    writer.table("spans").put(*record_words("spans", 0, 0)[:2], 5, 5, 5, 5, 5)  # not what it was
    for number in range(3):
        writer.table("scalars").put(*record_words("scalars", 0, number))
    path = table_path(tmp_path / "rank00000" / "attempt000", "scalars")
    writer.close()
    flip_byte(path, 4096 + 64 + 20)
    acknowledged = Acknowledged()
    for table, count in enumerate((4, 1, 3)):
        acknowledged.set(0, table, count)
    result = ModeResult(mode="mapped")
    check_run(tmp_path, acknowledged, result)
    assert result.num_lost == 2  # step 2 and the damaged scalar
    assert result.num_wrong == 1
    assert result.num_damaged_runs == 1
