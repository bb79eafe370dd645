"""The dispatch mode of a profiled step: what operators make, leave behind, and do not notice."""

import ctypes
import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ended_process import run_process
from meshscope.capture.guard import Guard
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.profiling import profiled_step
from meshscope.capture.profiling.automatic_profile import AutomaticProfile, find_training
from meshscope.capture.profiling.profiled_step import choose_step
from meshscope.capture.profiling.window_schedule import WindowSchedule

WIDTH, BATCH = 64, 32
WEIGHT_BYTES = 4 * WIDTH * WIDTH
ROW_BYTES = 4 * BATCH * WIDTH


@pytest.fixture(autouse=True)
def _leaves_no_mode():
    yield
    assert torch._C._len_torch_dispatch_stack() == 0


def profile_of(model, *optimizers, **settings):
    return MemoryProfile(torch, [model], optimizers, guard=Guard(), **settings).open()


def sizes(point, category):
    return dict(point.modules_bytes.get(category, {}))


def named(profile, name):
    return [point for point in profile.points if point.name == name]


def close_cleanly(profile):
    profile.close()
    assert profile._guard.counts == {}


class Seen(TorchDispatchMode):
    """Another's mode, which counts."""

    num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


class Keeps(nn.Module):
    """Makes a tensor that autograd does not save, and keeps it or not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.kept = None

    def forward(self, x):
        self.kept = x.detach() + 1
        return x + self.weight


def test_what_nobody_saves_is_temporary_and_has_its_module():
    model = nn.Sequential(Keeps(), Keeps())
    profile = profile_of(model)
    out = model(torch.zeros(BATCH, WIDTH))
    # The first one's result is dropped: only the last is an output.
    assert sizes(profile.point("now"), "temporaries") == {"0": ROW_BYTES, "1": ROW_BYTES}
    assert sizes(profile.points[-1], "outputs") == {"1": ROW_BYTES}
    model[0].kept = None
    assert sizes(profile.point("dropped"), "temporaries") == {"1": ROW_BYTES}
    del out
    close_cleanly(profile)


def test_what_was_there_before_is_other():
    """A batch's targets, a teacher: whatever the program holds that nobody claims."""
    held = torch.ones(1000)
    model = nn.Linear(WIDTH, WIDTH)
    profile = profile_of(model)
    before = sum(sizes(profile.points[0], "other").values())
    assert before >= 4000
    del held
    after = sum(sizes(profile.point("dropped"), "other").values())
    assert before - after == 4000
    close_cleanly(profile)


def test_the_peak_inside_of_an_optimizer_is_found():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    profile = profile_of(model, optimizer, steps=1)
    sampled = []
    take = profile._take
    profile._take = lambda name, **more: sampled.append(take(name, **more)) or sampled[-1]
    profile._allocator.allocated_bytes = lambda: len(sampled) + 1  # each operator is a peak
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    in_optimizer = [point for point in sampled if point.during.startswith("optimizer")]
    most = max(sum(sizes(point, "temporaries").values()) for point in in_optimizer)
    # sqrt(v) of all parameters at once, beside whatever else is on its way.
    assert most >= 8 * WEIGHT_BYTES
    phases = {point.during.split(",")[0] for point in sampled if point.during}
    assert phases == {"forward", "backward", "optimizer"}
    assert profile._guard.counts == {}


def test_backward_has_the_module_of_its_node():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    profile = profile_of(model)
    moments = []
    profile._sample = lambda operator="": moments.append(profile._describe_moment(operator))
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    assert "backward, 1, aten.gelu_backward.default" in moments
    assert "forward, 1, aten.gelu.default" in moments
    assert "forward, aten.sum.default" in moments  # the loss
    close_cleanly(profile)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc's mallinfo2")
def test_what_an_operator_leaves_behind_is_a_librarys():
    num_bytes = 4 << 20
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(libc.malloc(num_bytes))
        return x + 1

    library = torch.library.Library("meshscope_test", "DEF")
    library.define("keep(Tensor x) -> Tensor")
    library.impl("keep", keep, "CPU")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(torch.ops.meshscope_test.keep(x))

    model = Model()
    model.inner(torch.ones(1, WIDTH)).sum().backward()  # oneDNN's own comes before
    profile = profile_of(model)
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    found = sizes(profile.point("now"), "libraries")
    assert found["meshscope_test.keep.default"] == pytest.approx(num_bytes, rel=0.05)
    profile.end_step()
    close_cleanly(profile)
    for address in kept:
        libc.free(address)


def test_anothers_mode_around_the_forward_stays_in_force():
    model = nn.Linear(WIDTH, WIDTH)
    profile = profile_of(model)
    with Seen() as seen:
        loss = model(torch.ones(BATCH, WIDTH)).sum()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert seen.num_operators >= 2
    loss.backward()
    profile.end_step()
    close_cleanly(profile)


def test_anothers_mode_that_outlives_the_step_is_not_taken_out():
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer, steps=2)
    loss = model(torch.ones(BATCH, WIDTH)).sum()
    with Seen() as seen:
        loss.backward()
        optimizer.step()  # the profiled step ends in here
        before = seen.num_operators
        torch.ones(2) + 1
        assert seen.num_operators > before
    assert torch._C._len_torch_dispatch_stack() == 1  # ours: it hands on, and comes out later
    assert not profile._operators.is_on
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert [p.step for p in named(profile, "after_step")] == [0, 1]
    close_cleanly(profile)


@pytest.mark.filterwarnings("ignore")
def test_operators_of_higher_order_run():
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

    class Flexible(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(flex_attention(x, x, x))

    model = Flexible()
    profile = profile_of(model)
    x = torch.randn(1, 2, 128, 16)
    expected = model.inner(flex_attention(x, x, x))
    assert torch.equal(model(x), expected)
    close_cleanly(profile)


def test_a_compiled_model_is_compiled_once_and_as_one():
    from torch._dynamo.testing import CompileCounter

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(nn.functional.gelu(self.first(x)))

    torch._dynamo.reset()
    compiler = CompileCounter()
    model = Model()
    model.compile(backend=compiler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step():
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()

    train_step()
    assert compiler.frame_count == 1
    profile = profile_of(model, optimizer)
    train_step()
    train_step()
    assert not profile.is_open
    assert compiler.frame_count <= 2  # the hook of the step's begin is outside of the graph
    assert compiler.op_count == 3 * compiler.frame_count  # each time in one piece
    after = named(profile, "after_forward")[0]
    # GELU saves its input and the last Linear its own; whose they are inside is not known.
    assert sizes(after, "activations") == {"": 2 * ROW_BYTES}
    assert profile._guard.counts == {}


def test_hooks_of_an_optimizer_may_come_after_ours():
    """Taking a hook out while torch walks through them would raise into training."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(2):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    assert called == [1, 1]
    assert not profile.is_open
    assert not model._forward_hooks
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_a_skipped_update_ends_its_step_with_the_next():
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = [0]
    profile = profile_of(model, optimizer, steps={0}, find_step=lambda: step[0])
    model(torch.ones(BATCH, WIDTH)).sum().backward()  # gradients were not finite: no update
    step[0] = 1
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    assert [point.step for point in named(profile, "after_step")] == [0]
    assert not profile.is_open


def test_a_closed_profile_keeps_no_model():
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer)
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert not profile.is_open
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_profiled_step_is_told():
    told = []
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile_of(model, optimizer, steps={1}, note_step=lambda *facts: told.append(facts))
    for _ in range(3):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    (step, begin_ns, end_ns), (same, same_ns, over_ns) = told
    assert (step, same, end_ns) == (1, 1, None)
    assert begin_ns == same_ns < over_ns


@pytest.mark.parametrize(
    ("schedule", "num_steps", "expected"),
    [
        (None, 100, 2),
        (WindowSchedule(), 100, 2),  # its window is 6 and 7
        (WindowSchedule(), 2, 1),
        (WindowSchedule(), 1, 0),
        (WindowSchedule(skip=1, wait=1), 100, 5),  # 2 warms up, 3 is traced, 4 follows
        (WindowSchedule(skip=1, wait=0, warmup=0, repeat=0), 100, 2),  # all are traced
    ],
)
def test_the_profiled_step_is_warm_and_not_traced(schedule, num_steps, expected):
    assert choose_step(schedule, num_steps) == expected
    assert profiled_step.NUM_COLD_STEPS == 2


def test_models_and_their_optimizers_are_found():
    model, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    models, optimizers = find_training(torch)
    ids = set(map(id, models))
    assert id(model) in ids
    assert id(frozen) not in ids
    assert any(one is mine for one in optimizers)
    assert not any(one is other for one in optimizers)


def test_the_automatic_profile_waits_until_nothing_is_traced():
    model = nn.Linear(3, 3)
    asked, notes = [], []
    soon = AutomaticProfile(None, lambda *found: asked.append(found), lambda *n: notes.append(n))
    soon.visit(torch, is_tracing=False)
    soon.visit(torch, is_tracing=True)
    assert not asked
    assert soon.is_waiting
    soon.visit(torch, is_tracing=False)
    assert not soon.is_waiting
    assert any(one is model for one in asked[0][0])
    assert not notes


def test_the_compiler_is_not_imported_for_it():

    program = (
        "import sys, torch\n"
        "from meshscope.capture.memory.memory_profile import MemoryProfile\n"
        "from meshscope.capture.guard import Guard\n"
        "model = torch.nn.Linear(2, 2)\n"
        "guard = Guard()\n"
        "profile = MemoryProfile(torch, [model], [], guard=guard).open()\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "profile.end_step()\n"
        "assert not guard.counts and 'torch._dynamo' not in sys.modules\n"
    )
    done = run_process([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
