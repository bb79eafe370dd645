"""The explicit API, and everything that must not stop a training program."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from recorded import finish, read_recorded

import meshscope
from ended_process import run_process
from meshscope.capture import default
from meshscope.capture.config import read_off
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout
from meshscope.core.unavailable import known
from meshscope.errors import LayoutError, UsageError
from meshscope.store.read.run import open_run
from meshscope.store.schema import StepFlag


def test_nested_phases_share_a_step_exactly(rec, clock):
    for _ in range(3):
        with rec.step():
            clock.advance(5)
            with rec.phase("forward"):
                clock.advance(10)
                with rec.phase("augment"):
                    clock.advance(7)
                clock.advance(1)
            clock.advance(2)
        clock.advance(100)
    recorded = finish(rec)
    assert [step.end_ns - step.start_ns for step in recorded.steps] == [25] * 3
    for step in recorded.steps:
        assert step.total_ns("forward") == 11
        assert step.total_ns("augment") == 7
        assert step.flags == StepFlag.EXPLICIT
    starts = [step.start_ns for step in recorded.steps]
    assert starts[1] - recorded.steps[0].end_ns == 100


def test_usual_phases_out_of_order_nested_or_repeated_all_arrive(rec, clock):
    with rec.step():
        for name in ("backward", "forward", "data", "optimizer", "forward"):
            with rec.phase(name):
                clock.advance(3)
        with rec.phase("clip"), rec.phase("comm"), rec.phase("data"):
            clock.advance(4)
    recorded = finish(rec)
    (step,) = recorded.steps
    assert step.counts == {
        "backward": 1, "forward": 2, "data": 2, "optimizer": 1, "clip": 1, "comm": 1,
    }  # fmt: skip
    assert step.total_ns("forward") == 6
    assert step.total_ns("clip") == step.total_ns("comm") == 0
    assert step.end_ns - step.start_ns == 19


def test_a_phase_longer_than_the_packed_form_can_hold(rec, clock):
    with rec.step(), rec.phase("forward"):
        clock.advance(1)
    with rec.step():  # from here on the short cut is open
        with rec.phase("forward"):
            clock.advance(10_000_000_000)
        with rec.phase("backward"):
            clock.advance(5)
    recorded = finish(rec)
    assert recorded.steps[1].total_ns("forward") == 10_000_000_000
    assert recorded.steps[1].total_ns("backward") == 5


def test_detail_spans_take_nothing_from_phases(rec, clock):
    @rec.span("attention")
    def attend():
        clock.advance(4)

    with rec.step(), rec.phase("forward"):
        attend()
        clock.advance(1)
    recorded = finish(rec)
    (step,) = recorded.steps
    assert step.total_ns("forward") == 5
    details = [phase for phase in step.phases if phase.is_detail]
    assert [(phase.name, phase.self_ns) for phase in details] == [("attention", 4)]


def test_decorator_returns_the_value_and_records_on_exceptions(rec, clock):
    @rec.phase("load")
    def load(fails):
        clock.advance(2)
        if fails:
            raise KeyError("gone")
        return "value"

    with rec.step():
        assert load(False) == "value"
        with pytest.raises(KeyError):
            load(True)
    recorded = finish(rec)
    assert [phase.is_aborted for phase in recorded.steps[0].phases] == [False, True]


def test_a_step_left_by_an_exception_is_marked(rec, clock):
    def fail():
        with rec.step(), rec.phase("forward"):
            clock.advance(3)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    with rec.step():
        clock.advance(1)
    recorded = finish(rec)
    assert [bool(step.flags & StepFlag.ABORTED) for step in recorded.steps] == [True, False]
    assert recorded.steps[0].total_ns("forward") == 3


def test_step_numbers_can_be_given_and_go_on(rec, clock):
    with rec.step(1000):
        clock.advance(1)
    with rec.step():
        clock.advance(1)
    assert rec.current_step == 1001
    assert [step.index for step in finish(rec).steps] == [1000, 1001]


def test_microbatches_label_what_is_inside(rec, clock):
    with rec.step():
        for index in range(3):
            with rec.microbatch(index), rec.phase("forward"):
                clock.advance(1)
    recorded = finish(rec)
    assert [phase.microbatch for phase in recorded.steps[0].phases] == [0, 1, 2]
    assert recorded.steps[0].num_microbatches == 3


def test_scalars_are_kept_exactly_with_their_step(rec, clock):
    rec.log(before=1)
    for step in range(2):
        with rec.step():
            rec.log(loss=0.1 + step, grad_norm=float("nan"))
            clock.advance(1)
        rec.log(after=float("-inf"))
    recorded = finish(rec)
    assert recorded.scalars[0] == (-1, "before", 1.0)
    assert recorded.values("loss") == [0.1, 1.1]
    assert [step for step, name, _ in recorded.scalars if name == "after"] == [0, 1]
    assert all(value != value for value in recorded.values("grad_norm"))
    assert recorded.values("after") == [float("-inf")] * 2


def test_what_is_not_a_number_is_counted_and_training_goes_on(rec, clock):
    class Unprintable(Exception):
        def __str__(self):
            raise ValueError

    class Hostile:
        def __float__(self):
            raise Unprintable

    with rec.step():
        rec.log(text="many", thing=object(), lock=threading.Lock(), hostile=Hostile(), good=2)
        clock.advance(1)
    run_dir = rec.run_dir
    rec.close()
    assert rec.guard.counts == {"scalar": 4}
    recorded = read_recorded(run_dir)
    assert recorded.values("good") == [2.0]
    assert recorded.rank.closing["num_errors"] == 4
    assert [line["where"] for line in recorded.rank.health] == ["scalar"]


def test_a_loader_is_timed_without_being_changed(rec, clock):
    class Loader:
        def __iter__(self):
            for item in range(3):
                clock.advance(4)
                yield item
            clock.advance(2)  # finding out that there is nothing more

    seen = []
    for item in rec.data(Loader()):
        with rec.step():
            seen.append(item)
            clock.advance(1)
    recorded = finish(rec)
    assert seen == [0, 1, 2]
    fetches = [phase.self_ns for phase in recorded.outside if phase.name == "data"]
    assert fetches == [4, 4, 4, 2]


def test_pausing_leaves_a_hole_and_nothing_else(rec, clock):
    for index in range(6):
        if index == 2:
            rec.pause()
            assert not rec.is_recording
        if index == 4:
            rec.resume()
        with rec.step(), rec.phase("forward"):
            rec.log(loss=index)
            clock.advance(1)
    recorded = finish(rec)
    assert [step.index for step in recorded.steps] == [0, 1, 4, 5]
    assert recorded.values("loss") == [0, 1, 4, 5]


def test_reset_begins_a_new_attempt(rec, clock):
    with rec.step():
        clock.advance(1)
    run_dir = rec.run_dir
    rec.reset()
    with rec.step():
        rec.log(loss=7)
        clock.advance(2)
    rec.close()
    run = open_run(run_dir)
    assert len(run.attempts) == 2
    first, second = (read_recorded(run_dir, attempt=index) for index in (0, 1))
    assert [step.end_ns - step.start_ns for step in first.steps] == [1]
    assert [(step.index, step.end_ns - step.start_ns) for step in second.steps] == [(0, 2)]
    assert second.values("loss") == [7]


def test_settings_change_while_running_and_unknown_ones_are_refused(rec, clock):
    with rec.step():
        clock.advance(1)
    rec.configure(enabled=False)
    with rec.step():
        clock.advance(1)
    rec.configure(enabled=True, memory=False)
    with rec.step():
        clock.advance(1)
    with pytest.raises(UsageError, match=r"colour.*settings: enabled"):
        rec.configure(colour=True)
    assert [step.index for step in finish(rec).steps] == [0, 2]


def test_the_layout_may_come_later(rec, clock):
    with rec.step():
        clock.advance(1)
    rec.set_layout(Layout(dp=1))
    run_dir = rec.run_dir
    rec.close()
    assert open_run(run_dir).last_attempt.layout == Layout(dp=1)


@pytest.mark.parametrize(("given", "is_known"), [("dp=1,tp=1", True), ("dp=x", False), (4, False)])
def test_the_layout_may_come_as_text_and_a_wrong_one_does_no_harm(rec, clock, given, is_known):
    with rec.step():
        clock.advance(1)
    rec.set_layout(given)
    run_dir = rec.run_dir
    rec.close()
    assert rec.guard.counts == ({} if is_known else {"layout": 1})
    assert known(open_run(run_dir).last_attempt.layout) == (Layout(dp=1) if is_known else None)


def test_a_layout_given_at_the_start_is_checked_there(tmp_path):
    rec = Recorder(tmp_path / "run", layout="dp2xtp2")
    assert rec.session.layout == Layout(dp=2, tp=2)
    with pytest.raises(LayoutError, match="a degree is a whole number"):
        Recorder(tmp_path / "other", layout="dp")


def test_threads_record_beside_the_training_thread(recorder):
    rec = recorder
    rec.configure(gc_pauses=False)  # on a loaded machine a collection is long enough for a span
    with rec.step(), rec.phase("forward"):
        together = threading.Barrier(4)

        def work():
            together.wait()  # all alive at once, so that no thread id is used twice
            for _ in range(200):
                with rec.phase("prefetch"), rec.span("decode"):
                    pass
            together.wait()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run_dir = rec.run_dir
    rec.close()
    assert rec.guard.counts == {}
    spans = open_run(run_dir).last_attempt.ranks[0].read("spans")
    names = {"prefetch": 0, "decode": 0, "forward": 0}
    rank = open_run(run_dir).last_attempt.ranks[0]
    for name_id in spans["name_id"]:
        names[rank.name_of(int(name_id))] += 1
    assert names == {"prefetch": 800, "decode": 800, "forward": 1}
    assert set(spans["thread"].tolist()) == {0, 1, 2, 3, 4}


def test_a_forked_child_writes_nothing(recorder):
    rec = recorder
    for _ in range(2):
        with rec.step(), rec.phase("forward"):
            pass
    child = os.fork()
    if child == 0:
        with rec.step(), rec.phase("forward"):
            rec.log(loss=1)
        rec.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with rec.step(), rec.phase("forward"):
        pass
    assert [step.index for step in finish(rec).steps] == [0, 1, 2]


def test_a_child_of_fork_may_record_for_itself(tmp_path):
    parent = Recorder(tmp_path / "parent", config=RecorderConfig(provenance=False))
    with parent.step():
        pass
    child = os.fork()
    if child == 0:
        own = Recorder(tmp_path / "child", config=RecorderConfig(provenance=False))
        with own.step():
            pass
        own.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    parent.close()
    assert len(read_recorded(tmp_path / "child").steps) == 1


def test_an_unwritable_folder_costs_the_recording_and_nothing_else(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder", encoding="utf-8")
    rec = Recorder(blocker / "run", config=RecorderConfig(provenance=False))
    with caplog.at_level(logging.ERROR):
        for index in range(3):
            with rec.step(), rec.phase("forward"):
                rec.log(loss=index)
    rec.close()
    assert "NotADirectoryError" in rec.failure
    assert [r for r in caplog.records if "records nothing" in r.message]
    assert len(caplog.records) == 1


def test_files_closed_behind_our_back(rec, clock):
    with rec.step():
        clock.advance(1)
    os.close(rec.session.writer.journal._fd)
    for index in range(5):
        with rec.step(), rec.phase(f"new name {index}"):
            clock.advance(1)
    rec.close()
    assert rec.guard.num_errors > 0


def test_ranks_without_a_common_run_directory_do_not_record(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name in ("MESHSCOPE_RUN_DIR", "MESHSCOPE_LAUNCH_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rec = Recorder(config=RecorderConfig(provenance=False))
    with rec.step():
        pass
    rec.close()
    assert "2 ranks have no run directory in common" in rec.failure
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_rank_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    with rec.step():
        pass
    rec.close()
    assert "RANK" in rec.failure


def test_the_default_recorder_is_one_per_process(tmp_path):
    try:
        first = meshscope.start(tmp_path / "run", provenance=False)
        assert meshscope.recorder() is first
        assert meshscope.start(memory=False) is first
        assert first.config.memory is False
        with pytest.raises(UsageError, match="unknown setting"):
            meshscope.start(colour=1)
        first.close()
        assert meshscope.recorder() is not first
        meshscope.recorder().close()
    finally:
        default._default = None


def test_disabled_means_no_file_at_all(tmp_path):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(enabled=False))
    with rec.step(), rec.phase("forward"):
        rec.log(loss=1)
    rec.close()
    assert not (tmp_path / "run").exists()


def test_old_torch_is_refused_with_what_still_works(rec, clock, monkeypatch):
    class OldTorch:
        __version__ = "2.4.1+cu121"

    monkeypatch.setitem(sys.modules, "torch", OldTorch())
    rec.attach(model=object())
    assert "2.4.1+cu121 is older than 2.11" in rec.guard.first_messages["attach"]
    assert "step, phase, data and log still work" in rec.guard.first_messages["attach"]
    monkeypatch.undo()
    with rec.step():
        clock.advance(1)
    run_dir = rec.run_dir
    rec.close()
    assert len(read_recorded(run_dir).steps) == 1


KILLED = """
import os, signal, sys, time
from meshscope.capture.recorder import Recorder, RecorderConfig
rec = Recorder(sys.argv[1], config=RecorderConfig(provenance=False))
for index in range(5):
    with rec.step():
        with rec.phase("forward"):
            pass
        with rec.phase("backward"):
            if index == 4:
                print("ready", flush=True)
                time.sleep(60)
        with rec.phase("optimizer"):
            pass
"""


def test_a_killed_process_leaves_its_unfinished_step(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    rank = open_run(tmp_path / "run").last_attempt.ranks[0]
    recorded = read_recorded(tmp_path / "run")
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"]] * 4
    assert [phase.name for phase in recorded.outside] == ["forward"]  # of the step that was open
    going_on = [p for p in rank.open_phases() if p.end_host_mono_ns is None]
    assert [rank.name_of(p.name_id) for p in going_on] == ["backward"]
    assert rank.closing is None


DISK_FULL = """
import resource, sys
from meshscope.capture.recorder import Recorder, RecorderConfig
rec = Recorder(sys.argv[1], config=RecorderConfig(provenance=False))
with rec.step(), rec.phase("custom"):
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))  # three tables share a file
for index in range(20_000):
    with rec.step(), rec.phase("custom"):
        rec.log(loss=index)
rec.close()
print("trained to the end", rec.current_step, rec.guard.num_errors)
"""


def test_a_full_disk_does_not_stop_training(tmp_path):
    done = run_process(
        [sys.executable, "-c", textwrap.dedent(DISK_FULL), str(tmp_path / "run")], check=True
    )
    assert done.stdout.startswith("trained to the end 20000 ")
    rank = open_run(tmp_path / "run").last_attempt.ranks[0]
    steps = rank.read("steps")
    assert len(steps["step"]) > 1000
    assert steps["step"].tolist() == list(range(len(steps["step"])))
    dropped = [problem for problem in rank.problems if problem.kind == "dropped"]
    assert dropped
    assert dropped[0].num_records == 20_001 - len(steps["step"])


def test_nothing_is_imported_that_a_cluster_image_may_lack(tmp_path):
    script = """
    import sys
    for name in ("numpy", "duckdb", "msgspec", "click", "rich"):
        sys.modules[name] = None
    import meshscope
    rec = meshscope.start(sys.argv[1])
    with rec.step(), rec.phase("forward"):
        rec.log(loss=1)
    rec.close()
    assert "torch" not in sys.modules
    print(rec.failure or "recorded")
    """
    done = run_process(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")], check=True
    )
    assert done.stdout == "recorded\n"
    assert len(read_recorded(tmp_path / "run").steps) == 1


def test_provenance_says_what_ran_and_keeps_secrets_out(tmp_path):
    script = """
    import sys
    import meshscope
    rec = meshscope.start(sys.argv[1])
    with rec.step():
        pass
    """
    arguments = [str(tmp_path / "run"), "--api-key", "hunter2", "--token=hunter2", "--lr", "3"]
    done = run_process(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": "hunter2"},
        check=True,
    )
    assert done.stderr == ""
    journal = (tmp_path / "run" / "rank00000" / "attempt000" / "journal.jsonl").read_text()
    assert "hunter2" not in journal
    provenance = open_run(tmp_path / "run").last_attempt.ranks[0].header["provenance"]
    assert provenance["argv"][-2:] == ["--lr", "3"]
    assert provenance["environment"]["OMP_NUM_THREADS"] == "1"
    assert "numpy" in provenance["packages"]


def test_a_recorder_started_before_a_fork_serves_the_children(tmp_path):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
            with rec.step(), rec.phase("forward"):
                pass
            rec.close()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    rec.close()
    attempt = open_run(tmp_path / "run").last_attempt
    assert sorted(attempt.ranks) == [0, 1]
    assert [len(rank.read("steps")["step"]) for rank in attempt] == [1, 1]


def test_below_meshscope_run_its_directory_wins(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MESHSCOPE_RUN_DIR", str(tmp_path / "launched"))
    try:
        rec = meshscope.start(tmp_path / "mine", provenance=False)
        with rec.step():
            pass
        assert rec.run_dir == tmp_path / "launched"
        assert "not into" in caplog.text
    finally:
        meshscope.recorder().close()
        default._default = None


def test_microbatch_labels_hold_across_a_backward_inside(rec, clock):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    rec.attach(model)
    with rec.step():
        for index in range(2):
            with rec.microbatch(index):
                model(torch.ones(1, 2)).sum().backward()
                rec.log(loss=index)
    with rec.microbatch("many"):  # no number: counted, not raised
        pass
    run_dir = rec.run_dir
    rec.close()
    scalars = open_run(run_dir).last_attempt.ranks[0].read("scalars")
    labels = dict(zip(scalars["value"].tolist(), scalars["microbatch"].tolist(), strict=True))
    assert (labels[0.0], labels[1.0]) == (0, 1)
    assert rec.guard.counts == {"microbatch": 2}


def test_reset_completes_the_attempt_it_ends(rec, clock):
    with rec.step():
        rec.log(bad="text")
        clock.advance(1)
    run_dir = rec.run_dir
    rec.reset()
    with rec.step():
        clock.advance(1)
    rec.close()
    first, second = (attempt.ranks[0].closing for attempt in open_run(run_dir).attempts)
    assert first["num_errors"] == 1
    assert second["num_errors"] == 0
    assert first["opening_cost_ns"] >= 0


def test_nothing_opens_while_paused(rec):
    rec.pause()
    with rec.step(), rec.phase("custom"):
        rec.log(loss=1)
    assert rec.run_dir is None


def test_a_number_on_a_device_is_never_waited_for(rec, clock):
    """On a device without pooled events (here: meta) it is refused, and said so."""
    torch = pytest.importorskip("torch")
    with rec.step():
        rec.log(loss=torch.empty((), device="meta"))
        clock.advance(1)
    rec.close()
    assert rec.guard.counts == {"scalar": 1}
    assert "would make the program wait" in rec.guard.first_messages["scalar"]


def test_switches_are_turned_off_by_name():
    assert read_off("") == {}
    assert read_off("stack_samples, memory") == {"stack_samples": False, "memory": False}
    with pytest.raises(UsageError, match="nothing to turn off: max_detail_bytes, stacks"):
        read_off("stacks,max_detail_bytes")
