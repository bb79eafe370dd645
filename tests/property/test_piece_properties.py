"""Pieces of a rank sum to its periods, exactly, whatever was recorded."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import START_MONO_NS, make_writer, put_span, put_step
from meshscope.analyze.budget.budget import measure_budget
from meshscope.analyze.timeline.timeline import Timeline, build_timeline
from meshscope.analyze.timeline.work import measure_work
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.write.groups import GROUP_KIND
from meshscope.store.write.writer import RankWriter

MOMENT = st.integers(-100, 4_000)
ANY = st.one_of(MOMENT, st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 61, -1]))
ROW = st.tuples(ANY, ANY, ANY, st.integers(0, 255), st.integers(0, 12))


def _put(writer: RankWriter, table: str, row: tuple[int, int, int, int, int]) -> None:
    one, two, three, bits, kind = row
    local = [value + START_MONO_NS if abs(value) < 1 << 60 else value for value in (one, two)]
    if table == "spans":
        words = (kind | (bits % 3) << 16 | (bits & 2) << 24, local[0], three, three, 0, 0, 0)
    elif table == "collectives":
        flags = bits & 31
        head = kind | 1 << 8 | 1 << 16 | flags << 24
        words = (head, bits | 1 << 32, local[0], local[1], three, 64, (bits % 9) | 1 << 32)
    elif table == "waits":
        words = (1, local[0], local[1], three, -1 if bits % 2 else three, 0, bits % 9)
    elif table == "actions":
        words = (kind % 5 | bits << 32, bits % 9, kind, local[0], three, local[1], three)
    else:
        words = (kind, local[0], local[1], three, one, two, 0)
    writer.table(table).put(*words)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 4_000), min_size=2, max_size=12, unique=True),
    rows=st.lists(
        st.tuples(
            st.sampled_from(["spans", "collectives", "waits", "actions", "device_spans"]),
            st.integers(0, 1),
            ROW,
        ),
        max_size=30,
    ),
)
def test_pieces_sum_to_periods(
    cuts: list[int], rows: list[tuple[str, int, tuple[int, int, int, int, int]]]
) -> None:
    cuts.sort()
    with tempfile.TemporaryDirectory() as folder:
        writers = [make_writer(Path(folder), rank, 2) for rank in range(2)]
        for writer in writers:
            ranks = [0, 1]
            writer.journal.write(
                GROUP_KIND, id=0, name="0", description="", backend="gloo", ranks=ranks
            )
            for step, (start, end) in enumerate(zip(cuts[::2], cuts[1::2], strict=False)):
                put_step(writer, step, START_MONO_NS + start, START_MONO_NS + end)
                put_span(writer, "forward", START_MONO_NS + start, (end - start) // 2)
        for table, rank, row in rows:
            _put(writers[rank], table, row)
        for writer in writers:
            writer.close(end_host_mono_ns=START_MONO_NS)
        timeline = build_timeline(open_run(folder).last_attempt, warmup_steps=0)
    if isinstance(timeline, Unavailable):
        assert "device marks" in timeline.reason
        return
    _check(timeline)


def _check(timeline: Timeline) -> None:
    pieces = timeline.pieces
    period = timeline.period_end_ns - timeline.period_start_ns
    total = np.zeros(period.shape, dtype=np.int64)
    index = np.searchsorted(timeline.ranks, pieces.rank)
    np.add.at(total, (index, pieces.step), pieces.duration_ns)
    assert (total == period).all()
    assert (pieces.duration_ns > 0).all()
    same = (pieces.rank[1:] == pieces.rank[:-1]) & (pieces.step[1:] == pieces.step[:-1])
    assert (pieces.start_ns[1:][same] == pieces.end_ns[:-1][same]).all()
    assert (measure_work(timeline).period_ns == period).all()
    budget = measure_budget(timeline, Unavailable("not said"))
    assert (budget.time_ns.sum(axis=2) == period).all()
