import numpy as np

from builders import MS
from late_runs import STEADY, LateRun
from meshscope.analyze.timeline.gc_collections import measure_collections
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.store.read.run import open_run


def measure(path, **fields):
    LateRun(layout=Layout(dp=2), work=lambda rank, step: STEADY, num_steps=8, **fields).record(path)
    attempt = open_run(path).last_attempt
    timeline = build_timeline(attempt, warmup_steps=1)
    return timeline, measure_collections(attempt, timeline)


def test_a_collection_is_time_of_the_work_it_lies_in(tmp_path):
    timeline, found = measure(
        tmp_path, collections=lambda rank, step: 4 * MS if rank == 1 and step % 3 == 0 else 0
    )
    pieces = timeline.pieces
    hit = np.flatnonzero(found.lost_ns)
    assert found.lost_ns[hit].tolist() == [4 * MS] * 2
    assert set(pieces.rank[hit].tolist()) == {1}
    assert timeline.steps[pieces.step[hit]].tolist() == [3, 6]
    assert {timeline.phases[phase] for phase in pieces.phase[hit]} == {"forward"}
    assert found.num_collections == {1: 2}
    assert found.has_any


def test_a_collection_longer_than_the_work_counts_what_lies_in_work(tmp_path):
    """30 ms from the begin of forward: 10 ms of it and 20 ms of backward; then the all-reduce."""
    timeline, found = measure(tmp_path, collections=lambda rank, step: 35 * MS if rank == 0 else 0)
    pieces = timeline.pieces
    is_work = pieces.kind == PieceKind.WORK
    assert int(found.lost_ns[~is_work].sum()) == 0
    in_steps = [
        int(found.lost_ns[(pieces.rank == 0) & (pieces.step == step)].sum())
        for step in range(len(timeline.steps))
    ]
    assert in_steps == [32 * MS] * 7
    assert bool((found.lost_ns <= pieces.duration_ns).all())


def test_without_collections_nothing_is_lost(tmp_path):
    _, found = measure(tmp_path)
    assert not found.has_any
    assert found.num_collections == {}
