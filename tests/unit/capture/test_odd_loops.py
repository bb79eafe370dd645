"""Loops as some have them: threads that take turns, backwards that raise, mapped gradients."""

import copy
import gc
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from recorded import Recorded
from recorded import finish as end_recording
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from meshscope.analyze.rank.signals import ScalarSeries, read_scalars
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run

WIDTH = 4


@pytest.fixture
def recorder(tmp_path: Path):
    torch.manual_seed(0)
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    yield made
    made.close()


def finish(recorder: Recorder) -> tuple[Recorded, ScalarSeries | None, list[int]]:
    """What was recorded, its loss, and the samples of each step."""
    found = end_recording(recorder)
    series = read_scalars(found.rank, frozenset(("backward_loss",)))
    samples = found.rank.read("steps")["input_samples"].tolist()
    return found, series.get("backward_loss"), samples


def list_new_models(run_dir: Path) -> list[object]:
    rank = next(iter(open_run(run_dir).last_attempt))
    return [line["new_model_step"] for line in rank.updates if "new_model_step" in line]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


class Boom(torch.autograd.Function):
    """Raises in backward, as one that is out of memory does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no gradient today")


@pytest.mark.parametrize("num_before", [0, 12], ids=["sampled", "not sampled"])
def test_a_backward_that_raised_is_no_microbatch_and_has_no_loss(recorder, num_before):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    loss = torch.tensor(0.0)
    for step in range(num_before + 1):
        if step == num_before:
            with pytest.raises(RuntimeError, match="no gradient today"):
                Boom.apply(model(torch.randn(2, WIDTH)).square().mean() + 1000).backward()
        loss = model(torch.randn(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recorded, series, samples = finish(recorder)
    last = recorded.steps[-1]
    assert last.names == ["forward", "backward", "forward", "backward", "optimizer"]
    assert [phase.name for phase in last.phases if phase.is_aborted] == ["backward"]
    assert last.num_microbatches == 1
    assert samples == [2] * (num_before + 1)
    assert series.step[-1] == num_before
    assert series.value[-1] == pytest.approx(loss.item())


def test_optimizers_that_step_inside_backward_leave_the_last_loss(recorder):
    model = make_model()
    recorder.watch_everything()
    optimizers = {one: torch.optim.SGD([one], lr=0.01) for one in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    loss = torch.tensor(0.0)
    for _ in range(30):
        model.zero_grad()
        loss = model(torch.randn(2, WIDTH)).square().mean()
        loss.backward()
    recorded, series, _ = finish(recorder)
    assert len(recorded.steps) == 30
    assert series.step[-1] == 29
    assert series.value[-1] == pytest.approx(loss.item())


def test_a_sweep_that_deletes_its_model_before_the_next_loses_no_step(recorder, tmp_path):
    recorder.watch_everything()
    for _ in range(3):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
        gc.collect()
    recorded, series, _ = finish(recorder)
    assert [step.num_microbatches for step in recorded.steps] == [1] * 15
    assert series.step[-1] == 14
    assert list_new_models(tmp_path / "run") == [5, 10]


def test_a_new_optimizer_of_the_same_model_is_no_new_model(recorder, tmp_path):
    recorder.watch_everything()
    model, head = make_model(), nn.Linear(1, 1)
    for rate in (0.1, 0.01):
        first = torch.optim.SGD(model.parameters(), lr=rate)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        first.step()
    joined = torch.optim.SGD(head.parameters(), lr=0.1)
    for optimizer in (joined, first):
        head(model(torch.randn(2, WIDTH))).square().mean().backward()
        optimizer.step()
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (again, first):  # the same model: nothing was told that could be taken back
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
    finish(recorder)
    assert list_new_models(tmp_path / "run") == [2, -1]  # the head: and then the model trains on


def test_an_optimizer_made_anew_in_each_round_has_its_last_step_joined_by_the_one_that_stays(
    recorder, tmp_path
):
    """Reptile: a copy takes three steps with an optimizer of its own, then the original takes one.

    That the first comes back is known when it first does: in the second round, a step of its own.
    """
    recorder.watch_everything()
    model = make_model()
    outer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(3):
            fast(torch.randn(2, WIDTH)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        outer.step()
    recorded, _, samples = finish(recorder)
    assert [step.num_microbatches for step in recorded.steps] == [1] * 6 + [0] + [1] * 12
    assert sum(samples) == 6 * 3 * 2
    assert list_new_models(tmp_path / "run")[-1] == -1  # none of the copies is the next model


def test_a_loop_without_an_optimizer_is_told_what_to_do(recorder, caplog):
    """Updates by hand, as with `torch.func`: where a step ends cannot be seen."""
    model = make_model()
    recorder.watch_everything()
    for _ in range(3):
        loss = model(torch.randn(2, WIDTH)).square().mean()
        torch.autograd.grad(loss, list(model.parameters()))
    recorded, _, _ = finish(recorder)
    assert recorded.steps == []
    (line,) = [message for message in caplog.messages if message.startswith("meshscope")]
    assert "no optimizer of torch stepped; mark steps with recorder.step()" in line


def test_steps_may_go_from_thread_to_thread(recorder):
    """As asyncio's executors hand them out: whichever thread is free has the next."""
    model = make_model()
    recorder.watch_everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number in range(12):
            done: Future[None] = (second if number % 3 == 2 else first).submit(train)
            done.result()
    recorded, _, samples = finish(recorder)
    assert [step.names for step in recorded.steps] == [["forward", "backward", "optimizer"]] * 12
    assert samples == [2] * 12


def test_gradients_by_sample_are_no_error_and_count_nothing(recorder):
    """Under `vmap` a tensor hides how many samples it stands for, and their values."""
    model = make_model()
    recorder.watch_everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def measure_loss(parameters, sample):
        return functional_call(model, parameters, (sample[None],)).square().mean()

    per_sample = vmap(grad_and_value(measure_loss), in_dims=(None, 0))
    for _ in range(10):
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        gradients, _ = per_sample(parameters, torch.randn(6, WIDTH))
        for name, one in model.named_parameters():
            one.grad = gradients[name].mean(0)
        optimizer.step()
    recorded, series, samples = finish(recorder)
    names = [step.names for step in recorded.steps[1:]]  # the model is found in the first
    assert names == [["forward", "backward", "optimizer"]] * 9
    assert set(samples) == {0}
    assert series is None
