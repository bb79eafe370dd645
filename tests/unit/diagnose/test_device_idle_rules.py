"""CP004 to CP006 by kernel samples, in closed forms."""

import pytest
from diagnosed import context_of, find

from builders import put_device_span
from kernel_builders import T0, US, SampleBuilder
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.runner import diagnose
from meshscope.diagnose.views.launching import GRAPH_GAP_NS
from meshscope.store.kernel_table import KernelKind

STEP_US = 10_000
PHASES = (("forward", 0, 4_000), ("backward", 4_000, 9_000))
NUM_KERNELS = 20


def write_run(path, put_work, *, num_steps=40, long_step=None):
    """Steps of 10 ms, 9 of them in forward and backward; `put_work` says what steps 1 and 2 do."""
    made = SampleBuilder(path)
    now = 0
    for step in range(num_steps):
        length = STEP_US * (4 if step == long_step else 1)
        made.step(step, now, now + length)
        for name, start, end in PHASES:
            made.phase(name, now + start, now + end)
            begin_ns = T0 + (now + start) * US
            length_ns = (end - start) * US
            put_device_span(made.writer, name, begin_ns, length_ns, start_device_ns=begin_ns)
        made.phase("data", now + 9_990, now + 9_999)
        if step in (1, 2, 3):
            put_work(made, now)
        now += length
    made.close(2, now, disturbed_to_step=3)
    return path


def launch_slowly(made, now):
    """10 kernels of 0.1 ms in forward and as many in backward, each launched when it starts."""
    for index in range(10):
        for start in (now + 400 * index, now + 4_000 + 500 * index):
            made.work(start, start + 100, start)


def test_graphs_save_what_is_idle_in_forward_and_backward(tmp_path):
    (found,) = find("CP004", write_run(tmp_path, launch_slowly))
    saved_ns = 7_000 * US - NUM_KERNELS * GRAPH_GAP_NS
    assert found.gain.saved_ns == pytest.approx(saved_ns, rel=0.01)
    assert found.severity is Severity.CRITICAL
    assert "The device could compute 5.0 times as much" in found.summary
    values = {one.name: one.value for one in found.evidence}
    assert values["outside of forward and backward"] == pytest.approx(1_000 * US, rel=0.01)


def test_one_long_step_is_not_the_hosts_pace(tmp_path):
    (found,) = find("CP004", write_run(tmp_path, launch_slowly, long_step=20))
    assert found.gain.saved_ns < 7_200 * US


def wait_each_time(made, now):
    """5 kernels of 1.6 ms, launched ahead of time but for a wait of the host for each."""
    for index in range(5):
        start = now + 2_000 * index
        made.work(start, start + 1_600, start, launch_length=1)
        made.work(start, start + 1_700, kind=KernelKind.SYNCHRONISATION, stream=0)


def test_a_host_that_would_be_ahead_loses_all_to_its_waits(tmp_path):
    result = diagnose(context_of(write_run(tmp_path, wait_each_time)))
    above_low = [one for one in result.findings if one.severity > Severity.LOW]
    assert [one.code for one in above_low] == ["CP005"]
    assert above_low[0].gain.saved_ns == pytest.approx(2_000 * US, rel=0.06)
    assert "the host would be ahead" in above_low[0].summary


def copy_to_host(made, now):
    """6 ms of kernels, and 3 ms of copies that the host waits for."""
    made.work(now, now + 6_000, now, launch_length=1)
    made.work(
        now + 6_000, now + 9_000, now + 20, launch_length=9_000, kind=KernelKind.COPY,
        name="Memcpy DtoH (Device -> Pageable)",
    )  # fmt: skip


def test_copies_that_the_host_waits_for_are_the_waits(tmp_path):
    result = diagnose(context_of(write_run(tmp_path, copy_to_host)))
    above_low = [one for one in result.findings if one.severity > Severity.LOW]
    assert [one.code for one in above_low] == ["CP005"]
    assert above_low[0].gain.saved_ns == pytest.approx(4_000 * US, rel=0.06)
    assert "waits for copies" in above_low[0].summary
