"""Programs that know nothing of the recorder: what they call is the forward, whoever wraps it."""

import copy
import gc
import logging
import pickle
import time
import warnings
from pathlib import Path

import pytest
import torch
from recorded import finish
from torch import nn
from torch.nn.modules import module as module_globals
from torch.nn.parallel import DistributedDataParallel

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.capture.steps import model_search, module_hook

WIDTH = 8
USUAL = ["forward", "backward", "optimizer"]


@pytest.fixture
def recorder(tmp_path: Path):
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    made.watch_everything()
    yield made
    made.close()
    assert not module_globals._global_forward_pre_hooks
    assert not module_globals._global_module_registration_hooks


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # graphs would go while another test counts objects


def list_phases(recorder: Recorder) -> list[list[str]]:
    return [step.names for step in finish(recorder).steps]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def loss(self, x):
        return self.down(self.up(x).relu()).square().mean()


def make_sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)


def train(optimizer: torch.optim.Optimizer, compute_loss, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        compute_loss(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def is_searching() -> bool:
    return bool(module_globals._global_forward_pre_hooks)


def test_the_first_call_of_a_model_ends_the_search(recorder, caplog):
    model = Block()
    optimizer = make_sgd(model)
    assert is_searching()
    inside = []
    model.up.register_forward_hook(lambda *_: inside.append(is_searching()))
    train(optimizer, model)
    assert inside == [False] * 3
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
    assert recorder.watching.models == [model]
    assert list_phases(recorder) == [USUAL] * 3


def test_a_wrapper_made_after_the_optimizer_is_the_model(recorder, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model = Block()
        optimizer = make_sgd(model)
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))  # a look at its output, before it is wrapped
        wrapped = DistributedDataParallel(model)
        train(optimizer, wrapped)
        assert wrapped in recorder.watching.models
        steps = finish(recorder).steps
    finally:
        torch.distributed.destroy_process_group()
    assert [step.names for step in steps] == [USUAL] * 3


def test_an_evaluation_without_the_wrapper_is_seen_with_its_loader(recorder):
    wrapped = nn.DataParallel(model := Block())
    optimizer = make_sgd(model)
    loader = torch.utils.data.DataLoader(torch.zeros(2, WIDTH))
    for _ in range(2):
        train(optimizer, wrapped, num_steps=2)
        model.eval()  # and not the wrapper
        for batch in loader:
            with torch.no_grad():
                model(batch)
        model.train()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [USUAL] * 4
    assert {phase.name for phase in recorded.outside} == {"eval"}
    assert sum(phase.name == "eval" for phase in recorded.outside) >= 2 * 4


def test_a_wrapper_around_a_model_that_has_trained_takes_over(recorder):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model = Block()
    optimizer = make_sgd(model)
    train(optimizer, model)
    assert not is_searching()
    wrapper = Wrapper(model)
    train(optimizer, wrapper)
    assert not is_searching()
    assert wrapper in recorder.watching.models
    assert list_phases(recorder) == [USUAL] * 6


class Agent(nn.Module):
    """As in reinforcement learning: never called itself, and with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = Block(), Block()
        self.log_std = nn.Parameter(torch.zeros(()))


def test_parts_without_parameters_are_forward_too_if_the_root_calls_them(recorder):
    model, criterion = nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh(), nn.Linear(1, 1)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        y = model.forward(torch.ones(2, WIDTH))
        criterion(y, torch.ones(2, 1)).backward()
        optimizer.step()
    assert list_phases(recorder)[1:] == [["forward"] * 3 + USUAL[1:]] * 2


def test_the_parts_of_an_agent_are_its_forward(recorder):
    agent = Agent()
    optimizer = make_sgd(agent)
    for _ in range(3):
        with torch.no_grad():
            agent.actor(torch.zeros(1, WIDTH))  # acting
        x = torch.randn(4, WIDTH)
        loss = agent.actor(x).mean() + agent.critic(x).mean() + agent.log_std
        loss.backward()
        optimizer.step()
    assert not is_searching()  # `log_std` is in no module's call: given up
    assert set(recorder.watching.models) == {agent.actor, agent.critic}
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", *USUAL]] * 3
    assert [phase.name for phase in recorded.outside] == ["eval"] * 3


@pytest.mark.parametrize("method", ["loss", "forward"])
def test_a_method_of_the_root_is_timed_by_what_it_calls(recorder, method):
    model = Block()
    train(make_sgd(model), getattr(model, method))
    assert set(recorder.watching.models) == {model.up, model.down}
    assert list_phases(recorder) == [["forward", *USUAL]] * 3


def test_two_optimizers_have_both_their_models(recorder):
    generator, critic = Block(), Block()
    optimizers = make_sgd(critic), make_sgd(generator)
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        critic(generator(x).detach()).mean().backward()
        optimizers[0].step()
        (-critic(generator(x)).mean()).backward()
        optimizers[1].step()
    assert not is_searching()
    assert set(recorder.watching.models) == {generator, critic}
    assert list_phases(recorder) == [["forward", *USUAL] * 2] * 4


def test_what_no_optimizer_steps_is_not_a_model(recorder):
    student, teacher = Block(), Block()
    train(make_sgd(student), lambda x: student(x) - teacher(x))
    assert recorder.watching.models == [student]
    assert list_phases(recorder) == [USUAL] * 3


def test_an_optimizer_of_copies_finds_the_model_by_its_gradients(recorder):
    """Mixed precision by hand: the optimizer steps copies of the parameters."""
    model = Block()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    train(torch.optim.SGD(copies, lr=0.01), model)
    assert recorder.watching.models == [model]
    assert list_phases(recorder) == [["backward", "optimizer"], USUAL, USUAL]


def test_tokens_in_keywords_count_from_the_first_step(recorder):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, WIDTH)

        def forward(self, *, input_ids):
            return self.table(input_ids)

    model = Tokens()
    train(make_sgd(model), lambda x: model(input_ids=torch.zeros(4, 5, dtype=torch.long)))
    assert [step.input_tokens for step in finish(recorder).steps] == [20] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_traces_or_copies_a_model_is_no_forward_and_works(recorder):
    model = nn.Sequential(Block(), Block())
    optimizer = make_sgd(model)
    assert is_searching()
    x = torch.randn(4, WIDTH)
    others = [
        torch.jit.script(model),
        torch.jit.trace(model, x, check_trace=False),
        torch.fx.symbolic_trace(model),
        torch.export.export(model, (x,), strict=False).module(),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    assert recorder.watching.models == []
    recorder.pause()  # they are called only to see that they work
    for other in others:
        assert torch.allclose(other(x), model(x))
    recorder.resume()
    train(optimizer, model)
    assert model in recorder.watching.models


def count_compilations(program) -> int:
    counted = []

    def backend(graph, inputs):
        counted.append(graph)
        return graph.forward

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(backend)
    assert [one for one in caught if "hook" in str(one.message)] == []
    return len(counted)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_compiled_model_is_compiled_once_and_timed(recorder, is_late):
    def program(backend):
        model = Block()
        optimizer = make_sgd(model) if is_late else None
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        train(optimizer or make_sgd(compiled), compiled)
        assert recorder.watching.models == [compiled]

    assert count_compilations(program) == 1
    assert list_phases(recorder) == [["forward", "compile", *USUAL[1:]], USUAL, USUAL]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_model_compiled_in_place_is_compiled_once_and_timed(recorder, is_late):
    def program(backend):
        model = Block()
        optimizer = make_sgd(model) if is_late else None
        model.compile(backend=backend, fullgraph=True)
        train(optimizer or make_sgd(model), model)
        assert recorder.watching.models == [model]

    assert count_compilations(program) == 1
    assert list_phases(recorder) == [["forward", "compile", *USUAL[1:]], USUAL, USUAL]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_parts_of_a_plain_model_find_it(recorder, in_place):
    def program(backend):
        blocks = [Block(), Block()]
        if in_place:
            for block in blocks:
                block.compile(backend=backend, fullgraph=True)
        else:
            blocks = [torch.compile(one, backend=backend, fullgraph=True) for one in blocks]
        model = nn.Sequential(*blocks)
        train(make_sgd(model), model)
        assert recorder.watching.models == [model]

    assert count_compilations(program) == 2
    assert list_phases(recorder)[1:] == [USUAL] * 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_function_is_compiled_once(recorder):
    def program(backend):
        model = Block()
        compiled = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
        train(make_sgd(model), compiled, num_steps=8)

    assert count_compilations(program) == 1
    assert all(names[-2:] == USUAL[1:] for names in list_phases(recorder))


def test_objects_of_the_program_are_not_looked_at(recorder, monkeypatch):
    """However many there are: nothing asks the collector for them, and nothing sets it off."""
    monkeypatch.setattr(gc, "get_objects", None)
    kept = [[] for _ in range(200_000)]
    model = Block()
    optimizer = make_sgd(model)
    gc.collect()
    num_before = gc.get_stats()
    train(optimizer, model, num_steps=5)
    assert [found["collections"] for found in gc.get_stats()][1:] == [
        found["collections"] for found in num_before
    ][1:]
    assert len(kept) == 200_000
    assert list_phases(recorder) == [USUAL] * 5


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # what torch says of its own tracing
@pytest.mark.parametrize("with_update", [False, True], ids=["loss", "whole step"])
def test_a_compiled_function_is_the_forward_once_backward_shows_it(recorder, with_update):
    model = Block()
    optimizer = make_sgd(model)
    scale = torch.compile(lambda x: x * 2, backend="eager")  # compiled, and no forward

    def compute_loss(x):
        loss = model(x).square().mean()
        if with_update:
            loss.backward()
            optimizer.step()
        return loss

    compiled = torch.compile(compute_loss, backend="eager")
    for _ in range(4):
        loss = compiled(scale(torch.ones(4, WIDTH)))
        if not with_update:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    found = finish(recorder)
    assert [step.names for step in found.steps[1:]] == [USUAL] * 3
    for step in found.steps:
        assert sum(phase.self_ns for phase in step.phases) <= step.end_ns - step.start_ns


@pytest.mark.usefixtures("_fresh_compiler")
def test_of_compiled_functions_whose_results_are_not_kept_the_last_is_the_forward(
    recorder, monkeypatch
):
    """Torch before 2.13 keeps no result of a compiled call."""
    monkeypatch.setattr(module_hook, "_read_caller", lambda *_names: {})
    model = Block()
    optimizer = make_sgd(model)
    scale = torch.compile(lambda x: x * 2, backend="eager")
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    for _ in range(4):
        compiled(scale(torch.ones(4, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [step.names for step in finish(recorder).steps[1:]] == [USUAL] * 3


def test_a_wrapper_that_follows_another_around_the_same_model_takes_over(recorder):
    """As with a new process group in every epoch, or more layers that train from now on."""
    recorder.watch_everything()
    optimizer = make_sgd(model := Block())
    for _ in range(3):
        wrapper = nn.DataParallel(model)
        train(optimizer, wrapper)
        assert wrapper in recorder.watching.models


def test_a_wrapper_in_eval_mode_around_a_model_that_trains_is_training(recorder):
    wrapper = nn.Sequential(Block())
    optimizer = make_sgd(wrapper)
    wrapper.eval()
    wrapper[0].train()
    train(optimizer, wrapper)
    assert list_phases(recorder) == [USUAL] * 3


def test_hooks_of_the_model_are_part_of_its_forward(recorder):
    model, begins_ns = Block(), []
    optimizer = make_sgd(model)
    gather = lambda *args: begins_ns.append(time.perf_counter_ns())  # noqa: E731
    model.register_forward_pre_hook(gather, prepend=True)  # as FSDP2 gathers parameters
    train(optimizer, model)
    for step, begin_ns in zip(finish(recorder).steps, begins_ns, strict=True):
        assert step.phases[0].start_ns < begin_ns


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        time.sleep(0.002)
        return result


def test_all_of_an_optimizers_step_is_timed_once(recorder):
    """Its own class's step, around its parent's, and outside of what torch puts around both."""
    model, other = Block(), Block()
    optimizer = Derived(model.parameters(), lr=0.01)
    torch.optim.SGD(other.parameters(), lr=0.01)
    train(optimizer, model)
    found = finish(recorder)
    assert [step.names for step in found.steps] == [USUAL] * 3
    assert all(step.total_ns("optimizer") >= 2_000_000 for step in found.steps)
    for kind in (Derived, torch.optim.SGD):  # what is left is torch's own wrapper
        assert kind.step.__code__.co_filename.endswith("optimizer.py")


def test_an_optimizer_that_raises_ends_no_step(recorder):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    model = Block()
    optimizer = Failing(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="no"):
        train(optimizer, model)
    assert finish(recorder).steps == []


def count_walks(monkeypatch) -> list[nn.Module]:
    """The modules that are walked from here on."""
    walked = []
    original = model_search.list_parameters
    monkeypatch.setattr(
        model_search, "list_parameters", lambda one: walked.append(one) or original(one)
    )
    return walked


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_first_call_of_the_newest_module_walks_nothing(recorder, monkeypatch, is_wrapped):
    model = Block()
    optimizer = make_sgd(model)
    called = Wrapper(model) if is_wrapped else model
    walked = count_walks(monkeypatch)
    train(optimizer, called)
    assert walked == []
    assert list_phases(recorder) == [USUAL] * 3


def test_what_a_module_got_after_the_optimizer_was_made_is_seen(recorder, monkeypatch):
    model = Block()
    optimizer = make_sgd(model)
    model.head = nn.Linear(WIDTH, WIDTH)
    walked = count_walks(monkeypatch)
    train(optimizer, model)
    assert walked[0] is model
    assert list_phases(recorder) == [USUAL] * 3


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)
