"""The examples of docs/frameworks.md, with the real packages."""

import re
from pathlib import Path

import pytest
import torch

import meshscope
from meshscope.store.read.run import open_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
EXAMPLES = dict(
    re.findall(
        r"<!-- runnable with (\w+) -->\n```python\n(.*?)```",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
)


def surround_transformers():
    from check_transformers_callback import make_arguments, make_data, make_model
    from transformers import Trainer

    given = {"model": make_model(), "args": make_arguments("out"), "dataset": make_data(16)}
    return {"Trainer": Trainer, **given}


def surround_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"Trainer": lightning.Trainer, "module": Module(), "loader": make_loader()}


def surround_accelerate():
    from accelerate import Accelerator

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer, "loader": make_loader()}
    return {"Accelerator": Accelerator, **given}


def make_loader():
    return torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)


SURROUND = {
    "transformers": surround_transformers,
    "lightning": surround_lightning,
    "accelerate": surround_accelerate,
}


def test_every_framework_has_an_example():
    assert EXAMPLES.keys() == SURROUND.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_records_a_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[name], str(PAGE), "exec"), SURROUND[name]())
    recorder = meshscope.recorder()
    run_dir = recorder.run_dir
    recorder.close()
    assert run_dir.parent.resolve() == tmp_path / "runs"
    assert recorder.guard.counts == {}
    assert len(open_run(run_dir).last_attempt.ranks[0].read("steps")["step"]) >= 4
