import pytest

from meshscope.core.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_schedule,
    count_peak_activations,
    require_valid,
    walk_schedule,
)
from meshscope.errors import UsageError

F, B, I, W = ActionKind  # noqa: E741  # the letters are the subject here


def make_schedule(*rows: str, placement=None, num_microbatches=None, name="test") -> Schedule:
    """A schedule from rows of actions; by default stage i is on rank i."""
    actions = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    count = 1 + max((a.microbatch for row in actions for a in row), default=0)
    return Schedule(
        name=name,
        num_microbatches=count if num_microbatches is None else num_microbatches,
        stage_ranks=tuple(range(len(rows))) if placement is None else placement,
        actions=actions,
    )


TWO_RANKS = make_schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
SPLIT = make_schedule("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
IN_A_V = make_schedule(
    "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0), num_microbatches=1
)


class TestActions:
    def test_is_written_as_torch_writes_it(self):
        assert str(Action(I, 12, 3)) == "12I3"
        assert Action.parse(" 12I3 ") == Action(I, 12, 3)

    @pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "0SEND_F0", "0REDUCE_GRAD", "-1F0"])
    def test_anything_but_a_compute_action_is_refused(self, text):
        with pytest.raises(UsageError, match="is not an action; expected a stage, F, B, I or W"):
            Action.parse(text)


class TestShape:
    def test_stages_and_ranks_are_counted_from_the_rows_and_the_placement(self):
        assert (IN_A_V.num_ranks, IN_A_V.num_stages) == (2, 4)
        assert [IN_A_V.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
        assert [IN_A_V.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]

    @pytest.mark.parametrize("stage", [-1, 4])
    def test_a_stage_that_is_not_there_has_no_rank(self, stage):
        with pytest.raises(UsageError, match=rf"stage {stage} is outside 0\.\.3 of schedule test"):
            IN_A_V.rank_of(stage)

    def test_all_that_is_wrong_with_the_shape_is_said_at_once(self):
        with pytest.raises(UsageError) as caught:
            Schedule(name=" ", num_microbatches=0, stage_ranks=(0, 2), actions=((), ()))
        lines = str(caught.value).splitlines()
        assert [line.split(",")[0] for line in lines] == [
            "the name is ' '",
            "num_microbatches is 0",
            "stage 1 is placed on rank 2",
        ]

    def test_without_stages_there_is_no_schedule(self):
        with pytest.raises(UsageError, match="stage_ranks is empty"):
            Schedule(name="none", num_microbatches=1, stage_ranks=(), actions=((),))


class TestDependencies:
    @pytest.mark.parametrize(
        ("action", "expected"),
        [
            ("0F1", ""),
            ("1F1", "0F1"),
            ("1B1", "1F1"),
            ("0B1", "0F1 1B1"),
        ],
    )
    def test_of_whole_backwards(self, action, expected):
        found = TWO_RANKS.dependencies(Action.parse(action))
        assert " ".join(map(str, found)) == expected

    @pytest.mark.parametrize(
        ("action", "expected"),
        [("1I0", "1F0"), ("0I0", "0F0 1I0"), ("0W0", "0I0"), ("1W1", "1I1")],
    )
    def test_of_backwards_in_parts(self, action, expected):
        found = SPLIT.dependencies(Action.parse(action))
        assert " ".join(map(str, found)) == expected

    def test_the_next_stage_may_run_its_backward_the_other_way(self):
        mixed = make_schedule("0F0 0B0", "1F0 1I0 1W0", "2F0 2B0")
        assert require_valid(mixed) is mixed
        assert mixed.dependencies(Action(B, 0, 0)) == (Action(F, 0, 0), Action(I, 1, 0))
        assert mixed.dependencies(Action(I, 1, 0)) == (Action(F, 1, 0), Action(B, 2, 0))


class TestText:
    @pytest.mark.parametrize("schedule", [TWO_RANKS, SPLIT, IN_A_V])
    def test_is_read_back(self, schedule):
        assert Schedule.parse(schedule.to_text()) == schedule

    def test_is_one_line_for_the_placement_and_one_for_each_rank(self):
        assert IN_A_V.to_text() == (
            "test microbatches=1 stage_ranks=0,1,1,0\n0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n"
        )

    def test_a_row_without_actions_is_kept(self):
        schedule = Schedule(
            name="half a step", num_microbatches=2, stage_ranks=(0, 1),
            actions=((Action(F, 0, 0),), ()),
        )  # fmt: skip
        assert Schedule.parse(schedule.to_text()) == schedule

    def test_a_wrong_first_line_is_shown(self):
        with pytest.raises(UsageError, match="'0F0 0B0' is not the first line of a schedule"):
            Schedule.parse("0F0 0B0\n")

    def test_every_row_that_is_not_understood_is_named(self):
        with pytest.raises(UsageError) as caught:
            Schedule.parse("x microbatches=1 stage_ranks=0,1\n0F0 0X0 0B0\n1F0 1SEND_B0 1B0\n")
        first, second = str(caught.value).splitlines()
        assert first.startswith("row of rank 0: '0X0' not understood; expected a stage")
        assert second.startswith("row of rank 1: '1SEND_B0' not understood")


class TestCsv:
    def test_rows_of_torch_are_read_and_their_gaps_skipped(self):
        text = "0F0,0F1,,0I0,0W0,0I1,0W1\r\n,1F0,1I0,1F1,1I1,1W0,1W1\r\n"
        assert Schedule.from_csv(text, name="test") == SPLIT

    def test_placement_is_where_the_actions_are(self):
        assert Schedule.from_csv(IN_A_V.to_csv(), name="test") == IN_A_V

    def test_is_written_without_gaps(self):
        assert TWO_RANKS.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

    def test_a_lowered_schedule_is_refused_with_what_to_write_instead(self):
        with pytest.raises(UsageError, match="write only compute actions") as caught:
            Schedule.from_csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1F0,1B0\n")
        assert "'0UNSHARD', '0SEND_F0', '0RECV_B0', '0REDUCE_GRAD'" in str(caught.value)

    def test_a_stage_without_actions_is_named(self):
        with pytest.raises(UsageError, match=r"no row has actions of stages \[1\]"):
            Schedule.from_csv("0F0,0B0\n2F0,2B0\n")

    @pytest.mark.parametrize("text", ["", "\n\n", ",,\n,,\n"])
    def test_no_actions_at_all_are_refused(self, text):
        with pytest.raises(UsageError, match="there are no actions"):
            Schedule.from_csv(text)


class TestPeaks:
    def test_a_whole_backward_frees_at_its_end(self):
        assert count_peak_activations(TWO_RANKS) == (2, 1)

    def test_a_split_backward_frees_only_with_the_weight_gradient(self):
        assert count_peak_activations(SPLIT) == (2, 2)


class TestWalk:
    def test_orders_actions_after_all_that_they_wait_for(self):
        order = " ".join(str(action) for _, action in walk_schedule(TWO_RANKS).order)
        assert order == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"

    def test_says_where_each_rank_stops(self):
        crossed = make_schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
        walk = walk_schedule(crossed)
        assert [(stop.rank, str(stop.action)) for stop in walk.blocked] == [(0, "0B0"), (1, "1F1")]


class TestProblems:
    @pytest.mark.parametrize("schedule", [TWO_RANKS, SPLIT, IN_A_V])
    def test_a_whole_step_has_none(self, schedule):
        assert check_schedule(schedule) == []
        assert require_valid(schedule) is schedule

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            (
                ("0F0 0B0", "1B0"),
                [
                    "1F0 missing; every rank must run each of its once",
                    "deadlock: rank 0 stops at 0B0, which waits for 1B0; rank 1 stops at 1B0, which"
                    " waits for 1F0, which no rank runs; run what is waited for earlier",
                ],
            ),
            (
                ("0F0 0F0 0B0", "1F0 1B0 1B0"),
                ["0F0 2 times, 1B0 2 times; run each action once"],
            ),
            (
                ("0F0 0I0", "1F0 1I0 1W0"),
                ["0W0 missing; every rank must run each of its once"],
            ),
            (
                ("0F0", "1F0 1B0"),
                ["0B0 (or I and W) missing; every rank must run each of its once"],
            ),
            (
                ("0F0 0B0 0W0", "1F0 1B0 1I0 1W0"),
                [
                    "stage 0 microbatch 0, stage 1 microbatch 0: the backward is there both whole "
                    "(B) and in parts (I, W); keep B, or I and W"
                ],
            ),
            (
                ("0B0 0F0", "1F0 1W0 1I0"),
                [
                    "0B0 on rank 0 before its forward; run F first",
                    "1W0 on rank 1 before its input gradient; run I first",
                    "deadlock: rank 0 stops at 0B0, which waits for 0F0; rank 1 stops at 1F0, which"
                    " waits for 0F0; run what is waited for earlier",
                ],
            ),
            (
                ("0F0 0B0 1B0", "1F0"),
                [
                    "1B0 on rank 0 instead of 1: a stage runs only on the rank that holds it; "
                    "move the actions or change stage_ranks",
                    "deadlock: rank 0 stops at 0B0, which waits for 1B0; "
                    "run what is waited for earlier",
                ],
            ),
            (
                ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
                [
                    "deadlock: rank 0 stops at 0B0, which waits for 1B0; rank 1 stops at 1F1, which"
                    " waits for 0F1; run what is waited for earlier"
                ],
            ),
        ],
    )
    def test_are_told_with_the_actions(self, rows, expected):
        assert check_schedule(make_schedule(*rows)) == expected

    def test_actions_of_stages_and_microbatches_that_are_not_there(self):
        schedule = make_schedule("0F0 0B0 0F1 0B1 3F0", "1F0 1B0", num_microbatches=1)
        assert check_schedule(schedule) == [
            "0F1, 0B1, 3F0: there are only stages 0..1 and microbatches 0..0; "
            "correct or remove them",
            "deadlock: rank 0 stops at 0B1, which waits for 1B1, which no rank runs; "
            "run what is waited for earlier",
        ]

    def test_a_rank_without_a_stage(self):
        schedule = make_schedule("0F0 0B0", "", placement=(0,))
        assert check_schedule(schedule) == ["rank 1 holds no stage; give it one or remove its row"]

    def test_many_of_a_kind_are_counted(self):
        schedule = make_schedule("0F0 0B0", num_microbatches=6)
        assert check_schedule(schedule) == [
            "0F1, 0B1 (or I and W), 0F2, 0B2 (or I and W), 0F3, 0B3 (or I and W) and 4 more "
            "missing; every rank must run each of its once"
        ]

    def test_are_raised_together_under_the_schedules_name(self):
        with pytest.raises(UsageError) as caught:
            require_valid(make_schedule("0F0 0F0 0B0", "1F0", name="mine"))
        assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
            "schedule mine: 1B0 (or I and W) missing",
            "schedule mine: 0F0 2 times",
            "schedule mine: deadlock: rank 0 stops at 0B0, which waits for 1B0, which no rank runs",
        ]
