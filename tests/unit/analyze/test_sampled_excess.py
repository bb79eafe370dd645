"""What ranks are slow at, from sampled steps that are written down here."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from builders import MS
from late_runs import make_peer_work
from meshscope.analyze.rank.kernel_steps import DeviceStep
from meshscope.analyze.stragglers.sampled_excess import find_sampled_excess
from meshscope.analyze.stragglers.stragglers import find_stragglers
from meshscope.analyze.timeline.device_parts import DeviceParts, Sampled
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.work import WorkTable
from meshscope.core.layout import Layout
from meshscope.diagnose.views.device_view import measure_common

LAYOUT = Layout(dp=4)
NUM_STEPS = 12


def make_step(rank, step, *, forward=4.0, backward=12.0, host=0.0):
    compute = {"forward": int(forward * MS), "backward": int(backward * MS)}
    values = dict.fromkeys((field.name for field in fields(DeviceStep)), 0) | {
        "rank": rank,
        "step": step,
        "end_ns": 80 * MS,
        "compute_ns": sum(compute.values()),
        "compute_by_phase_ns": compute,
        "copy_by_phase_ns": {},
        "idle_ns": {"host": int(host * MS)} if host else {},
        "host_by_phase_ns": {"backward": int(host * MS)} if host else {},
    }
    return DeviceStep(**values)


def make_parts(slow, *, host=0.0, exposed=0.0, num_sampled=4):
    """Ranks of `slow` are so in all sampled steps; the others have `exposed` more communication,
    and in steps without a sample the slow ones idle `host`."""
    steps = {
        rank: tuple(
            make_step(rank, step, **(slow.get(rank, {}) | {"backward": 12 + 0.1 * step}))
            for step in range(20, 20 + num_sampled)
        )
        for rank in range(4)
    }
    time = np.zeros((4, NUM_STEPS, 2), dtype=np.int64)
    for rank in range(4):
        time[rank, :, 0] = int(host * MS) if rank in slow else 0
        time[rank, :, 1] = 0 if rank in slow else int(exposed * MS)
    return DeviceParts(
        ranks=(0, 1, 2, 3), parts=(("host", ""), ("exposed", "dp")), time_ns=time,
        spread_ns=np.zeros((4, 2)), is_divided=np.empty(0, dtype=np.bool_),
        sampled={rank: Sampled(steps=one, exposed_ns={}) for rank, one in steps.items()},
    )  # fmt: skip


def make_work():
    """All ranks seem to work as long."""
    same = np.full((NUM_STEPS, 4), 30.0 * MS)
    return make_peer_work(same, same, LAYOUT)


def make_table():
    held = np.zeros((4, NUM_STEPS, len(PieceKind)))
    held[:, :, PieceKind.WORK] = 60 * MS
    return WorkTable(
        ranks=(0, 1, 2, 3), layout=LAYOUT, steps=np.arange(NUM_STEPS), phases=("",),
        work_ns=held[:, :, :1], held_ns=held, period_ns=held.sum(axis=2),
    )  # fmt: skip


def find(parts):
    return find_sampled_excess(parts, make_work(), make_table())


def test_kernels_of_two_slow_ranks_are_compared_with_the_others():
    found = find(make_parts({1: {"forward": 11.0}, 3: {"forward": 12.0}}, exposed=5))
    assert {rank: one.kernels_ns for rank, one in found.items()} == {
        1: {"forward": pytest.approx(7 * MS)},
        3: {"forward": pytest.approx(8 * MS)},
    }
    assert {(one.reference, one.waiting_ns, one.is_host) for one in found.values()} == {
        ((0, 2), 5 * MS, False)
    }
    # 6 ways to choose two of four ranks, of C(16, 8) ways to order their 4 steps each
    assert found[1].p_value == pytest.approx(6 / 12_870)


def test_a_late_host_is_as_late_as_in_steps_without_a_sample_and_named_where_peers_wait():
    parts = make_parts({2: {"host": 40.0}}, host=30.0, exposed=28.0)
    found = find(parts)
    assert found[2].host_ns == {"backward": pytest.approx(30 * MS)}
    assert found[2].is_host
    assert find_stragglers(make_work(), LAYOUT, {}).slow_sets == ()
    (slow_set,) = find_stragglers(make_work(), LAYOUT, {}, found).slow_sets
    assert (slow_set.ranks, slow_set.slow[0].main_phases) == ((2,), ("backward",))
    assert slow_set.slow[0].excess_ns == 28 * MS
    alone = find(make_parts({2: {"host": 40.0}}, host=30.0))  # nobody waits for it
    assert find_stragglers(make_work(), LAYOUT, {}, alone).slow_sets == ()


@pytest.mark.parametrize(
    "parts",
    [
        make_parts({}),
        make_parts({0: {"forward": 9.0}, 1: {"forward": 9.0}, 2: {"forward": 9.0}}),
    ],
)
def test_nobody_stands_out(parts):
    assert find(parts) == {}


def test_two_sampled_steps_name_a_rank_by_themselves_only_from_afar():
    """4 of C(8, 2) is chance; the others lie within 0.1 ms."""
    near = find(make_parts({2: {"forward": 4.5}}, num_sampled=2))[2]
    far = find(make_parts({2: {"forward": 9.0}}, num_sampled=2))[2]
    assert near.p_value == far.p_value == pytest.approx(1 / 7)
    assert (near.is_clear, far.is_clear) == (False, True)
    assert not find(make_parts({2: {"forward": 9.0}}, num_sampled=1))[2].is_clear


def test_idle_time_of_one_rank_is_not_common():
    study = SimpleNamespace(peer_work=make_work())
    parts = make_parts({2: {}}, host=30.0)
    common = measure_common(SimpleNamespace(study=study), parts, "host")
    assert (common.total_ns, common.ratio.tolist()) == (0, [0, 0, 0, 0])
    parts = make_parts({rank: {} for rank in range(4)}, host=30.0)
    common = measure_common(SimpleNamespace(study=study), parts, "host")
    assert common.total_ns == 4 * NUM_STEPS * 30 * MS
    assert common.ratio.tolist() == [1, 1, 1, 1]
