"""A profiled step changes nothing: programs with all that could clash with it, bit by bit.

Each program trains a few steps with and without a profile of the third; what it returns must be
the same, and nothing of ours may be left.
"""

import copy
import io
import os
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshscope.capture.guard import Guard
from meshscope.capture.memory.heap import find_instances
from meshscope.capture.memory.memory_profile import MAX_FORWARDS_PER_STEP, MemoryProfile
from meshscope.capture.profiling.automatic_profile import AutomaticProfile, find_training
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout

WIDTH = 8


def modes_left():
    return torch._C._len_torch_dispatch_stack(), top_hooks()


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


NOTHING = (0, None)


@pytest.fixture(autouse=True)
def _leaves_nothing():
    apply = torch.autograd.Function.__dict__["apply"]
    disable = torch._C._autograd._saved_tensors_hooks_disable
    yield
    found = modes_left()
    while top_hooks() is not None:  # a test that failed must not take others with it
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    assert found == NOTHING
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch._C._autograd._saved_tensors_hooks_disable is disable


class FusedLinear(torch.autograd.Function):
    """As Megatron's: backward adds to an attribute of the weight it saved."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight, None)
        return value @ weight

    @staticmethod
    def backward(ctx, gradient):
        value, weight, _ = ctx.saved_tensors
        weight.main_grad.add_(value.t() @ gradient)
        return gradient @ weight.t(), None


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.weight.main_grad = torch.zeros(WIDTH, WIDTH)

    def forward(self, value):
        return FusedLinear.apply(value + self.bias, self.weight)


def make_model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Program:
    """What a step of training is; kinds of it below."""

    make_model = staticmethod(make_model)
    make_optimizer = staticmethod(lambda model: torch.optim.AdamW(model.parameters(), 1e-2))

    def __init__(self):
        torch.manual_seed(0)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model)
        self.seen = []

    def forward(self):
        return self.model(torch.randn(4, WIDTH)).pow(2).mean()

    def step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class FunctionTransforms(Program):
    """torch.func refuses to run while there are saved-tensor hooks."""

    def forward(self):
        value = torch.randn(4, WIDTH)
        slope = torch.func.grad(lambda x: (x**3).sum())(value)
        jacobian = torch.func.vmap(torch.func.jacrev(self.model))(value)
        inner = torch.func.functional_call(self.model, dict(self.model.named_parameters()), value)
        return self.model(value).pow(2).mean() + slope.mean() + jacobian.mean() + inner.mean()


class MainGradient(Program):
    make_model = Fused

    def step(self):
        weight = self.model.weight
        weight.main_grad.zero_()
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        weight.grad = weight.main_grad.clone()
        self.optimizer.step()
        return loss.detach()


class DelicateFormulas(Program):
    """Torch has other formulas for these where a dispatch mode is on."""

    def forward(self):
        made = self.model(torch.randn(WIDTH, WIDTH, requires_grad=True))
        matrix = torch.randn(WIDTH, WIDTH, requires_grad=True)
        found = torch.linalg.det(self.model(matrix) + torch.eye(WIDTH))
        (slope,) = torch.autograd.grad(found, matrix, create_graph=True)
        return made.prod(0).sum() + made.cumprod(1).sum() + made.sin().prod() + slope.pow(2).mean()


class HooksUntilTheStep(Program):
    def step(self):
        self.optimizer.zero_grad()
        made = self.model(torch.randn(4, WIDTH))
        with torch.autograd.graph.save_on_cpu():
            loss = made.pow(2).mean()
            loss.backward()
            self.optimizer.step()
        return loss.detach()


class ModeUntilTheStep(Program):
    def step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
            self.optimizer.step()
        self.seen.append(torch.tensor(counter.get_total_flops()))
        return loss.detach()


class CountingMode(TorchFunctionMode):
    num_calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


class FunctionModeOfOthers(Program):
    """Sees the program's calls, and none of ours."""

    def step(self):
        with CountingMode() as mode:
            loss = super().step()
        self.seen.append(torch.tensor(mode.num_calls))
        return loss


class StepInBackward(Program):
    """Modes and hooks that are taken out inside of backward come back at its end."""

    make_optimizer = staticmethod(
        lambda model: [torch.optim.SGD([one], 0.1) for one in model.parameters()]
    )

    def __init__(self):
        super().__init__()
        for parameter, optimizer in zip(self.model.parameters(), self.optimizer, strict=True):

            def update(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)

    def step(self):
        loss = self.forward()
        loss.backward()
        return loss.detach()


class ForwardInAThread(Program):
    def __init__(self):
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def forward(self):
        assert self.pool.submit(lambda: None).result() is None
        return self.pool.submit(super().forward).result()


class AroundCheckpoints(Program):
    """Forward is called only while others' hooks are on top, and in backward."""

    def forward(self):
        def run(value):
            return self.model(value).pow(2).mean()

        value = torch.randn(4, WIDTH, requires_grad=True)
        with_hooks = checkpoint(run, value, use_reentrant=False)
        return with_hooks + checkpoint(run, value, use_reentrant=True)


class RaisesAndGoesOn(Program):
    def forward(self):
        with pytest.raises(RuntimeError), FlopCounterMode(display=False):
            self.model(torch.randn(4, WIDTH + 1))
        made = self.model(torch.randn(4, WIDTH))
        with pytest.raises(RuntimeError):
            made.backward()  # not a scalar
        return made.pow(2).mean()


class CopiesAndSaves(Program):
    """Of the model, with its hooks, and of an output."""

    def forward(self):
        made = self.model(torch.randn(4, WIDTH))
        average = copy.deepcopy(self.model)
        torch.save(made, io.BytesIO())
        loaded = pickle.loads(pickle.dumps(self.model))
        inputs = torch.ones(2, WIDTH)
        assert torch.equal(average(inputs), loaded(inputs))
        return made.pow(2).mean()


PROGRAMS = [
    Program,
    FunctionTransforms,
    MainGradient,
    DelicateFormulas,
    HooksUntilTheStep,
    ModeUntilTheStep,
    FunctionModeOfOthers,
    StepInBackward,
    ForwardInAThread,
    AroundCheckpoints,
    RaisesAndGoesOn,
    CopiesAndSaves,
]


def train(kind, guard=None):
    program = kind()
    losses, profile = [], None
    for step in range(5):
        if step == 2 and guard is not None:
            optimizers = program.optimizer
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            profile = MemoryProfile(torch, [program.model], optimizers, guard=guard).open()
        losses.append(program.step())
    return program, profile, [*losses, *program.seen, *program.model.state_dict().values()]


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_nothing_is_changed_and_nothing_is_left(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, expected = train(kind)
        guard = Guard()
        program, profile, found = train(kind, guard)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert guard.counts == {}
    assert profile.tidy()
    assert "after_forward" in [point.name for point in profile.points]
    assert not program.model._forward_hooks
    assert not program.model._forward_pre_hooks
    if isinstance(program, ForwardInAThread):
        assert program.pool.submit(modes_left).result() == NOTHING
        program.pool.shutdown()


def test_what_a_custom_function_saves_is_an_activation():
    torch.manual_seed(0)
    model = Fused()
    profile = MemoryProfile(torch, [model], [], guard=Guard()).open()
    model(torch.randn(4, WIDTH)).sum().backward()
    profile.end_step()
    forward = next(one for one in profile.points if one.name == "after_forward")
    assert sum(forward.modules_bytes["activations"].values()) == 4 * 4 * WIDTH
    backward = next(one for one in profile.points if one.name == "after_backward")
    assert not backward.modules_bytes.get("activations")


def test_two_threads_may_train_at_once():
    def run(number, results, barrier, guard):
        generator = torch.Generator().manual_seed(number)
        model = make_model()
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        results[number] = [model, optimizer]
        barrier.wait()
        if not number and guard is not None:
            models, optimizers = zip(*results.values(), strict=True)
            results["profile"] = MemoryProfile(torch, models, optimizers, guard=guard).open()
        barrier.wait()
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator)).pow(2).mean().backward()
            optimizer.step()
        results[number] = [*model.state_dict().values()]
        results[f"left{number}"] = modes_left()

    found = []
    for guard in (None, Guard()):
        results, barrier = {}, threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(n, results, barrier, guard)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append([*results[0], *results[1]])
        assert results["left0"] == results["left1"] == NOTHING
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    results["profile"].close()


def test_a_model_that_is_dropped_before_the_step_is_not_kept():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = MemoryProfile(torch, [model], [optimizer], guard=Guard()).open()
    references = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    assert [find() for find in references] == [None, None]
    assert profile.point("later") is not None
    profile.close()
    assert profile.tidy()


def test_a_step_that_nothing_ends_is_ended():
    model = nn.Linear(1, 1)
    profile = MemoryProfile(torch, [model], [], guard=Guard()).open()
    value = torch.ones(1, 1)
    for _ in range(MAX_FORWARDS_PER_STEP + 2):
        model(value)
    assert not profile.is_open
    assert profile.tidy()


def test_models_that_nobody_calls_are_given_up_and_lists_are_looked_into():
    torch.manual_seed(0)
    held = nn.ModuleList([make_model(), nn.ModuleDict({"one": make_model()})])
    models, _ = find_training(torch)
    assert any(one is held[0] for one in models)
    assert any(one is held[1]["one"] for one in models)
    assert not any(one is held for one in models)
    notes, profiles = [], []

    def profile(models, optimizers):
        profiles.append(MemoryProfile(torch, models, optimizers, guard=Guard()).open())
        return profiles[0]

    automatic = AutomaticProfile(None, profile, lambda *note: notes.append(note))
    num_visits = 0
    while automatic.is_waiting and num_visits < 20:
        automatic.visit(torch, is_tracing=False)
        num_visits += 1
    assert "no forward" in notes[0][1]
    assert not held[0]._forward_hooks


def test_a_forked_child_has_neither_hooks_nor_files(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    config = RecorderConfig(provenance=False, communication=False)
    with Recorder(tmp_path / "run", layout=Layout(), config=config) as recorder:
        recorder.attach(model, optimizer)
        profile = recorder.profile_memory(model, optimizer)
        loss = model(torch.randn(4, WIDTH)).sum()
        child = os.fork()
        if not child:
            is_clean = modes_left() == NOTHING and not profile.is_open and profile._files is None
            os._exit(0 if is_clean else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert modes_left() != NOTHING
        loss.backward()
        optimizer.step()
        assert pickle.loads(pickle.dumps(model)) is not None  # with the recorder's own hooks
    assert recorder.guard.counts == {}


def test_the_heap_is_searched_by_type_and_nothing_else_is_touched():
    class Liar:
        @property
        def __class__(self):
            raise AssertionError("nobody may ask")

    class Derived(nn.Linear):
        pass

    liar, own = Liar(), Derived(2, 2)
    found = find_instances(nn.Module)
    assert sum(one is own for one in found) == 1
    assert liar is not None
