"""MeshscopeCallback in the real Trainers of Lightning, in code and by the entry point."""

import os
import pickle
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from callback_runs import read_folder, read_run
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch, {package} as L
from check_lightning_callback import fit
fit(L, sys.argv[1], [])
"""


def fit(package, folder, callbacks):
    """Two epochs of four steps with validation, and what was logged in them."""

    class Module(package.LightningModule):
        def __init__(self, width=8, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
            self.losses = []

        def training_step(self, batch, batch_index):
            loss = self.layers(batch[0]).square().mean()
            self.log("train_loss", loss)
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch, batch_index):
            self.log("val_loss", self.layers(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    module = Module()
    trainer = package.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, log_every_n_steps=2, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data, data)
    return module, trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("num_callbacks", [1, 2])
def test_names_are_added_to_one_recording(tmp_path, package, num_callbacks):
    made = import_module(f"meshscope.integrations.{package}").MeshscopeCallback
    callbacks = [made(tmp_path / "run", config={"fold": 3}) for _ in range(num_callbacks)]
    assert pickle.loads(pickle.dumps(callbacks[0])).recorder is callbacks[0].recorder
    module, _ = fit(import_module(package), str(tmp_path), list(callbacks))
    found = read_run(callbacks[0].recorder)
    assert found.steps == list(range(8))
    assert found.scalars["epoch"] == [(0, 0.0), (4, 1.0)]
    logged = found.scalars["train_loss (logged by Lightning)"]
    assert [step for step, _ in logged] == [1, 3, 5, 7]
    assert [value for _, value in logged] == pytest.approx([module.losses[i] for i in (1, 3, 5, 7)])
    assert len(found.scalars["val_loss (logged by Lightning)"]) >= 2
    assert found.spans.count("validation") == 2  # not that of the sanity check
    assert found.settings["config"] == {"fold": 3}
    assert found.settings["Module hparams"] == {"width": 8, "lr": 0.1}
    assert found.settings["Trainer"]["max_epochs"] == 2
    assert found.known_by["Module hparams"] == "save_hyperparameters of Module"


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_entry_point_needs_no_code_and_records_only_where_it_is_wanted(tmp_path, package):
    install_entry_points(tmp_path / "site")
    folders = [tmp_path / "site", ROOT / "src", Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(package=package), str(tmp_path)]
    for wanted in (False, True) if package == "lightning" else (True,):
        asked = {"MESHSCOPE_RUN_DIR": str(tmp_path / "run")} if wanted else {}
        subprocess.run(command, env={**environment, **asked}, check=True, timeout=120)
        assert (tmp_path / "run").exists() == wanted
    found = read_folder(tmp_path / "run")
    assert found.steps == list(range(8))
    assert found.scalars["epoch"] == [(0, 0.0), (4, 1.0)]


def install_entry_points(folder: Path) -> None:
    """As an installed meshscope has them, whether it is installed here or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "meshscope-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: meshscope\nVersion: 0.1.0\n", encoding="utf-8")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in points.items()) + "\n"
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
