"""Real torch loops of every shape, recorded automatically: what a step holds must be right."""

import time

import pytest
import torch
from recorded import Recorded, read_recorded
from recorded import finish as end_recording
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.schema import StepFlag

WIDTH = 8


def finish(recorder: Recorder) -> Recorded:
    recorded = end_recording(recorder)
    assert_exact(recorded)
    return recorded


def assert_exact(recorded: Recorded) -> None:
    """Phases never claim more than their step; steps are in order and do not overlap."""
    previous_end = 0
    for step in recorded.steps:
        assert previous_end <= step.start_ns <= step.end_ns
        claimed = sum(phase.self_ns for phase in step.phases if not phase.is_detail)
        assert 0 <= claimed <= step.end_ns - step.start_ns
        previous_end = step.end_ns


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def attach(
    recorder: Recorder, model: nn.Module | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, by default a small one, and its optimizer, both watched."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    return model, optimizer


def make_loader(num_batches: int) -> DataLoader:
    inputs = torch.randn(num_batches * 2, WIDTH)
    targets = torch.zeros(num_batches * 2, dtype=torch.long)
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def test_a_plain_loop_gives_one_step_per_optimizer_step(recorder):
    model, optimizer = attach(recorder)
    for inputs, _ in make_loader(5):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer"]
    ] * 5
    assert [step.num_microbatches for step in recorded.steps] == [1] * 5
    assert [phase.name for phase in recorded.outside] == ["data"]  # the fetch that ended the epoch


def test_gradient_accumulation_keeps_every_microbatch_in_its_phase(recorder):
    model, optimizer = attach(recorder)
    seen_ns = []
    for index, (inputs, _) in enumerate(make_loader(8)):
        seen_ns.append(time.monotonic_ns())  # work between fetch and forward is nobody's phase
        (loss_of(model, inputs) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    recorded = finish(recorder)
    assert len(recorded.steps) == 2
    for step in recorded.steps:
        assert step.names == ["data", "forward", "backward"] * 4 + ["optimizer"]
        assert step.num_microbatches == 4
        forwards = [phase.microbatch for phase in step.phases if phase.name == "forward"]
        assert forwards == [0, 1, 2, 3]
        backwards = [phase.microbatch for phase in step.phases if phase.name == "backward"]
        assert backwards == [0, 1, 2, 3]
        inside = [ns for ns in seen_ns if step.start_ns < ns < step.end_ns]
        assert len(inside) == 4
        assert not any(p.start_ns <= ns <= p.end_ns for p in step.phases for ns in inside)


def test_several_forward_passes_before_one_backward(recorder):
    model, optimizer = attach(recorder)
    inputs = torch.randn(4, WIDTH)
    for _ in range(3):
        (loss_of(model, inputs) + loss_of(model, -inputs)).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["forward", "forward", "backward", "optimizer"]
    ] * 3
    assert [step.num_microbatches for step in recorded.steps] == [1] * 3


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool):
        super().__init__()
        self.inner = make_model()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_backward_and_not_another_forward(recorder, use_reentrant):
    model = Checkpointed(use_reentrant=use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach([model, model.inner], optimizer)  # the inner one is called again in backward
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH, requires_grad=True)).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"]] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_root_that_is_checkpointed_as_a_whole(recorder, use_reentrant):
    model, optimizer = attach(recorder)
    for _ in range(3):
        inputs = torch.randn(4, WIDTH, requires_grad=True)
        checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean().backward()
        optimizer.step()
    recorded = finish(recorder)
    phases = ["eval" if use_reentrant else "forward", "backward", "optimizer"]
    # Reentrant checkpointing runs its forward without gradients: from a hook it looks like
    # evaluation, so the step begins with its backward.
    for step in recorded.steps:
        assert step.names == [name for name in phases if name != "eval"]
    assert len(recorded.steps) == 3


def test_evaluation_between_steps_is_a_gap_and_its_own_phase(recorder):
    model, optimizer = attach(recorder)
    for _ in range(2):
        for inputs, _ in make_loader(2):
            loss_of(model, inputs).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs, _ in make_loader(3):
                model(inputs)
        model.train()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer"]
    ] * 4
    outside = [phase.name for phase in recorded.outside]
    assert outside.count("eval") == 2 * (3 + 4)  # forwards, and what is fetched for them
    assert outside.count("data") == 2  # the fetches that end an epoch of training
    between = (recorded.steps[1].end_ns, recorded.steps[2].start_ns)
    evals = [phase for phase in recorded.outside if phase.name == "eval"]
    assert all(between[0] <= phase.start_ns <= phase.end_ns <= between[1] for phase in evals[:7])


def test_evaluation_inside_a_step_stays_there(recorder):
    model, optimizer = attach(recorder)
    inputs = torch.randn(4, WIDTH)
    for _ in range(2):
        loss = loss_of(model, inputs)
        with torch.no_grad():
            model(inputs)
        loss.backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["forward", "eval", "backward", "optimizer"]
    ] * 2


def test_fine_tuning_in_eval_mode_is_training_once_that_is_clear(recorder):
    model, optimizer = attach(recorder, make_model().eval())  # frozen batch norm statistics, say
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps[1:]] == [["forward", "backward", "optimizer"]] * 2


def test_gradient_clipping_is_its_own_phase_and_gives_the_norm(recorder):
    model, optimizer = attach(recorder)
    norms = []
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.11)  # signals are read at most ten times a second
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["forward", "backward", "clip", "optimizer"]
    ] * 3
    assert recorded.values("grad_norm") == pytest.approx(norms)


def test_a_scheduler_built_after_attaching_works_and_is_followed(recorder):
    model, optimizer = attach(recorder)
    step_method = optimizer.step
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.11)
    recorded = finish(recorder)
    assert step_method.__func__ is not None
    assert recorded.values("lr") == pytest.approx([0.1, 0.05, 0.025])
    assert len(recorded.steps) == 3


def test_exceptions_in_the_loop_leave_no_phase_open(recorder):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()
            self.fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("bad batch")
            return self.inner(x)

    model, optimizer = attach(recorder, Fragile())
    for index in range(4):
        model.fails = index == 1
        try:
            loss_of(model, torch.randn(4, WIDTH)).backward()
            optimizer.step()
        except ValueError:
            continue
    recorded = finish(recorder)
    assert len(recorded.steps) == 3
    # The failed forward belongs to the step that the loop then completed.
    assert recorded.steps[1].names == ["forward", "forward", "backward", "optimizer"]
    assert recorded.steps[2].names == ["forward", "backward", "optimizer"]


def test_an_optimizer_that_raises_is_closed_as_aborted(recorder):
    model = make_model()

    class Fragile(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("overflow")
            return super().step(closure)

    optimizer = Fragile(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    for index in range(4):
        optimizer.fails = index == 1
        try:
            for inputs, _ in make_loader(1):
                loss_of(model, inputs).backward()
                optimizer.step()
        except RuntimeError:
            continue
    recorded = finish(recorder)
    assert len(recorded.steps) == 3
    aborted = [phase.name for step in recorded.steps for phase in step.phases if phase.is_aborted]
    assert aborted == ["optimizer"]


def test_an_exception_in_backward_closes_it(recorder):
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no gradient today")

    model, optimizer = attach(recorder)
    with pytest.raises(RuntimeError, match="no gradient today"):
        Boom.apply(loss_of(model, torch.randn(2, WIDTH))).backward()
    loss_of(model, torch.randn(2, WIDTH)).backward()
    optimizer.step()
    recorded = finish(recorder)
    assert recorded.steps[0].names == ["forward", "backward", "forward", "backward", "optimizer"]


def test_two_optimizers_that_take_turns_make_one_step(recorder):
    critic, generator = make_model(), make_model()
    first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    recorder.attach([critic, generator], [first, second])
    for _ in range(4):
        loss_of(critic, torch.randn(4, WIDTH)).backward()
        first.step()
        loss_of(generator, torch.randn(4, WIDTH)).backward()
        second.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"] * 2] * 4
    assert [step.num_microbatches for step in recorded.steps] == [2] * 4


def test_two_optimizers_over_one_model_make_one_step(recorder):
    model = make_model()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:])]
    recorder.attach(model, optimizers)
    for inputs, _ in make_loader(4):
        loss_of(model, inputs).backward()
        for optimizer in optimizers:
            optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer", "optimizer"]
    ] * 4


def test_an_optimizer_that_steps_less_often_joins_the_step_it_steps_in(recorder):
    critic, generator = make_model(), make_model()
    first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    recorder.attach([critic, generator], [first, second])
    for index in range(6):
        loss_of(critic, torch.randn(4, WIDTH)).backward()
        first.step()
        if index % 3 == 2:
            loss_of(generator, torch.randn(4, WIDTH)).backward()
            second.step()
    recorded = finish(recorder)
    assert [step.counts["optimizer"] for step in recorded.steps] == [1, 1, 2, 1, 1, 2]


def test_a_closure_optimizer_holds_its_own_forwards(recorder):
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    recorder.attach(model, optimizer)
    inputs = torch.randn(4, WIDTH)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    recorded = finish(recorder)
    assert len(recorded.steps) == 3
    for step in recorded.steps:
        assert step.counts["optimizer"] == 1
        assert step.counts["forward"] == step.counts["backward"] >= 1


def test_an_optimizer_inside_backward_does_not_cut_the_step(recorder):
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    recorder.attach(model, list(optimizers.values()))
    for parameter, optimizer in optimizers.items():

        def update(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
    recorded = finish(recorder)
    assert len(recorded.steps) == 3
    for step in recorded.steps:
        assert step.counts == {"forward": 1, "backward": 1, "optimizer": 4}


def test_frozen_parameters_change_nothing(recorder):
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    recorder.attach(model, optimizer)
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"]] * 3


def test_code_between_steps_is_a_gap_and_never_data(recorder):
    model, optimizer = attach(recorder)
    for _ in range(4):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
        time.sleep(0.01)  # a checkpoint, say
    recorded = finish(recorder)
    assert all("data" not in step.names for step in recorded.steps)
    assert recorded.outside == []
    for before, after in zip(recorded.steps, recorded.steps[1:], strict=False):
        assert after.start_ns - before.end_ns >= 9_000_000


def test_a_second_model_kept_for_reference_does_not_train(recorder):
    student, teacher = make_model(), make_model().eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    recorder.attach([student, teacher], optimizer)
    inputs = torch.randn(4, WIDTH)
    for _ in range(3):
        with torch.no_grad():
            target = teacher(inputs)
        (student(inputs) - target).square().mean().backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"]] * 3


def test_gradients_taken_with_autograd_grad_are_backward_but_no_microbatch(recorder):
    model, optimizer = attach(recorder)
    for _ in range(2):
        inputs = torch.randn(4, WIDTH, requires_grad=True)
        output = model(inputs).sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        (output + slope.square().sum()).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["forward", "backward", "backward", "optimizer"]
    ] * 2
    assert [step.num_microbatches for step in recorded.steps] == [1, 1]


def test_a_skipped_update_ends_its_step_and_is_marked(recorder):
    model, optimizer = attach(recorder)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for index in range(4):
        loss = loss_of(model, torch.randn(4, WIDTH))
        scaler.scale(loss * float("inf") if index == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    recorded = finish(recorder)
    assert len(recorded.steps) == 4
    assert [bool(step.flags & StepFlag.SKIPPED) for step in recorded.steps] == [
        False,
        True,
        False,
        False,
    ]


def test_tokens_are_counted_from_integer_inputs(recorder):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, WIDTH)

        def forward(self, input_ids):
            return self.embedding(input_ids)

    model, optimizer = attach(recorder, Tokens())
    for length in (3, 5):
        for _ in range(2):
            loss_of(model, torch.zeros(4, length, dtype=torch.long)).backward()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.input_tokens for step in recorded.steps] == [25, 41]


def test_a_batch_that_an_optimizer_evaluates_again_counts_once(recorder):
    model = nn.Embedding(10, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    recorder.attach(model, optimizer)
    tokens = torch.zeros(3, 5, dtype=torch.long)

    def evaluate():
        optimizer.zero_grad()
        loss = (model(tokens) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(evaluate)
    steps = finish(recorder).steps
    assert steps[0].counts["forward"] > 1
    assert [step.input_tokens for step in steps] == [15, 15]


@pytest.mark.parametrize("is_named", [False, True], ids=["list", "list of a mapping"])
def test_a_batch_as_its_loader_gave_it_is_counted(recorder, is_named):
    """Lightning hands batches on to DDP so."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)

        def forward(self, batch, index):
            return self.embedding(batch[0]["input_ids"] if is_named else batch[0])

    model, optimizer = attach(recorder, Whole())
    tokens = torch.zeros(3, 5, dtype=torch.long)
    model([{"input_ids": tokens} if is_named else tokens], 0).mean().backward()
    optimizer.step()
    [step] = finish(recorder).steps
    assert step.input_tokens == 15


def test_loader_workers_are_seen_and_write_nothing_themselves(recorder):
    model, optimizer = attach(recorder)
    data = TensorDataset(torch.randn(8, WIDTH))
    for _ in range(2):  # the second epoch forks workers from a process that is recording
        for (inputs,) in DataLoader(data, batch_size=2, num_workers=1):
            loss_of(model, inputs).backward()
            optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer"]
    ] * 8


def test_closing_undoes_everything(tmp_path):
    functions = (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.nn.utils.clip_grad_norm_,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        torch.amp.GradScaler.step,
        torch.optim.Optimizer.__init__,
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_before = optimizer.step
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.attach(model, optimizer)
    recorder.watch_everything()
    assert "forward" not in vars(model)
    assert optimizer.step == step_before
    assert torch.autograd.backward is not functions[0]
    recorder.close()
    assert functions == (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.nn.utils.clip_grad_norm_,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        torch.amp.GradScaler.step,
        torch.optim.Optimizer.__init__,
    )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_tap_that_someone_wrapped_falls_silent(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    model = make_model()
    recorder.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    original = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: original(*args, **kwargs)
    try:
        recorder.close()
        loss_of(model, torch.randn(2, WIDTH)).backward()  # passes through both
    finally:
        torch.autograd.backward = original.__wrapped__
    assert model[0].weight.grad is not None


def test_watching_everything_finds_models_and_optimizers_by_itself(recorder):
    recorder.watch_everything()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in make_loader(3):
        loss_of(model, inputs).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer"]
    ] * 3


def test_gradients_are_the_same_with_and_without_recording(recorder):
    def train(attach):
        torch.manual_seed(3)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        attach(model, optimizer)
        for _ in range(5):
            loss_of(model, torch.randn(4, WIDTH)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    recorded = train(recorder.attach)
    plain = train(lambda model, optimizer: None)
    assert torch.equal(recorded, plain)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_function_compiled_as_one_graph_may_call_a_watched_model(recorder):
    model, optimizer = attach(recorder)
    compiled = torch.compile(lambda x: loss_of(model, x), backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(2, WIDTH)).backward()
        optimizer.step()
    recorded = finish(recorder)
    # The forward is inside the graph, where hooks are traced away: it is unattributed time.
    assert [step.names for step in recorded.steps] == [["backward", "optimizer"]] * 3


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_timed_from_outside(recorder):
    model, optimizer = attach(
        recorder, torch.compile(make_model(), backend="eager", fullgraph=True)
    )
    for _ in range(3):
        loss_of(model, torch.randn(2, WIDTH)).backward()
        optimizer.step()
    recorded = finish(recorder)
    usual = ["forward", "backward", "optimizer"]
    assert [step.names for step in recorded.steps] == [
        ["forward", "compile", *usual[1:]],
        usual,
        usual,
    ]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_in_place_still_compiles_as_one_graph(recorder):
    model = Checkpointed(use_reentrant=False)  # of torch's own modules alone nothing is compiled
    model.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    for _ in range(3):
        loss_of(model, torch.randn(2, WIDTH)).backward()
        optimizer.step()
    recorded = finish(recorder)
    # Hooks would be traced into the graph: the call is timed around it.
    usual = ["forward", "backward", "optimizer"]
    assert [step.names for step in recorded.steps] == [
        ["forward", "compile", *usual[1:]],
        usual,
        usual,
    ]


@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's own, when inductor loads
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_optimizer_step_still_compiles(recorder):
    model, optimizer = attach(recorder)
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        loss_of(model, torch.randn(2, WIDTH)).backward()
        update()
    recorder.close()
    assert recorder.guard.counts == {}


def test_a_process_that_only_evaluates_is_not_recorded_when_slipped_in(recorder, tmp_path):
    recorder.watch_everything()
    model = make_model().eval()
    torch.optim.SGD(model.parameters(), lr=0.1)  # by which the model is found
    with torch.no_grad():
        for inputs, _ in make_loader(3):
            model(inputs)
    assert recorder.run_dir is None
    recorder.close()
    assert not (tmp_path / "run").exists()


def test_what_came_before_the_first_training_step_is_kept_when_slipped_in(recorder):
    recorder.watch_everything()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    for inputs, _ in make_loader(2):
        loss_of(model, inputs).backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [phase.name for phase in recorded.outside] == ["eval", "data"]
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "backward", "optimizer"]
    ] * 2


def test_a_sharded_loss_is_not_read_on_our_own_account(recorder):
    """Reading it may communicate, and ranks take signals at moments of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.randn(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        recorder.attach(None, optimizer)
        loss = weight.square().sum()
        assert isinstance(loss.placements[0], Partial)
        loss.backward()
        optimizer.step()
        run_dir = recorder.run_dir
        recorder.close()
    finally:
        torch.distributed.destroy_process_group()
    assert recorder.guard.counts == {}
    assert read_recorded(run_dir).values("backward_loss") == []


def test_a_module_that_cannot_be_hooked_does_not_hide_the_others(recorder):
    class Stubborn(nn.Module):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise TypeError("no hooks here")

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    stubborn, model = Stubborn(), make_model()
    recorder.watch_everything()
    optimizer = torch.optim.SGD([*stubborn.parameters(), *model.parameters()], lr=0.1)
    for _ in range(2):
        loss_of(model, stubborn(torch.randn(2, WIDTH))).backward()
        optimizer.step()
    run_dir = recorder.run_dir
    recorder.close()
    assert list(recorder.guard.counts) == ["model search"]
    assert read_recorded(run_dir).steps[0].names == ["forward", "backward", "optimizer"]


def test_modules_of_a_list_are_timed_where_the_list_is_attached(recorder):
    """A list cannot be called: stages of a pipeline are attached so."""
    parts = nn.ModuleList([make_model(), nn.ModuleDict({"head": nn.Linear(2, 2)})])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    recorder.attach(parts, optimizer)
    for inputs, _ in make_loader(3):
        parts[1]["head"](parts[0](inputs)).square().mean().backward()
        optimizer.step()
    recorded = finish(recorder)
    assert [step.names for step in recorded.steps] == [
        ["data", "forward", "forward", "backward", "optimizer"]
    ] * 3
    assert [step.num_microbatches for step in recorded.steps] == [1] * 3
