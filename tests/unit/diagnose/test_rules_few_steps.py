"""The slow rank of a few steps, in traces of a real job with one rank slowed down."""

from pathlib import Path

import pytest

from meshscope.analyze.study import Study
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.runner import diagnose
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import make_run
from slow_traces import slow_down
from trace_builders import MS, write_traces

DDP = Path(__file__).parents[4] / "shared" / "data" / "nccl" / "ddp"


def find_findings(folder):
    paths = sorted(folder.glob("*.json.gz"))
    recordings = [record_trace(read_trace(path), max_spans=10_000) for path in paths]
    study = Study(make_run(recordings, folder).run.last_attempt)
    return {one.code: one for one in diagnose(Context(study)).findings}


@pytest.mark.parametrize(
    ("cause", "delay_ns", "text"),
    [
        ("kernels", 20 * MS, "its kernels take longer in forward"),
        ("host", 40 * MS, "its host launches late before backward"),
    ],
)
def test_a_slow_rank_of_a_real_job_is_named_with_its_cause_and_price(
    tmp_path, cause, delay_ns, text
):
    if not DDP.exists():
        pytest.skip("the shared traces are not on this machine")
    slow_down(DDP, tmp_path, slow_rank=2, cause=cause, delay_ns=delay_ns)
    findings = find_findings(tmp_path)
    found = findings.pop("ST005")
    assert found.ranks == (2,)
    assert found.severity is Severity.MEDIUM
    assert text in found.title
    assert found.saved_ns == pytest.approx(delay_ns, rel=0.15)
    above = {code for code, one in findings.items() if one.severity > Severity.LOW}
    assert above == {"CO001"}  # so has the healthy job


def test_a_real_healthy_job_has_no_slow_rank():
    if not DDP.exists():
        pytest.skip("the shared traces are not on this machine")
    findings = find_findings(DDP)
    assert {code for code, one in findings.items() if one.severity > Severity.LOW} == {"CO001"}


def test_three_steps_of_four_ranks_are_enough_for_a_clear_lead(tmp_path):
    write_traces(tmp_path, num_ranks=4, num_steps=3, extra_ns={1: 5 * MS})
    found = find_findings(tmp_path)["ST005"]
    assert found.ranks == (1,)
    assert found.saved_ns == pytest.approx(5 * MS, rel=0.01)


def test_a_lead_no_larger_than_the_others_spread_is_chance(tmp_path):
    late = {0: 0, 1: 3 * MS, 2: 6 * MS, 3: 9 * MS}
    write_traces(tmp_path, num_ranks=4, num_steps=2, extra_ns=late)
    assert "ST005" not in find_findings(tmp_path)
