"""A prediction is read as it was stored, and garbage as nothing."""

import json

from meshscope.core.prediction import LINES, PredictedTime, Prediction, read_prediction
from meshscope.core.unavailable import Unavailable

MADE = Prediction(
    time=PredictedTime(
        step_ns=100e6,
        interval_ratio=0.2,
        lines_ns=dict.fromkeys(LINES, 1e6),
        calibrated_on="two runs",
        fitted=("the pace", "the link"),
    ),
    memory_bytes={0: {"parameters": 4, "activations": 6}, 1: {"parameters": 5}},
)


def store(prediction):
    return json.loads(json.dumps(prediction.as_fields()))


def test_it_is_read_as_it_was_stored():
    assert read_prediction(store(MADE)) == MADE


def test_so_is_a_missing_time():
    made = Prediction(time=Unavailable("no device"), memory_bytes={})
    assert read_prediction(store(made)) == made


def test_garbage_is_as_if_it_were_not_there():
    found = read_prediction(
        {
            "step_ns": float("inf"), "interval_ratio": True, "lines_ns": [], "fitted": {"0": 1},
            "memory_bytes": {"x": {"a": 1}, "0": 7, "1": {"a": -1, "b": 2, "c": "3"}},
        }
    )  # fmt: skip
    assert found.time == Unavailable("no step was predicted")
    assert found.memory_bytes == {0: {}, 1: {"b": 2}}
