"""The outline of a trace says what its summary says, without looking at all of it."""

from pathlib import Path

import pytest

from made_traces import call, host, kernel, nccl, read, step
from meshscope.analyze.device.trace_outline import outline_summary, outline_trace
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.analyze.study import Study
from meshscope.cli.trace_loading import load_traces
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_view import TraceView
from trace_builders import write_traces

DEVICE = [
    step(1, 0, 100),
    host("cpu_op", "aten::mm", 5, 10),
    call("cudaLaunchKernel", 6, 1),
    kernel("gemm", 20, 30, correlation=1),
    nccl("allreduce", 40, 30, group="0", ranks=[0, 1]),
    {**kernel("Memcpy HtoD", 90, 5), "cat": "gpu_memcpy"},
]
SECOND = [{**kernel("gemm", 25, 7), "args": {"device": 1, "stream": 7}}]
HOST = [step(1, 0, 100), host("cpu_op", "aten::mm", 5, 10), host("cpu_op", "aten::add", 20, 30)]


@pytest.mark.parametrize("events", [DEVICE, [*DEVICE, *SECOND], HOST])
def test_an_outline_is_that_of_the_summary(tmp_path: Path, events):
    trace = read(tmp_path / "a.json", events, rank=3, world_size=8)
    outline = outline_trace(TraceView(trace))
    assert outline == outline_summary(summarize_trace(trace))
    assert outline.rank == 3
    assert (outline.host is None) == (events is not HOST)


def test_the_first_steady_step_needs_no_more_than_steps(tmp_path: Path):
    write_traces(tmp_path, num_ranks=2, num_steps=5)
    alone, whole = (Study(load_traces([tmp_path]).run.last_attempt) for _ in range(2))
    first = alone._first_steady_step
    assert "_totals" not in vars(alone)
    assert whole.steps.num_steps == 5
    assert whole._first_steady_step == first == whole.steps.step[whole.steps.num_warmup]


def test_a_trace_that_is_cut_off_does_not_say_that_nothing_was_communicated(tmp_path: Path):
    for rank in (0, 1):
        read(tmp_path / f"rank{rank}.json", HOST, rank=rank)
    whole = Study(load_traces([tmp_path], use_cache=False).run.last_attempt).communication
    for path in tmp_path.glob("*.json"):
        path.write_bytes(path.read_bytes()[:-4])
    cut = Study(load_traces([tmp_path], use_cache=False).run.last_attempt).communication
    assert isinstance(whole, Unavailable)
    assert isinstance(cut, Unavailable)
    assert "there was none" in whole.reason
    assert "cut off" in cut.reason
