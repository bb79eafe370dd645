"""MeshscopeTracker in the real Accelerator."""

import pytest
import torch
from accelerate import Accelerator
from callback_runs import read_run

from meshscope.integrations.accelerate import MeshscopeTracker


@pytest.mark.parametrize("num_trackers", [1, 2])
def test_names_are_added_to_one_recording(tmp_path, num_trackers):
    trackers = [MeshscopeTracker(tmp_path / "run") for _ in range(num_trackers)]
    accelerator = Accelerator(cpu=True, log_with=trackers, gradient_accumulation_steps=2)
    accelerator.init_trackers("project", config={"lr": 0.1, "hf_token": "abc"})
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"train_loss": losses[-1], "text": "no number"}, step=len(losses))
    accelerator.end_training()
    assert accelerator.get_tracker("meshscope", unwrap=True) is trackers[0].tracker
    found = read_run(trackers[0].tracker)
    assert found.steps == [0, 1]
    logged = found.scalars["train_loss (logged by Accelerate)"]
    assert [value for _, value in logged] == pytest.approx(losses)
    assert [step for step, _ in logged] == [0, 0, 1, 1]
    assert found.settings["init_trackers"] == {"lr": 0.1, "hf_token": "(hidden)"}
    assert found.settings["Accelerator"]["gradient_accumulation_steps"] == 2
