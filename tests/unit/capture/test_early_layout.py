"""A short run has its groups for less than a second: its first steps are looked at."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshscope.capture import sampling
from meshscope.capture.model.layout_search import FoundLayout, LayoutSearch
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout
from meshscope.store.read.run import open_run


@pytest.mark.parametrize("num_hidden", [0, 5, 14])
def test_a_layout_that_shows_within_sixteen_steps_is_found_there(
    tmp_path: Path, monkeypatch, num_hidden
):
    made = SimpleNamespace(num_steps=0)

    def visit(search, dist, models, log):
        found = FoundLayout(layout=Layout(dp=1), source="the test")
        return found if dist is not None and made.num_steps > num_hidden else None

    monkeypatch.setattr(LayoutSearch, "visit", visit)
    monkeypatch.setattr(sampling, "_SAMPLE_EVERY_NS", 3600 * 10**9)
    monkeypatch.setattr(
        sampling, "initialized_distributed", lambda: made if made.num_steps < 20 else None
    )
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    for number in range(20):
        with recorder.step(number):
            made.num_steps = number + 1
    recorder.close()
    assert recorder.guard.counts == {}
    assert open_run(tmp_path / "run").last_attempt.layout == Layout(dp=1)
