"""What is fetched for training and what for an evaluation, by any of the ways programs evaluate."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from recorded import Recorded, read_recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshscope.capture.recorder import Recorder

NUM_BATCHES = 3


class Program:
    """A loop over epochs, with an evaluation after each."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.training, self.validation = (
            DataLoader(TensorDataset(torch.randn(NUM_BATCHES * 2, 4)), batch_size=2)
            for _ in range(2)
        )
        recorder.attach(self.model, self.optimizer)

    def train(self, evaluate: Callable[["Program"], None], num_epochs: int = 3) -> Recorded:
        for _ in range(num_epochs):
            for (inputs,) in self.training:
                self.model.train()  # as late as transformers does it
                self.model(inputs).sum().backward()
                self.optimizer.step()
            evaluate(self)
        run_dir = self.recorder.run_dir
        self.recorder.close()
        assert self.recorder.guard.counts == {}
        assert run_dir is not None
        return read_recorded(run_dir)


def evaluate_without_gradients(program: Program) -> None:
    with torch.no_grad():
        for (inputs,) in program.validation:
            program.model(inputs)


def evaluate_in_evaluation_mode(program: Program) -> None:
    program.model.eval()
    for (inputs,) in program.validation:
        with torch.inference_mode():
            program.model(inputs)


def evaluate_ahead(program: Program) -> None:
    """Each batch is fetched while the one before it has not been used yet."""
    program.model.eval()
    batches = iter(program.validation)
    (inputs,) = next(batches)
    for (following,) in batches:
        with torch.no_grad():
            program.model(inputs)
        inputs = following


def evaluate_by_the_recorder(program: Program) -> None:
    with torch.no_grad():
        for (inputs,) in program.recorder.data(program.validation):
            program.model(inputs)


@pytest.mark.parametrize(
    "evaluate",
    [
        evaluate_without_gradients,
        evaluate_in_evaluation_mode,
        evaluate_ahead,
        evaluate_by_the_recorder,
    ],
)
def test_what_is_fetched_for_an_evaluation_is_part_of_it(recorder, evaluate):
    recorded = Program(recorder).train(evaluate)
    assert [step.counts["data"] for step in recorded.steps] == [1] * 3 * NUM_BATCHES
    assert all(step.counts["eval"] == 0 for step in recorded.steps)
    outside = Counter(phase.name for phase in recorded.outside)
    assert outside["data"] == 3  # the fetches that end an epoch
    num_forwards = NUM_BATCHES - (evaluate is evaluate_ahead)
    assert outside["eval"] == 3 * (num_forwards + NUM_BATCHES + 1)


@pytest.mark.parametrize("make", [list, iter, tuple, lambda batches: (one for one in batches)])
def test_anything_can_be_fetched_from(recorder, make):
    program = Program(recorder)
    for inputs in recorder.data(make([torch.randn(2, 4) for _ in range(NUM_BATCHES)])):
        program.model(inputs).sum().backward()
        program.optimizer.step()
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    assert run_dir is not None
    assert [step.counts["data"] for step in read_recorded(run_dir).steps] == [1] * NUM_BATCHES


def test_a_loader_that_feeds_training_is_known_by_its_backwards(recorder):
    """A model that is tuned in evaluation mode, from a loader that is asked without gradients."""
    program = Program(recorder)
    program.model.eval()
    batches = iter(program.training)
    for _ in range(NUM_BATCHES):
        with torch.no_grad():
            (inputs,) = next(batches)
        program.model(inputs).sum().backward()
        program.optimizer.step()
    run_dir = recorder.run_dir
    recorder.close()
    assert run_dir is not None
    steps = read_recorded(run_dir).steps
    assert [step.counts["data"] for step in steps] == [0, 1, 1]
