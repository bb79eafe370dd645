"""A timeline of some windows of a run is the same windows of the timeline of all of it."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.timeline.timeline import StepChoice, Timeline
from meshscope.analyze.timeline.work import measure_work
from meshscope.core.layout import Layout
from meshscope.store.read import table_window
from meshscope.store.read.compact import compact_run
from meshscope.store.read.run import open_run
from timeline_builders import TimedJob, timeline_of

NUM_STEPS = 120
CHOICE = StepChoice(max_rank_steps=2 * 40, num_windows=2)


def _make(path: Path) -> None:
    job = TimedJob(path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    rng = np.random.default_rng(1)
    at = 0
    for step in range(NUM_STEPS):
        work = {
            rank: {"data": rng.uniform(1, 2), "forward": rng.uniform(5, 9)} for rank in range(2)
        }
        at = job.train(
            num_steps=1,
            work_ms=work,
            transfer_ms=2,
            gap_ms=1,
            group=group,
            first_step=step,
            start_ns=at,
        )
        for rank in range(2):
            job.action(
                rank,
                "F",
                step=step,
                microbatch=0,
                stage=0,
                start_ns=at - 3 * MS,
                end_ns=at - 2 * MS,
            )
    job.close()


def _check_same(part: Timeline, whole: Timeline) -> None:
    index = np.searchsorted(whole.steps, part.steps)
    assert (part.period_start_ns == whole.period_start_ns[:, index]).all()
    assert (part.period_end_ns == whole.period_end_ns[:, index]).all()
    assert (measure_work(part).work_ns == measure_work(whole).work_ns[:, index]).all()
    assert (measure_work(part).held_ns == measure_work(whole).held_ns[:, index]).all()


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("whole_bytes", [1 << 20, 0])
def test_windows_are_as_in_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compacted: bool, whole_bytes: int
) -> None:
    _make(tmp_path)
    whole = timeline_of(open_run(tmp_path).last_attempt)
    if is_compacted:
        compact_run(tmp_path, remove_raw=True)
        assert not list(tmp_path.rglob("*.pack"))
    monkeypatch.setattr(table_window, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(table_window, "MARGIN_RECORDS", 8)
    part = timeline_of(open_run(tmp_path).last_attempt, steps=CHOICE)

    assert part.steps[part.starts_window].tolist() == [0, 100]
    assert part.num_left_out == NUM_STEPS - len(part.steps)
    assert len(part.steps) == 40
    _check_same(part, whole)


def test_rows_bound_the_steps_too(tmp_path: Path) -> None:
    _make(tmp_path)
    part = timeline_of(open_run(tmp_path).last_attempt, steps=StepChoice(max_rows=400))

    whole = timeline_of(open_run(tmp_path).last_attempt)
    assert 20 <= len(part.steps) <= 60
    _check_same(part, whole)
    assert part.communication is not None
    assert len(part.communication.operations.rows) <= 2 * (len(part.steps) + 10)


def test_warmup_counts_in_windows(tmp_path: Path) -> None:
    _make(tmp_path)
    part = timeline_of(open_run(tmp_path).last_attempt, warmup_steps=30, steps=CHOICE)

    assert part.steps[0] == 30
    assert part.num_left_out == 90 - len(part.steps)
