"""Pipeline actions and injected faults: rows, phases, microbatches, and nothing that raises."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist
from recorded import Recorded, finish, read_recorded

from fake_clock import FakeClock
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run
from meshscope.store.schema import ACTION_KINDS, BUILTIN_NAMES, ActionFlag

F, B, I, W = range(4)  # noqa: E741 - the letters of the schedules


def rows(recorded: Recorded, table: str = "actions") -> list[dict[str, int]]:
    columns = recorded.rank.read(table)
    size = len(next(iter(columns.values())))
    return [{name: int(values[i]) for name, values in columns.items()} for i in range(size)]


def action_rows(recorded: Recorded) -> list[tuple[int, ...]]:
    """Kind, stage, chunk, step, microbatch, begin, duration, wait begin, wait."""
    names = ("kind", "stage", "chunk", "step", "microbatch", "begin_host_mono_ns", "duration_ns")
    names += ("wait_begin_host_mono_ns", "wait_ns")
    return [tuple(row[name] for name in names) for row in rows(recorded)]


def run(rec: Recorder, clock: FakeClock, kind: str, microbatch: int, ns: int, **more: int) -> None:
    """An action of stage 3, chunk 1, after 2 ns that belong to nothing."""
    wait_ns = more.get("wait_ns", 0)
    if wait_ns:
        with rec.action_wait(kind, 3, microbatch):
            clock.advance(wait_ns)
    clock.advance(2)
    with rec.action(kind, 3, microbatch, chunk=1):
        clock.advance(ns)


def test_a_row_says_what_ran_when_and_what_it_waited_for(rec, clock):
    with rec.step(7):
        run(rec, clock, "F", 0, 10)
        run(rec, clock, "F", 1, 11, wait_ns=5)
        run(rec, clock, "I", 0, 12, wait_ns=6)
        run(rec, clock, "W", 0, 13)
        run(rec, clock, "B", 1, 14, wait_ns=7)
    assert action_rows(finish(rec)) == [
        (F, 3, 1, 7, 0, 1_002, 10, -1, -1),
        (F, 3, 1, 7, 1, 1_019, 11, 1_012, 5),
        (I, 3, 1, 7, 0, 1_038, 12, 1_030, 6),
        (W, 3, 1, 7, 0, 1_052, 13, -1, -1),
        (B, 3, 1, 7, 1, 1_074, 14, 1_065, 7),
    ]


def test_the_phases_of_a_step_of_actions_share_it_exactly(rec, clock):
    for step in range(3):
        with rec.step(step):
            for microbatch in range(4):
                run(rec, clock, "F", microbatch, 10 + microbatch, wait_ns=3)
            for microbatch in range(4):
                run(rec, clock, "B", microbatch, 20 + microbatch, wait_ns=4)
            with rec.phase("optimizer"):
                clock.advance(50)
    recorded = finish(rec)
    assert len(recorded.steps) == 3
    for step in recorded.steps:
        assert step.counts == {"forward": 4, "backward": 4, "pipeline wait": 8, "optimizer": 1}
        assert step.total_ns("forward") == 10 + 11 + 12 + 13
        assert step.total_ns("backward") == 20 + 21 + 22 + 23
        assert step.total_ns("pipeline wait") == 4 * 3 + 4 * 4
        claimed = sum(phase.self_ns for phase in step.phases)
        assert step.end_ns - step.start_ns - claimed == 8 * 2
        assert step.num_microbatches == 4
        for name in ("forward", "backward"):
            found = [phase.microbatch for phase in step.phases if phase.name == name]
            assert found == [0, 1, 2, 3]


def test_the_phase_of_an_action_begins_with_it_so_that_device_spans_join(rec, clock):
    with rec.step():
        run(rec, clock, "F", 0, 10, wait_ns=3)
        run(rec, clock, "B", 0, 10, wait_ns=3)
    recorded = finish(rec)
    phases = [p.start_ns for p in recorded.steps[0].phases if p.name != "pipeline wait"]
    assert [row["begin_host_mono_ns"] for row in rows(recorded)] == phases


def test_one_forward_one_backward_counts_each_microbatch_once(rec, clock):
    order = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    for _ in range(2):
        with rec.step():
            for kind, index in order:
                run(rec, clock, kind, int(index), 5)
    recorded = finish(rec)
    assert [step.num_microbatches for step in recorded.steps] == [4, 4]
    assert [
        ACTION_KINDS[row["kind"]] + str(row["microbatch"]) for row in rows(recorded)
    ] == 2 * order


def test_forwards_between_steps_are_evaluation_and_belong_to_none(rec, clock):
    with rec.step(4):
        run(rec, clock, "F", 0, 5)
        run(rec, clock, "B", 0, 5)
    run(rec, clock, "F", 2, 9)
    with rec.step(5):
        run(rec, clock, "F", 0, 5)
        run(rec, clock, "B", 0, 5)
    recorded = finish(rec)
    assert [row["step"] for row in rows(recorded)] == [4, 4, -1, 5, 5]
    assert [(phase.name, phase.self_ns) for phase in recorded.outside] == [("eval", 9)]
    assert [step.num_microbatches for step in recorded.steps] == [1, 1]


def test_a_wait_whose_action_never_came_is_not_given_to_a_later_one(rec, clock):
    with rec.step():
        with rec.action_wait("F", 3, 0):
            clock.advance(5)
        run(rec, clock, "F", 1, 10)
        with rec.action_wait("B", 3, 0):
            clock.advance(5)
    with rec.step():
        run(rec, clock, "B", 0, 10)
    assert [row["wait_ns"] for row in rows(finish(rec))] == [-1, -1]


def test_two_waits_for_one_action_add_up(rec, clock):
    with rec.step():
        with rec.action_wait("F", 3, 0):
            clock.advance(5)
        clock.advance(100)
        run(rec, clock, "F", 0, 10, wait_ns=3)
    (row,) = rows(finish(rec))
    assert (row["wait_begin_host_mono_ns"], row["wait_ns"]) == (1_000, 8)


def test_communication_inside_carries_microbatch_and_phase(tmp_path, alone):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    with recorder.step(3):
        for kind, microbatch in (("F", 2), ("B", 1)):
            with recorder.action_wait(kind, 0, microbatch):
                dist.all_reduce(torch.ones(4))
            with recorder.action(kind, 0, microbatch):
                dist.all_reduce(torch.ones(4))
    found = [
        (BUILTIN[row["phase_id"]], row["step"], row["microbatch"])
        for row in rows(finish(recorder), "collectives")
    ]
    assert found == [
        ("pipeline wait", 3, 2),
        ("forward", 3, 2),
        ("pipeline wait", 3, 1),
        ("backward", 3, 1),
    ]


BUILTIN = {name_id: name for name, name_id in BUILTIN_NAMES.items()}


def test_hooks_on_the_model_and_on_backward_count_nothing_twice(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    for _ in range(2):
        with recorder.step():
            losses = []
            for microbatch in range(3):
                with recorder.action("F", 0, microbatch):
                    losses.append(model(torch.ones(2, 4)).sum())
            for microbatch in range(3):
                with recorder.action("B", 0, microbatch):
                    losses[microbatch].backward()
            optimizer.step()
        model(torch.ones(2, 4)).sum().backward()  # outside of actions the hooks see it again
    recorded = finish(recorder)
    for step in recorded.steps:
        assert step.counts == {"forward": 3, "backward": 3, "optimizer": 1}
        assert step.num_microbatches == 3
    assert [phase.name for phase in recorded.outside] == ["forward", "backward"] * 2


def test_an_exception_passes_through_and_is_seen_in_row_and_phase(rec, clock):
    with pytest.raises(ZeroDivisionError), rec.step(), rec.action("F", 0, 0):
        raise ZeroDivisionError
    with rec.step():
        run(rec, clock, "F", 0, 10)
    recorded = finish(rec)
    assert [row["flags"] for row in rows(recorded)] == [ActionFlag.ABORTED, 0]
    assert [phase.is_aborted for step in recorded.steps for phase in step.phases] == [True, False]


@pytest.mark.parametrize(
    "arguments",
    [
        ("X", 0, 0),
        ("F", -1, 0),
        ("F", 0, 0, 1 << 16),
        ("F", "two", 0),
        ("F", 0, None),
        ("F", 0, 0.5),
        ("F", 0, -1),
        (None, 0, 0),
    ],
)
def test_what_is_no_action_is_counted_and_training_goes_on(rec, clock, arguments):
    ran = []
    with rec.step():
        with rec.action_wait(*arguments[:3]):
            ran.append("wait")
        with rec.action(*arguments):
            ran.append("action")
        run(rec, clock, "B", 0, 10)
    assert ran == ["wait", "action"]
    assert sum(rec.guard.counts.values()) >= 1
    path = rec.run_dir
    rec.close()
    recorded = read_recorded(path)
    assert [row["kind"] for row in rows(recorded)] == [B]
    assert recorded.steps[0].total_ns("backward") == 10


def test_nested_actions_and_threads_get_blocks_of_their_own(rec, clock):
    def elsewhere() -> None:
        with rec.action("F", 5, 1):
            pass

    with rec.step(), rec.action("B", 1, 0):
        clock.advance(1)
        with rec.action("F", 2, 1):
            clock.advance(2)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        clock.advance(4)
    recorded = finish(rec)
    assert [(row["stage"], row["duration_ns"]) for row in rows(recorded)] == [
        (5, 0),
        (2, 2),
        (1, 7),
    ]
    assert recorded.steps[0].total_ns("backward") == 5
    assert recorded.steps[0].total_ns("forward") == 2


def test_blocks_are_used_again(rec, clock):
    with rec.step():
        blocks = set()
        for microbatch in range(50):
            block = rec.action("F", 0, microbatch)
            blocks.add(id(block))
            with block:
                clock.advance(1)
    assert len(blocks) == 1
    assert len(rows(finish(rec))) == 50


def test_paused_disabled_and_closed_recorders_write_nothing(rec, clock, tmp_path):
    disabled = Recorder(tmp_path / "none", config=RecorderConfig(enabled=False), clock=clock)
    with disabled.step():
        run(disabled, clock, "F", 0, 10, wait_ns=1)
        disabled.fault("slow rank")
    assert not (tmp_path / "none").exists()
    with rec.step():
        run(rec, clock, "F", 0, 10)
    rec.pause()
    with rec.step():
        run(rec, clock, "F", 1, 10, wait_ns=1)
        rec.fault("unseen")
    rec.resume()
    with rec.step():
        run(rec, clock, "F", 2, 10)
    recorded = finish(rec)
    with rec.step():
        run(rec, clock, "F", 3, 10, wait_ns=1)
    rec.fault("too late")
    assert rec.guard.counts == {}
    assert [row["microbatch"] for row in rows(recorded)] == [0, 2]
    assert rows(recorded, "faults") == []


def test_a_run_without_a_pipeline_has_no_table_of_actions(rec, clock):
    with rec.step():
        clock.advance(1)
    recorded = finish(rec)
    assert not recorded.rank.has_table("actions")
    assert not recorded.rank.has_table("faults")


def test_an_action_can_be_the_first_thing_recorded(rec, clock):
    run(rec, clock, "F", 0, 10, wait_ns=4)
    rec.begin_step()
    rec.end_step()
    (row,) = rows(finish(rec))
    assert (row["step"], row["duration_ns"], row["wait_ns"]) == (-1, 10, 4)


def test_the_detail_limit_counts_what_it_leaves_out(tmp_path, clock):
    limit = 1 << 17
    config = RecorderConfig(provenance=False, max_detail_bytes=limit)
    rec = Recorder(tmp_path / "run", config=config, clock=clock)
    num_actions = 4 * limit // 64
    with rec.step():
        for microbatch in range(num_actions):
            with rec.action("F", 0, microbatch):
                clock.advance(1)
    path = rec.run_dir
    rec.close()
    rank = open_run(path).last_attempt.ranks[0]
    kept = len(rank.read("actions")["kind"])
    assert 0 < kept <= limit // 64
    (dropped,) = [p.num_records for p in rank.problems if p.path and p.path.name == "actions.tbl"]
    assert kept + dropped == num_actions


def test_a_fault_has_kind_detail_and_extent(rec, clock):
    with rec.step(6):
        clock.advance(5)
        rec.fault("slow rank", detail="0.5 of each forward")
        begin_ns = clock.now_ns
        clock.advance(70)
    rec.fault(
        "slow rank",
        step=6,
        begin_host_mono_ns=begin_ns,
        end_host_mono_ns=clock.now_ns,
        detail="0.5 of each forward",
    )
    rec.fault("crash", step=9)
    recorded = finish(rec)
    name_of = recorded.rank.name_of
    found = [
        (
            name_of(row["kind_id"]),
            name_of(row["detail_id"]) if row["detail_id"] else None,
            row["step"],
            row["begin_host_mono_ns"],
            row["end_host_mono_ns"],
        )
        for row in rows(recorded, "faults")
    ]
    assert found == [
        ("slow rank", "0.5 of each forward", 6, 1_005, 1_075),
        ("crash", None, 9, 1_075, -1),
    ]


def test_a_fault_that_cannot_be_written_is_counted(rec):
    with rec.step():
        rec.fault("slow rank", step="six")
    assert rec.guard.counts == {"fault": 1}


KILLED = """
import os, sys
from meshscope.capture.recorder import Recorder, RecorderConfig

rec = Recorder(sys.argv[1], config=RecorderConfig(provenance=False))
done = 0
for step in range(1_000_000):
    with rec.step(step):
        rec.fault("stall", step=step, detail="a loader")
        for kind in "FIW":
            for microbatch in range(4):
                with rec.action_wait(kind, 1, microbatch):
                    pass
                with rec.action(kind, 1, microbatch):
                    pass
                done += 1
                os.write(1, done.to_bytes(8, "little"))
"""


def test_a_killed_process_leaves_every_action_and_fault_it_had_recorded(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    acknowledged = 0
    while acknowledged < 3_000:
        acknowledged = int.from_bytes(process.stdout.read(8), "little")
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    acknowledged += len(rest) // 8
    rank = open_run(tmp_path / "run").last_attempt.ranks[0]
    actions = rank.read("actions")
    found = list(
        zip(
            *(actions[name].tolist() for name in ("step", "kind", "microbatch", "stage")),
            strict=True,
        )
    )
    assert len(found) in (acknowledged, acknowledged + 1)  # one may be written and not told
    expected = [
        (done // 12, ACTION_KINDS.index("FIW"[done % 12 // 4]), done % 4, 1)
        for done in range(len(found))
    ]
    assert found == expected
    assert (actions["wait_ns"] >= 0).all()
    faults = rank.read("faults")["step"].tolist()
    assert faults == list(range(len(faults)))
    assert len(faults) >= acknowledged // 12 + bool(acknowledged % 12)
