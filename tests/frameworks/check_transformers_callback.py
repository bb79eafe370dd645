"""MeshscopeCallback in the real Trainer of transformers, and in one of TRL."""

import copy
import pickle

import pytest
import torch
from callback_runs import read_run
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import meshscope
from meshscope.integrations.transformers import MeshscopeCallback


def make_model():
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=64,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def make_data(num_samples):
    tokens = torch.randint(0, 64, (num_samples, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_arguments(path, **more):
    return TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        learning_rate=3e-4, hub_token="hf_abcdefghijklmnop12", **more,
    )  # fmt: skip


@pytest.mark.parametrize("num_callbacks", [1, 2])
def test_names_are_added_to_one_recording_however_often_it_is_attached(tmp_path, num_callbacks):
    callbacks = [
        MeshscopeCallback(tmp_path / "run", config={"note": index})
        for index in range(num_callbacks)
    ]
    trainer = Trainer(
        model=make_model(), args=make_arguments(tmp_path, eval_strategy="epoch"),
        train_dataset=make_data(16), eval_dataset=make_data(8), callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    found = read_run(callbacks[0].recorder)
    assert found.steps == list(range(8))
    assert found.scalars["epoch"] == [(0, 0.0), (4, 1.0)]
    logged = found.scalars["loss (logged by transformers)"]
    assert [step for step, _ in logged] == [1, 3, 5, 7]
    assert [value for _, value in logged] == pytest.approx(history)
    assert [value for _, value in found.scalars["eval_loss (logged by transformers)"]] == (
        pytest.approx(evaluated)
    )
    settings = found.settings
    assert settings["config"] == {"note": num_callbacks - 1}
    assert settings["TrainingArguments"]["learning_rate"] == 3e-4
    assert settings["TrainingArguments"]["hub_token"] == "(hidden)"
    assert settings["GPT2Config"]["n_embd"] == 16


def test_the_callback_survives_being_copied_and_pickled(tmp_path):
    callback = MeshscopeCallback(tmp_path / "run")
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.recorder is meshscope.recorder()
    meshscope.recorder().close()


def test_configurations_of_trl_are_stored_whole(tmp_path):
    from trl import SFTConfig

    callback = MeshscopeCallback(tmp_path / "run")
    args = SFTConfig(
        output_dir=str(tmp_path), max_length=64, packing=False, report_to=[], use_cpu=True
    )
    callback.on_train_begin(args, None, None, model=None)
    assert callback.recorder.session.settings.groups["SFTConfig"].values["max_length"] == 64
    callback.recorder.close()
