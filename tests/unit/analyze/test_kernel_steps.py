"""Steps of the device in a kernel sample: closed forms, in microseconds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS
from kernel_builders import T0, US, SampleBuilder, open_real
from meshscope.analyze.rank.kernel_sample import (
    DeviceWork,
    KernelSample,
    RuntimeCalls,
    read_samples,
)
from meshscope.analyze.rank.kernel_steps import HostPhases, read_host_phases, split_sample
from meshscope.analyze.rank.phases import StepTimes, order_steps
from meshscope.numerics.intervals import EMPTY, unite
from meshscope.store.kernel_table import KernelKind

COMMUNICATION, COPY, FILL = KernelKind.COMMUNICATION, KernelKind.COPY, KernelKind.FILL


def split(recording):
    steps = order_steps(recording.read("steps"))
    (sample,) = read_samples(recording)
    return split_sample(sample, steps, read_host_phases(recording, steps))


def in_us(parts):
    return {name: value / US for name, value in parts.items()}


def test_parts_of_a_step_are_what_ran_beside_what(tmp_path):
    """The host is a step ahead: what it launched before the sample is no part of its steps."""
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 100)
    made.step(2, 100, 200)
    made.phase("forward", 0, 50)
    made.phase("inner", 5, 12, depth=1)
    made.phase("backward", 50, 95)
    made.work(60, 100)  # launched by step 0
    made.work(90, 115, kind=COMMUNICATION)  # by step 0 too, and runs into step 1
    made.work(100, 120, 10)  # inner
    made.work(110, 130, 20, stream=9)  # 10 of it beside the one before
    made.work(125, 150, 30, kind=COPY, stream=9)
    made.work(140, 190, 40, kind=COMMUNICATION)
    made.work(160, 170, 60)
    made.work(180, 185, 97, kind=FILL)
    made.work(230, 240, 110)
    first, second = split(made.close(2, 300))
    assert (first.step, first.is_followed, first.length_ns) == (1, True, 130 * US)
    assert first.start_ns == T0 + 100 * US
    assert first.compute_ns == 40 * US
    assert first.copy_ns == 25 * US
    assert first.communication_ns == 65 * US
    assert first.exposed_ns == 25 * US
    assert first.exposed_beside_copy_ns == 15 * US
    assert in_us(first.idle_ns) == {"dependency": 40}
    assert in_us(first.compute_by_phase_ns) == {"inner": 20, "forward": 10, "backward": 10}
    assert in_us(first.copy_by_phase_ns) == {"forward": 20, "(no phase)": 5}
    assert (second.step, second.is_followed, second.length_ns) == (2, False, 10 * US)


def test_what_a_checkpoint_copies_and_waits_for_is_its_own(tmp_path):
    """Also in a phase within it."""
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 200)
    made.step(2, 200, 300)
    made.phase("forward", 0, 20)
    made.phase("checkpoint", 20, 150)
    made.phase("inner", 30, 60, depth=1)
    made.work(5, 25, 1)
    made.work(25, 26, 2, kind=COPY)
    made.work(40, 60, 35, kind=COPY)
    made.work(36, 140, kind=KernelKind.SYNCHRONISATION, stream=0)
    made.work(200, 230, 200)
    first, _ = split(made.close(2, 300))
    assert in_us(first.copy_by_phase_ns) == {"forward": 1, "checkpoint": 20}
    assert (first.training_copy_ns, first.training_compute_ns) == (1 * US, 20 * US)
    assert in_us(first.idle_ns)["checkpoint"] == 9 + 90
    assert "synchronising" not in first.idle_ns
    assert first.waiting_ns == 0
    assert not first.has_compiled


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda made: None, {"host": 95, "launch": 5}),
        (lambda made: made.phase("data", 20, 60), {"data": 40, "host": 55, "launch": 5}),
        (
            lambda made: (made.phase("eval", 20, 60), made.phase("compile", 30, 35, depth=1)),
            {"eval": 35, "compile": 5, "host": 55, "launch": 5},
        ),
        (
            lambda made: (
                made.phase("data", 20, 60),
                made.work(50, 70, kind=KernelKind.SYNCHRONISATION, stream=0),
            ),
            {"data": 30, "synchronising": 20, "host": 45, "launch": 5},
        ),
        (
            lambda made: (
                made.phase("data", 20, 60),
                made.work(50, 70, kind=KernelKind.UNLAUNCHED, name="Activity Buffer Request"),
                made.work(70, 90, kind=KernelKind.UNLAUNCHED, name="Command Buffer Full"),
            ),
            {"data": 30, "profiler": 20, "host": 45, "launch": 5},
        ),
        (
            lambda made: made.work(5, 30, kind=KernelKind.SYNCHRONISATION, stream=0),
            {"synchronising": 95, "launch": 5},
        ),
        (
            lambda made: made.work(5, 30, kind=KernelKind.SYNCHRONISATION, stream=0, thread=3),
            {"host": 95, "launch": 5},
        ),
        (
            lambda made: made.work(
                8, 10, 4, launch_length=9, kind=COPY, name="Memcpy DtoH (Device -> Pageable)"
            ),
            {"synchronising": 95, "launch": 5},
        ),
    ],
    ids=[
        "host",
        "data",
        "inner cause",
        "a wait later",
        "profiler",
        "runs dry",
        "watchdog",
        "blocking copy",
    ],
)
def test_idle_time_has_the_name_of_what_the_host_did(tmp_path, prepare, expected):
    """Idle from 10 to 110; the call that launched what follows was over at 105."""
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 200)
    made.step(2, 200, 300)
    made.work(2, 10, 1)
    prepare(made)
    made.work(110, 230, 100, launch_length=5)
    made.work(230, 240, 201)
    first, _ = split(made.close(2, 300))
    assert in_us(first.idle_ns) == expected


def test_a_graph_belongs_to_the_step_that_launched_it(tmp_path):
    """Work without a launch is of the step of the work before it on its stream."""
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 100)
    made.step(2, 100, 200)
    made.work(0, 10)
    made.work(50, 60, 20, is_graph=True)
    made.work(70, 80, 20, is_graph=True)
    made.work(90, 95)
    made.work(150, 160, 110)
    first, second = split(made.close(2, 300))
    assert (first.length_ns, first.compute_ns) == (100 * US, 25 * US)
    assert in_us(first.idle_ns) == {"host": 15, "launch": 20, "dependency": 30, "unknown": 10}
    assert second.compute_ns == 10 * US


def test_without_the_next_record_a_step_ends_where_later_launches_begin(tmp_path):
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 100)
    made.work(50, 60, 20)
    made.work(150, 160, 110)
    (only,) = split(made.close(2, 300))
    assert (only.length_ns, only.is_followed) == (100 * US, False)


@pytest.mark.parametrize(
    "fields",
    [{"is_read": False}, {"num_rows": 2}, {"end_host_mono_ns": None}, {"first_step": "x"},
     {"number": 1 << 40}],
)  # fmt: skip
def test_samples_that_are_not_whole_are_left_out(tmp_path, fields):
    made = SampleBuilder(tmp_path)
    made.work(50, 60, 20)
    assert read_samples(made.close(1, 300, **fields)) == ()


def test_impossible_times_are_no_work_and_no_launch(tmp_path):
    made = SampleBuilder(tmp_path)
    made.step(1, 0, 100)
    made.work(50, 60, 20)
    made.work(60, 70, 1e12)
    made.work(1e12, 1e12 + 1, 20)
    made.work(60, 1e12, 20)
    made.work(60, 50, 20)
    made.phase("data", 1e14, 9e14)
    (only,) = split(made.close(1, 300, num_rows=2))
    assert (only.compute_ns, only.length_ns) == (20 * US, 20 * US)
    assert in_us(only.compute_by_phase_ns) == {"(no phase)": 10, "(launch not seen)": 10}


def test_real_steps_are_what_an_independent_profiler_saw(tmp_path):
    """The means of 4 other steps of the same program and rank; steps vary by some ms."""
    steps = split(open_real(tmp_path, "ddp").ranks[2])
    assert [(one.step, one.is_followed) for one in steps] == [(21, True), (22, True)]
    expected = {
        "compute_ns": (23.17, 1),
        "copy_ns": (0.72, 0.1),
        "communication_ns": (73.8, 1.5),
        "exposed_ns": (57.7, 1.5),
        "total_idle_ns": (16.1, 1.5),
        "length_ns": (97.7, 1.5),
    }
    for name, (truth, error) in expected.items():
        mean = np.mean([getattr(one, name) for one in steps]) / MS
        assert mean == pytest.approx(truth, abs=error), name
    for one in steps:
        assert list(one.compute_by_phase_ns) == ["forward", "backward", "optimizer"]
        assert list(one.idle_ns) == ["dependency"]  # the host is 50 ms ahead


pieces = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(7, 9), st.integers(0, 400), st.integers(0, 60),
        st.integers(-1, 400), st.integers(0, 30),
    ),
    max_size=30,
)  # fmt: skip
spans = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 90)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(pieces, spans, spans)
def test_parts_sum_exactly(pieces, waits, data):
    table = np.array(sorted(pieces, key=lambda one: one[2]), dtype=np.int64).reshape(-1, 6)
    kind, stream, start, length, launch, launch_length = table.T
    none = np.empty(0, dtype=np.int64)
    waits, data = (np.array(one, dtype=np.int64).reshape(-1, 2).T for one in (waits, data))
    sample = KernelSample(
        rank=0, number=0, first_step=0, last_step=3, begin_ns=0, end_ns=500,
        work=DeviceWork(
            start_ns=start, end_ns=start + length, kind=kind, stream=stream, launch_ns=launch,
            launched_ns=np.where(launch >= 0, launch + launch_length, -1),
            thread=np.zeros_like(kind), is_graph=kind < 0, name_id=kind,
        ),
        calls=RuntimeCalls(
            start_ns=none, end_ns=none, is_synchronising=none > 0, thread=none, name_id=none
        ),
        synchronising=unite(waits[0], waits.sum(axis=0)),
        profiling=unite(waits[1] + 20, waits.sum(axis=0)),
    )  # fmt: skip
    edges = np.arange(0, 500, 100)
    steps = StepTimes(step=edges // 100, start_ns=edges, end_ns=edges + 90, num_overlapping=0)
    causes = {"data": unite(data[0], data.sum(axis=0)), "eval": EMPTY}
    for one in split_sample(sample, steps, HostPhases(layers=(), causes=causes, names={})):
        parts = one.compute_ns + one.copy_ns + one.exposed_ns + one.total_idle_ns
        assert parts == one.length_ns > 0
        assert min(one.idle_ns.values(), default=0) >= 0
        assert sum(one.compute_by_phase_ns.values()) == one.compute_ns
        assert sum(one.copy_by_phase_ns.values()) == one.copy_ns
        beside = one.exposed_ns + one.exposed_beside_copy_ns
        assert one.communication_ns - one.compute_ns <= beside <= one.communication_ns
