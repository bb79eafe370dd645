"""The monitor: right for every shape of layout, and silent where there is nothing to say."""

import itertools
import struct
import threading
from pathlib import Path

import pytest

from builders import MS, SECOND, START_MONO_NS, make_writer, put_span, put_step, table_path
from meshscope.capture.monitor.monitor import Monitor
from meshscope.capture.monitor.monitor_records import MAX_RECORDS, HoldUp, Surroundings, count_once
from meshscope.capture.monitor.monitor_results import MonitorThresholds
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.advice import KEEP_TP_INSIDE
from meshscope.core.verdict.severity import Severity
from meshscope.store.read.files import exists
from meshscope.store.read.tail import read_last_records
from meshscope.store.schema import ACTION_KINDS, OperationFlag

DP, TP, PP, WORLD = range(4)
AXES = {DP: "dp", TP: "tp", PP: "pp", WORLD: "world"}
STEP_NS = 100 * MS


class Run:
    """Writes the tables of one rank and looks at them as the recorder would."""

    def __init__(self, path: Path, layout: Layout | None = None, **around) -> None:
        self.writer = make_writer(path)
        self.now_ns = START_MONO_NS
        self.step = 0
        self.around = {
            "layout": layout,
            "rank": 0,
            "world_size": layout.world_size if layout else 1,
            "axes": AXES,
            "has_communication": True,
            "host_limit_bytes": 1000,
            "tokens_name_id": 0,
            "facts": {},
            **around,
        }
        self.monitor = Monitor(self.look, lambda: self.now_ns)

    def look(self) -> Surroundings:
        return Surroundings(read=self.read, **self.around)

    def read(self, table: str, count: int):
        path = table_path(self.writer.directory, table)
        return read_last_records(path, count) if exists(path) else []

    def add_step(self, duration_ns=STEP_NS, gap_ns=0, tokens=-1, phases=(), flags=0):
        """Phases are laid one after another from the step's begin."""
        self.now_ns += gap_ns
        begin_ns = now_ns = self.now_ns
        for name, phase_ns in phases:
            put_span(self.writer, name, now_ns, phase_ns)
            now_ns += phase_ns
        self.now_ns += duration_ns
        put_step(self.writer, self.step, begin_ns, self.now_ns, input_tokens=tokens, flags=flags)
        self.step += 1
        return begin_ns

    def add_operation(self, begin_ns, duration_ns, group, kind=Kind.ALL_REDUCE, flags=0):
        word = int(kind) | Outcome.OK << 8 | flags << 24 | group << 32
        end_ns = begin_ns + duration_ns
        step = self.step + 1
        self.writer.table("collectives").put(word, 0, begin_ns, begin_ns, end_ns, 64, step)

    def add_wait(self, key, begin_ns, duration_ns, device_ns=-1):
        self.writer.table("waits").put(1, key, begin_ns, duration_ns, device_ns, 0, self.step + 1)

    def add_action(self, begin_ns, duration_ns, microbatch, kind="F"):
        word = ACTION_KINDS.index(kind)
        self.writer.table("actions").put(word, self.step, microbatch, begin_ns, duration_ns, -1, -1)


@pytest.fixture
def make(tmp_path):
    numbers = itertools.count()
    return lambda layout=None, **around: Run(tmp_path / str(next(numbers)), layout, **around)


def is_missing(value) -> bool:
    return isinstance(value, Unavailable)


# --- nothing to say ----------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "pp"), list(itertools.product((1, 2), repeat=3)))
def test_every_shape_of_layout_has_a_report_from_the_first_moment_on(make, dp, tp, pp):
    run = make(Layout(dp=dp, tp=tp, pp=pp))
    assert "no verdict after 0 steps" in run.monitor.report()
    for _ in range(6):
        begin_ns = run.add_step(tokens=100)
        for axis in (DP, TP, PP):
            run.add_operation(begin_ns + (10 + axis) * MS, MS, axis)
    analysis = run.monitor.analysis()
    assert is_missing(analysis.dp_efficiency_ratio) == (dp == 1)
    assert is_missing(analysis.tp_efficiency_ratio) == (tp == 1)
    assert is_missing(analysis.pipeline_utilization_ratio)
    assert analysis.communication_ratio == pytest.approx(0.03)
    assert analysis.tokens_per_s == pytest.approx(1000.0 * dp)
    assert analysis.device_tokens_per_s == pytest.approx(1000.0 / tp / pp)
    assert f"rank 0 of {dp * tp * pp}" in run.monitor.report()


def test_a_fresh_monitor_says_nothing_at_all(make):
    run = make()
    analysis, stats = run.monitor.analysis(), run.monitor.stats()
    assert analysis.bottlenecks == ()
    assert not analysis.has_verdict
    assert all(
        is_missing(value)
        for value in (
            analysis.step_ns, analysis.communication_ratio, analysis.pipeline_utilization_ratio,
            analysis.memory_used_ratio, analysis.mfu_ratio, stats.num_tokens, stats.rss_bytes,
        )
    )  # fmt: skip
    assert stats.windows == {}


def test_few_steps_give_numbers_but_no_verdict(make):
    run = make()
    for _ in range(4):
        run.add_step(phases=[("data", 50 * MS)])
    analysis = run.monitor.analysis()
    assert analysis.input_ratio == pytest.approx(0.5)
    assert (analysis.has_verdict, analysis.bottlenecks) == (False, ())
    run.add_step(phases=[("data", 50 * MS)])
    (found,) = run.monitor.analysis().bottlenecks
    assert (found.category, found.severity) == ("input", Severity.CRITICAL)


# --- throughput --------------------------------------------------------------------------------


def test_throughput_is_over_wall_clock_with_gaps(make):
    run = make()
    run.add_step(tokens=50)
    for _ in range(20):
        run.add_step(gap_ns=100 * MS, tokens=50, phases=[("forward", 30 * MS)])
    stats = run.monitor.stats()
    assert stats.windows[10].tokens_per_s == pytest.approx(250)
    assert stats.windows[10].step_ns == 200 * MS
    assert (stats.windows[1].num_steps, stats.windows[50].num_steps) == (1, 21)
    assert stats.num_tokens == 21 * 50
    assert (stats.num_forwards, stats.forward_ns) == (20, 600 * MS)
    assert stats.wall_ns == 21 * 100 * MS + 20 * 100 * MS


def test_windows_follow_a_change_of_pace(make):
    run = make()
    for _ in range(60):
        run.add_step(100 * MS, tokens=10)
    for _ in range(10):
        run.add_step(200 * MS, tokens=10)
    windows = run.monitor.stats().windows
    assert [windows[size].step_ns / MS for size in (1, 10, 50)] == [200, 200, 120]


def test_tokens_that_were_logged_come_first(make):
    run = make(tokens_name_id=70)
    for step in range(3):
        run.add_step(tokens=5)
        bits = struct.unpack("<q", struct.pack("<d", 40.0))[0]
        run.writer.table("scalars").put(70, step, run.now_ns, bits, 0, 0, 0)
    assert run.monitor.stats().num_tokens == 120


def test_without_a_layout_the_jobs_tokens_are_not_guessed(make):
    run = make(world_size=8)
    run.add_step(tokens=5)
    assert is_missing(run.monitor.analysis().tokens_per_s)
    assert run.monitor.stats().num_tokens == 5


def test_aborted_steps_do_not_count(make):
    run = make()
    run.add_step()
    run.add_step(5 * SECOND, flags=1)
    assert run.monitor.stats().num_steps == 1


def test_device_times_come_before_host_times(make):
    run = make()
    for _ in range(2):
        begin_ns = run.add_step(phases=[("forward", 1 * MS), ("backward", 2 * MS)])
        run.writer.table("device_spans").put(2, begin_ns, 0, 30 * MS, 0, 0, 0)
        run.writer.table("device_spans").put(3, begin_ns + MS, 0, 60 * MS, 0, 0, 0)
    analysis = run.monitor.analysis()
    assert (analysis.clock, analysis.forward_ns, analysis.backward_ns) == (
        "device",
        30 * MS,
        60 * MS,
    )
    assert run.monitor.stats().forward_ns == 60 * MS


# --- communication -----------------------------------------------------------------------------


def test_tp_efficiency_is_of_the_step_whatever_else_is_sent(make):
    layout = Layout(dp=1, tp=8)
    found = []
    for send_ns in (0, 100 * SECOND):
        run = make(layout)
        for _ in range(5):
            begin_ns = run.add_step(3 * SECOND + send_ns)
            run.add_operation(begin_ns, 1_000, TP)
            if send_ns:
                run.add_operation(begin_ns + SECOND, send_ns, WORLD, kind=Kind.SEND)
        found.append(run.monitor.analysis())
    assert found[0].tp_efficiency_ratio == pytest.approx(1 - 1e-6 / 3)
    assert found[1].tp_efficiency_ratio == pytest.approx(1 - 1e-6 / 103)
    assert found[0].bottlenecks == ()
    assert [one.category for one in found[1].bottlenecks] == ["communication"]


def test_tp_traffic_that_takes_half_the_step_halves_the_efficiency(make):
    run = make(Layout(tp=2))
    for _ in range(5):
        run.add_operation(run.add_step(), 50 * MS, TP)
    analysis = run.monitor.analysis()
    assert analysis.tp_efficiency_ratio == pytest.approx(0.5)
    (found,) = analysis.bottlenecks
    assert (found.category, found.severity, found.recoverable_ns) == (
        "tp",
        Severity.CRITICAL,
        50 * MS,
    )
    assert f"try: {KEEP_TP_INSIDE}" in run.monitor.report(), "the words of rule CO002"


def test_a_hidden_reduction_costs_no_efficiency(make):
    run = make(Layout(dp=4))
    for _ in range(5):
        begin_ns = run.add_step()
        run.add_operation(begin_ns, 80 * MS, DP, flags=OperationFlag.ASYNC)
        run.add_wait(begin_ns, begin_ns + 80 * MS, 2 * MS)
    analysis = run.monitor.analysis()
    assert analysis.dp_efficiency_ratio == pytest.approx(0.98)
    assert analysis.communication_ratio == pytest.approx(0.02)
    assert analysis.bottlenecks == ()


def test_a_reducers_stretch_is_from_its_last_call_to_its_last_end(make):
    run = make(Layout(dp=4))
    for _ in range(5):
        begin_ns = run.add_step()
        run.add_operation(begin_ns + 10 * MS, 40 * MS, DP, flags=OperationFlag.ENGINE)
        run.add_operation(begin_ns + 60 * MS, 15 * MS, DP, flags=OperationFlag.ENGINE)
    # Rows carry the step after: `add_step` counts on before they are written.
    assert run.monitor.analysis().dp_efficiency_ratio == pytest.approx(0.85)


def test_on_a_device_the_stream_is_what_is_held_up(make):
    run = make(Layout(dp=4))
    for _ in range(5):
        begin_ns = run.add_step()
        flags = OperationFlag.ASYNC | OperationFlag.DEVICE
        run.add_operation(begin_ns, 80 * MS, DP, flags=flags)
        run.add_wait(begin_ns, begin_ns + MS, 10_000, device_ns=20 * MS)
    assert run.monitor.analysis().dp_efficiency_ratio == pytest.approx(0.8)


def test_a_moment_counts_once():
    found = count_once([HoldUp(10, 20, 1), HoldUp(0, 15, 0), HoldUp(5, 12, 2), HoldUp(30, 31, 0)])
    assert found == [HoldUp(0, 15, 0), HoldUp(15, 20, 1), HoldUp(30, 31, 0)]


def test_without_watching_there_is_no_zero(make):
    run = make(Layout(dp=2), has_communication=False)
    run.add_step()
    analysis = run.monitor.analysis()
    assert is_missing(analysis.communication_ratio)
    assert is_missing(analysis.dp_efficiency_ratio)
    assert is_missing(run.monitor.stats().exposed_communication_ns)


# --- pipeline, memory, MFU ---------------------------------------------------------------------


def add_pipeline_steps(run, busy_ns, num_microbatches=4, num_steps=5):
    for _ in range(num_steps):
        begin_ns = run.add_step(110 * MS)
        put_span(run.writer, "optimizer", begin_ns + 100 * MS, 10 * MS)
        for microbatch in range(num_microbatches):
            run.add_action(begin_ns + microbatch * 20 * MS, busy_ns, microbatch)


def test_pipeline_utilisation_is_busy_time_over_the_step_without_its_update(make):
    run = make(Layout(pp=2))
    add_pipeline_steps(run, 20 * MS)
    analysis = run.monitor.analysis()
    assert analysis.pipeline_utilization_ratio == pytest.approx(0.8)
    assert analysis.pipeline_plain_ratio == pytest.approx(4 / 5)
    assert analysis.bottlenecks == ()


def test_a_bubble_beyond_the_schedules_is_a_bottleneck(make):
    run = make(Layout(pp=2))
    add_pipeline_steps(run, 10 * MS)
    analysis = run.monitor.analysis()
    assert analysis.pipeline_utilization_ratio == pytest.approx(0.4)
    (found,) = analysis.bottlenecks
    assert (found.category, found.severity) == ("pp", Severity.CRITICAL)


def test_actions_that_overlap_are_not_busy_twice(make):
    run = make(Layout(pp=2))
    for _ in range(5):
        begin_ns = run.add_step(100 * MS)
        run.add_action(begin_ns, 60 * MS, 0)
        run.add_action(begin_ns + 20 * MS, 50 * MS, 1)
    assert run.monitor.analysis().pipeline_utilization_ratio == pytest.approx(0.7)


def add_memory(run, *, peak=80, reserved=90, free=5, total=100, inactive=0):
    run.writer.table("memory").put(run.step, run.now_ns, 300, 50, reserved, peak, reserved)
    run.writer.table("allocator").put(run.step, run.now_ns, 50, inactive, free, total, 0)


def test_memory_is_judged_by_the_device_and_not_by_a_constant(make):
    run = make()
    for _ in range(5):
        run.add_step()
    add_memory(run, peak=60)
    analysis = run.monitor.analysis()
    assert analysis.memory_efficiency_ratio == pytest.approx(60 / 90)
    assert analysis.memory_used_ratio == pytest.approx(0.65)  # and 5 of somebody else
    assert analysis.bottlenecks == ()
    add_memory(run, peak=88)
    (found,) = run.monitor.analysis().bottlenecks
    assert (found.category, found.severity) == ("memory", Severity.MEDIUM), "as rule ME002 has it"
    assert run.monitor.stats().peak_allocated_bytes == 88
    add_memory(run, peak=92)
    (found,) = run.monitor.analysis().bottlenecks
    assert (found.category, found.severity) == ("memory", Severity.HIGH)


def test_without_a_device_memory_is_that_of_the_host(make):
    run = make(host_limit_bytes=1000)
    for _ in range(5):
        run.add_step()
    run.writer.table("memory").put(4, run.now_ns, 950, -1, -1, -1, -1)
    analysis = run.monitor.analysis()
    assert analysis.memory_used_ratio == pytest.approx(0.95)
    assert is_missing(analysis.memory_efficiency_ratio)
    assert [one.category for one in analysis.bottlenecks] == ["memory"]


def test_mfu_is_of_the_steps_wall_clock_and_not_clamped(make):
    flops = {"model_flops": 3e9, "per": "step", "dtype": "bfloat16", "device": "NVIDIA H200"}
    peak = {"flops_per_s": 2e10, "dtype": "bfloat16"}
    run = make(facts={"flops": flops, "peak": peak})
    for _ in range(3):
        run.add_step()
    assert run.monitor.analysis().mfu_ratio == pytest.approx(1.5)
    by_table = make(facts={"flops": flops})
    by_table.add_step()
    assert by_table.monitor.analysis().mfu_ratio == pytest.approx(3e10 / 989.4e12)


# --- the face ----------------------------------------------------------------------------------


def test_thresholds_can_be_changed(make):
    run = make()
    for _ in range(5):
        run.add_step(phases=[("data", 2 * MS)])
    assert run.monitor.analysis().bottlenecks == ()
    run.monitor.thresholds = MonitorThresholds(input_ratio=0.01)
    (found,) = run.monitor.analysis().bottlenecks
    assert found.severity == Severity.LOW


def test_after_a_reset_only_new_steps_count(make):
    run = make()
    for _ in range(5):
        run.add_step(tokens=10)
    run.monitor.reset()
    assert run.monitor.stats().num_steps == 0
    run.add_step(tokens=10)
    assert run.monitor.stats().num_tokens == 10


def test_no_more_is_read_than_the_limit(make):
    asked = []
    run = make()
    run.add_step()
    read = run.read
    run.read = lambda table, count: asked.append(count) or read(table, count)
    run.monitor.report()
    assert set(asked) == {MAX_RECORDS}


def test_the_recorder_answers_while_other_threads_record(tmp_path):
    rec = Recorder(tmp_path / "run", layout=Layout(), config=RecorderConfig(provenance=False))
    assert rec.stats().num_steps == 0
    stop = threading.Event()
    errors = []

    def ask():
        while not stop.is_set():
            try:
                assert "monitor: rank 0 of 1" in rec.report()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
                errors.append(error)
                return

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(200):
        with rec.step(), rec.phase("forward"):
            rec.log(tokens=4)
    stop.set()
    asking.join()
    assert errors == []
    assert rec.stats().num_steps == 200
    assert rec.stats().num_tokens == 800
    rec.reset_stats()
    assert rec.stats().num_steps == 0
    with rec.step():
        pass
    assert rec.stats().num_steps == 1
    rec.close()
    assert rec.stats().num_steps == 1, "what was recorded can be looked at afterwards"
    assert rec.guard.counts == {}


def test_an_error_of_the_monitors_own_does_not_reach_the_program(tmp_path, monkeypatch):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    with rec.step():
        pass
    monkeypatch.setattr(rec.monitor, "snapshot", lambda: 1 // 0)
    assert rec.stats().num_steps == 0
    assert rec.analysis().bottlenecks == ()
    assert "error of the recorder's own" in rec.report()
    assert rec.guard.counts == {"monitor": 3}
    rec.close()
