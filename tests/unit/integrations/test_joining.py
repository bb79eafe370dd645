"""Members of one recording, without any framework."""

import pickle
import types

import pytest
import torch

import meshscope
from meshscope.analyze.rank.signals import read_scalars
from meshscope.analyze.training.settings import read_settings
from meshscope.capture import default
from meshscope.integrations.joining import Member, is_recording_wanted
from meshscope.integrations.lightning_events import LightningEvents
from meshscope.store.read.run import open_run


@pytest.fixture(autouse=True)
def own_recorder(monkeypatch):
    monkeypatch.setattr(default, "_default", None)
    yield
    recorder = default.find_recorder()
    if recorder is not None:
        recorder.close()


def train(num_steps, after=lambda step: None):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def read(run_dir):
    recorder = meshscope.recorder()
    recorder.close()
    assert recorder.guard.counts == {}
    attempt = open_run(run_dir).last_attempt
    rank = attempt.ranks[0]
    series = read_scalars(rank, frozenset(rank.names.values()))
    scalars = {name: list(zip(s.step, s.value, strict=True)) for name, s in series.items()}
    spans = [rank.name_of(int(name_id)) for name_id in rank.read("spans")["name_id"]]
    return list(rank.read("steps")["step"]), scalars, read_settings(attempt), spans


def test_members_share_one_recording_and_say_things_once(tmp_path):
    one, other = (Member("Frame", tmp_path / "run", {"lr": 1}) for _ in range(2))
    assert one.recorder is other.recorder is meshscope.recorder()

    def say(step):
        for member in (one, other):
            member.say_epoch(step // 2)
            member.log({"loss": 0.5 + step, "text": "x", "flag": True}, step)
            member.log({"loss": torch.tensor(9.0)}, step)

    train(4, say)
    steps, scalars, (group,), _ = read(tmp_path / "run")
    assert steps == [0, 1, 2, 3]
    assert scalars["epoch"] == [(0, 0), (2, 1)]
    assert scalars["loss (logged by Frame)"] == [(step, 0.5 + step) for step in range(4)]
    assert "flag (logged by Frame)" not in scalars
    assert group.values == {"lr": 1}


def test_nothing_is_opened_before_training(tmp_path):
    member = Member("Frame", tmp_path / "run", None)
    member.log({"eval_loss": 1.0}, 0)
    member.say_epoch(0)
    member.begin_validation()
    member.end_validation()
    assert not (tmp_path / "run").exists()


def test_a_program_that_attached_itself_is_not_attached_again(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = meshscope.start(tmp_path / "run").attach(model, optimizer)
    Member("Frame", tmp_path / "other", None)
    for _ in range(3):
        model(torch.randn(2, 2)).sum().backward()
        optimizer.step()
    assert recorder.current_step == 2
    assert not (tmp_path / "other").exists()


def test_a_member_is_pickled_without_its_recorder_and_joins_again(tmp_path):
    text = pickle.dumps(Member("Frame", tmp_path / "run", None))
    meshscope.recorder().close()
    assert pickle.loads(text).recorder is meshscope.recorder()


def test_errors_stay_the_recorders(tmp_path):
    member = Member("Frame", tmp_path / "run", None)
    member.tell(Member.log, None, 0)
    train(1)
    member.tell(Member.log, None, 0)
    assert member.recorder.guard.counts == {"Frame": 1}


def test_recording_is_wanted_where_a_folder_is_given(monkeypatch):
    assert not is_recording_wanted()
    monkeypatch.setenv("MESHSCOPE_RUN_DIR", "runs/x")
    assert is_recording_wanted()


def test_lightning_events_name_epochs_metrics_validation_and_settings(tmp_path):
    trainer = types.SimpleNamespace(
        current_epoch=0, log_every_n_steps=2, global_step=0, sanity_checking=False, max_epochs=1,
        callback_metrics={},
    )  # fmt: skip
    module = types.SimpleNamespace(hparams={"width": 8})
    callback = LightningEvents(tmp_path / "run")
    callback.on_fit_start(trainer, module)

    def end_batch(step):
        trainer.global_step, trainer.callback_metrics = step + 1, {"loss": torch.tensor(1.0 + step)}
        callback.on_train_batch_end(trainer, module, None, None, step)
        if step == 3:
            callback.on_validation_start(trainer, module)
            trainer.callback_metrics["val_loss"] = torch.tensor(7.0)
            callback.on_validation_end(trainer, module)
            callback.on_exception(trainer, module, RuntimeError())

    train(4, end_batch)
    _, scalars, groups, spans = read(tmp_path / "run")
    assert scalars["epoch"] == [(0, 0)]
    assert scalars["loss (logged by Lightning)"] == [(1, 2), (3, 4)]
    assert scalars["val_loss (logged by Lightning)"] == [(3, 7)]
    assert spans.count("validation") == 1
    assert [group.name for group in groups] == ["Trainer", "SimpleNamespace hparams"]
