"""The sentence said when a device is full; the observer itself needs one (tests/gpu)."""

import torch

from meshscope.capture.memory.out_of_memory import describe_out_of_memory
from meshscope.capture.recorder import Recorder, RecorderConfig

GIB = 1 << 30
FACTS = {
    "device": "cuda:0",
    "requested_bytes": 2 * GIB,
    "total_bytes": 80 * GIB,
    "free_bytes": GIB,
    "allocated_bytes": 60 * GIB,
    "reserved_bytes": 75 * GIB,
}


def test_the_sentence_names_what_filled_the_device():
    categories = {
        "parameters": 6 * GIB,
        "activations": 30 * GIB,
        "optimizer_state": 12 * GIB,
        "gradients": 5 * GIB,
    }
    assert describe_out_of_memory({**FACTS, "categories_bytes": categories}) == (
        "cuda:0 is full: 60.0 GiB of 80.0 GiB are allocated, activations 30.0 GiB (50 %), "
        "optimizer state 12.0 GiB (20 %), parameters 6.00 GiB (10 %), other 12.0 GiB; "
        "2.00 GiB were asked for, with 1.00 GiB free on the device and 15.0 GiB reserved in pieces "
        "that are not in use"
    )


def test_without_a_model_it_says_so():
    text = describe_out_of_memory({**FACTS, "categories_bytes": {}})
    assert "not attributed, since no model was given to the recorder: 60.0 GiB" in text


def test_where_there_is_no_device_nothing_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Recorder(tmp_path, config=RecorderConfig(provenance=False)) as recorder:
        assert recorder.watch_out_of_memory() is False
        assert recorder.guard.counts == {}
