"""Replays of recorded programs of which every gain is known, because the program can be rerun."""

import dataclasses
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import lose_table, table_path
from made_programs import (
    MS,
    ProgramRun,
    call,
    ddp,
    hand,
    post,
    receive,
    reduce,
    replay_of,
    send,
    settle,
    share,
    start,
    wait,
    work,
)
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline, build_timeline
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.simulate import rank_events, what_if
from meshscope.simulate.dependency_graph import DependencyGraph
from meshscope.simulate.edits import equalise, scale_work, transfer_factor
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit, Gain, Replay, build_replay
from meshscope.store.read.run import open_run


def price(replay: Replay, edit: Edit | Unavailable) -> Gain:
    assert isinstance(edit, Edit), edit
    gain = replay.price([edit])[0]
    assert isinstance(gain, Gain), gain
    return gain


def test_two_ranks_and_one_all_reduce(tmp_path):
    def make(rank: int, step: int):
        return [work("forward", (10 if rank else 4) * MS), reduce((0, 1), 2 * MS)]

    run = ProgramRun(make, num_ranks=2, num_steps=5)
    replay = replay_of(run, tmp_path)
    assert run.step_ns == 12 * MS
    assert replay.fidelity.error_ratio == 0
    assert replay.fidelity.measured_ns == replay.fidelity.replayed_ns == 12 * MS
    assert price(replay, equalise(replay.timeline, [1])).saved_ns == 6 * MS
    assert price(replay, scale_work(replay.timeline, factor=0.5)).saved_ns == 5 * MS
    assert price(replay, scale_work(replay.timeline, factor=0, ranks=[0])).saved_ns == 0
    assert price(replay, transfer_factor(replay.timeline, factor=0.5)).saved_ns == MS
    assert price(replay, transfer_factor(replay.timeline, factor=3.0)).saved_ns == -4 * MS


def test_a_rank_without_steps_is_left_out(tmp_path):
    def make(rank: int, step: int):
        return [work("forward", (10 if rank else 4) * MS), reduce((0, 1, 2), 2 * MS)]

    ProgramRun(make, num_ranks=3, num_steps=5).record(tmp_path)
    lose_table(table_path(tmp_path / "rank00002" / "attempt000", "steps"))
    timeline = build_timeline(open_run(tmp_path).attempts[-1])
    assert isinstance(timeline, Timeline)
    replay = build_replay(timeline)
    assert isinstance(replay, Replay)
    assert timeline.ranks == (0, 1)


def test_what_is_routed_is_the_same_operation_whatever_its_size(tmp_path):
    """The rank of a hot expert is compared before and after it was given more, not as a whole."""

    def make(rank: int, step: int):
        hot = 26 if rank == 2 else 10
        return [
            work("forward", 10 * MS),
            reduce((0, 1, 2), 2 * MS),
            work("forward", hot * MS),
            reduce((0, 1, 2), 2 * MS),
        ]

    replay = replay_of(ProgramRun(make, num_ranks=3, num_steps=5), tmp_path)
    rows = replay.timeline.communication.operations.rows
    rows.kind[:] = Kind.ALL_TO_ALL
    rows.size_bytes[:] = 4096 * (1 + (rows.rank == 2))
    assert price(replay, equalise(replay.timeline, [2])).saved_ns == 16 * MS


def test_identity_gains_exactly_nothing(tmp_path):
    replay = replay_of(ddp({1: 3 * MS + 7}), tmp_path)
    timeline = replay.timeline
    same = Edit(
        name="same",
        work_ns=timeline.pieces.duration_ns.copy(),
        transfer_ns=timeline.communication.row_times.transfer_ns.copy(),
    )
    assert [gain.saved_ns for gain in replay.price([Edit(name="none"), same])] == [0, 0]


def test_overlapped_gradients_and_a_slow_rank(tmp_path):
    slow, even = ddp({2: 7 * MS}), ddp({})
    replay = replay_of(slow, tmp_path)
    gain = price(replay, equalise(replay.timeline, [2]))
    assert gain.saved_ns == slow.step_ns - even.step_ns == 7 * MS
    assert gain.saved_ratio == pytest.approx(7 * MS / slow.step_ns)
    assert price(replay, equalise(replay.timeline, [2], phases=["forward"])).saved_ns == 7 * MS
    assert price(replay, equalise(replay.timeline, [2], phases=["backward"])).saved_ns == 0


def test_transfers_that_compute_hid_become_visible_when_it_is_faster(tmp_path):
    run = ddp({}, transfer_ns=5 * MS)
    replay = replay_of(run, tmp_path)
    # 1 + 10 + 12 of work, the second bucket's 5, 1: the first bucket's 5 is hidden by 6 of work.
    assert run.step_ns == 29 * MS
    # Work 12 in all; the second bucket queues behind the first, whose end is 5 after 8.5.
    gain = price(replay, scale_work(replay.timeline, factor=0.5))
    assert gain.step_ns - gain.saved_ns == (8.5 + 5 + 5 + 0.5) * MS


def test_work_of_a_phase_that_all_ranks_have(tmp_path):
    run, quick = ddp({}, data_ns=9 * MS), ddp({}, data_ns=-MS)
    replay = replay_of(run, tmp_path)
    gain = price(replay, scale_work(replay.timeline, factor=0.0, phases=("data",)))
    assert gain.saved_ns == run.step_ns - quick.step_ns == 10 * MS


@pytest.mark.parametrize("after", [False, True])
def test_a_delay_costs_where_it_is(tmp_path, after):
    def make(rank: int, step: int):
        extra = 8 * MS if rank == 1 else 0
        return [
            work("backward", 10 * MS + (0 if after else extra)),
            reduce((0, 1, 2), MS),
            work("backward", 4 * MS + (extra if after else 0)),
            reduce((0, 1, 2), MS),
        ]

    replay = replay_of(ProgramRun(make, num_ranks=3, num_steps=5, layout=Layout(dp=3)), tmp_path)
    assert price(replay, equalise(replay.timeline, [1])).saved_ns == 8 * MS


def pipeline(
    schedule, forward_ns, backward_ns, latency_ns, slow_stage=-1, extra_ns=0, sending=send
):
    """Every rank runs its row of a schedule with one stage per rank."""

    def make(rank: int, step: int):
        lines = []
        for action in schedule.actions[rank]:
            is_forward = str(action.kind) == "F"
            before = rank - 1 if is_forward else rank + 1
            after = rank + 1 if is_forward else rank - 1
            extra = extra_ns if rank == slow_stage else 0
            if 0 <= before < schedule.num_ranks:
                lines.append(receive(before, latency_ns))
            ns = (forward_ns if is_forward else backward_ns) + extra
            lines.append(work("forward" if is_forward else "backward", ns))
            if 0 <= after < schedule.num_ranks:
                lines.append(sending(after))
        return [*lines, reduce(tuple(range(schedule.num_ranks)), MS)]

    return ProgramRun(
        make, num_ranks=schedule.num_ranks, num_steps=4, layout=Layout(pp=schedule.num_ranks)
    )


def makespan_ns(schedule, forward_ns: int, half_backward_ns: int) -> float:
    costs = ActionCosts.uniform(
        schedule,
        forward_ns=forward_ns,
        input_grad_ns=half_backward_ns,
        weight_grad_ns=half_backward_ns,
    )
    return replay_schedule(schedule, costs).makespan_ns


def test_one_forward_one_backward_agrees_with_the_schedule_replay(tmp_path):
    schedule = build_schedule("1f1b", 4, 8, None)
    replay = replay_of(pipeline(schedule, 2 * MS, 4 * MS, 0), tmp_path)
    assert replay.fidelity.error_ratio == 0
    assert replay.fidelity.replayed_ns == makespan_ns(schedule, 2 * MS, 2 * MS) + MS
    for factor in (0.5, 0.25):
        gain = price(replay, scale_work(replay.timeline, factor=factor))
        part = round(2 * MS * factor)
        assert gain.step_ns - gain.saved_ns == makespan_ns(schedule, part, part) + MS


def test_messages_of_a_pipeline_take_their_time(tmp_path):
    schedule = build_schedule("1f1b", 4, 8, None)
    replay = replay_of(pipeline(schedule, 2 * MS, 4 * MS, MS), tmp_path)
    half = price(replay, scale_work(replay.timeline, factor=0.5))
    assert half.step_ns - half.saved_ns == pipeline(schedule, MS, 2 * MS, MS).step_ns
    faster = price(replay, transfer_factor(replay.timeline, factor=0.0, kind=Kind.RECV))
    assert faster.step_ns - faster.saved_ns == pipeline(schedule, 2 * MS, 4 * MS, 0).step_ns


def test_a_slow_stage_removed_gives_the_known_gain(tmp_path):
    schedule = build_schedule("1f1b", 4, 6, None)
    slow = pipeline(schedule, 3 * MS, 5 * MS, MS, slow_stage=2, extra_ns=2 * MS)
    replay = replay_of(slow, tmp_path)
    gain = price(replay, equalise(replay.timeline, [2]))
    assert gain.saved_ns == slow.step_ns - pipeline(schedule, 3 * MS, 5 * MS, MS).step_ns


@pytest.mark.parametrize("slow_stage", [0, 1, 2, 3])
def test_blocking_sends_wait_for_their_receiver(tmp_path, slow_stage):
    schedule = build_schedule("gpipe", 4, 6, None)
    slow = pipeline(schedule, 3 * MS, 5 * MS, MS, slow_stage, 2 * MS, hand)
    even = pipeline(schedule, 3 * MS, 5 * MS, MS, sending=hand)
    replay = replay_of(slow, tmp_path)
    assert replay.fidelity.error_ratio == 0
    gain = price(replay, equalise(replay.timeline, [slow_stage]))
    assert gain.saved_ns == slow.step_ns - even.step_ns
    assert gain.saved_ns > 10 * MS


def sharded_optimizer(extra_ns: int) -> ProgramRun:
    """Every rank updates its part and broadcasts it; rank 1 takes longer."""

    def make(rank: int, step: int):
        return [
            work("forward", 10 * MS),
            reduce((0, 1, 2), MS),
            work("optimizer", 2 * MS + (extra_ns if rank == 1 else 0)),
            share((0, 1, 2), MS),
            share((1, 0, 2), MS),
            share((2, 0, 1), MS),
        ]

    return ProgramRun(make, num_ranks=3, num_steps=5, layout=Layout(dp=3))


def test_a_root_that_its_broadcast_holds_waits_for_the_late(tmp_path):
    slow = sharded_optimizer(12 * MS)
    replay = replay_of(slow, tmp_path)
    pieces = replay.timeline.pieces
    held = [
        pieces.duration_ns[(pieces.rank == 0) & (pieces.kind == kind)].sum()
        for kind in (PieceKind.WAIT, PieceKind.TRANSFER)
    ]
    assert held[0] > 2 * held[1]
    gain = price(replay, equalise(replay.timeline, [1]))
    assert gain.saved_ns == slow.step_ns - sharded_optimizer(0).step_ns == 12 * MS


def test_receivers_of_a_broadcast_depend_on_its_root(tmp_path):
    def make(extra_ns: int) -> ProgramRun:
        # Rank 1 comes before rank 2 and after the root, and is gone before rank 2 comes.
        return ProgramRun(
            lambda rank, step: [
                work("forward", (4 * MS, 6 * MS + extra_ns, 10 * MS)[rank]),
                share((0, 1, 2), MS),
                work("backward", (0, 20 * MS, 0)[rank]),
                reduce((0, 1, 2), MS),
            ],
            num_ranks=3,
        )

    slow = make(2 * MS)
    replay = replay_of(slow, tmp_path)
    timeline = replay.timeline
    is_edited = (timeline.pieces.rank == 1) & (timeline.pieces.kind == PieceKind.WORK)
    work_ns = timeline.pieces.duration_ns.copy()
    is_forward = timeline.pieces.phase == timeline.phases.index("forward")
    work_ns[is_edited & is_forward] = MS
    gain = price(replay, Edit(name="at once", work_ns=work_ns))
    # It cannot have the data before the root comes: 4 ms and not 1 ms.
    assert gain.saved_ns == slow.step_ns - make(-5 * MS).step_ns == 4 * MS


def test_sends_whose_end_only_a_late_wait_shows_hold_nobody_up(tmp_path):
    def make(rank: int, step: int, factor: float = 1.0):
        part = round(4 * MS * factor)
        if rank == 0:
            lines = [line for _ in range(4) for line in (work("forward", part), post(1))]
            lines += [settle(1) for _ in range(4)]
        else:
            lines = [line for _ in range(4) for line in (receive(0, MS), work("forward", 2 * part))]
        return [*lines, reduce((0, 1), MS)]

    run = ProgramRun(make, num_ranks=2, num_steps=5, layout=Layout(pp=2))
    half = ProgramRun(lambda r, s: make(r, s, 0.5), num_ranks=2, num_steps=5)
    replay = replay_of(run, tmp_path)
    gain = price(replay, scale_work(replay.timeline, factor=0.5))
    assert gain.saved_ns == pytest.approx(run.step_ns - half.step_ns, abs=10_000)


def test_an_end_that_is_not_known_is_guessed_by_its_own_link(tmp_path):
    """Most messages of the pipeline's group go over a slow link; those of ranks 0 and 1 do not."""

    def make(slow_ns: int) -> ProgramRun:
        fast_ns, part = MS // 5, MS // 10  # no two calls at one moment: it is their key
        lines = {
            0: [
                *(work("forward", 2 * MS), post(1), work("forward", part)),
                *(receive(1, fast_ns), settle(1)),
            ],
            1: [
                *(receive(0, fast_ns), work("forward", 2 * MS)),
                *(post(2), work("forward", part), post(2), work("forward", part)),
                *(receive(2, slow_ns), receive(2, slow_ns), settle(2), settle(2)),
                *(work("backward", 3 * MS), post(0), work("backward", MS), settle(0)),
            ],
            2: [
                *(receive(1, slow_ns), receive(1, slow_ns), work("backward", 4 * MS)),
                *(post(1), work("backward", part), post(1), work("backward", part)),
                *(settle(1), settle(1)),
            ],
        }
        return ProgramRun(
            lambda rank, step: [*lines[rank], work("backward", 3 * MS), reduce((0, 1, 2), MS)],
            num_ranks=3,
            layout=Layout(pp=3),
        )

    slow, even = make(30 * MS), make(MS // 5)
    replay = replay_of(slow, tmp_path)
    communication = replay.timeline.communication
    assert communication is not None
    rows, transfer_ns = communication.operations.rows, communication.row_times.transfer_ns
    is_slow = np.isin(rows.rank, (1, 2)) & np.isin(rows.peer, (1, 2))
    edit = Edit(name="as others", transfer_ns=np.where(is_slow, MS // 5, transfer_ns))
    assert price(replay, edit).saved_ns == pytest.approx(slow.step_ns - even.step_ns, abs=10_000)


def test_a_slow_call_waits_for_nobody(tmp_path):
    """Rank 1 is there when rank 0 calls; with a fast rank 0 it is not, and the calls go on."""

    def make(forward_ns: int) -> ProgramRun:
        ahead = [line for _ in range(4) for line in (work("forward", forward_ns), call(1, MS // 5))]
        behind = [line for _ in range(4) for line in (receive(0, MS // 10), work("data", 4 * MS))]
        lines = (
            [*ahead, work("backward", 20 * MS), receive(1, MS // 10), *[settle(1)] * 4],
            [*behind, post(0), work("data", MS), settle(0)],
        )
        return ProgramRun(
            lambda rank, step: [*lines[rank], reduce((0, 1), MS)],
            num_ranks=2,
            layout=Layout(pp=2),
        )

    slow, even = make(8 * MS), make(MS)
    replay = replay_of(slow, tmp_path)
    edit = scale_work(replay.timeline, factor=1 / 8, phases=["forward"])
    assert price(replay, edit).saved_ns == pytest.approx(slow.step_ns - even.step_ns, abs=10_000)


def test_from_5_percent_error_on_nothing_is_answered(tmp_path):
    replay = replay_of(ddp({}), tmp_path)
    far_off = dataclasses.replace(replay.fidelity, error_ratio=0.05)
    gain = dataclasses.replace(replay, fidelity=far_off).price([Edit(name="none")])[0]
    assert isinstance(gain, Unavailable)
    assert "misses the measured step time by 5.0%" in gain.reason


def test_an_operation_that_one_rank_did_not_record_stays_as_it_was(tmp_path):
    run = ddp({2: 7 * MS})
    run.lost = [call for call in run.calls if (call[0], call[1], call[2]) == (3, 2, "wait")]
    replay = replay_of(run, tmp_path)
    assert replay.fidelity.replayed_ns == replay.fidelity.measured_ns
    # 2 ms of 165 are what the lost operation held its rank up for.
    assert replay.fidelity.error_ratio == pytest.approx(2 / 165)
    assert replay.fidelity.unexplained_ratio > 0
    gain = price(replay, equalise(replay.timeline, [2], phases=["forward"]))
    assert 4 * MS < gain.saved_ns < 7 * MS


def test_of_a_long_run_the_last_steps_are_replayed(tmp_path, monkeypatch):
    timeline = replay_of(ddp({2: 7 * MS}), tmp_path).timeline
    monkeypatch.setattr(rank_events, "MAX_PIECES", len(timeline.pieces) // 2)
    replay = build_replay(timeline)
    assert isinstance(replay, Replay)
    assert replay.fidelity.num_steps == 2
    assert replay.fidelity.error_ratio == 0
    assert rank_events.number_windows(timeline).tolist() == [-1, -1, -1, 0, 0]
    assert price(replay, equalise(timeline, [2])).saved_ns == 7 * MS


def test_edits_that_do_not_fit_are_refused_one_by_one(tmp_path):
    replay = replay_of(ddp({}), tmp_path)
    none = np.empty(0, dtype=np.int64)
    wrong, good = Edit(name="wrong", work_ns=none), Edit(name="fine")
    first, second, third = replay.price([wrong, good, Edit(name="rows", transfer_ns=none)])
    assert isinstance(first, Unavailable)
    assert "pieces" in first.reason
    assert isinstance(second, Gain)
    assert second.saved_ns == 0
    assert isinstance(third, Unavailable)
    assert "operations" in third.reason


@pytest.mark.parametrize("num_at_once", [1, 3, 100])
def test_as_many_edits_are_replayed_at_once_as_the_budget_holds(tmp_path, monkeypatch, num_at_once):
    replay = replay_of(ddp({3: 9 * MS}), tmp_path)
    recorded = replay.recorded
    edit_bytes = 8 * (len(recorded.source) + 2 * recorded.graph.num_nodes)
    edit_bytes += replay.timeline.period_end_ns.nbytes
    work_ns = replay.timeline.pieces.duration_ns
    made: list[weakref.ref[np.ndarray]] = []
    most_alive, widths = 0, []

    def make_edits():
        nonlocal most_alive
        for index in range(7):
            work = work_ns * (index + 1)
            made.append(weakref.ref(work))
            most_alive = max(most_alive, sum(one() is not None for one in made))
            yield Edit(name=str(index), work_ns=work)
            del work

    def evaluate(graph, weight, release):
        widths.append(weight.shape[1])
        return whole(graph, weight, release)

    expected = [gain.saved_ns for gain in replay.price(list(make_edits()))]
    whole, most_alive = DependencyGraph.evaluate, 0
    monkeypatch.setattr(DependencyGraph, "evaluate", evaluate)
    monkeypatch.setattr(what_if, "MAX_REPLAY_BYTES", (num_at_once + 1) * edit_bytes - 1)
    assert [gain.saved_ns for gain in replay.price(make_edits())] == expected
    assert len(set(expected)) == 7
    assert widths == {1: [1] * 7, 3: [3, 3, 1], 100: [7]}[num_at_once]
    assert most_alive <= 2  # the one that is made, and the one before it


def test_without_communication_ranks_are_alone(tmp_path):
    def make(rank: int, step: int):
        return [work("forward", 4 * MS)]

    replay = replay_of(ProgramRun(make, num_ranks=2, num_steps=4), tmp_path)
    assert price(replay, scale_work(replay.timeline, factor=0.5, ranks=[1])).saved_ns == 0
    assert price(replay, scale_work(replay.timeline, factor=0.5)).saved_ns == 2 * MS
    assert isinstance(transfer_factor(replay.timeline, factor=1.0), Unavailable)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_shorter_work_never_makes_a_step_longer(tmp_path_factory, data):
    lengths = st.integers(1, 20)
    table = data.draw(st.lists(st.lists(lengths, min_size=3, max_size=3), min_size=3, max_size=3))

    def make(rank: int, step: int):
        first, second, third = (n * MS // (1 + step % 2) for n in table[rank])
        others = (0, 1) if rank < 2 else (1, 2)
        lines = [work("forward", first), start((0, 1, 2), MS), work("backward", second)]
        lines += [wait((0, 1, 2)), work("optimizer", third)]
        return [*lines, *([reduce(others, MS)] if rank == 0 else []),
                *([reduce((0, 1), MS), reduce((1, 2), MS)] if rank == 1 else []),
                *([reduce((1, 2), MS)] if rank == 2 else [])]  # fmt: skip

    run = ProgramRun(make, num_ranks=3, num_steps=4)
    replay = replay_of(run, tmp_path_factory.mktemp("run"))
    assert replay.fidelity.error_ratio == 0
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    work_ns = replay.timeline.pieces.duration_ns
    shorter = [
        Edit(name="shorter", work_ns=(work_ns * generator.random(len(work_ns))).astype(np.int64))
        for _ in range(3)
    ]
    longer = Edit(name="longer", work_ns=work_ns * 2)
    gains = [gain.saved_ns for gain in replay.price([*shorter, longer])]
    assert min(gains[:3]) >= 0 >= gains[3]


def test_gains_of_one_rank_add_up_while_it_stays_the_slowest(tmp_path):
    replay = replay_of(ddp({3: 9 * MS}), tmp_path)
    timeline = replay.timeline
    forward = scale_work(timeline, factor=0.8, ranks=[3], phases=["forward"])
    data = scale_work(timeline, factor=0.0, ranks=[3], phases=["data"])
    both = Edit(name="both", work_ns=forward.work_ns + data.work_ns - timeline.pieces.duration_ns)
    held = timeline.pieces.kind != 0
    both.work_ns[held] = 0
    first, second, together = (gain.saved_ns for gain in replay.price([forward, data, both]))
    assert first + second == together > 0


def test_ranks_that_meet_in_every_fourth_step_lose_a_slow_ones_time_there(tmp_path):
    """By the last rank's end every step saves alike; two of three ranks save it where they meet."""

    def make(rank, step):
        own = work("forward", (20 if rank == 1 else 10) * MS)
        return [own, reduce((0, 1, 2), MS)] if step % 4 == 3 else [own]

    replay = replay_of(ProgramRun(make, num_ranks=3, num_steps=16, layout=Layout(dp=3)), tmp_path)
    pieces = replay.timeline.pieces
    work_ns = measured_work(replay.timeline)
    work_ns[pieces.rank == 1] //= 2
    edit = Edit(name="rank 1 as its peers", work_ns=work_ns)
    meets = replay.timeline.steps % 4 == 3
    by_ranks, _ = replay.save_by_step_ns(edit, of_ranks=True)
    by_last, _ = replay.save_by_step_ns(edit)
    assert by_ranks[meets][1:] == pytest.approx(40 * MS)
    assert by_ranks[~meets] == pytest.approx(0)
    assert by_last == pytest.approx(10 * MS)
