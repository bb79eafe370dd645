"""`trace` and `report` against an oracle that shares no code with them, on made and real traces."""

from pathlib import Path

import pytest
from trace_truth import compare

import trace_oracle
from trace_builders import write_traces

SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_made_job_is_as_the_oracle_says(tmp_path, has_steps):
    paths = write_traces(tmp_path, num_ranks=2, num_steps=4, has_steps=has_steps)
    row = compare(paths[1])
    assert row["differences"] == {}
    assert row["num_steps"] == 4
    assert row["num_compared"] > 10


def test_the_oracle_sees_what_is_wrong(tmp_path, monkeypatch):
    paths = write_traces(tmp_path, num_ranks=2, num_steps=4)
    answer = trace_oracle.answer(paths[0])
    answer["device"]["exposed"] += 1
    answer["phases"]["backward"] += 100
    monkeypatch.setattr(trace_oracle, "answer", lambda path: answer)
    assert set(compare(paths[0])["differences"]) == {"exposed", "report: backward"}


@pytest.mark.parametrize("name", ["nccl/ddp/rank0", "nccl/pp4/rank3", "traces/a100-ddp-rank0of2"])
def test_real_traces_are_as_the_oracle_says(name):
    path = SHARED / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("the shared traces are not on this machine")
    assert compare(path)["differences"] == {}
