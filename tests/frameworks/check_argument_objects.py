"""Real argument objects under `meshscope run`, without a line of ours; with a callback as well."""

import subprocess
import sys
from pathlib import Path

from callback_runs import read_folder

PROGRAM = """
import sys
import accelerate, lightning, torch
from transformers import TrainingArguments
from trl import GRPOConfig

folder = sys.argv[1]
if len(sys.argv) > 2:
    from meshscope.integrations.accelerate import MeshscopeTracker
    from meshscope.integrations.transformers import MeshscopeCallback
    MeshscopeCallback(sys.argv[2]), MeshscopeTracker(sys.argv[2])
TrainingArguments(output_dir=folder, learning_rate=3e-4, report_to=[], use_cpu=True)
GRPOConfig(output_dir=folder, beta=0.25, report_to=[], use_cpu=True)
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
accelerator.init_trackers("project", config={"width": 8})

class Module(lightning.LightningModule):
    def __init__(self, depth=2):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        accelerator.log({"seen": index}, step=index)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
).fit(Module(), data)
"""


def record(folder: Path, *more: str):
    run_dir, given = folder / "launched", [str(folder), *more]
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, *given]
    launch = [sys.executable, "-m", "meshscope.capture", "-o", str(run_dir), *program]
    subprocess.run(launch, check=True, timeout=150)
    return read_folder(run_dir)


def test_what_frameworks_were_told_is_recorded_without_code(tmp_path):
    found = record(tmp_path)
    settings = found.settings
    assert settings["TrainingArguments"]["learning_rate"] == 3e-4
    assert settings["GRPOConfig"]["beta"] == 0.25
    assert settings["Accelerator"]["gradient_accumulation_steps"] == 3
    assert settings["init_trackers"] == {"width": 8}
    assert settings["Module hparams"] == {"depth": 2}
    assert settings["Trainer"]["max_epochs"] == 1
    assert found.scalars["seen (logged by Accelerate)"][-1] == (1, 1.0)


def test_callbacks_join_the_launchers_recording(tmp_path):
    found = record(tmp_path, str(tmp_path / "other"))
    assert found.steps == [0, 1]
    assert not (tmp_path / "other").exists()
    assert found.settings["GRPOConfig"]["beta"] == 0.25
