import numpy as np
import pytest

from builders import MS, SECOND
from communication_builders import Job
from meshscope.analyze.job.clock_bounds import Bounds, find_lines
from meshscope.analyze.job.clock_pairs import ClockMethod
from meshscope.analyze.job.clocks import align_clocks
from meshscope.analyze.job.host_clocks import find_host_clocks
from meshscope.analyze.job.matching import match_operations
from meshscope.analyze.job.operations import load_operations
from meshscope.core.operations import EndSource, Kind
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.clock_graph import Edge, find_islands, solve, walk_best, walk_between
from meshscope.numerics.theil_sen import fit_line

SPAN_NS = 30 * SECOND
MICROSECOND = 1_000


def align(job):
    attempt = job.close()
    operations = load_operations(attempt)
    matches = match_operations(operations, find_host_clocks(attempt))
    return align_clocks(attempt, operations.rows, matches)


def worst_error_ns(job, alignment, clock, span_ns=SPAN_NS):
    """How far off a clock is anywhere in the run."""
    rank, reference = clock.ranks[0], alignment.reference_rank
    moments = np.linspace(0, span_ns, 60).astype(np.int64).tolist()
    shown = np.array([job.local_ns(rank, moment) for moment in moments])
    true = np.array([job.local_ns(reference, moment) for moment in moments])
    return int(np.abs(alignment.to_reference(rank, shown) - true).max())


def assert_honest(job, alignment, *, below_ns, span_ns=SPAN_NS):
    for clock in alignment.clocks[1:]:
        error_ns = worst_error_ns(job, alignment, clock, span_ns)
        assert error_ns <= clock.uncertainty_ns < below_ns


class Noise:
    """How late ranks notice the end of an operation: exponential, and 1 % late by milliseconds."""

    def __init__(self, random, ranks):
        self._random = random
        self._scale_ns = {rank: random.uniform(20, 80) * MICROSECOND for rank in ranks}

    def draw(self, ranks):
        late = {rank: self._random.exponential(self._scale_ns[rank]) for rank in ranks}
        return {
            rank: int(
                ns + (self._random.exponential(3 * MS) if self._random.random() < 0.01 else 0)
            )
            for rank, ns in late.items()
        }


def communicate(job, groups, random, *, num=300, span_ns=SPAN_NS):
    """All-reduces of several groups, spread over the run, with ranks arriving in disorder."""
    ids = {ranks: job.group(ranks) for ranks in groups}
    noise = Noise(random, job.ranks)
    for index in range(num):
        moment = int((index + 0.5) / num * span_ns)
        for ranks, group in ids.items():
            job.collective(
                group,
                {rank: moment + int(random.exponential(MS / 2)) for rank in ranks},
                transfer_ns=int(random.uniform(100, 400) * MICROSECOND),
                notice_ns=noise.draw(ranks),
                kind=Kind.BARRIER if index % 3 else Kind.ALL_REDUCE,
            )


def wild_clocks(random, count):
    return {
        f"node{index}": (int(random.uniform(-3, 3) * SECOND), float(random.uniform(-50, 50)))
        for index in range(count)
    }


@pytest.mark.parametrize("seed", range(4))
def test_offsets_of_seconds_and_drifts_are_recovered_within_the_uncertainty(tmp_path, seed):
    random = np.random.default_rng(seed)
    clocks = wild_clocks(random, 3)
    job = Job(tmp_path, num_ranks=6, host=lambda rank: f"node{rank // 2}", clocks=clocks)
    communicate(job, [tuple(range(6))], random)
    alignment = align(job)
    assert [clock.method for clock in alignment.clocks] == [
        ClockMethod.REFERENCE,
        ClockMethod.OPERATIONS,
        ClockMethod.OPERATIONS,
    ]
    assert_honest(job, alignment, below_ns=200 * MICROSECOND)
    assert alignment.problems == ()
    for clock in alignment.clocks[1:]:
        expected = clocks[clock.host][1] - clocks["node0"][1]
        assert clock.drift_ppm == pytest.approx(expected, abs=5)


@pytest.mark.parametrize("seed", range(4))
def test_clocks_are_aligned_along_a_chain_of_groups(tmp_path, seed):
    random = np.random.default_rng(100 + seed)
    job = Job(tmp_path, num_ranks=3, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 3))
    communicate(job, [(0, 1), (1, 2)], random)
    alignment = align(job)
    assert_honest(job, alignment, below_ns=400 * MICROSECOND)
    first, second = (clock.uncertainty_ns for clock in alignment.clocks[1:])
    assert second > first


def test_several_ways_between_clocks_agree(tmp_path):
    random = np.random.default_rng(7)
    job = Job(tmp_path, num_ranks=4, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 4))
    communicate(job, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)], random)
    alignment = align(job)
    assert_honest(job, alignment, below_ns=300 * MICROSECOND)
    assert alignment.problems == ()


def test_two_operations_bound_the_offset(tmp_path):
    random = np.random.default_rng(8)
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
    communicate(job, [(0, 1)], random, num=2, span_ns=SECOND)
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.BOUNDS
    assert_honest(job, alignment, below_ns=20 * MS, span_ns=SECOND)


@pytest.mark.parametrize("num", [3, 5, 7])
@pytest.mark.parametrize("seed", range(6))
def test_a_few_operations_are_no_surer_than_their_range(tmp_path, num, seed):
    random = np.random.default_rng(800 + seed)
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
    communicate(job, [(0, 1)], random, num=num, span_ns=SECOND)
    assert_honest(job, align(job), below_ns=20 * MS, span_ns=SECOND)


def test_where_ends_mislead_bounds_overrule_them(tmp_path):
    """One host notices every end 5 ms late: the ends alone would put its clock 5 ms ahead."""
    random = np.random.default_rng(9)
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
    group = job.group([0, 1])
    for index in range(300):
        moment = index * 100 * MS
        job.collective(
            group,
            {rank: moment + int(random.exponential(3 * MS)) for rank in (0, 1)},
            transfer_ns=200 * MICROSECOND,
            notice_ns={1: 5 * MS if index % 10 else 100 * MICROSECOND},
        )
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.BOUNDS
    assert_honest(job, alignment, below_ns=2 * MS)


def test_messages_in_both_directions_bound_the_offset(tmp_path):
    random = np.random.default_rng(10)
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
    group = job.group([0, 1])
    for index in range(300):
        moment = index * 100 * MS
        for source, target in ((0, 1), (1, 0)):
            job.message(
                group,
                source,
                target,
                sent_ns=moment,
                asked_ns=moment - MS,
                latency_ns=int((50 + random.exponential(100)) * MICROSECOND),
            )
            moment += 10 * MS
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.BOUNDS
    assert_honest(job, alignment, below_ns=200 * MICROSECOND)


def test_messages_in_one_direction_say_too_little(tmp_path):
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}")
    group = job.group([0, 1])
    for index in range(20):
        job.message(group, 0, 1, sent_ns=index * MS, asked_ns=index * MS)
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.WALL_CLOCK


def test_without_common_operations_wall_clocks_place_a_clock_and_say_so(tmp_path):
    clocks = {"node1": (40 * SECOND, 0.0)}
    job = Job(
        tmp_path,
        num_ranks=2,
        host=lambda rank: f"node{rank}",
        clocks=clocks,
        wall_clock_error_ns={"node1": 30 * MS},
    )
    job.collective(job.group([0]), {0: 0})
    job.collective(job.group([1]), {1: SECOND})
    alignment = align(job)
    clock = alignment.clocks[1]
    assert clock.method is ClockMethod.WALL_CLOCK
    assert clock.offset_ns == 40 * SECOND - 30 * MS
    assert clock.uncertainty_ns == SECOND
    assert isinstance(clock.drift_ppm, Unavailable)
    assert "placed by the wall clocks" in alignment.problems[0]
    pair = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    assert alignment.uncertainty_between(*pair).tolist() == [SECOND]


def test_without_anything_a_clock_is_not_aligned(tmp_path):
    job = Job(
        tmp_path,
        num_ranks=2,
        host=lambda rank: f"node{rank}",
        header=lambda rank: {"start_unix_ns": None} if rank else {},
    )
    job.collective(job.group([0]), {0: 0})
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.NONE
    assert isinstance(alignment.clocks[1].offset_ns, Unavailable)
    assert isinstance(alignment.clocks[1].uncertainty_ns, Unavailable)
    assert "not aligned" in alignment.problems[0]


def test_two_islands_are_each_exact_inside(tmp_path):
    random = np.random.default_rng(11)
    clocks = wild_clocks(random, 4)
    job = Job(tmp_path, num_ranks=4, host=lambda rank: f"node{rank}", clocks=clocks)
    communicate(job, [(0, 1), (2, 3)], random, num=100)
    alignment = align(job)
    first = np.array([0, 2, 0], dtype=np.int32)
    second = np.array([1, 3, 2], dtype=np.int32)
    inside, other, across = alignment.uncertainty_between(first, second).tolist()
    assert inside < 200 * MICROSECOND
    assert other < 200 * MICROSECOND
    assert across >= SECOND


def test_calibrations_of_the_recorder_are_used(tmp_path):
    random = np.random.default_rng(12)
    job = Job(tmp_path, num_ranks=3, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 3))
    job.collective(job.group([0]), {0: 0})
    job.collective(job.group([0]), {0: SPAN_NS})
    for moment in (0, SPAN_NS // 2, SPAN_NS):
        job.calibrate(2, 0, moment, 20 * MICROSECOND)
        job.calibrate(0, 1, moment, 30 * MICROSECOND)  # the other way round
    alignment = align(job)
    assert [clock.method for clock in alignment.clocks[1:]] == [ClockMethod.CALIBRATION] * 2
    assert_honest(job, alignment, below_ns=100 * MICROSECOND)


def test_a_calibration_sharpens_what_operations_say(tmp_path):
    def measure(path, *, is_calibrated):
        random = np.random.default_rng(13)
        job = Job(path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
        communicate(job, [(0, 1)], random)
        if is_calibrated:
            for moment in (0, SPAN_NS):
                job.calibrate(1, 0, moment, 5 * MICROSECOND)
        alignment = align(job)
        assert_honest(job, alignment, below_ns=200 * MICROSECOND)
        return alignment.clocks[1].uncertainty_ns

    plain_ns = measure(tmp_path / "plain", is_calibrated=False)
    assert measure(tmp_path / "sharp", is_calibrated=True) < plain_ns / 2


def test_ranks_of_one_host_share_a_clock(tmp_path):
    random = np.random.default_rng(14)
    job = Job(tmp_path, num_ranks=4, clocks={"node0": (5 * SECOND, 20.0)})
    communicate(job, [(0, 1, 2, 3)], random, num=50)
    alignment = align(job)
    (clock,) = alignment.clocks
    assert (clock.ranks, clock.uncertainty_ns, clock.offset_ns) == ((0, 1, 2, 3), 0, 0)
    times = np.array([5, 10**15])
    assert alignment.to_reference(3, times).tolist() == times.tolist()


def test_machines_that_share_a_name_but_not_a_clock_are_told_apart(tmp_path):
    random = np.random.default_rng(15)

    class Twins(Job):
        def local_ns(self, rank, moment_ns):
            return super().local_ns(rank, moment_ns) + (7 * SECOND if rank == 1 else 0)

    job = Twins(tmp_path, num_ranks=2, host=lambda rank: "localhost")
    communicate(job, [(0, 1)], random)
    alignment = align(job)
    assert len(alignment.clocks) == 2
    assert "do not share a clock" in alignment.problems[0]
    assert alignment.clocks[1].offset_ns == pytest.approx(7 * SECOND, abs=100 * MICROSECOND)
    assert_honest(job, alignment, below_ns=200 * MICROSECOND)


def test_a_clock_id_tells_machines_of_one_name_apart(tmp_path):
    job = Job(tmp_path, num_ranks=2, header=lambda rank: {"clock_id": f"boot{rank}"})
    communicate(job, [(0, 1)], np.random.default_rng(16), num=50)
    alignment = align(job)
    assert [clock.ranks for clock in alignment.clocks] == [(0,), (1,)]
    assert alignment.problems == ()


def test_a_clock_that_is_corrected_on_the_way_is_followed(tmp_path):
    """For a third of the run its rate is 150 ppm off: 1.5 ms that no straight line follows."""
    random = np.random.default_rng(17)

    class Corrected(Job):
        def local_ns(self, rank, moment_ns):
            bend = min(max(moment_ns - SPAN_NS // 3, 0), SPAN_NS // 3)
            return super().local_ns(rank, moment_ns) + (round(bend * 150e-6) if rank else 0)

    job = Corrected(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}")
    communicate(job, [(0, 1)], random, num=1500)
    alignment = align(job)
    assert alignment.clocks[1].unevenness_ns > 100 * MICROSECOND
    assert_honest(job, alignment, below_ns=400 * MICROSECOND)


def test_clocks_that_no_line_fits_are_reported(tmp_path):
    class Stepped(Job):
        def local_ns(self, rank, moment_ns):
            jump = SECOND if rank and moment_ns > SPAN_NS // 2 else 0
            return super().local_ns(rank, moment_ns) + jump

    job = Stepped(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}")
    communicate(job, [(0, 1)], np.random.default_rng(18))
    alignment = align(job)
    assert "no offset and drift fits all operations" in alignment.problems[0]
    assert alignment.clocks[1].uncertainty_ns > 100 * MS


def test_wall_clocks_far_from_what_operations_say_are_reported(tmp_path):
    job = Job(
        tmp_path,
        num_ranks=2,
        host=lambda rank: f"node{rank}",
        wall_clock_error_ns={"node1": 100 * SECOND},
    )
    communicate(job, [(0, 1)], np.random.default_rng(19), num=50)
    alignment = align(job)
    assert any("100.000 s apart" in problem for problem in alignment.problems)
    assert_honest(job, alignment, below_ns=300 * MICROSECOND)


def test_ends_that_are_only_bounds_are_not_taken_for_ends(tmp_path):
    random = np.random.default_rng(20)
    job = Job(tmp_path, num_ranks=2, host=lambda rank: f"node{rank}", clocks=wild_clocks(random, 2))
    group = job.group([0, 1])
    for index in range(200):
        moment = index * 100 * MS
        job.collective(
            group,
            {rank: moment + int(random.exponential(MS)) for rank in (0, 1)},
            transfer_ns=200 * MICROSECOND,
            notice_ns={1: 30 * MS},
            overrides={1: {"end_source": EndSource.WAIT_LATE}},
        )
    alignment = align(job)
    assert alignment.clocks[1].method is ClockMethod.BOUNDS
    assert_honest(job, alignment, below_ns=50 * MS)


def test_lines_keep_between_bounds_but_for_a_wild_one():
    time = np.linspace(-1e9, 1e9, 200)
    true = 5e5 + 30e-6 * time
    lower, upper = true - 1000, true + 3000
    upper[17] = true[17] - 1e9  # damaged
    lines = find_lines(Bounds(time=time, lower=lower, upper=upper))
    assert lines is not None
    assert lines.gap == 0
    for moment in (-1e9, 0.0, 1e9):
        low, high = lines.range_at(moment)
        assert low <= 5e5 + 30e-6 * moment <= high
        assert high - low == pytest.approx(4000, rel=0.2)


def test_bounds_that_cross_leave_a_gap():
    time = np.linspace(-1e9, 1e9, 200)
    lines = find_lines(Bounds(time=time, lower=np.full(200, 500.0), upper=np.full(200, -500.0)))
    assert lines is not None
    assert lines.gap == pytest.approx(1000)
    only_upper = Bounds(time=time, lower=np.full(200, -np.inf), upper=np.zeros(200))
    assert find_lines(only_upper) is None


def test_a_graph_is_averaged_and_its_errors_add_up():
    edges = [
        Edge(low=0, high=1, value=10.0, error=1.0),
        Edge(low=1, high=2, value=5.0, error=1.0),
        Edge(low=0, high=2, value=18.0, error=1.0),
        Edge(low=3, high=4, value=7.0, error=2.0),
    ]
    islands = find_islands(5, edges)
    assert islands == [0, 0, 0, 3, 3]
    assert solve(5, edges, islands).tolist() == pytest.approx([0, 11, 17, 0, 7])
    values, errors = walk_best(5, edges, islands)
    assert values == [0, 10, 18, 0, 7]
    assert errors == [0, 1, 1, 0, 2]


def test_two_clocks_are_as_sure_as_the_best_way_between_them():
    edges = [
        Edge(low=0, high=1, value=5.0, error=3.0),
        Edge(low=0, high=2, value=9.0, error=4.0),
        Edge(low=1, high=2, value=4.0, error=1.0),
    ]
    expected = [[0, 3, 4, np.inf], [3, 0, 1, np.inf], [4, 1, 0, np.inf], [np.inf] * 3 + [0]]
    assert walk_between(4, edges).tolist() == expected


def test_a_line_ignores_wild_points():
    x = np.arange(1000.0)
    y = 3 * x + 5
    y[::5] += 1e6
    line = fit_line(x, y)
    assert line is not None
    assert line.slope == pytest.approx(3, rel=1e-6)
    assert line.intercept == pytest.approx(5, abs=0.1)
    assert fit_line(np.zeros(5), np.arange(5.0)) is None
    assert fit_line(np.zeros(1), np.zeros(1)) is None
