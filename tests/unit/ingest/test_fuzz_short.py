"""Short runs of the fuzz targets, so that they cannot rot; the long ones are in
benchmarks/results."""

import pytest

from fuzz import fuzz_snapshot, fuzz_trace
from meshscope.ingest.snapshot import snapshot_native


def test_damaged_traces_end_in_an_error_or_a_partial_result():
    found = fuzz_trace.run(seed=7, inputs=1_500)
    assert found["failures"] == []
    assert sum(found["ended"].values()) == 1_500


@pytest.mark.skipif(snapshot_native.load_library() is None, reason="no compiler here")
def test_damaged_snapshots_give_the_same_in_both_readers():
    found = fuzz_snapshot.run(seed=7, inputs=600, library=None)
    assert found["failures"] == []
    assert found["ended"]["rows"] > 100
    assert found["ended"]["refused"] > 5
