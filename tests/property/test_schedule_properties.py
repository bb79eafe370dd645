"""Schedules of every size are whole steps without deadlock, and replays keep to their rules."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshscope.core.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_schedule,
    count_peak_activations,
    walk_schedule,
)
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, ScheduleReplay, replay_schedule
from meshscope.errors import UsageError

# The deadline measures the machine, not the code: CI shares its cores.
any_duration = settings(deadline=None, max_examples=150)

SPLITS_BACKWARD = ("zb_h1", "zb_h2", "zb_v")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(BUILDERS)))
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 16))
    chunks = draw(st.integers(1, 4)) if BUILDERS[name].is_chunked else None
    # The only sizes refused: see test_schedule_builders.
    assume(name != "interleaved_1f1b" or m % max(1, m // p) == 0)
    return build_schedule(name, p, m, chunks)


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> ActionCosts:
    """Whole numbers, so that sums are exact."""
    durations = st.integers(1, 9)
    stages = range(schedule.num_stages)
    exceptions = st.dictionaries(
        st.tuples(
            st.sampled_from(ActionKind),
            st.integers(0, schedule.num_stages - 1),
            st.integers(0, schedule.num_microbatches - 1),
        ),
        st.integers(0, 30),
        max_size=3,
    )
    return ActionCosts(
        by_stage={(kind, stage): draw(durations) for kind in ActionKind for stage in stages},
        by_microbatch=draw(exceptions),
        communication_ns=draw(st.integers(0, 5)),
    )


@st.composite
def replays(draw: st.DrawFn) -> tuple[ScheduleReplay, ActionCosts]:
    schedule = draw(schedules())
    costs = draw(costs_for(schedule))
    return replay_schedule(schedule, costs), costs


@any_duration
@given(schedules())
def test_every_schedule_is_one_whole_step(schedule):
    assert check_schedule(schedule) == []
    actions = [action for row in schedule.actions for action in row]
    is_split = schedule.name in SPLITS_BACKWARD
    assert set(actions) == {
        Action(kind, stage, microbatch)
        for kind in (("F", "I", "W") if is_split else ("F", "B"))
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    assert len(actions) == len(set(actions))


@any_duration
@given(schedules())
def test_dependencies_come_first_in_the_order_of_a_walk(schedule):
    seen = set()
    for rank, action in walk_schedule(schedule).order:
        assert schedule.rank_of(action.stage) == rank
        assert seen.issuperset(schedule.dependencies(action))
        seen.add(action)


@any_duration
@given(schedules())
def test_text_and_csv_are_read_back(schedule):
    assert Schedule.parse(schedule.to_text()) == schedule
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


@any_duration
@given(schedules())
def test_activations_stay_within_what_the_schedule_promises(schedule):
    p, m = schedule.num_ranks, schedule.num_microbatches
    chunks = schedule.num_stages // p
    # A round can be longer than p where p does not divide m.
    round_length = m // max(1, m // p)
    promised = {
        "1f1b": min(p, m),
        "interleaved_1f1b": min(m * chunks, (chunks - 1) * round_length + 2 * p - 1),
        "zb_h1": min(p, m),
        "zb_h2": min(2 * p - 1, m),
        "zb_v": 2 * p,
    }.get(schedule.name, m * chunks)
    peaks = count_peak_activations(schedule)
    assert max(peaks) <= promised
    if schedule.name != "zb_v":
        assert peaks[0] == promised


@any_duration
@given(replays())
def test_actions_start_when_they_may_and_not_later(result):
    replay, costs = result
    schedule = replay.schedule
    ends = {time.action: time.end_ns for rank in replay.ranks for time in rank.times}
    for index, rank in enumerate(replay.ranks):
        assert tuple(time.action for time in rank.times) == schedule.actions[index]
        free_ns = 0
        for time in rank.times:
            arrivals = [
                ends[need]
                + (costs.communication_ns if schedule.rank_of(need.stage) != index else 0)
                for need in schedule.dependencies(time.action)
            ]
            assert time.start_ns == max([free_ns, *arrivals])
            assert time.end_ns - time.start_ns == costs.duration_ns(time.action)
            free_ns = time.end_ns


@any_duration
@given(replays())
def test_sums_of_a_replay_agree(result):
    replay, _ = result
    assert replay.ideal_ns <= replay.cost_ns <= replay.makespan_ns
    for rank in replay.ranks:
        assert rank.idle_ns >= 0
        assert rank.busy_ns + rank.idle_ns == rank.span_ns
    of_total = Fraction(replay.bubble_ns, replay.cost_ns)
    assert Fraction(replay.bubble_ns, replay.ideal_ns) == of_total / (1 - of_total)
    assert 0 <= replay.idle_of_makespan_ratio < 1


@any_duration
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
def test_gpipe_and_1f1b_cost_the_textbooks_bubble(p, m, forward, backward):
    for name in ("gpipe", "1f1b"):
        schedule = build_schedule(name, p, m)
        costs = ActionCosts.uniform(
            schedule, forward_ns=forward, input_grad_ns=backward, weight_grad_ns=0
        )
        replay = replay_schedule(schedule, costs)
        assert Fraction(replay.bubble_ns, replay.cost_ns) == Fraction(p - 1, m + p - 1)


@any_duration
@given(st.integers(1, 8), st.integers(0, 20))
def test_zb_v_has_no_bubble_at_equal_parts(p, more):
    schedule = build_schedule("zb_v", p, 2 * p - 1 + more)
    costs = ActionCosts.uniform(schedule, forward_ns=2, input_grad_ns=2, weight_grad_ns=2)
    assert replay_schedule(schedule, costs).bubble_ns == 0


@any_duration
@given(schedules(), st.data())
def test_a_removed_or_repeated_action_is_noticed(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    index = data.draw(st.integers(0, len(row) - 1))
    if data.draw(st.booleans()):
        del row[index]
    else:
        row.insert(data.draw(st.integers(0, len(row))), row[index])
    assert check_schedule(_replace_row(schedule, rank, row))


@any_duration
@given(schedules(), st.data())
def test_a_shuffled_row_is_replayed_or_told_to_be_stuck(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = data.draw(st.permutations(schedule.actions[rank]))
    shuffled = _replace_row(schedule, rank, row)
    costs = ActionCosts.uniform(schedule, forward_ns=12, input_grad_ns=12, weight_grad_ns=12)
    problems = check_schedule(shuffled)
    if problems:
        assert problems[-1].startswith("deadlock: ")
        with pytest.raises(UsageError, match="deadlock: "):
            replay_schedule(shuffled, costs)
    else:
        # The work is the same, only its order is not.
        assert replay_schedule(shuffled, costs).ideal_ns == 36 * schedule.num_microbatches


def _replace_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return Schedule(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        stage_ranks=schedule.stage_ranks,
        actions=tuple(rows),
    )
