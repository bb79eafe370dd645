from types import SimpleNamespace

import pytest

from meshscope.core.schedule import Schedule, check_schedule
from meshscope.core.schedule_builders import (
    BUILDERS,
    build_schedule,
    gpipe,
    interleaved_one_f_one_b,
    looped_breadth_first,
    one_f_one_b,
    round_robin,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from meshscope.errors import UsageError


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


class TestOrders:
    def test_gpipe(self):
        assert rows_of(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]

    def test_one_f_one_b(self):
        assert rows_of(one_f_one_b(3, 4)) == [
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ]

    def test_one_f_one_b_with_fewer_microbatches_than_ranks(self):
        assert rows_of(one_f_one_b(4, 2)) == [
            "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1",
        ]  # fmt: skip

    def test_interleaved(self):
        assert rows_of(interleaved_one_f_one_b(2, 4, 2)) == [
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
        ]

    def test_round_robin_takes_each_group_through_all_chunks(self):
        # Five microbatches over two ranks: groups of two and three.
        assert rows_of(round_robin(2, 5, 2))[1] == (
            "1F0 1F1 3F0 3F1 1F2 1F3 1F4 3F2 3F3 3F4 3B0 3B1 1B0 1B1 3B2 3B3 3B4 1B2 1B3 1B4"
        )

    def test_looped_breadth_first_takes_all_microbatches_through_each_chunk(self):
        assert rows_of(looped_breadth_first(2, 2, 2)) == [
            "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
            "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
        ]

    def test_zb_h1_puts_off_as_many_weight_gradients_as_the_ranks_index(self):
        assert rows_of(zero_bubble_h1(3, 4)) == [
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ]

    def test_zb_h2_runs_twice_as_many_forwards_ahead(self):
        assert rows_of(zero_bubble_h2(2, 4)) == [
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
        ]

    def test_zb_v_goes_there_and_back(self):
        schedule = zero_bubble_v(2, 4)
        assert schedule.stage_ranks == (0, 1, 1, 0)
        assert rows_of(schedule)[0].startswith(
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2"
        )

    @pytest.mark.parametrize("name", BUILDERS)
    def test_one_rank_and_one_microbatch_are_enough(self, name):
        schedule = build_schedule(name, 1, 1)
        assert check_schedule(schedule) == []
        assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, 1, 1)


class TestByName:
    @pytest.mark.parametrize("name", ["ZB-H1", " zb_h1 ", "Zb H1"])
    def test_spelling_does_not_matter(self, name):
        assert build_schedule(name, 2, 3) == zero_bubble_h1(2, 3)

    def test_chunks_have_a_default(self):
        assert {name: build_schedule(name, 2, 4).num_stages // 2 for name in BUILDERS} == {
            "gpipe": 1,
            "1f1b": 1,
            "interleaved_1f1b": 2,
            "round_robin": 2,
            "looped_bfs": 2,
            "zb_h1": 1,
            "zb_h2": 1,
            "zb_v": 2,
        }

    def test_an_unknown_name_is_answered_with_the_known_ones(self):
        with pytest.raises(UsageError, match="there is no schedule 'pipedream'; use one of gpipe"):
            build_schedule("pipedream", 2, 4)

    @pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("zb_v", 1), ("zb_h1", 0)])
    def test_chunks_that_a_schedule_cannot_have_are_refused(self, name, chunks):
        with pytest.raises(
            UsageError, match=f"{name} puts . chunk.* on each rank, but num_chunks is {chunks}"
        ):
            build_schedule(name, 2, 4, chunks)

    @pytest.mark.parametrize("name", BUILDERS)
    @pytest.mark.parametrize("bad", [0, -1, True, 1.5])
    def test_counts_are_whole_and_at_least_one(self, name, bad):
        with pytest.raises(UsageError) as caught:
            build_schedule(name, bad, bad)
        assert [line.split(",")[0] for line in str(caught.value).splitlines()] == [
            f"num_ranks is {bad}",
            f"num_microbatches is {bad}",
        ]

    def test_interleaving_says_which_numbers_it_can_divide(self):
        with pytest.raises(
            UsageError,
            match=r"cannot divide 9 microbatches into 2 equal rounds of at least 4 .*; "
            "use a multiple of 4 such as 8 or 12, or the schedule round_robin",
        ):
            build_schedule("interleaved_1f1b", 4, 9)

    @pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
    def test_interleaving_takes_what_torch_takes(self, m):
        assert check_schedule(build_schedule("interleaved_1f1b", 4, m)) == []


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def read_torch_rows(rows) -> list[str]:
    """torch's actions without gaps and without what is not compute."""
    kept = ([action for action in row if action and action.is_compute_op] for row in rows)
    return [" ".join(map(str, row)) for row in kept]


SIZES = [(2, 4), (4, 8), (4, 12), (3, 9), (4, 10), (2, 7)]


class TestAgainstTorch:
    """The same orders as torch's own classes, whose builders run without processes."""

    @pytest.mark.parametrize(("p", "m"), SIZES)
    def test_gpipe(self, torch_schedules, p, m):
        settings = SimpleNamespace(_num_stages=p, _n_microbatches=m)
        rows = torch_schedules.ScheduleGPipe._get_pipeline_order(settings)
        assert read_torch_rows(rows.values()) == rows_of(gpipe(p, m))

    @pytest.mark.parametrize(("p", "m"), SIZES)
    def test_1f1b_but_for_the_last_rank(self, torch_schedules, p, m):
        settings = SimpleNamespace(_num_stages=p, _n_microbatches=m)
        rows = torch_schedules.Schedule1F1B._get_pipeline_order(settings)
        # torch 2.13 numbers the last rank's forwards from 1 here; what it runs is not this list.
        assert read_torch_rows(rows.values())[:-1] == rows_of(one_f_one_b(p, m))[:-1]

    @pytest.mark.parametrize(("p", "m"), [*SIZES[:5], (4, 3), (4, 1)])
    @pytest.mark.parametrize("v", [1, 2, 3])
    def test_interleaved_1f1b(self, torch_schedules, p, m, v):
        settings = SimpleNamespace(
            pp_group_size=p,
            n_local_stages=v,
            _n_microbatches=m,
            microbatches_per_round=m // max(1, m // p),
        )
        order = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
        rows = [order(settings, rank) for rank in range(p)]
        assert read_torch_rows(rows) == rows_of(interleaved_one_f_one_b(p, m, v))

    @pytest.mark.parametrize(("p", "m"), SIZES)
    @pytest.mark.parametrize("v", [1, 2, 3])
    def test_looped_breadth_first(self, torch_schedules, p, m, v):
        settings = SimpleNamespace(pp_group_size=p, _stages=[None] * v, _n_microbatches=m)
        order = torch_schedules.ScheduleLoopedBFS._calculate_single_rank_operations
        rows = [order(settings, rank) for rank in range(p)]
        assert read_torch_rows(rows) == rows_of(looped_breadth_first(p, m, v))

    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (3, 9)])
    def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_chunk(self, torch_schedules, p, m):
        settings = SimpleNamespace(
            pp_group_size=p, n_local_stages=1, _n_microbatches=m, microbatches_per_round=p
        )
        order = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
        rows = [order(settings, rank) for rank in range(p)]
        assert read_torch_rows(rows) == rows_of(zero_bubble_h1(p, m))

    @pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (2, 4), (4, 7), (4, 12), (3, 9)])
    def test_zb_v(self, torch_schedules, p, m):
        settings = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
        order = torch_schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations
        rows = [order(settings, rank) for rank in range(p)]
        assert read_torch_rows(rows) == rows_of(zero_bubble_v(p, m))

    @pytest.mark.parametrize("name", BUILDERS)
    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 3)])
    def test_torch_reads_the_rows_and_finds_sends_and_receives_for_them(
        self, torch_schedules, name, p, m
    ):
        schedule = build_schedule(name, p, m)
        lines = schedule.to_csv().splitlines()
        rows = {
            rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(lines)
        }
        placement = torch_schedules._validate_schedule(rows, p, schedule.num_stages, m)
        assert placement == dict(enumerate(schedule.stage_ranks))
        # Takes rows apart, raises on a deadlock.
        lowered = torch_schedules._add_send_recv(rows, placement.get, schedule.num_stages)
        assert read_torch_rows(lowered.values()) == rows_of(schedule)
