"""Hyper-parameters: from any kind of configuration to flat, bounded names without secrets."""

import argparse
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

import meshscope
from meshscope.analyze.training.settings import read_settings
from meshscope.capture import default
from meshscope.capture.model.settings import MAX_KEYS, flatten_settings
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.unavailable import Unavailable
from meshscope.errors import CaptureError
from meshscope.store.read.run import open_run
from meshscope.store.write.redaction import HIDDEN


class Schedule(Enum):
    COSINE = "cosine"


@dataclass
class Optimizer:
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass
class Given:
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = Schedule.COSINE
    out: Path = Path("runs/x")
    api_key: str = "hunter2"


class HasToDict:
    def to_dict(self):
        return {"lr": 1e-3, "layers": [{"width": 4}, {"width": 8}]}


class Loud:
    def __repr__(self):
        raise RuntimeError("must not be called")


OF_GIVEN = {
    "optimizer.lr": 3e-4,
    "optimizer.betas": "[0.9, 0.95]",
    "schedule": "cosine",
    "out": "runs/x",
    "api_key": HIDDEN,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"a": {"b": {"c": 1}}, "d": None}, {"a.b.c": 1, "d": None}),
        (Given(), OF_GIVEN),
        (argparse.Namespace(lr=1e-3, on=True), {"lr": 1e-3, "on": True}),
        (types.SimpleNamespace(kind=int, loud=Loud()), {"kind": "int", "loud": "<Loud>"}),
        (HasToDict(), {"lr": 1e-3, "layers.0.width": 4, "layers.1.width": 8}),
        ({"lr": float("inf"), "tags": {"b", "a"}}, {"lr": "inf", "tags": '["a", "b"]'}),
        ({}, {}),
    ],
)
def test_every_kind_of_configuration_becomes_names_and_values(config, expected):
    assert flatten_settings(config) == (expected, 0)


@pytest.mark.parametrize("config", [5, "lr=3", [1], Given, None])
def test_what_has_no_names_is_refused(config):
    with pytest.raises(CaptureError, match="expected a mapping, a dataclass"):
        flatten_settings(config)


def test_secrets_are_hidden_by_their_whole_name_and_by_their_shape():
    found, _ = flatten_settings(
        {
            "wandb": {"key": "abcdef"},
            "hub": {"auth": {"value": "abc"}},
            "db": "postgres://me:pw@host/db",
            "note": "hf_AbCdEf0123456789xyz",
            "tokenizer": "gpt2",
            "num_tokens": 1024,
        }
    )
    assert found == {
        "wandb.key": HIDDEN,
        "hub.auth.value": HIDDEN,
        "db": f"postgres://{HIDDEN}@host/db",
        "note": HIDDEN,
        "tokenizer": "gpt2",
        "num_tokens": 1024,
    }


def test_names_values_and_depth_are_bounded_and_long_values_still_differ():
    found, num_left_out = flatten_settings({f"k{i}": i for i in range(MAX_KEYS + 7)})
    assert (len(found), num_left_out) == (MAX_KEYS, 7)
    one, other = ({"name": " ".join(["word"] * 90 + [end])} for end in "ab")
    texts = [flatten_settings(config)[0]["name"] for config in (one, other)]
    assert texts[0] != texts[1]
    assert max(map(len, texts)) <= 200
    nested: dict[str, object] = {}
    nested["self"] = nested
    assert len(flatten_settings(nested)[0]) == 1


def record(path: Path, *configs: object) -> object:
    with Recorder(path, config=configs[0]) as recorder:
        for config in configs[1:]:
            recorder.set_config(config)
        for _ in range(2):
            with recorder.step(), recorder.phase("work"):
                pass
        assert recorder.guard.counts == {}
    return read_settings(open_run(path).last_attempt)


def test_a_recorder_stores_what_it_is_given_and_the_last_value_counts(tmp_path):
    (group,) = record(tmp_path, {"lr": 1, "seed": 3}, argparse.Namespace(lr=2))
    assert (group.name, group.known_by) == ("config", "given by the program")
    assert group.values == {"lr": 2, "seed": 3}


def test_the_recorders_own_settings_are_no_hyper_parameters(tmp_path):
    assert isinstance(record(tmp_path, RecorderConfig(memory=False)), Unavailable)


def test_start_takes_them_also_when_it_is_running(tmp_path, monkeypatch):
    monkeypatch.setattr(default, "_default", None)
    recorder = meshscope.start(tmp_path, config={"lr": 1}, memory=False)
    assert meshscope.start(config={"depth": 2}) is recorder
    with recorder.step():
        pass
    recorder.close()
    (group,) = read_settings(open_run(tmp_path).last_attempt)
    assert group.values == {"lr": 1, "depth": 2}


def test_a_configuration_that_raises_costs_no_more_than_itself(tmp_path):
    class Raises:
        def to_dict(self):
            raise RuntimeError("no")

    with Recorder(tmp_path, config=Raises()) as recorder, recorder.step():
        pass
    assert recorder.guard.counts == {"config": 1}
