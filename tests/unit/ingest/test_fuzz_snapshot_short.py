"""A short run of the fuzz target, so that it cannot rot; the long one is in benchmarks/results."""

import importlib.util
from pathlib import Path

import pytest

from meshscope.ingest.snapshot import snapshot_native

FUZZ = Path(__file__).parents[2] / "fuzz" / "fuzz_snapshot.py"


@pytest.mark.skipif(snapshot_native.load_library() is None, reason="no compiler here")
def test_damaged_snapshots_give_the_same_in_both_readers():
    spec = importlib.util.spec_from_file_location("fuzz_snapshot", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    found = fuzz.run(seed=7, inputs=600, library=None)
    assert found["failures"] == []
    assert found["ended"]["rows"] > 100
    assert found["ended"]["refused"] > 5
