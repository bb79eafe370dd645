"""What programs do with models gives the same with a recorder attached as without one."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshscope.capture.recorder import Recorder

INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def save_and_load(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def run(model: Any) -> list[float]:
    return model(INPUTS).flatten().tolist()


def list_nodes(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.op} {node.target}" for node in graph.nodes]


def export(model: nn.Module) -> list[str]:
    return list_nodes(torch.export.export(model, (INPUTS,)).graph)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "script": lambda model: run(torch.jit.script(model)),
    "graph of script": lambda model: str(torch.jit.script(model).inlined_graph).count("aten::"),
    "script inside another": lambda model: run(torch.jit.script(nn.Sequential(model, nn.Tanh()))),
    "jit trace": lambda model: run(torch.jit.trace(model, INPUTS)),
    "fx": lambda model: list_nodes(torch.fx.symbolic_trace(model).graph),
    "fx inside another": lambda m: list_nodes(torch.fx.symbolic_trace(nn.Sequential(m)).graph),
    "export": export,
    "pickle": lambda model: run(pickle.loads(pickle.dumps(model))),
    "deepcopy": lambda model: run(copy.deepcopy(model)),
    "copy": lambda model: run(copy.copy(model)),
    "save": lambda model: run(save_and_load(model)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_an_attached_model_can_be_used_as_ever(recorder: Recorder, use: str) -> None:
    expected = USES[use](make_model())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    assert USES[use](model) == expected
    model(INPUTS).sum().backward()
    optimizer.step()
    assert recorder.current_step == 0
    assert USES[use](make_model()) == expected
    assert recorder.guard.counts == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_programs_own_hooks_are_still_compiled_by_torch_script(recorder: Recorder) -> None:
    model = make_model()
    model.register_forward_hook(lambda *_: None)
    recorder.attach(model)
    hooks = list(model._forward_hooks.values())
    with pytest.raises(Exception, match="top-level function"):
        torch.jit.script(model)
    assert list(model._forward_hooks.values()) == hooks


def differentiate(x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad([(x * x).sum()], [x])
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_script_knows_the_functions_we_stand_for(recorder: Recorder) -> None:
    recorder.attach(make_model())
    x = torch.ones(3, requires_grad=True)
    assert torch.jit.script(differentiate)(x).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_that_takes_no_hooks_is_said_in_one_line(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = torch.jit.script(make_model())
    recorder.attach(scripted, torch.optim.SGD(scripted.parameters(), lr=0.1))
    (line,) = caplog.messages
    assert "forward is not timed" in line
    assert recorder.guard.counts == {}
