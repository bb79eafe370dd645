import numpy as np
import pytest
from diagnosed import context_of, find

from builders import MS, make_run
from late_runs import LateRun, noisy
from meshscope.analyze.stragglers.load_imbalance import LoadImbalance
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose import relief
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rules import stragglers
from meshscope.diagnose.runner import diagnose

OWN = {
    code: RULES[code] for code in ("ST001", "ST002", "ST003", "ST004", "IM001", "PA001", "PA002")
}


def with_delay(seed, delay):
    """Noisy work with more of it where `delay(rank, step)` says: phase to nanoseconds."""
    plain = noisy(seed)

    def work(rank, step):
        extra = delay(rank, step)
        return {name: ns + extra.get(name, 0) for name, ns in plain(rank, step).items()}

    return work


def diagnose_run(path):
    return diagnose(context_of(path), rules=OWN).findings


def test_a_slow_rank_is_found_and_priced_as_removing_it_is(tmp_path):
    def delay(rank, step):
        return {"forward": 8 * MS} if rank == 2 else {}

    layout = Layout(dp=4)
    slow_ns = LateRun(layout=layout, work=with_delay(1, delay)).record(tmp_path / "slow")
    fast_ns = LateRun(layout=layout, work=noisy(1)).record(tmp_path / "fast")
    (finding,) = diagnose_run(tmp_path / "slow")
    assert (finding.code, finding.ranks) == ("ST001", (2,))
    assert finding.title == "rank 2 is slow in forward"
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)
    assert finding.severity is Severity.HIGH
    assert finding.confidence.p_value < 1e-6
    assert diagnose_run(tmp_path / "fast") == ()


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(ep=4), Layout(dp=2, cp=2)], ids=str)
def test_a_slow_rank_has_peers_along_cp_and_ep(tmp_path, layout):
    work = with_delay(1, lambda rank, step: {"forward": 8 * MS} if rank == 2 else {})
    LateRun(layout=layout, work=work).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks, finding.severity) == ("ST001", (2,), Severity.HIGH)
    assert finding.saved_ns == pytest.approx(8 * MS, rel=0.15)


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_the_phase_of_the_delay_is_named(tmp_path, phase):
    work = with_delay(2, lambda rank, step: {phase: 6 * MS} if rank == 0 else {})
    LateRun(layout=Layout(dp=4), work=work).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert finding.title == f"rank 0 is slow in {phase}"


def test_two_equally_slow_ranks_are_one_finding_priced_together(tmp_path):
    """Mending one alone would win nothing."""
    work = with_delay(3, lambda rank, step: {"backward": 10 * MS} if rank in (1, 6) else {})
    LateRun(layout=Layout(dp=8), work=work).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks) == ("ST001", (1, 6))
    assert finding.saved_ns == pytest.approx(10 * MS, rel=0.15)
    assert "nothing in common" in finding.summary


def test_a_slow_host_is_named(tmp_path):
    work = with_delay(4, lambda rank, step: {"forward": 6 * MS} if rank >= 4 else {})
    LateRun(layout=Layout(dp=8), work=work).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks) == ("ST002", (4, 5, 6, 7))
    assert finding.title == "all ranks of host node1 are slow in forward"
    assert finding.saved_ns == pytest.approx(6 * MS, rel=0.15)


def test_a_rank_that_became_slow_is_named_with_the_step(tmp_path):
    def delay(rank, step):
        return {"backward": 12 * MS} if rank == 3 and step >= 30 else {}

    LateRun(layout=Layout(dp=4), work=with_delay(5, delay), num_steps=60).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks, finding.first_step) == ("ST003", (3,), 30)
    assert finding.last_step is None
    assert finding.title == "rank 3 became slow at step 30 in backward"
    assert finding.saved_ns == pytest.approx(12 * MS * 30 / 60, rel=0.15)


def test_recovery_and_ranks_without_peers(tmp_path):
    """Two stages by layout: each is compared with its own other steps."""

    def delay(rank, step):
        return {"forward": 15 * MS} if rank == 1 and 20 <= step < 45 else {}

    LateRun(layout=Layout(pp=2), work=with_delay(6, delay), num_steps=70).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks) == ("ST003", (1,))
    assert (finding.first_step, finding.last_step) == (20, 44)


def test_a_rank_that_was_slow_at_first_is_worded_so(tmp_path):
    work = with_delay(7, lambda rank, step: {"forward": 15 * MS} if rank == 1 and step < 30 else {})
    LateRun(layout=Layout(dp=4), work=work, num_steps=60).record(tmp_path)
    (finding,) = find("ST003", tmp_path)
    assert finding.title == "rank 1 was slow until step 29 in forward"


@pytest.mark.parametrize(
    ("queued_ratio", "severity", "sure"),
    [(0.001, Severity.MEDIUM, "medium"), (0.3, Severity.LOW, "low"), (None, Severity.LOW, "low")],
)
def test_work_that_goes_around_is_uneven_and_nobodys_fault(tmp_path, queued_ratio, severity, sure):
    """Unless threads waited for cores, or nobody knows whether they did."""

    def tell(writer):
        if queued_ratio is not None:
            queue = {"elapsed_ns": 1000, "run_ns": 500, "queued_ns": int(1000 * queued_ratio)}
            writer.journal.write("update", core_queue=queue)

    work = with_delay(8, lambda rank, step: {"backward": 15 * MS} if rank == step * 7 % 4 else {})
    LateRun(layout=Layout(dp=4), work=work, also=tell).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks, finding.severity) == ("ST004", (), severity)
    assert finding.confidence.level.value == sure
    assert "take turns" in finding.summary


def test_little_excess_is_low_and_none_is_silent(tmp_path):
    work = with_delay(9, lambda rank, step: {"optimizer": MS // 2} if rank == 1 else {})
    LateRun(layout=Layout(dp=4), work=work).record(tmp_path)
    assert all(finding.severity is Severity.LOW for finding in diagnose_run(tmp_path))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=8), Layout(dp=2, tp=2, pp=2)])
def test_healthy_runs_are_silent(tmp_path, layout):
    LateRun(layout=layout, work=noisy(10, sigma=0.04)).record(tmp_path)
    context = context_of(tmp_path)
    assert diagnose(context, rules=OWN).findings == ()
    assert context.study.suspects.ranks == frozenset()


def test_runs_without_peers_steps_or_time_are_silent(tmp_path):
    make_run(tmp_path / "one", num_steps=30)
    make_run(tmp_path / "none", layout=Layout(dp=2), num_steps=0)
    make_run(tmp_path / "few", layout=Layout(dp=2), num_steps=3)
    for name in ("one", "none", "few"):
        context = context_of(tmp_path / name)
        assert diagnose(context, rules=OWN).findings == ()
        assert context.study.failures == []
    assert isinstance(context_of(tmp_path / "none").study.suspects, Unavailable)


def test_a_threshold_above_the_effect_silences_the_rule(tmp_path):
    work = with_delay(11, lambda rank, step: {"forward": 5 * MS} if rank == 1 else {})
    LateRun(layout=Layout(dp=4), work=work).record(tmp_path)
    assert len(find("ST001", tmp_path)) == 1
    assert find("ST001", tmp_path, slow_rank_min_effect_ratio=2.0) == []


def test_more_ranks_than_are_compared_by_segment_are_priced_too(tmp_path, monkeypatch):
    monkeypatch.setattr(relief, "MAX_SEGMENTED", 2)
    work = with_delay(12, lambda rank, step: {"forward": 6 * MS} if rank >= 4 else {})
    LateRun(layout=Layout(dp=8), work=work).record(tmp_path)
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks) == ("ST002", (4, 5, 6, 7))
    assert finding.saved_ns == pytest.approx(6 * MS, rel=0.15)


def test_a_rank_whose_excess_is_anything_between_little_and_tenfold_is_a_hint(tmp_path):
    """Two identical ranks beside other programs: one got less of the machine."""
    long = np.random.default_rng(7).random(200) < 0.5

    def delay(rank, step):
        return {"forward": (160 if long[step] else 2) * MS} if rank == 1 else {}

    LateRun(layout=Layout(dp=2), work=with_delay(3, delay)).record(tmp_path)
    found = {one.code: one for one in diagnose_run(tmp_path)}
    assert found["ST001"].severity is Severity.LOW
    assert "another program on the host would look the same" in found["ST001"].confidence.text


def test_uneven_work_of_which_one_rank_nearly_always_has_most_is_about_that_rank(
    tmp_path, monkeypatch
):
    """As of a drift that no other rule is sure of: its peers' work is the price."""

    def delay(rank, step):
        return {"forward": 40 * MS} if rank == 1 else {}

    found = LoadImbalance(
        variation_ratio=0.2, lost_ns=20e6, lost_ratio=0.2, leader=1, leader_ratio=1.0,
        leader_p=1e-9, num_steps=40,
    )  # fmt: skip
    monkeypatch.setattr(stragglers, "measure_load_imbalance", lambda work: found)
    layout = Layout(dp=3)
    slow_ns = LateRun(layout=layout, work=with_delay(3, delay)).record(tmp_path / "slow")
    fast_ns = LateRun(layout=layout, work=noisy(3)).record(tmp_path / "fast")
    (finding,) = diagnose(context_of(tmp_path / "slow"), rules={"ST004": RULES["ST004"]}).findings
    assert (finding.title, finding.ranks) == ("rank 1 has more work than its peers", (1,))
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)
