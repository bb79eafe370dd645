"""The loss that is shown is the one the program means, under whatever it does to it first."""

import gc
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded import finish as end_recording
from torch import nn
from torch.func import functional_call, grad_and_value

from meshscope.analyze.rank.signals import ScalarSeries, read_scalars
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run

NAMES = frozenset(("backward_loss", "backward_loss 2", "lr", "lr 2", "grad_norm"))


@pytest.fixture
def recorder(tmp_path: Path):
    torch.manual_seed(0)
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    yield made
    made.close()


class Named(nn.Module):
    """A model that returns its loss under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, num_items_in_batch: int | None = None):
        errors = self.line(inputs).square()
        loss = errors.mean() if num_items_in_batch is None else errors.sum() / num_items_in_batch
        return SimpleNamespace(loss=loss)


def finish(recorder: Recorder) -> dict[str, ScalarSeries]:
    return read_scalars(end_recording(recorder).rank, NAMES)


def attach(recorder: Recorder, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    return optimizer


def accumulate(recorder, backward, *, num_batches=8, every=4, model=None):
    """Means of the losses of each step's microbatches, and the series that was recorded."""
    model = model or nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    losses, means = [], []
    for index in range(num_batches):
        loss = model(torch.randn(3, 4))
        loss = loss.loss if isinstance(model, Named) else loss.square().mean()
        losses.append(loss.item())
        backward(loss)
        if (index + 1) % every == 0:
            optimizer.step()
            means.append(sum(losses) / len(losses))
            losses.clear()
    return means, finish(recorder)["backward_loss"]


@pytest.mark.parametrize(
    "divide",
    [lambda loss: loss / 4, lambda loss: loss * 0.25, lambda loss: loss.clone().div(4).mean()],
)
def test_a_loss_divided_by_the_microbatches_is_shown_undivided(recorder, divide):
    means, found = accumulate(recorder, lambda loss: divide(loss).backward())
    assert found.value == pytest.approx(means)
    assert found.step.tolist() == [0, 1]
    assert "times 4: the program divided it by its microbatches" in found.source


def test_a_division_by_something_else_is_the_programs_own(recorder):
    means, found = accumulate(recorder, lambda loss: (loss / 3).backward())
    assert found.value == pytest.approx([mean / 3 for mean in means])
    assert found.source == "what backward was called on, mean of 4 microbatches"


def test_what_the_model_returned_as_its_loss_is_believed(recorder):
    means, found = accumulate(recorder, lambda loss: (loss * 100 / 7).backward(), model=Named())
    assert found.value == pytest.approx(means)
    assert found.source == "what the model returned as its loss, mean of 4 microbatches"


def test_a_scaled_loss_is_shown_unscaled(recorder):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    means, found = accumulate(recorder, lambda loss: scaler.scale(loss / 4).backward())
    assert found.value == pytest.approx(means)
    assert "before the gradient scaler" in found.source


def test_losses_normalised_by_the_tokens_of_the_step_add_up(recorder):
    model = Named()
    optimizer = attach(recorder, model)
    parts = [torch.randn(count, 4) for count in (2, 5, 3)]
    expected = model(torch.cat(parts)).loss.item()
    for part in parts:
        model(part, num_items_in_batch=10).loss.backward()
    optimizer.step()
    found = finish(recorder)["backward_loss"]
    assert found.value == pytest.approx([expected])
    assert "added up over 3 microbatches" in found.source


def test_a_left_over_microbatch_belongs_to_no_step(recorder):
    means, found = accumulate(recorder, lambda loss: (loss / 2).backward(), num_batches=7, every=2)
    assert found.step.tolist()[-1] == 2
    assert found.value[-1] == pytest.approx(means[-1])


def test_the_last_value_is_of_the_last_step_however_short_steps_are(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    for step in range(200):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 5.0  # as a schedule does, for the next step
    found = finish(recorder)
    expected = {"backward_loss": loss.item(), "grad_norm": norm.item(), "lr": 0.1 / 200}
    for name, value in expected.items():
        assert found[name].step[-1] == 199
        assert found[name].value[-1] == pytest.approx(value)
        assert all(a < b for a, b in pairwise(found[name].step.tolist()))


def test_the_last_values_of_a_schedule_that_gives_backward_a_list(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    for _ in range(200):
        optimizer.zero_grad()
        losses = []
        for _ in range(3):
            losses.append(model(torch.randn(2, 4)).square().mean())
            torch.autograd.backward([losses[-1]])
        optimizer.step()
    found = finish(recorder)["backward_loss"]
    assert found.step[-1] == 199
    assert found.value[-1] == pytest.approx(torch.stack(losses).mean().item())


def test_a_penalty_by_autograd_is_not_the_loss(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    inputs = torch.randn(2, 4, requires_grad=True)
    output = model(inputs).sum()
    (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
    loss = (output.square() + slope.square().sum()) * 0.5
    loss.backward()
    optimizer.step()
    assert finish(recorder)["backward_loss"].value == pytest.approx([loss.item()])


def test_a_loss_whose_gradient_is_asked_for_by_keyword_is_seen(recorder):
    """As the last stage of a zero-bubble schedule does: there is no call of backward."""
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    expected = []
    for _ in range(3):
        loss = model(torch.randn(3, 4)).square().mean()
        expected.append(loss.item())
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(outputs=[loss], inputs=parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    found = finish(recorder)["backward_loss"]
    assert found.value == pytest.approx([expected[step] for step in found.step])


def test_nothing_of_the_programs_graph_is_held(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    for _ in range(3):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
    assert recorder.watching.hooks is not None
    assert all(kept.grad_fn is None for kept in recorder.watching.hooks._recent)


def test_steps_whose_numbers_are_not_taken_leave_no_objects_to_the_collector(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    recorder.configure(stack_samples=False, flop_counts=False)
    inputs = torch.randn(2, 4)
    hooks = recorder.watching.hooks
    assert hooks is not None

    def train(num_steps: int) -> int:
        for _ in range(num_steps):
            hooks._next_signals_ns = hooks._next_signals_step = 1 << 62  # taken in none of these
            model(inputs).square().mean().backward()
            optimizer.step()
        return len(gc.get_objects())

    train(10)
    gc.collect()  # what earlier tests left goes now, and not between the two counts
    assert train(100) - train(100) == pytest.approx(0, abs=20)
    assert len(hooks._older) == 2 * 210
    assert {type(number) for number in hooks._older} <= {int, float}


def test_hooks_on_saved_tensors_are_left_alone(recorder):
    """One that computes again, or that works only once, would break the program."""
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    unpacked: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        assert all(saved is not one for one in unpacked)
        unpacked.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), unpack):
        loss = model(torch.randn(2, 4)).square().mean() / torch.tensor(2.0)
    loss.backward()
    optimizer.step()
    assert finish(recorder)["backward_loss"].value == pytest.approx([loss.item()])


def test_each_optimizer_has_its_own_losses_and_rate(recorder):
    judge, maker = nn.Linear(4, 1), nn.Linear(4, 4)
    rates = (1e-4, 1e-5)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=rate)
        for one, rate in zip((judge, maker), rates, strict=True)
    ]
    recorder.attach([judge, maker], optimizers)
    expected: tuple[list[float], list[float]] = ([], [])
    for _ in range(30):
        real = judge(torch.randn(2, 4)).square().mean()
        fake = judge(maker(torch.randn(2, 4)).detach()).square().mean() + 100
        for loss in (real, fake):
            loss.backward()
        optimizers[0].step()
        expected[0].append((real.item() + fake.item()) / 2)
        loss = judge(maker(torch.randn(2, 4))).square().mean() - 1000
        loss.backward()
        optimizers[1].step()
        expected[1].append(loss.item())
    found = finish(recorder)
    for name, values in zip(("backward_loss", "backward_loss 2"), expected, strict=True):
        assert found[name].step[-1] == 29
        assert found[name].value == pytest.approx([values[step] for step in found[name].step])
    assert [set(found[name].value) for name in ("lr", "lr 2")] == [{rate} for rate in rates]


def train_fold(make_optimizers, num_steps=5):
    """A new model with new optimizers, of which each steps once in every step."""
    model = nn.Linear(4, 1)
    optimizers = make_optimizers(model)
    for _ in range(num_steps):
        for optimizer in optimizers:
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def make_one(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def make_two(model):
    return [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]


@pytest.mark.parametrize("make", [make_one, make_two])
def test_folds_with_new_optimizers_go_on_with_steps_and_series(recorder, make):
    """The ones of before are kept alive: it is not by their end that they are known."""
    recorder.watch_everything()
    kept = [train_fold(make) for _ in range(3)]
    found = finish(recorder)
    assert len(kept) == 3
    assert set(found) == {"backward_loss", "lr"} | (
        {"backward_loss 2", "lr 2"} if make is make_two else set()
    )
    assert all(series.step[-1] == 14 for series in found.values())


def test_an_optimizer_made_later_that_joins_the_first_has_series_of_its_own(recorder):
    recorder.watch_everything()
    model, (first,) = train_fold(make_one)
    head = nn.Linear(1, 1)
    second = torch.optim.SGD(head.parameters(), lr=0.01)
    for _ in range(20):
        for optimizer in (first, second):
            head(model(torch.randn(2, 4))).square().mean().backward()
            optimizer.step()
    found = finish(recorder)
    assert found["lr"].step[-1] == found["lr 2"].step[-1] == 24
    assert set(found["lr 2"].value) == {0.01}


@pytest.mark.parametrize(
    ("call", "num_samples", "num_tokens"),
    [
        (lambda model: model(torch.zeros(6, 4)), 6, -1),
        (lambda model: model(inputs=torch.zeros(5, 3, 4)), 5, -1),
        (lambda model: model({"mask": None, "input_ids": torch.zeros(3, 4).long()}), 3, 12),
        (lambda model: model(inputs_embeds=torch.zeros(2, 7, 4)), 2, 14),
        (lambda model: [model(torch.zeros(6, 4)) for _ in range(2)][1], 12, -1),
    ],
)
def test_samples_are_the_first_dimension_of_the_batch(recorder, call, num_samples, num_tokens):
    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, *given, **named):
            return self.line(torch.zeros(1, 4)).sum()

    model, head = Any(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    recorder.attach([model, head], optimizer)
    for _ in range(2):
        head(call(model).reshape(1, 1)).sum().backward()  # the head's batch is the same
        optimizer.step()
    run_dir = recorder.run_dir
    finish(recorder)
    assert run_dir is not None
    steps = next(iter(open_run(run_dir).last_attempt)).read("steps")
    assert steps["input_samples"].tolist() == [num_samples] * 2
    assert steps["input_tokens"].tolist() == [num_tokens] * 2


def test_a_second_optimizer_of_the_same_loss_takes_no_samples_away(recorder):
    model = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
    recorder.attach(model, optimizers)
    for _ in range(2):
        model(torch.zeros(6, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    run_dir = recorder.run_dir
    found = finish(recorder)
    assert run_dir is not None
    steps = next(iter(open_run(run_dir).last_attempt)).read("steps")
    rows = zip(steps["step"].tolist(), steps["input_samples"].tolist(), strict=True)
    assert dict(rows) == {0: 6, 1: 6}  # of rows with the same step the last one counts
    assert "backward_loss 2" not in found
    assert {"lr", "lr 2"} <= found.keys()


@pytest.mark.parametrize("num_steps", [3, 40])  # the last one is a sampled one, or not
def test_the_last_loss_and_norm_belong_to_the_first_of_two_optimizers(recorder, num_steps):
    model = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
    recorder.attach(model, optimizers)
    for _ in range(num_steps):
        model(torch.zeros(6, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    found = finish(recorder)
    assert {name for name in found if name.endswith("2")} == {"lr 2"}
    assert found["backward_loss"].step[-1] == found["grad_norm"].step[-1] == num_steps - 1


def test_an_optimizer_that_steps_seldom_has_a_curve(recorder):
    """A critic's five updates for one of the generator's."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    recorder.attach(models, optimizers)
    for _ in range(20):
        for number in (0, 0, 0, 0, 0, 1):
            loss = models[number](torch.ones(3, 4)).mean()
            optimizers[number].zero_grad()
            loss.backward()
            optimizers[number].step()
            time.sleep(0.002)
    found = finish(recorder)
    assert found["backward_loss"].step[-1] == 99
    curve = found["backward_loss 2"]
    # Whenever the critic's numbers are taken, so are the generator's last ones.
    sampled = [step for step in found["backward_loss"].step.tolist() if step > 4]
    assert {step - 1 - step % 5 for step in sampled if step % 5 < 4} <= set(curve.step.tolist())
    assert set((curve.step % 5).tolist()) == {4}
    assert curve.step[-1] == 99
    assert curve.value.tolist() == sorted(curve.value.tolist(), reverse=True)


@pytest.mark.parametrize("num_steps", [2, 40])
def test_losses_of_one_forward_add_up(recorder, num_steps):
    """Two backward calls on one graph are one microbatch's; two forwards are two."""
    model = nn.Linear(4, 2)
    optimizer = attach(recorder, model)
    sums = []
    for _ in range(num_steps):
        total = 0.0
        for _ in range(2):
            first, second = model(torch.randn(3, 4)).square().mean(0)
            first.backward(retain_graph=True)
            second.backward()
            total += (first + second).item() / 2
        optimizer.step()
        sums.append(total)
    found = finish(recorder)["backward_loss"]
    assert found.value.tolist() == pytest.approx([sums[step] for step in found.step])
    assert found.step[-1] == num_steps - 1
    assert "added up over backward calls of one forward, mean of 2 microbatches" in found.source


def test_backwards_after_all_forwards_are_microbatches_of_their_own(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    losses = [model(torch.randn(3, 4)).square().mean() for _ in range(4)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    found = finish(recorder)["backward_loss"]
    assert found.value.tolist() == pytest.approx([sum(loss.item() for loss in losses) / 4])


def test_of_an_optimizer_that_computes_the_loss_itself_the_first_is_the_steps(recorder):
    model = nn.Linear(4, 1)
    inputs = torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    recorder.attach(model, optimizer)

    def evaluate():
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    returned = [optimizer.step(evaluate).item() for _ in range(5)]
    found = finish(recorder)["backward_loss"]
    expected = [returned[step] for step in found.step.tolist()]
    assert found.value.tolist() == pytest.approx(expected)
    assert found.step[-1] == 4


@pytest.mark.parametrize("value", [float("nan"), 1000.0])
def test_losses_between_samples_are_kept_where_one_stands_out(recorder, value):
    """Steps of well below a millisecond are sampled rarely; only step 40 is told by its value."""
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    for step in range(60):
        loss = model(torch.ones(2, 4)).square().mean() * 0 + (value if step == 40 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    series = finish(recorder)["backward_loss"]
    found = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    assert found[39] == found[41] == 1.0
    assert found[40] == pytest.approx(value, nan_ok=True)


def test_losses_that_change_little_are_not_all_written(recorder):
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    for _ in range(60):
        (model(torch.ones(2, 4)).square().mean() * 0 + 1.0).backward()
        optimizer.step()
    assert len(finish(recorder)["backward_loss"].step) < 50


@pytest.mark.parametrize("way", ["autograd", "func"])
def test_the_last_loss_of_gradients_that_are_asked_for_is_there(recorder, way):
    """Of a program that never calls backward, in a step whose numbers are not taken."""
    model = nn.Linear(4, 1)
    optimizer = attach(recorder, model)
    parameters = dict(model.named_parameters())

    def compute_loss(weights, inputs):
        return functional_call(model, weights, (inputs,)).square().mean()

    inputs = torch.randn(8, 4)
    optimizer.param_groups[0]["lr"] = 1e-3  # a loss that stands out would be written for that
    for _ in range(30):
        if way == "func":
            weights = {name: p.detach() for name, p in parameters.items()}
            gradients, loss = grad_and_value(compute_loss)(weights, inputs)
        else:
            loss = compute_loss(parameters, inputs)
            found = torch.autograd.grad(loss, list(parameters.values()))
            gradients = dict(zip(parameters, found, strict=True))
        for name, p in parameters.items():
            p.grad = gradients[name]
        optimizer.step()
    series = finish(recorder)["backward_loss"]
    assert len(series.step) < 30  # not every step's are taken
    assert series.step[-1] == 29
    assert series.value[-1] == pytest.approx(loss.item())
