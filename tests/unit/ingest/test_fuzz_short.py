"""A short run of the fuzz target, so that it cannot rot; the long one is in benchmarks/results."""

import importlib.util
from pathlib import Path

FUZZ = Path(__file__).parents[2] / "fuzz" / "fuzz_trace.py"


def test_damaged_traces_end_in_an_error_or_a_partial_result():
    spec = importlib.util.spec_from_file_location("fuzz_trace", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    found = fuzz.run(seed=7, inputs=1_500)
    assert found["failures"] == []
    assert sum(found["ended"].values()) == 1_500
