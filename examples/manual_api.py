"""The explicit API on a single-process loop: start, step, phase, data, log, span.

    python examples/manual_api.py --run-dir runs/manual

Use it where a loop is unusual enough that steps cannot be inferred, or to give parts of it names
of their own. `rec.attach(model, optimizer)` would find forward, backward and optimizer by itself.
"""

import argparse
import time

import torch
from torch import nn

import meshscope


def main() -> None:
    """Trains a small network for a few steps and says where the run is."""
    parser = argparse.ArgumentParser(description="Records a training loop by hand.")
    parser.add_argument("--run-dir", help="default: below runs/manual_api")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [torch.randn(16, 32) for _ in range(options.steps)]

    recorder = meshscope.start(options.run_dir)

    @recorder.phase("augment")
    def augment(inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.01 * torch.randn_like(inputs)

    # Batches are fetched inside the step, so that waiting for them is part of it.
    fetch = recorder.data(batches)
    for step in range(options.steps):
        with recorder.step(step):
            inputs = augment(next(fetch))
            with recorder.phase("forward"):
                with recorder.span("first layer"):  # a detail: its time stays the forward's
                    hidden = model[0](inputs)
                outputs = model[1:](hidden)
                loss = (outputs.squeeze(1) - inputs.sum(dim=1)).square().mean()
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=loss, samples=len(inputs))
        if (step + 1) % 10 == 0:
            with recorder.phase("checkpoint"):  # between steps: a gap with a name
                time.sleep(0.01)

    print(f"recorded in {recorder.run_dir}")
    recorder.close()


if __name__ == "__main__":
    main()
