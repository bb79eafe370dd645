"""Known answers: ZB-2p of the Zero Bubble paper (arXiv 2401.10241), and bounds that always hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.schedule import check_schedule, count_peak_activations
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.schedule_replay import replay_schedule
from meshscope.core.schedule_search import (
    StageCosts,
    list_costs,
    measure_held,
    search_schedule,
)
from meshscope.errors import UsageError

# p, m, T_F, T_B, T_W, T_comm in ms (table 9), hidden size, heads (table 3; sequences of 1024), and
# the bubble rate of ZB-2p (table 5).
PAPER = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 0.0433),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32, 0.0029),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40, 0.0066),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48, 0.0038),
]


def same_stages(num_ranks, forward_ns, input_ns, weight_ns, max_held):
    stage = StageCosts(
        forward_ns=forward_ns,
        input_grad_ns=input_ns,
        weight_grad_ns=weight_ns,
        max_held=max_held,
    )
    return [stage] * num_ranks


@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"p{row[0]}-h{row[6]}")
def test_twice_the_memory_gives_the_papers_bubble(row):
    p, m, forward, inputs, weights, transfer, hidden, heads, published = row
    kept = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    found = search_schedule(
        same_stages(p, forward, inputs, weights, 2 * p),
        m,
        communication_ns=transfer,
        kept_ratio=kept,
    )
    assert check_schedule(found.schedule) == []
    assert found.replay.bubble_of_total_ratio <= published + 0.002
    # No order can be better: the last rank starts p-1 forwards late, and its last gradient has to
    # go all the way back, where one W is left to be run.
    least = (p - 1) * (forward + 2 * transfer + inputs) + m * (forward + inputs) + weights
    assert found.replay.cost_ns >= max(least, m * (forward + inputs + weights)) - 1e-6
    assert max(found.peak_held) <= 2 * p


times = st.integers(0, 40)


@settings(max_examples=60)
@given(
    stages=st.lists(st.tuples(times, times, times, st.floats(1, 12)), min_size=1, max_size=5),
    num_microbatches=st.integers(1, 9),
    communication_ns=st.integers(0, 15),
    kept_ratio=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_any_costs_give_a_whole_step_within_the_memory(
    stages, num_microbatches, communication_ns, kept_ratio
):
    costs = [
        StageCosts(
            forward_ns=forward + 1, input_grad_ns=inputs, weight_grad_ns=weights, max_held=held
        )
        for forward, inputs, weights, held in stages
    ]
    found = search_schedule(
        costs, num_microbatches, communication_ns=communication_ns, kept_ratio=kept_ratio
    )
    assert check_schedule(found.schedule) == []
    assert all(
        peak <= cost.max_held + 1e-6 for peak, cost in zip(found.peak_held, costs, strict=True)
    )
    for name in ("1f1b", "zb_h1", "zb_h2"):
        other = build_schedule(name, len(costs), num_microbatches)
        held = measure_held(other, kept_ratio)
        if all(peak <= cost.max_held for peak, cost in zip(held, costs, strict=True)):
            other_replay = replay_schedule(other, list_costs(costs, communication_ns))
            assert found.replay.cost_ns <= other_replay.cost_ns


def test_what_is_kept_until_w_is_counted_as_the_schedule_does():
    for name in ("1f1b", "zb_h1", "zb_h2"):
        schedule = build_schedule(name, 4, 8)
        assert measure_held(schedule, 1.0) == count_peak_activations(schedule)


def test_all_that_is_wrong_is_said_at_once():
    bad = StageCosts(forward_ns=-1, input_grad_ns=1, weight_grad_ns=float("nan"), max_held=0.5)
    with pytest.raises(UsageError) as caught:
        search_schedule([bad], 0, communication_ns=-1, kept_ratio=2)
    for word in ("num_microbatches", "communication_ns", "kept_ratio", "forward_ns", "weight_grad"):
        assert word in str(caught.value)
    assert "max_held" in str(caught.value)


def test_a_text_is_a_schedule_for_its_own_ranks_and_microbatches():
    text = search_schedule(same_stages(2, 1, 1, 1, 4), 3).schedule.to_text()
    assert build_schedule(f"\n{text}\n", 2, 3).to_text() == text
    with pytest.raises(UsageError, match="is for 3 microbatches, but there are 4"):
        build_schedule(text, 2, 4)
    with pytest.raises(UsageError, match="is for 2 pipeline ranks, but there are 3"):
        build_schedule(text, 3, 3)
