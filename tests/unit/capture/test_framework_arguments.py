"""Frameworks' argument objects, of packages of the same shape; tests/frameworks has real ones."""

import contextlib
import importlib
import sys
import types

import pytest

from meshscope.capture.frameworks.arguments import ArgumentObjects
from meshscope.capture.frameworks.module_watch import ModuleWatch
from meshscope.capture.guard import Guard
from meshscope.capture.model.settings import Settings

PACKAGES = {
    "transformers/training_args.py": """
from dataclasses import dataclass

@dataclass
class TrainingArguments:
    learning_rate: float = 5e-5
    hub_token: str = ""

    def __post_init__(self):
        self.learning_rate *= 2

    def to_dict(self):
        raise RuntimeError("methods are not called")

@dataclass
class SFTConfig(TrainingArguments):
    packing: bool = False
""",
    "transformers/trainer.py": """
from types import SimpleNamespace

class Trainer:
    def __init__(self, args):
        self.args = args
        self.model = None
        self.state = SimpleNamespace(global_step=7)

    def train(self):
        return "trained"

    def log(self, logs, start_time=None):
        return logs
""",
    "deepspeed/runtime/config.py": """
class DeepSpeedConfig:
    def __init__(self, config):
        if config is None:
            raise ValueError("no config")
        self._param_dict = config
""",
    "megatron/training/global_vars.py": """
def set_global_variables(args, build_tokenizer=True):
    return args
""",
    "lightning/pytorch/trainer/trainer.py": """
class Trainer:
    max_epochs = 3
    strategy = object()

    def _run(self, model, ckpt_path=None):
        return model
""",
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    roots = {path.partition("/")[0] for path in PACKAGES}
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        monkeypatch.delitem(sys.modules, name)
    for path, text in PACKAGES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in [f for f in file.parents if tmp_path in f.parents]:
            (folder / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in roots:
            del sys.modules[name]


class Heard:
    def __init__(self):
        self.guard = Guard()
        self.settings = Settings(lambda kind, **line: None)
        self.logged = []
        heard = types.SimpleNamespace(log=lambda *event: self.logged.append(event))
        self.objects = ArgumentObjects(self.settings, self.guard, heard)

    def __enter__(self):
        self.objects.watch()
        return self

    def __exit__(self, *error):
        self.objects.remove()

    @property
    def groups(self):
        return {name: group.values for name, group in self.settings.groups.items()}


def test_arguments_are_stored_as_made_and_as_training_begins(packages):
    with Heard() as heard:
        made = packages("transformers.training_args")
        args = made.SFTConfig(hub_token="hf_abc")
        values = {"learning_rate": 1e-4, "hub_token": "(hidden)", "packing": False}
        assert heard.groups == {"SFTConfig": values}
        args.packing = True
        assert packages("transformers.trainer").Trainer(args).train() == "trained"
        assert heard.groups == {"SFTConfig": {**values, "packing": True}}
        known_by = heard.settings.groups["SFTConfig"].known_by
        assert known_by == "SFTConfig of transformers, as training began"
    assert heard.guard.counts == {}


def test_what_a_framework_logs_is_heard(packages):
    with Heard() as heard:
        trainer = packages("transformers.trainer").Trainer(None)
        assert trainer.log({"loss": 1.5}) == {"loss": 1.5}
        assert trainer.log(logs={"eval_loss": 2.5}) == {"eval_loss": 2.5}
    assert heard.logged == [
        ("transformers", {"loss": 1.5}, 7),
        ("transformers", {"eval_loss": 2.5}, 7),
    ]


def test_a_module_that_was_imported_before_is_heard_too(packages):
    made = packages("megatron.training.global_vars")
    with Heard() as heard:
        made.set_global_variables({"lr": 1})
    assert heard.groups == {"megatron": {"lr": 1}}
    with Heard() as heard:
        pass
    made.set_global_variables({"lr": 2})
    assert heard.groups == {}


def test_lightning_and_deepspeed_are_read_and_their_errors_are_their_own(packages):
    with Heard() as heard:
        config = packages("deepspeed.runtime.config").DeepSpeedConfig
        config({"zero_optimization": {"stage": 2}})
        with pytest.raises(ValueError, match="no config"):
            config(None)

        class Module:
            hparams = {"width": 8}  # noqa: RUF012 - as AttributeDict is

        packages("lightning.pytorch.trainer.trainer").Trainer()._run(Module())
    assert heard.groups == {
        "DeepSpeedConfig": {"zero_optimization.stage": 2},
        "Trainer": {"max_epochs": 3, "strategy": "object"},
        "Module hparams": {"width": 8},
    }
    assert heard.guard.counts == {}


def test_a_module_that_is_half_imported_is_taken_when_it_is_whole(packages, tmp_path):
    folder = tmp_path / "deepspeed"
    text = (folder / "runtime" / "config.py").read_text(encoding="utf-8")
    text = "import starts_the_watch\n" + text
    (folder / "runtime" / "config.py").write_text(text, encoding="utf-8")
    starts = "import heard_here\nheard_here.watch()\n"
    (tmp_path / "starts_the_watch.py").write_text(starts, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        heard = Heard()
        sys.modules["heard_here"] = types.SimpleNamespace(watch=heard.__enter__)
        stack.push(heard)
        stack.callback(sys.modules.pop, "heard_here")
        stack.callback(sys.modules.pop, "starts_the_watch", None)
        config = packages("deepspeed.runtime.config").DeepSpeedConfig
        heard.objects.visit()
        config({"fp16": True})
    assert heard.groups == {"DeepSpeedConfig": {"fp16": True}}


def test_imports_are_as_they_were_afterwards(packages):
    finders = list(sys.meta_path)
    seen = []
    watch = ModuleWatch({"deepspeed.runtime.config": seen.append, "json": seen.append})
    watch.install()
    watch.install()
    module = packages("deepspeed.runtime.config")
    assert seen == [sys.modules["json"], module]
    assert "exec_module" not in vars(module.__spec__.loader)
    assert importlib.reload(module) is module
    assert seen[2:] == [module]
    watch.remove()
    assert sys.meta_path == finders
