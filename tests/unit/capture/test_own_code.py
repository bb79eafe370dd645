"""torch.compile makes of a program what it would without us, and steps are recorded."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from meshscope.capture.recorder import Recorder, RecorderConfig

INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)
NUM_STEPS = 3


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    yield made
    made.close()
    torch._dynamo.reset()
    gc.collect()  # graphs refer to themselves; other tests count references


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(INPUTS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(INPUTS).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.grad(model(INPUTS).sum(), list(model.parameters()))


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


FUNCTIONS = (whole_step, clipped_backward, gradients, optimizer_step)


def train(
    function: Callable[..., None], recorder: Recorder | None, *, finds_all: bool = False
) -> tuple[list[float], int, int]:
    """Weights after some steps, graph breaks, graphs."""
    torch._dynamo.reset()
    counters.clear()
    if recorder is not None and finds_all:
        recorder.watch_everything()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if recorder is not None and not finds_all:
        recorder.attach(model, optimizer)
    compiled = torch.compile(function, backend="eager")
    for _ in range(NUM_STEPS):
        if function is optimizer_step:
            model(INPUTS).sum().backward()
        compiled(model, optimizer)
        if function in (clipped_backward, gradients):
            optimizer.step()
        optimizer.zero_grad()
    breaks = sum(counters["graph_break"].values())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights, breaks, counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("finds_all", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_of_ours_is_compiled(
    recorder: Recorder, function: Callable[..., None], finds_all: bool
) -> None:
    weights, breaks, graphs = train(function, None)
    seen = train(function, recorder, finds_all=finds_all)  # a warning would be an error
    assert (seen[0], seen[2]) == (weights, graphs)
    assert seen[1] <= breaks
    assert recorder.current_step == NUM_STEPS - 1
    assert recorder.guard.counts == {}


class PlainOptimizer(torch.optim.Optimizer):
    """One that torch.compile traces whole, hooks included."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1)


def test_steps_that_a_compiler_hides_are_said_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizer = PlainOptimizer(list(model.parameters()))
    recorder.attach(model, optimizer)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(NUM_STEPS):
        model(INPUTS).sum().backward()
        compiled()
    recorder.close()
    (line,) = [message for message in caplog.messages if message.startswith("meshscope")]
    assert "no step finished" in line
