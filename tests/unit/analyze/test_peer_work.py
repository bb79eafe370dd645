import numpy as np
import pytest

from builders import MS, make_run
from late_runs import STEADY, LateRun
from meshscope.analyze.timeline.peer_work import group_true_peers, measure_peer_work
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

UNKNOWN = Unavailable("no layout")


def groups(layout, num_ranks, *, is_piped=False, ranks=None):
    found = group_true_peers(layout, ranks or tuple(range(num_ranks)), is_piped=is_piped)
    return [(group.axis, group.indices) for group in found]


def test_peers_differ_along_dp_alone():
    assert groups(Layout(dp=4, tp=2), 8) == [("dp", (0, 2, 4, 6)), ("dp", (1, 3, 5, 7))]


def test_tp_neighbours_join_where_peers_are_few():
    assert groups(Layout(dp=2, tp=2, pp=2), 8) == [
        ("dp+tp", (0, 1, 2, 3)),
        ("dp+tp", (4, 5, 6, 7)),
    ]


def test_tp_neighbours_are_peers_where_dp_is_one():
    assert groups(Layout(tp=2, pp=2), 4) == [("tp", (0, 1)), ("tp", (2, 3))]


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_ranks_along_cp_and_ep_have_the_same_layers(axis):
    assert groups(Layout(**{axis: 4}), 4) == [(axis, (0, 1, 2, 3))]
    assert groups(Layout(**{axis: 2}, dp=2, pp=2), 8) == [
        (f"dp+{axis}", (0, 1, 2, 3)),
        (f"dp+{axis}", (4, 5, 6, 7)),
    ]
    assert groups(Layout(**{axis: 2}, tp=2), 4) == [(f"{axis}+tp", (0, 1, 2, 3))]


def test_stages_have_no_peers():
    assert groups(Layout(pp=4), 4) == []


def test_without_a_layout_all_are_peers_unless_they_send_messages():
    assert groups(UNKNOWN, 3) == [("", (0, 1, 2))]
    assert groups(UNKNOWN, 3, is_piped=True) == []
    assert groups(UNKNOWN, 1) == []


def test_ranks_that_recorded_nothing_are_left_out():
    assert groups(Layout(dp=4), 4, ranks=(0, 2, 3)) == [("dp", (0, 1, 2))]
    assert groups(Layout(dp=2, tp=2), 4, ranks=(0, 1, 2)) == [("dp+tp", (0, 1, 2))]


def measure(path):
    timeline = build_timeline(open_run(path).last_attempt, warmup_steps=1)
    return measure_peer_work(timeline)


def test_work_is_without_waiting(tmp_path):
    """Rank 1 is 5 ms late in backward: it works longer, rank 0 does not."""

    def work(rank, step):
        return {**STEADY, "backward": 20 * MS + (5 * MS if rank == 1 else 0)}

    LateRun(layout=Layout(dp=2), work=work, num_steps=6).record(tmp_path)
    found = measure(tmp_path)
    assert found.phases == ("backward", "forward", "optimizer")
    assert np.allclose(found.total_ns, [[32 * MS, 37 * MS]] * 5, atol=0.01 * MS)
    assert np.allclose(found.work_ns[0], [[20 * MS, 25 * MS]] * 5, atol=0.01 * MS)
    assert found.step_ns == pytest.approx(38 * MS, rel=0.01)


def test_fetching_data_and_gaps_between_steps_do_not_count(tmp_path):
    make_run(
        tmp_path,
        layout=Layout(dp=2),
        num_steps=6,
        phases=(("data", 9 * MS), ("forward", 30 * MS), ("checkpoint", 7 * MS)),
        unattributed_ns=3 * MS,
        gap_ns=50 * MS,
    )
    found = measure(tmp_path)
    assert found.phases == ("forward", "")
    assert np.unique(found.total_ns).tolist() == [33.0 * MS]


def test_one_rank_has_nobody_to_be_compared_with(tmp_path):
    make_run(tmp_path, num_steps=6)
    assert isinstance(measure(tmp_path), Unavailable)
