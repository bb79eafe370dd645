"""Steps of traces without ProfilerStep#n, and phases by the program's own ranges: known answers."""

import pytest

from made_traces import call, host, kernel, read
from meshscope.ingest.traces.trace_phases import NAMES, find_phases
from meshscope.ingest.traces.trace_range_names import RangePhase, name_phase
from meshscope.ingest.traces.trace_steps import StepSource
from meshscope.ingest.traces.trace_view import TraceView

STEP_US = 1000


def backward(begin, length=100.0):
    name = "autograd::engine::evaluate_function: MmBackward0"
    return host("cpu_op", name, begin, length, thread=2)


def annotation(name, begin, length, thread=1):
    return host("user_annotation", name, begin, length, thread)


def training_step(begin, number=0, *, with_optimizer=True, optimizers=("AdamW",)):
    """Forward, backward and update of 1 ms, of the host alone."""
    events = [
        host("cpu_op", "aten::mm", begin + 10, 200),
        host("cpu_op", "aten::relu", begin + 220, 100),
        backward(begin + 400, 300),
        *(
            annotation(f"Optimizer.step#{one}.step", begin + 800 + 50 * place, 40)
            for place, one in enumerate(optimizers)
            if with_optimizer
        ),
        host("cpu_op", "aten::_foreach_add_", begin + 810, 20),
    ]
    return events


def steps_of(tmp_path, events):
    return TraceView(read(tmp_path / "t.json", events)).steps


@pytest.mark.parametrize("optimizers", [("AdamW",), ("AdamW", "SGD"), ("AdamW", "AdamW")])
def test_steps_end_with_the_optimizer(tmp_path, optimizers):
    events = [e for n in range(5) for e in training_step(n * STEP_US, optimizers=optimizers)]
    steps = steps_of(tmp_path, events)
    assert steps.source is StepSource.OPTIMIZER
    assert steps.number.tolist() == [0, 1, 2, 3, 4]
    last = 840 + 50 * (len(optimizers) - 1)
    assert (steps.end_ns // 1000).tolist() == [last + n * STEP_US for n in range(5)]
    assert ((steps.end_ns - steps.begin_ns)[1:] == STEP_US * 1000).all()


def test_the_first_step_begins_with_the_range_around_its_first_operator(tmp_path):
    events = [e for n in range(3) for e in training_step(n * STEP_US)]
    steps = steps_of(tmp_path, [annotation("forward", 2, 330), *events])
    assert (steps.begin_ns // 1000).tolist() == [2, 840, 840 + STEP_US]


def test_a_trace_that_begins_within_a_step_leaves_it_out(tmp_path):
    events = [e for n in range(5) for e in training_step(n * STEP_US)]
    steps = steps_of(tmp_path, [e for e in events if e["ts"] >= 750])
    assert len(steps) == 4
    assert ((steps.end_ns - steps.begin_ns) == STEP_US * 1000).all()


def test_the_profilers_own_steps_come_first(tmp_path):
    events = [e for n in range(3) for e in training_step(n * STEP_US)]
    events += [annotation(f"ProfilerStep#{7 + n}", n * STEP_US, 990) for n in range(3)]
    steps = steps_of(tmp_path, events)
    assert steps.source is StepSource.PROFILER
    assert steps.number.tolist() == [7, 8, 9]


def test_ranges_that_say_step_are_steps(tmp_path):
    events = [host("cpu_op", "aten::mm", n * STEP_US + 10, 200) for n in range(3)]
    events += [annotation(f"train step {n}", n * STEP_US, 900) for n in range(3)]
    events += [annotation("attention", n * STEP_US / 4, 20) for n in range(12)]
    steps = steps_of(tmp_path, events)
    assert steps.source is StepSource.RANGE
    assert (steps.begin_ns // 1000).tolist() == [0, 1000, 2000]


def test_outermost_ranges_that_cover_the_time_are_steps(tmp_path):
    events = [annotation("model inference", n * STEP_US, 900) for n in range(4)]
    events += [annotation("layer", n * 100, 50) for n in range(40)]
    steps = steps_of(tmp_path, events)
    assert steps.source is StepSource.RANGE
    assert len(steps) == 4


def test_ranges_of_layers_are_no_steps(tmp_path):
    """As DualPipe writes them: parts of layers, which fill less than the time, side by side."""
    names = ("attn(F)", "mlp(B)", "mlp(W)", "dispatch(F)")
    events = [
        annotation(name, n * STEP_US + 200 * place, 150)
        for n in range(4)
        for place, name in enumerate(names)
    ]
    assert not len(steps_of(tmp_path, events))


def launches(names, *, first=0):
    events = []
    for place, name in enumerate(names):
        at = first + 20 * place
        events.append(call("cudaLaunchKernel", at, place + 1, 2))
        events.append(kernel(name, at + 5, 10, correlation=place + 1))
    return events


LAYER = ["gemm", "softmax", "gemm2", "add", "norm", "gelu"]


def test_kernels_that_repeat_are_steps(tmp_path):
    step = ["embedding", *LAYER * 4, "loss", "adam"]
    steps = steps_of(tmp_path, launches(step * 5))
    assert steps.source is StepSource.KERNELS
    assert len(steps) == 5
    assert ((steps.end_ns - steps.begin_ns)[:-1] == len(step) * 20_000).all()


def test_a_window_that_begins_anywhere_has_the_same_period(tmp_path):
    step = ["embedding", *LAYER * 4, "loss", "adam"]
    steps = steps_of(tmp_path, launches((step * 5)[11:]))
    assert steps.source is StepSource.KERNELS
    assert len(steps) == 4
    assert ((steps.end_ns - steps.begin_ns)[:-1] == len(step) * 20_000).all()


def test_layers_of_one_pass_are_no_steps(tmp_path):
    once = ["embedding", *LAYER * 40, "last norm", "head", "sample"]
    assert steps_of(tmp_path, launches(once)).source is StepSource.NONE


def test_kernels_in_no_order_are_no_steps(tmp_path):
    mixed = [LAYER[(n * n + n // 7) % len(LAYER)] for n in range(200)]
    assert steps_of(tmp_path, launches(mixed)).source is StepSource.NONE


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward", RangePhase.FORWARD),
        ("## forward ##", RangePhase.FORWARD),
        ("Backward pass", RangePhase.BACKWARD),
        ("model.fwd", RangePhase.FORWARD),
        ("optimizer_step", RangePhase.OPTIMIZER),
        ("opt.step", RangePhase.OPTIMIZER),
        ("attn(F)", RangePhase.FORWARD),
        ("attn(B)", RangePhase.BACKWARD),
        ("mlp(W)", RangePhase.WEIGHTS),
        ("mlp(b)", None),
        ("optimizer.zero_grad", None),
        ("DistributedDataParallel.forward", None),
        ("FSDP::pre_backward", None),
        ("straightforward", None),
        ("attention", None),
    ],
)
def test_what_names_of_ranges_say(name, phase):
    assert name_phase(name) is phase


def phase_lengths(tmp_path, events):
    view = TraceView(read(tmp_path / "t.json", events))
    phases = find_phases(view.trace, view.steps)
    found = {}
    for name, begin, end in zip(phases.name, phases.begin_ns, phases.end_ns, strict=True):
        found[NAMES[name]] = found.get(NAMES[name], 0) + int(end - begin) // 1000
    return found


def test_the_programs_own_ranges_are_the_phases(tmp_path):
    events = [
        annotation("ProfilerStep#1", 0, 1000),
        annotation("forward", 100, 200),
        annotation("loss", 300, 50),
        annotation("backward", 350, 400),
        annotation("forward", 400, 100),  # computed again
        annotation("optimizer", 800, 100),
        backward(380, 300),
    ]
    assert phase_lengths(tmp_path, events) == {
        "forward": 200,
        "backward": 400,
        "optimizer": 100,
        "rest": 300,
    }


def test_letters_split_backward_from_its_weights(tmp_path):
    events = [
        annotation("ProfilerStep#1", 0, 1000),
        annotation("attn(F)", 0, 300),
        annotation("mlp(B)", 300, 250),
        annotation("mlp(W)", 550, 150),
        annotation("attn(F)", 700, 300),
        backward(300, 650),
    ]
    found = phase_lengths(tmp_path, events)
    assert found == {"forward": 600, "backward": 250, "weight gradient": 150}
