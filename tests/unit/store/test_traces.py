"""Windows as journals have them, and which steps they disturb."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import MS, make_run, make_writer, put_step
from late_runs import LateRun
from meshscope.analyze.compare.compare import read_side
from meshscope.analyze.stragglers.step_pattern import read_periods
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import Attempt, open_run
from meshscope.store.read.trace_windows import mark_profiled, windows_of

PATH = "traces/rank0/host_1.2.pt.trace.json.gz"


def window(number: int = 0, *, first: int = 4, last: int = 5, **changes: object) -> dict:
    """A line of one that ended, with a step of warm-up."""
    return {
        "number": number,
        "reason": "the schedule",
        "disturbed_from_step": first - 1,
        "first_step": first,
        "last_step": last,
        "disturbed_to_step": last + 1,
        "begin_host_mono_ns": 1000,
        "end_host_mono_ns": 2000,
        "write_ns": 300,
        "path": PATH,
        "bytes": 77,
        **changes,
    }


def with_lines(attempt: Attempt, lines: dict[int, list[object]]) -> Attempt:
    """The attempt with trace windows in some ranks' journals."""
    ranks = {
        rank: replace(
            recording, updates=tuple({"trace_window": line} for line in lines.get(rank, []))
        )
        for rank, recording in attempt.ranks.items()
    }
    return replace(attempt, ranks=ranks)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=20)
    return open_run(tmp_path / "run").last_attempt


def test_a_window_written_by_a_rank_is_read_back(tmp_path):
    writer = make_writer(tmp_path / "run")
    put_step(writer, 0, 10, 20)
    begun = window(first=-1, last=-1, disturbed_from_step=3, disturbed_to_step=-1, path=None)
    writer.journal.write("update", trace_window={**begun, "is_open": True})
    writer.journal.write("update", trace_window=window())
    writer.close(end_host_mono_ns=30)
    (found,) = windows_of(open_run(tmp_path / "run").last_attempt)
    assert (found.rank, found.number, found.reason) == (0, 0, "the schedule")
    assert (found.disturbed_from_step, found.first_step) == (3, 4)
    assert (found.last_step, found.disturbed_to_step) == (5, 6)
    assert (found.path, found.num_bytes, found.problem) == (PATH, 77, None)
    assert (found.begin_host_mono_ns, found.end_host_mono_ns, found.write_ns) == (1000, 2000, 300)


def test_numbers_begin_again_with_other_settings(attempt):
    later = window(first=12, last=12, begin_host_mono_ns=5000)
    found = windows_of(with_lines(attempt, {0: [window(), later]}))
    assert [(w.number, w.first_step) for w in found] == [(0, 4), (0, 12)]


@pytest.mark.parametrize(
    "line",
    [
        None,
        [],
        "window",
        {},
        window(number=-1),
        window(number=True),
        window(number=1 << 70),
        window(begin_host_mono_ns="now"),
        window(disturbed_from_step=None),
    ],
)
def test_a_line_that_makes_no_sense_is_no_window(attempt, line):
    assert windows_of(with_lines(attempt, {0: [line]})) == ()


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b", "", 3, "x" * 2000, "a\0"])
def test_a_path_out_of_the_run_is_no_path(attempt, path):
    (found,) = windows_of(with_lines(attempt, {0: [window(path=path)]}))
    assert (found.path, found.num_bytes) == (None, None)


def test_a_window_disturbs_its_warmup_its_steps_and_the_next(attempt):
    windows = windows_of(with_lines(attempt, {1: [window()]}))
    marked = mark_profiled(np.arange(10), windows)
    assert np.flatnonzero(marked).tolist() == [3, 4, 5, 6]


def test_a_window_without_an_end_disturbs_all_that_follows(attempt):
    windows = windows_of(with_lines(attempt, {0: [window(disturbed_to_step=-1)]}))
    assert np.flatnonzero(mark_profiled(np.arange(8), windows)).tolist() == [3, 4, 5, 6, 7]


def test_the_timeline_leaves_profiled_steps_out(attempt):
    found = build_timeline(with_lines(attempt, {1: [window()]}))
    assert found.steps.tolist() == [1, 2, *range(7, 20)]
    assert (found.num_profiled, found.num_left_out) == (4, 0)


def test_no_timeline_where_all_was_profiled(attempt):
    lines = {0: [window(disturbed_from_step=0, disturbed_to_step=99)]}
    found = build_timeline(with_lines(attempt, lines))
    assert found == Unavailable("all 19 steps after warm-up were profiled")


def make_slow_window(path: Path) -> Attempt:
    """Steps of 100 ms with gaps of 1 ms; 4 and 5 take 300 ms, and gaps around them 500 ms."""
    writer = make_writer(path)
    now_ns = 10 * MS
    for step in range(40):
        duration_ns = 300 * MS if step in (4, 5) else 100 * MS
        put_step(writer, step, now_ns, now_ns + duration_ns)
        now_ns += duration_ns + (500 * MS if step in (2, 5) else MS)
    writer.journal.write("update", trace_window=window())
    writer.close(end_host_mono_ns=now_ns)
    return open_run(path).last_attempt


def test_statistics_of_steps_leave_profiled_ones_out(tmp_path):
    attempt = make_slow_window(tmp_path / "run")
    steps = Study(attempt).steps
    assert (steps.num_steps, steps.num_warmup, steps.num_profiled) == (40, 1, 4)
    assert (steps.time.count, steps.time.max_ns) == (35, 100 * MS)
    assert steps.interval.max_ns == 101 * MS
    assert int(steps.duration_ns.max()) == 300 * MS, "the series has them"
    assert read_periods(attempt, num_warmup=1).period_ns.max() == 101 * MS
    side = read_side(attempt, None)
    assert (side.duration_ns.max(), side.period_ns.max()) == (100 * MS, 101 * MS)


def test_phases_and_ranks_leave_the_same_steps_out(tmp_path):
    summary = Study(make_slow_window(tmp_path / "run"))
    (rank,) = summary.ranks
    assert (rank.num_warmup, rank.num_profiled, rank.num_steady_steps) == (1, 4, 35)
    assert (rank.step_time.count, rank.step_time.max_ns) == (35, 100 * MS)
    assert rank.step_interval.max_ns == 101 * MS
    assert rank.time.steady_steps.wall_ns == summary.time.steady_steps.wall_ns == 3500 * MS
    assert summary.time.num_steady_rank_steps == 35
    assert rank.time.steps.wall_ns == 38 * 100 * MS + 2 * 300 * MS, "the wall clock has all"
    assert rank.time.between.wall_ns == 37 * MS + 2 * 500 * MS


def test_where_all_was_profiled_no_rank_has_statistics(attempt):
    found = with_lines(attempt, {0: [window(first=1, last=30)]})
    summary = Study(found)
    reason = Unavailable("all steps after warm-up were profiled")
    assert summary.steps.time == reason
    assert [rank.step_time for rank in summary.ranks] == [reason, reason]
    assert summary.time.num_steady_rank_steps == 0
    assert summary.time.steps.wall_ns > 0


def test_communication_leaves_the_same_steps_out(tmp_path):
    work = {"forward": 10 * MS, "backward": 20 * MS, "optimizer": MS}
    slow = {**work, "forward": 50 * MS}

    def choose_work(rank: int, step: int) -> dict[str, int]:
        return slow if rank and step in (3, 4, 5, 6) else work

    LateRun(layout=Layout(dp=2), work=choose_work).record(tmp_path)
    attempt = open_run(tmp_path).last_attempt
    found = Study(attempt).communication
    assert (found.total.num_operations, found.total.wait_ns) == (39, 4 * 40 * MS)
    found = Study(with_lines(attempt, {1: [window()]})).communication
    assert (found.total.num_operations, found.total.wait_ns) == (35, 0)
    assert found.health.num_warmup == 2 * 5, "of two ranks: the first step and four profiled"
