"""Known answers: the closed forms, and the Zero Bubble paper's tables (arXiv 2401.10241)."""

import math
from fractions import Fraction

import pytest

from meshscope.core.schedule import Action, ActionKind, Schedule
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.schedule_replay import (
    ActionCosts,
    ActionTime,
    RankReplay,
    ScheduleReplay,
    replay_schedule,
)
from meshscope.errors import UsageError

# Table 9 (inputs, here in us) and table 5 (bubble rates) of the paper: p, m, T_F, T_B, T_W, T_comm,
# chunks of one layer on each rank, then 1F1B, 1F1B-I, ZB-H1, ZB-H2. The models have 22, 30, 46 and
# 62 layers; embedding and loss count as one each, so the chunks are (layers + 2) / p.
PAPER = [
    (8, 24, 18522, 18086, 9337, 601, 3, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 24, 29718, 29444, 19927, 527, 4, 0.2347, 0.0808, 0.1323, 0.0698),
    (16, 48, 11347, 11248, 8132, 377, 3, 0.2552, 0.1104, 0.1397, 0.0672),
    (32, 96, 10419, 10207, 7715, 408, 2, 0.2646, 0.1493, 0.1421, 0.0641),
]


def replay_paper(row: tuple[float, ...], name: str, num_chunks: int | None = None) -> float:
    p, m, forward, inputs, weights, communication = map(int, row[:6])
    schedule = build_schedule(name, p, m, num_chunks)
    costs = ActionCosts.uniform(
        schedule,
        forward_ns=forward * 1000,
        input_grad_ns=inputs * 1000,
        weight_grad_ns=weights * 1000,
        communication_ns=communication * 1000,
    )
    return replay_schedule(schedule, costs).bubble_of_total_ratio


def replay_equal(
    schedule: Schedule, *, forward: int = 12, inputs: int = 12, weights: int = 12
) -> ScheduleReplay:
    return replay_schedule(
        schedule,
        ActionCosts.uniform(
            schedule, forward_ns=forward, input_grad_ns=inputs, weight_grad_ns=weights
        ),
    )


class TestClock:
    def test_every_action_of_a_small_pipeline(self):
        schedule = build_schedule("1f1b", 2, 2)
        costs = ActionCosts(
            by_stage={
                (ActionKind.FORWARD, 0): 10,
                (ActionKind.FORWARD, 1): 20,
                (ActionKind.BACKWARD, 0): 30,
                (ActionKind.BACKWARD, 1): 40,
            },
            by_microbatch={(ActionKind.FORWARD, 1, 1): 25},
            communication_ns=1,
        )
        first, second = replay_schedule(schedule, costs).ranks
        assert first == RankReplay(
            times=(
                ActionTime(Action.parse("0F0"), 0, 10),
                ActionTime(Action.parse("0F1"), 10, 20),
                ActionTime(Action.parse("0B0"), 72, 102),
                ActionTime(Action.parse("0B1"), 137, 167),
            ),
            busy_ns=80,
            peak_activations=2,
        )
        assert second == RankReplay(
            times=(
                ActionTime(Action.parse("1F0"), 11, 31),
                ActionTime(Action.parse("1B0"), 31, 71),
                ActionTime(Action.parse("1F1"), 71, 96),
                ActionTime(Action.parse("1B1"), 96, 136),
            ),
            busy_ns=125,
            peak_activations=1,
        )

    def test_sums_of_the_same_pipeline(self):
        schedule = build_schedule("1f1b", 2, 2)
        costs = ActionCosts.uniform(schedule, forward_ns=10, input_grad_ns=20, weight_grad_ns=10)
        replay = replay_schedule(schedule, costs)
        assert (replay.makespan_ns, replay.cost_ns, replay.ideal_ns) == (120, 120, 80)
        assert [rank.idle_ns for rank in replay.ranks] == [40, 0]
        assert replay.bubble_ns == 40
        assert replay.bubble_of_total_ratio == 40 / 120
        assert replay.bubble_over_ideal_ratio == 40 / 80
        assert replay.idle_of_makespan_ratio == pytest.approx(80 / 240)

    def test_neighbouring_chunks_of_one_rank_need_no_transfer(self):
        schedule = build_schedule("zb_v", 1, 1)
        costs = ActionCosts.uniform(
            schedule, forward_ns=2, input_grad_ns=2, weight_grad_ns=2, communication_ns=100
        )
        assert replay_schedule(schedule, costs).makespan_ns == 6

    def test_transfers_overlap_with_compute(self):
        # Rank 1 computes longer than a transfer takes: only the first transfer is waited for.
        schedule = Schedule(
            name="forward", num_microbatches=3, stage_ranks=(0, 1),
            actions=tuple(
                tuple(Action(ActionKind.FORWARD, stage, i) for i in range(3)) for stage in (0, 1)
            ),
        )  # fmt: skip
        costs = ActionCosts(
            by_stage={(ActionKind.FORWARD, 0): 10, (ActionKind.FORWARD, 1): 10}, communication_ns=7
        )
        assert [time.start_ns for time in replay_schedule(schedule, costs).ranks[1].times] == [
            17, 27, 37
        ]  # fmt: skip

    def test_the_slant_of_a_pipeline_is_in_the_makespan_but_not_in_the_cost(self):
        replay = replay_equal(build_schedule("zb_h2", 4, 8))
        assert (replay.cost_ns, replay.ideal_ns) == (8 * 36, 8 * 36)
        assert replay.makespan_ns == 8 * 36 + 3 * 12


class TestCosts:
    def test_a_whole_backward_takes_as_long_as_its_parts(self):
        costs = ActionCosts(
            by_stage={(ActionKind.INPUT_GRAD, 0): 3, (ActionKind.WEIGHT_GRAD, 0): 4},
            by_microbatch={(ActionKind.WEIGHT_GRAD, 0, 1): 6},
        )
        assert costs.duration_ns(Action(ActionKind.BACKWARD, 0, 0)) == 7
        assert costs.duration_ns(Action(ActionKind.BACKWARD, 0, 1)) == 9
        assert costs.duration_ns(Action(ActionKind.BACKWARD, 1, 0)) is None

    def test_chunks_share_the_time_of_their_rank(self):
        schedule = build_schedule("interleaved_1f1b", 2, 2, 3)
        costs = ActionCosts.uniform(schedule, forward_ns=9, input_grad_ns=6, weight_grad_ns=4)
        assert {stage: costs.by_stage[ActionKind.FORWARD, stage] for stage in range(6)} == (
            dict.fromkeys(range(6), 3)
        )
        assert costs.by_stage[ActionKind.WEIGHT_GRAD, 5] == 4 / 3

    def test_all_that_is_wrong_is_said_at_once(self):
        costs = ActionCosts(
            by_stage={(ActionKind.FORWARD, 0): -1, (ActionKind.BACKWARD, 1): math.inf},
            communication_ns=math.nan,
        )
        with pytest.raises(UsageError) as caught:
            replay_schedule(build_schedule("gpipe", 2, 3), costs)
        assert str(caught.value).splitlines() == [
            "the duration of 0B0 is not given, but a finite number of at least 0 is expected; "
            "give one for B of stage 0 (3 actions)",
            "the duration of 0F0 is -1 ns, but a finite number of at least 0 is expected; "
            "give one for F of stage 0 (3 actions)",
            "the duration of 1B0 is inf ns, but a finite number of at least 0 is expected; "
            "give one for B of stage 1 (3 actions)",
            "the duration of 1F0 is not given, but a finite number of at least 0 is expected; "
            "give one for F of stage 1 (3 actions)",
            "communication_ns is nan, but a finite number of at least 0 is expected; correct it",
        ]

    def test_nothing_that_takes_time_has_no_bubble(self):
        with pytest.raises(UsageError, match="no action takes any time"):
            replay_equal(build_schedule("gpipe", 2, 2), forward=0, inputs=0, weights=0)

    def test_a_deadlock_is_shown(self):
        rows = "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"
        text = "\n".join(["crossed microbatches=2 stage_ranks=0,1", *rows])
        with pytest.raises(UsageError, match="rank 0 stops at 0B0, which waits for 1B0; rank 1"):
            replay_equal(Schedule.parse(text))


class TestClosedForms:
    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    @pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (4, 3), (4, 8), (8, 24), (5, 7)])
    @pytest.mark.parametrize(("forward", "inputs", "weights"), [(12, 12, 12), (10, 17, 4)])
    def test_whole_stages(self, name, p, m, forward, inputs, weights):
        replay = replay_equal(
            build_schedule(name, p, m), forward=forward, inputs=inputs, weights=weights
        )
        assert Fraction(replay.bubble_ns, replay.cost_ns) == Fraction(p - 1, m + p - 1)
        assert Fraction(replay.bubble_ns, replay.ideal_ns) == Fraction(p - 1, m)

    @pytest.mark.parametrize("name", ["interleaved_1f1b", "round_robin", "looped_bfs"])
    @pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (4, 8), (8, 24), (5, 5)])
    @pytest.mark.parametrize("v", [1, 2, 3, 4])
    def test_chunks_where_ranks_divide_microbatches(self, name, p, m, v):
        replay = replay_equal(build_schedule(name, p, m, v))
        assert Fraction(replay.bubble_ns, replay.cost_ns) == Fraction(p - 1, v * m + p - 1)

    @pytest.mark.parametrize("name", ["round_robin", "looped_bfs"])
    @pytest.mark.parametrize(("p", "m"), [(4, 5), (4, 11), (3, 7)])
    def test_chunks_in_loops_for_any_number_of_microbatches(self, name, p, m):
        replay = replay_equal(build_schedule(name, p, m, 2))
        assert Fraction(replay.bubble_ns, replay.cost_ns) == Fraction(p - 1, 2 * m + p - 1)

    @pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 12), (8, 24)])
    @pytest.mark.parametrize(("forward", "inputs", "weights"), [(12, 12, 12), (12, 13, 11)])
    def test_zb_h1_saves_two_weight_gradients_for_each_rank(self, p, m, forward, inputs, weights):
        replay = replay_equal(
            build_schedule("zb_h1", p, m), forward=forward, inputs=inputs, weights=weights
        )
        assert replay.bubble_ns == (p - 1) * (forward + inputs - weights)

    @pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 7), (4, 12), (8, 24)])
    @pytest.mark.parametrize(("forward", "inputs", "weights"), [(12, 12, 12), (12, 13, 11)])
    def test_zb_h2_saves_three(self, p, m, forward, inputs, weights):
        replay = replay_equal(
            build_schedule("zb_h2", p, m), forward=forward, inputs=inputs, weights=weights
        )
        assert replay.bubble_ns == (p - 1) * (forward + inputs - 2 * weights)

    @pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
    @pytest.mark.parametrize("more", [0, 1, 9])
    def test_zb_v_has_no_bubble_from_2p_less_1_microbatches_on(self, p, more):
        assert replay_equal(build_schedule("zb_v", p, 2 * p - 1 + more)).bubble_ns == 0

    @pytest.mark.parametrize(
        ("p", "m", "expected"), [(2, 2, 0.0769), (4, 4, 0.1111), (8, 8, 0.1273), (8, 14, 0.0233)]
    )
    def test_zb_v_with_fewer_is_the_better_of_pattern_and_packing(self, p, m, expected):
        # The pattern cut short: 0.1429, 0.2, 0.2258, 0.0233; the packing: the first three, 0.0769.
        found = replay_equal(build_schedule("zb_v", p, m)).bubble_of_total_ratio
        assert round(found, 4) == expected


class TestPeaks:
    """METHODS §5, in microbatches of a whole rank: stages held at once over chunks."""

    @pytest.mark.parametrize(
        ("name", "chunks", "expected"),
        [
            ("gpipe", 1, 24),
            ("1f1b", 1, 8),
            ("interleaved_1f1b", 2, 8 * (1 + Fraction(7, 8 * 2))),
            ("interleaved_1f1b", 4, 8 * (1 + Fraction(7, 8 * 4))),
            ("zb_h1", 1, 8),
            ("zb_h2", 1, 15),
            ("zb_v", 2, 8),
        ],
    )
    def test_on_rank_0(self, name, chunks, expected):
        replay = replay_equal(build_schedule(name, 8, 24, chunks))
        assert Fraction(replay.ranks[0].peak_activations, chunks) == expected

    def test_1f1b_holds_less_the_later_the_rank(self):
        replay = replay_equal(build_schedule("1f1b", 4, 8))
        assert [rank.peak_activations for rank in replay.ranks] == [4, 3, 2, 1]

    @pytest.mark.parametrize(("name", "expected"), [("zb_h1", 8), ("zb_h2", 15), ("zb_v", 16)])
    def test_zero_bubble_holds_the_same_everywhere(self, name, expected):
        replay = replay_equal(build_schedule(name, 8, 24))
        assert {rank.peak_activations for rank in replay.ranks} == {expected}


class TestZeroBubbleTables:
    @pytest.mark.parametrize("row", PAPER)
    def test_1f1b_to_four_decimals(self, row):
        assert round(replay_paper(row, "1f1b"), 4) == row[7]

    @pytest.mark.parametrize("row", PAPER)
    def test_zb_h1_to_four_decimals(self, row):
        assert round(replay_paper(row, "zb_h1"), 4) == row[9]

    @pytest.mark.parametrize("row", PAPER)
    def test_zb_h2_to_four_decimals(self, row):
        assert round(replay_paper(row, "zb_h2"), 4) == row[10]

    @pytest.mark.parametrize(
        ("row", "measured"), list(zip(PAPER, [0.1090, 0.0827, 0.1136, 0.1528], strict=True))
    )
    def test_interleaved_is_above_the_paper_by_0_2_to_0_35_points(self, row, measured):
        # The paper's figures leave out dependencies that are there: see the next test. With all of
        # them the rates are higher by .0035, .0019, .0032 and .0035.
        found = replay_paper(row, "interleaved_1f1b", num_chunks=int(row[6]))
        assert round(found, 4) == measured
        assert 0 < found - row[8] < 0.0036

    @pytest.mark.parametrize("row", PAPER)
    def test_interleaved_is_the_papers_without_most_of_the_ways_back_to_the_first_rank(self, row):
        # The evaluation that the paper's authors published lets only the first microbatch of a
        # round wait where a chunk ends on the last rank and the next begins on the first.
        p, m, forward, inputs, weights, communication, num_chunks = map(int, row[:7])
        schedule = build_schedule("interleaved_1f1b", p, m, num_chunks)
        durations = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: inputs + weights}
        ends: dict[Action, float] = {}
        free = [0.0] * p
        for action in _order_by_start(schedule):
            rank = schedule.rank_of(action.stage)
            arrivals = [
                ends[need] + (communication if schedule.rank_of(need.stage) != rank else 0)
                for need in schedule.dependencies(action)
                if need.stage // p == action.stage // p or action.microbatch % p == 0
            ]
            duration = durations[action.kind] / num_chunks
            free[rank] = ends[action] = max([free[rank], *arrivals]) + duration
        # Rank 0 starts at 0 and ends last, so its end is the cost.
        cost = max(free)
        ideal = m * (forward + inputs + weights)
        assert round((cost - ideal) / cost, 4) == row[8]

    @pytest.mark.parametrize(
        ("row", "measured"), list(zip(PAPER, [0.0728, 0.0446, 0.0518, 0.0541], strict=True))
    )
    def test_zb_v_on_the_same_inputs(self, row, measured):
        # Not in the paper's table. The pattern is made for F=I=W; here W is 0.5 to 0.75 of F, and
        # it still leaves less than half of ZB-H1's bubble.
        found = replay_paper(row, "zb_v")
        assert round(found, 4) == measured
        assert found < row[9] / 2


def _order_by_start(schedule: Schedule) -> list[Action]:
    times = [time for rank in replay_equal(schedule).ranks for time in rank.times]
    return [time.action for time in sorted(times, key=lambda time: time.start_ns)]
