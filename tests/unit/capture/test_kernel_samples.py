"""Kernel samples on a machine without a device: the schedule, the gate and the rows are real."""

import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from meshscope.capture.profiling import kernel_samples, kernel_window
from meshscope.capture.profiling.kernel_rows import KernelRows, find_kind
from meshscope.capture.profiling.kernel_samples import KernelSamples
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.run import open_run
from meshscope.store.read.trace_windows import disturbing_windows

MS = 1_000_000


class Event:
    """As torch gives it; times are on the wall clock."""

    def __init__(self, name, start, duration, *, device=0, resource=0, correlation=0):
        self._values = (name, start, duration, device, resource, correlation)

    name = property(lambda self: lambda: self._values[0])
    start_ns = property(lambda self: lambda: self._values[1])
    duration_ns = property(lambda self: lambda: self._values[2])
    device_type = property(lambda self: lambda: self._values[3])
    device_resource_id = property(lambda self: lambda: self._values[4])
    correlation_id = property(lambda self: lambda: self._values[5])


def make_result(*events):
    return SimpleNamespace(events=lambda: list(events))


class Window:
    """Stands in for torch's profiler of a device, which is not here."""

    calls: ClassVar[list[str]] = []
    is_passed = True

    def __init__(self, torch):
        pass

    def prepare(self):
        self.calls.append("prepare")

    def enable(self):
        self.calls.append("enable")

    def mark_end(self):
        self.calls.append("mark")

    def disable(self):
        self.calls.append("disable")
        return make_result(
            Event("cudaLaunchKernel", 10 * MS, 1000, resource=77, correlation=5),
            Event("cudaStreamSynchronize", 20 * MS, 300, resource=77),
            Event("gemm", 11 * MS, 2000, device=1, resource=7, correlation=5),
        )


@pytest.fixture
def samples(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(kernel_samples, "KernelWindow", Window)
    monkeypatch.setattr(kernel_samples, "find_obstacle", lambda torch: "")
    monkeypatch.setattr(Window, "calls", [])
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.open()
    yield recorder.profiles.samples, recorder
    recorder.close()


def visit(samples: KernelSamples, steps: range) -> dict[int, list[str]]:
    """What was called at the end of which step."""
    found = {}
    for step in steps:
        before = len(Window.calls)
        samples.visit(step, 0, 30 * MS, may_begin=True)
        if Window.calls[before:]:
            found[step] = Window.calls[before:]
    return found


def test_two_steps_are_watched_and_the_rows_read(samples):
    kernels, recorder = samples
    assert visit(kernels, range(60)) == {
        19: ["prepare"], 20: ["enable"], 22: ["mark"], 23: ["disable"],
        43: ["prepare"], 44: ["enable"], 46: ["mark"], 47: ["disable"],
    }  # fmt: skip
    run_dir = recorder.run_dir
    recorder.close()
    attempt = open_run(run_dir).last_attempt
    rows = attempt.ranks[0].read("kernels")
    assert rows["kind"].tolist() == [KernelKind.SYNCHRONISATION, KernelKind.COMPUTE] * 2
    assert rows["stream"].tolist() == [0, 7, 0, 7]
    # The kernel has the call that launched it, on the same clock.
    assert (rows["start_host_mono_ns"] - rows["launch_host_mono_ns"])[1] == MS
    assert [(w.disturbed_from_step, w.disturbed_to_step) for w in disturbing_windows(attempt)] == [
        (20, 24),
        (44, 48),
    ]


def test_the_programs_profiler_comes_first(samples):
    kernels, recorder = samples
    visit(kernels, range(21))
    assert kernels.is_open
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not kernels.is_open
        assert Window.calls == ["prepare", "enable", "disable"]
        # None begins beside it.
        assert visit(kernels, range(21, 60)) == {}
    recorder.close()
    assert recorder.guard.counts == {}


def test_an_error_ends_the_samples_and_nothing_else(samples, monkeypatch):
    kernels, recorder = samples

    def fail(self):
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(Window, "enable", fail)
    assert visit(kernels, range(60)) == {19: ["prepare"], 20: ["disable"]}
    assert recorder.guard.counts == {"kernel samples": 1}


def test_torch_gets_its_own_functions_back(tmp_path: Path):
    module = torch.autograd.profiler
    before = module._prepare_profiler
    gate = kernel_window.ProfilerGate(lambda: None)
    assert gate.install(torch)
    assert module._prepare_profiler is not before
    gate.remove()
    assert module._prepare_profiler is before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", KernelKind.COMMUNICATION),
        ("Memcpy DtoH (Device -> Pinned)", KernelKind.COPY),
        ("Memset (Device)", KernelKind.FILL),
        ("void at::native::vectorized_elementwise_kernel<4>", KernelKind.COMPUTE),
        ("Context Sync", None),
    ],
)
def test_kinds_by_name(name, kind):
    assert find_kind(name) == kind


def test_a_graphs_kernels_have_its_launch():
    rows = KernelRows(
        make_result(
            Event("cudaGraphLaunch", 100, 10, resource=3, correlation=9),
            Event("gemm", 200, 5, device=1, resource=7, correlation=9),
            Event("gemm", 210, 5, device=1, resource=7, correlation=9),
        )
    )
    found = [row for row in rows.walk() if row is not None]
    assert [(row[4], row[6], row[8]) for row in found] == [(200, 100, 1), (210, 100, 1)]


def test_the_end_of_a_sample_counts_to_its_cost(samples, monkeypatch):
    """Stopping torch's profiler and reading it take longest."""
    kernels, recorder = samples

    def stop_slowly(self):
        time.sleep(0.05)
        return make_result()

    monkeypatch.setattr(Window, "disable", stop_slowly)
    visit(kernels, range(30))
    run_dir = recorder.run_dir
    recorder.close()
    rank = open_run(run_dir).last_attempt.ranks[0]
    lines = [update["kernel_window"] for update in rank.updates if "kernel_window" in update]
    assert lines[-1]["cost_ns"] >= 50 * MS


def test_a_host_that_is_ahead_keeps_the_profilers_part_and_one_that_is_late_does_not(
    samples, monkeypatch
):
    detached = []
    monkeypatch.setattr(kernel_samples, "detach", lambda calls: detached.append(calls) or True)
    kernels, _ = samples
    visit(kernels, range(30))  # the kernel began 1 ms after its launch
    assert detached == []
    late = make_result(
        Event("cudaLaunchKernel", 10 * MS, 1000, resource=77, correlation=5),
        Event("gemm", 10 * MS + 5000, 2000, device=1, resource=7, correlation=5),
    )
    monkeypatch.setattr(Window, "disable", lambda self: late)
    visit(kernels, range(30, 60))
    assert detached == [["cudaLaunchKernel"]]
    num_calls = len(Window.calls)
    visit(kernels, range(60, 400))  # it is out: no sample brings it back
    assert len(Window.calls) == num_calls


def test_the_profilers_part_stays_if_the_program_ever_captured_a_graph(samples, monkeypatch):
    """One that only an evaluation replays is in no window."""
    monkeypatch.setattr(torch.cuda.graphs.CUDAGraph, "capture_begin", lambda self: None)
    detached = []
    monkeypatch.setattr(kernel_samples, "detach", lambda calls: detached.append(calls) or True)
    kernels, _ = samples
    late = make_result(
        Event("cudaLaunchKernel", 10 * MS, 1000, resource=77, correlation=5),
        Event("gemm", 10 * MS + 5000, 2000, device=1, resource=7, correlation=5),
    )
    monkeypatch.setattr(Window, "disable", lambda self: late)
    visit(kernels, range(3))
    torch.cuda.graphs.CUDAGraph.capture_begin(None)
    visit(kernels, range(3, 60))
    assert detached == []
    kernels.close()


@pytest.mark.parametrize(
    ("calls", "variable"),
    [(["cudaGraphLaunch"], ""), (["cuStreamBeginCapture_v2"], ""), ([], "KINETO_USE_DAEMON")],
)
def test_the_profilers_part_stays_with_graphs_and_with_others_that_use_it(
    calls, variable, monkeypatch
):
    monkeypatch.setattr(kernel_window.Path, "open", None)  # nothing is looked for
    if variable:
        monkeypatch.setenv(variable, "1")
    assert kernel_window.detach(calls) is False


def test_nothing_is_taken_out_where_nothing_is():
    assert kernel_window.detach(["cudaLaunchKernel"]) is False


@pytest.mark.parametrize(
    ("module", "may_look"),
    [
        (SimpleNamespace(local=SimpleNamespace(tree_manager_containers={})), True),
        (SimpleNamespace(local=SimpleNamespace(tree_manager_containers={0: "graphs"})), False),
        (SimpleNamespace(), False),  # another torch: not known
    ],
)
def test_that_the_module_of_graphs_is_loaded_does_not_say_that_there_are_any(
    module, may_look, monkeypatch
):
    """`torch._dynamo.reset` loads it where CUDA is available."""
    looked = []
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", module)
    monkeypatch.setattr(
        kernel_window.Path, "open", lambda *args, **kwargs: looked.append(1) or io.StringIO()
    )
    assert kernel_window.detach(["cudaLaunchKernel"]) is False
    assert bool(looked) is may_look
