"""Runs of pipelines are put into one array, from actions or from phases."""

from types import SimpleNamespace

import numpy as np
import pytest

from builders import MS, START_MONO_NS, make_writer, put_span, put_step
from meshscope.analyze.pipeline import phase_actions
from meshscope.analyze.pipeline.pipeline_times import ActionSource, collect_pipeline_times
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from pipeline_builders import Recipe, make_pipeline_run, stage_cost

EVEN = stage_cost({0: (2, 4), 1: (2, 4), 2: (2, 4)})


def collect(path):
    attempt = open_run(path).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable), timeline
    return collect_pipeline_times(timeline, attempt)


@pytest.mark.parametrize("records_actions", [True, False])
def test_actions_and_phases_give_the_same_times(tmp_path, records_actions):
    recipe = Recipe(
        schedule=build_schedule("1f1b", 3, 4),
        cost=EVEN,
        num_chains=2,
        num_steps=3,
        records_actions=records_actions,
    )
    times = collect(make_pipeline_run(tmp_path / "run", recipe))
    assert not isinstance(times, Unavailable)
    assert times.source is (ActionSource.RECORDED if records_actions else ActionSource.PHASES)
    assert times.executed.name == "1f1b"
    assert times.chains == ((0, 1, 2), (3, 4, 5))
    assert times.start_ns.shape == (24, 6)
    assert sorted(zip(times.chain.tolist(), times.step.tolist(), strict=True)) == [
        (chain, step) for chain in range(2) for step in range(3)
    ]
    assert np.unique(times.duration_ns).tolist() == [2 * MS, 4 * MS]
    assert (times.work_ns == times.duration_ns).all()
    assert (times.num_other_runs, times.num_runs_skipped) == (0, 0)


def test_without_a_layout_pipelines_follow_from_stages(tmp_path):
    recipe = Recipe(
        schedule=build_schedule("zb_v", 2, 4),
        cost=lambda step, chain, action: MS,
        num_chains=2,
        num_steps=2,
        layout=False,
    )
    times = collect(make_pipeline_run(tmp_path / "run", recipe))
    assert not isinstance(times, Unavailable)
    assert times.executed.name == "zb_v"
    assert times.chains == ((0, 1), (2, 3))
    assert times.ranks_of(1) == (1, 3)


def test_without_layout_actions_and_messages_there_is_no_pipeline(tmp_path):
    recipe = Recipe(
        schedule=build_schedule("1f1b", 3, 4), cost=EVEN, layout=False, records_actions=False
    )
    found = collect(make_pipeline_run(tmp_path / "run", recipe))
    assert isinstance(found, Unavailable)


def test_steps_in_another_order_are_counted_and_left_out(tmp_path):
    path = tmp_path / "run"
    usual, other = build_schedule("1f1b", 2, 4), build_schedule("gpipe", 2, 4)
    writers = [make_writer(path, rank, 2) for rank in range(2)]
    for step in range(5):
        schedule = other if step == 2 else usual
        start_ns = START_MONO_NS + step * 100 * MS
        for rank, writer in enumerate(writers):
            for index, action in enumerate(schedule.actions[rank]):
                code = 0 if action.kind is ActionKind.FORWARD else 1
                at_ns = start_ns + (4 * index + rank) * MS
                words = (code | rank << 32, step, action.microbatch, at_ns, MS, -1, -1)
                writer.table("actions").put(*words)
            put_step(writer, step, start_ns, start_ns + 99 * MS)
    for writer in writers:
        writer.close(end_host_mono_ns=START_MONO_NS + 600 * MS, last_step=4, num_errors=0)
    times = collect(path)
    assert not isinstance(times, Unavailable)
    assert times.executed.name == "1f1b"
    assert (times.num_runs, times.num_other_runs) == (4, 1)


def test_a_rank_without_actions_is_said(tmp_path):
    path = tmp_path / "run"
    layout = {"dp": 1, "tp": 1, "pp": 2, "cp": 1, "ep": 1, "order": ["pp"]}
    for rank in range(2):
        writer = make_writer(path, rank, 2, layout=layout)
        put_span(writer, "forward", START_MONO_NS, 2 * MS)
        if rank == 0:
            writer.table("actions").put(0, 0, 0, START_MONO_NS, 2 * MS, -1, -1)
        put_step(writer, 0, START_MONO_NS, START_MONO_NS + 9 * MS)
        writer.close(end_host_mono_ns=START_MONO_NS + 10 * MS, last_step=0, num_errors=0)
    found = collect(path)
    assert isinstance(found, Unavailable)
    assert "places [1]" in found.reason


@pytest.mark.parametrize(
    "words",
    [
        (250, 0, 0, START_MONO_NS, 5, -1, -1),  # a kind that does not exist
        ((1 << 30) << 32, 0, 0, START_MONO_NS, 5, -1, -1),  # a stage that cannot be
        (0, 0, 1 << 62, START_MONO_NS, 5, -1, -1),  # a microbatch that cannot be
        (0, 0, 1 << 30, START_MONO_NS, 5, -1, -1),  # one of a billion
        (0, 0, -1 << 62, START_MONO_NS, -5, 3, -7),
        (0, 0, 0, -1, 1 << 62, 1 << 62, 1 << 62),
    ],
)
def test_hostile_actions_are_refused_with_a_reason(tmp_path, words):
    path = tmp_path / "run"
    for rank in range(2):
        writer = make_writer(path, rank, 2)
        writer.table("actions").put(*words)
        put_step(writer, 0, START_MONO_NS, START_MONO_NS + 9 * MS)
        writer.close(end_host_mono_ns=START_MONO_NS + 10 * MS, last_step=0, num_errors=0)
    assert isinstance(collect(path), Unavailable)


def test_phases_of_a_device_are_where_its_stream_was_and_not_where_its_host_was(monkeypatch):
    """The host issued both phases at once; the device came to them 100 and 130 later."""
    marks = {
        "host_start_host_mono_ns": np.array([20, 10]),
        "start_device_ns": np.array([1130, 1100]),
        "duration_ns": np.array([7, 5]),
    }
    recording = SimpleNamespace(read=lambda table: marks)
    offsets = SimpleNamespace(find=lambda issued_ns: np.full(len(issued_ns), -1000))
    monkeypatch.setattr(phase_actions, "fit_mark_offsets", lambda recording: offsets)
    start_ns, end_ns, is_known = phase_actions._find_device_times(recording, np.array([10, 15, 20]))
    assert is_known.tolist() == [True, False, True]
    assert start_ns[is_known].tolist() == [100, 130]
    assert end_ns[is_known].tolist() == [105, 137]
    # Without a kernel sample the device's clock is not known well enough.
    monkeypatch.setattr(phase_actions, "fit_mark_offsets", lambda recording: None)
    assert not phase_actions._find_device_times(recording, np.array([10]))[2].any()
