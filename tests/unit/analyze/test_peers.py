import numpy as np
import pytest

from builders import MS, START_MONO_NS, Faults, make_run, make_writer, put_span, put_step
from meshscope.analyze.rank.phases import PhaseTable
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peers import MAX_STEPS, PeerPhases, group_peers
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

UNKNOWN = Unavailable("no layout")
PHASES = ["data", "forward", "backward", "optimizer"]
MEAN_NS = np.array([1.0, 30.0, 60.0, 5.0]) * MS


def summarize(path, **options):
    return Study(open_run(path).last_attempt, **options)


def collect(times_ns, *, steps=None):
    """What the collector makes of an array of ranks, steps and phases."""
    num_ranks, num_steps, _ = times_ns.shape
    peers = PeerPhases(num_ranks=num_ranks)
    for rank in range(num_ranks):
        total_ns = np.zeros((2 * num_steps + 1, len(PHASES)), dtype=np.int64)
        total_ns[1::2] = times_ns[rank]
        numbers = np.arange(num_steps) if steps is None else steps[rank]
        table = PhaseTable(total_ns=total_ns, phases=PHASES)
        peers.add(rank, numbers, table, is_steady=np.ones(num_steps, dtype=np.bool_))
    return peers


def find(times_ns, layout=UNKNOWN, **options):
    groups = group_peers(layout, range(len(times_ns)))
    return collect(times_ns, **options).find_clues(groups, float(MEAN_NS.sum()))


def make_times(seed, *, num_ranks=8, num_steps=100, sigma=0.3):
    noise = np.random.default_rng(seed).lognormal(0, sigma, (num_ranks, num_steps, len(PHASES)))
    return noise * MEAN_NS


def test_one_slow_rank_is_named_with_its_phase_though_steps_take_the_same_time(tmp_path):
    """Every rank's step takes as long as the slow rank's: the others wait in backward."""
    random = np.random.default_rng(5)
    for rank in range(8):
        writer = make_writer(tmp_path, rank, 8, layout={"dp": 8})
        for step in range(30):
            start = START_MONO_NS + step * 200 * MS
            forward = int((62 if rank == 5 else 29) * MS * random.lognormal(0, 0.1))
            put_span(writer, "forward", start, forward)
            put_span(writer, "backward", start + forward, 190 * MS - forward)
            put_step(writer, step, start, start + 195 * MS)
        writer.close(end_host_mono_ns=START_MONO_NS + 30 * 200 * MS)
    summary = summarize(tmp_path)
    assert summary.steps.slowest == ()
    (clue,) = summary.clues
    assert (clue.rank, clue.phase, clue.num_peers) == (5, "forward", 7)
    assert clue.median_ns == pytest.approx(62 * MS, rel=0.1)
    assert clue.peers_median_ns == pytest.approx(29 * MS, rel=0.05)
    assert (clue.num_steps, clue.num_steps_largest) == (29, 29)
    assert [spread.phase for spread in summary.spreads] == ["forward", "backward"]
    assert summary.spreads[0].furthest_rank == 5


@pytest.mark.parametrize(("num_ranks", "num_steps", "sigma"), [(8, 20, 0.5), (2, 60, 0.8)])
def test_healthy_noisy_runs_are_hardly_ever_flagged(num_ranks, num_steps, sigma):
    runs = [
        find(make_times(seed, num_ranks=num_ranks, num_steps=num_steps, sigma=sigma))
        for seed in range(200)
    ]
    assert sum(bool(clues) for clues in runs) <= 4


def test_a_slow_rank_is_found_in_as_much_noise():
    times = make_times(1, sigma=0.5)
    times[3, :, 1] *= 3
    assert [(clue.rank, clue.phase) for clue in find(times)] == [(3, "forward")]


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    layout = Layout(dp=2, pp=4)
    times = make_times(2, sigma=0.05)
    for rank in range(8):
        times[rank, :, 1] *= 1 + layout.coordinates(rank).pp
    assert find(times, layout) == ()
    assert find(times, Layout(dp=8)) == ()  # two ranks share the last stage and its time
    times[layout.rank_of(dp=1, pp=2), :, 1] *= 1.5
    (clue,) = find(times, layout)
    assert (clue.rank, clue.num_peers) == (layout.rank_of(dp=1, pp=2), 1)


def test_tensor_ranks_are_compared_within_their_dp_group(tmp_path):
    layout = Layout(dp=4, tp=2)
    make_run(tmp_path, layout=layout, num_steps=20, faults=Faults(slow={3: 1.5}))
    clue = summarize(tmp_path).clues[0]
    assert (clue.rank, clue.phase, clue.num_peers) == (3, "backward", 3)
    assert (clue.median_ns, clue.peers_median_ns) == (90 * MS, 60 * MS)


@pytest.mark.parametrize(("num_steps", "is_named"), [(10, False), (11, True)])
def test_with_fewer_than_ten_steps_after_the_warm_up_nobody_is_named(tmp_path, num_steps, is_named):
    faults = Faults(slow={1: 2.0})
    make_run(tmp_path, layout=Layout(dp=4), num_steps=num_steps, faults=faults)
    assert bool(summarize(tmp_path).clues) == is_named


def test_what_is_a_small_part_of_a_step_is_no_clue():
    times = make_times(4, sigma=0.05)
    times[2, :, 0] *= 1.9  # 0.9 ms more of 96 ms
    assert find(times) == ()
    times[2, :, 0] *= 1.2
    assert [clue.phase for clue in find(times)] == ["data"]


def test_rare_long_steps_of_one_rank_are_no_clue():
    times = make_times(6, sigma=0.05)
    times[2, ::3, 1] *= 20
    assert find(times) == ()


def test_a_rank_that_stopped_early_does_not_hide_another():
    times = make_times(7, sigma=0.1)
    times[2, :, 2] *= 1.6
    peers = collect(times)
    rank, step, found = peers._ranks[6]
    peers._ranks[6] = (rank, step[:12], {name: values[:12] for name, values in found.items()})
    clues = peers.find_clues(group_peers(UNKNOWN, range(8)), float(MEAN_NS.sum()))
    assert [(clue.rank, clue.num_peers) for clue in clues] == [(2, 6)]


def test_only_ranks_that_have_the_phase_are_compared():
    times = make_times(8, sigma=0.05)
    times[1:, :, 3] = 0  # the optimizer runs on rank 0 only
    assert find(times) == ()


def test_of_a_long_run_ranks_keep_the_same_steps():
    times = make_times(9, num_ranks=4, num_steps=5000, sigma=0.1)
    times[1, :, 1] *= 1.5
    (clue,) = find(times)
    assert clue.rank == 1
    assert 0.9 * MAX_STEPS < clue.num_steps < 1.1 * MAX_STEPS
    shifted = [np.arange(5000) + (2500 if rank == 3 else 0) for rank in range(4)]
    (clue,) = find(times, steps=shifted)
    assert 0.4 * MAX_STEPS < clue.num_steps < 0.6 * MAX_STEPS


def test_peers_are_those_of_any_layout():
    for layout in (Layout(dp=2, tp=2, pp=2), Layout(dp=3, cp=2, order=("cp", "dp")), Layout(dp=1)):
        groups = group_peers(layout, range(layout.world_size))
        assert groups == {rank: layout.peers(rank)[0] for rank in range(layout.world_size)}
