"""The budget's section and its values in the JSON document."""

from pathlib import Path

import pytest

from builders import MS
from meshscope.analyze.budget.budget import Utilisation, measure_budget
from meshscope.analyze.budget.model_flops import RankFlops
from meshscope.core.unavailable import Unavailable
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.budget import BudgetFacts, describe_budget
from meshscope.report.screen import Screen
from meshscope.report.sections.run import budget as section
from timeline_builders import TimedJob, make_dp_run, timeline_of

UNKNOWN = Unavailable("FLOPs are not known")


def _show(budget: BudgetFacts | Unavailable, width: int = 100) -> list[str]:
    shown = section.describe_budget(budget)
    assert shown is not None
    return render_terminal([shown], Screen(width=width)).splitlines()


def _make(path: Path, flops: float | None = None) -> BudgetFacts:
    work = {
        0: {"data": 2.0, "forward": 10.0, "backward": 20.0},
        1: {"data": 8.0, "forward": 10.0, "backward": 20.0},
    }
    timeline = timeline_of(make_dp_run(path, work, num_steps=4))
    said = {
        rank: RankFlops(
            model_flops=flops,
            hardware_flops=Unavailable("recomputation was not said"),
            source="said",
            dtype="float32",
            peak_flops_per_s=1e12,
            peak_source="declared",
        )
        for rank in range(2)
        if flops is not None
    }
    return describe_budget(measure_budget(timeline, said or UNKNOWN), 7)


def test_lines_are_shown_largest_first(tmp_path: Path) -> None:
    assert _show(_make(tmp_path)) == [
        "",
        "Budget  mean of a rank's step, gap before it included; 4 steps, 7 not looked at",
        "                          time  share",
        "  compute              30.0 ms   70 %",
        "  exposed transfer dp  5.00 ms   12 %",
        "  input stall          5.00 ms   12 %",
        "  exposed wait dp      3.00 ms  7.0 %",
        "  residual                0 ns    0 %",
        "  wall clock           43.0 ms  100 %",
        "  compute is not split: FLOPs are not known",
        "  The wall clock is that of all steps; lines are those of the steps looked at.",
        "  MFU, HFU  n/a: FLOPs are not known",
    ]


def test_utilisation_names_formula_and_denominator(tmp_path: Path) -> None:
    text = " ".join(" ".join(_show(_make(tmp_path, 8.6e9))).split())
    assert "useful compute 8.60 ms 20 %" in text
    assert "kernel inefficiency 21.4 ms 50 %" in text
    assert (
        "MFU 20 % (model FLOPs of a step / (peak FLOP/s x period), summed over ranks; "
        "1.72e+10 FLOPs: said; 2e+12 FLOP/s: declared)" in text
    )
    assert "HFU n/a: recomputation was not said" in text


def test_impossible_utilisation_is_said(tmp_path: Path) -> None:
    facts = _make(tmp_path, 8.6e10)
    assert isinstance(facts.mfu, Utilisation)
    assert facts.mfu.is_impossible
    text = " ".join(" ".join(_show(facts)).split())
    assert "MFU 200 %; impossible: FLOPs or peak are wrong" in text
    assert "kernel inefficiency -56.0 ms -130 %" in text


def test_parts_of_ranks_sum_to_their_wall_clock(tmp_path: Path) -> None:
    facts = _make(tmp_path)
    assert [rank.wall_ns for rank in facts.ranks] == [4 * 43 * MS] * 2
    assert all(rank.wall_ns == sum(rank.time_ns) + rank.residual_ns for rank in facts.ranks)
    total = sum(line.mean_ns for line in facts.lines) + facts.residual_mean_ns
    assert total == pytest.approx(facts.mean_wall_ns)
    assert facts.num_left_out == 7


def test_no_budget() -> None:
    assert _show(Unavailable("no step finished")) == ["", "Budget", "  n/a: no step finished"]
    assert section.describe_budget(None) is None


def test_hostile_axis_names_are_cleaned(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group(range(2), description="mesh_\x1b[31m\ud800x")
    work: dict[int, dict[str, float]] = {0: {"forward": 10}, 1: {"forward": 20}}
    job.train(num_steps=4, work_ms=work, transfer_ms=3, group=group)
    facts = describe_budget(measure_budget(timeline_of(job.close()), UNKNOWN), 0)
    text = "\n".join(_show(facts, width=60))
    assert "\x1b" not in text
    text.encode()
