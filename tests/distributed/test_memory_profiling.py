"""`--profiling` also profiles memory: the engine over two stages, and a program that asks nothing.

The allocator is the C library's, for the whole process: gloo's threads allocate at times of their
own. A run beyond its limits is therefore made again, up to `MAX_ATTEMPTS` times in all.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from ended_process import run_process
from meshscope.analyze.memory.memory_attribution import summarize_memory
from meshscope.analyze.prediction import check_prediction
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.report.render.sunburst import CHARTS
from meshscope.store.read.memory_points import read_memory
from meshscope.store.read.run import open_run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MAX_RESIDUAL_RATIO = 0.03
MAX_ATTEMPTS = 3
CONFIG = """
num_steps = 4
device = "cpu"
[model]
preset = "llama-tiny"
sequence_length = 256
[parallel]
pp = 2
schedule = "1f1b"
[batch]
microbatch_size = 8
num_microbatches = 2
"""
PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(512, 256)).square().mean().backward()
    optimizer.step()
"""


def run_meshscope(*arguments):
    command = [sys.executable, "-m", "meshscope", *map(str, arguments)]
    done = run_process(command, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def is_within_limits(overview):
    return all(
        abs(point.residual_ratio) <= MAX_RESIDUAL_RATIO
        for rank in overview.ranks
        for point in rank.points
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    for attempt in range(MAX_ATTEMPTS):
        folder = tmp_path_factory.mktemp(f"trained{attempt}")
        (folder / "train.toml").write_text(CONFIG)
        said = run_meshscope("train", folder / "train.toml", "--profiling", "-o", folder / "run")
        overview = summarize_memory(read_memory(folder / "run"))
        if is_within_limits(overview):
            break
    return folder / "run", overview, said


def test_every_rank_has_one_warm_step_and_small_residuals(trained):
    _, overview, _ = trained
    assert [rank.rank for rank in overview.ranks] == [0, 1]
    assert [stage.stage for stage in overview.stages] == [0, 1]
    for rank in overview.ranks:
        names = [point.name for point in rank.points]
        assert names[0] == "construction"
        assert names[-2:] == ["at_peak", "after_step"]
        assert names.count("after_forward") == names.count("after_backward") == 2
        assert {point.step for point in rank.points[1:]} == {2}
    assert is_within_limits(overview)


def test_the_estimate_stands_beside_it_and_holds(trained):
    """Parameters and Adam's moments are exact; what comes and goes is as the peak finds it."""
    _, overview, _ = trained
    for rank in overview.ranks:
        lines = {line.category: line for line in rank.estimate}
        for name in ("parameters", "optimizer_state"):
            assert lines[name].found_bytes == pytest.approx(lines[name].estimated_bytes, rel=0.01)
        activations = lines["activations"]
        assert "temporaries" in activations.covers
        assert activations.found_bytes == pytest.approx(activations.estimated_bytes, rel=0.2)
        together = sum(line.found_bytes for line in rank.estimate)
        assert together == pytest.approx(
            sum(line.estimated_bytes for line in rank.estimate), rel=0.1
        )


def test_what_was_predicted_before_is_held_against_it(trained):
    """Time is not: nothing is known of a CPU before a run was recorded on it."""
    run_dir, _, _ = trained
    check = check_prediction(Study(open_run(run_dir).last_attempt), read_memory(run_dir))
    assert "--predict-from" in check.step.reason
    assert [one.pp_rank for one in check.memory] == [0, 1]
    for one in check.memory:
        assert abs(one.residual_bytes) <= 0.1 * one.predicted_bytes


def test_pages_are_beside_the_logs_and_need_no_network(trained):
    run_dir, overview, said = trained
    index = run_dir / "memory" / "index.html"
    assert str(index) in said
    links = re.findall(r'href="([^"]+)"', index.read_text())
    assert len(links) == 2 * len(CHARTS)
    for link in links:
        page = index.parent / link
        text = page.read_text()
        assert (page.parent / "memory.log").is_file()
        assert not re.search(r'(src|href)="(https?:)?//', text)
        assert (page.parent / re.findall(r'href="([^"]+index.html)"', text)[0]).resolve() == index
    folders = {Path(link).parent.name for link in links}
    assert folders == {"rank0_dp0_tp0_pp0", "rank1_dp0_tp0_pp1"}
    peak = overview.ranks[0].peak
    summary = index.parent / "rank0_dp0_tp0_pp0" / "summary_sunburst.html"
    data = json.loads(re.search(r'id="data">(.*?)</script>', summary.read_text())[1])
    assert add_up(data["tree"]) == max(peak.allocated_bytes, peak.attributed_bytes)


def add_up(node):
    return node.get("bytes", 0) + sum(map(add_up, node.get("children", ())))


def test_the_profiled_step_is_left_out_of_statistics(trained):
    attempt = open_run(trained[0]).last_attempt
    assert 2 not in build_timeline(attempt, warmup_steps=0).steps.tolist()


def test_a_program_below_run_is_profiled_without_its_help(tmp_path):
    for attempt in range(MAX_ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        options = ["--profiling", "--no-progress", "-o", folder / "run"]
        run_meshscope("run", *options, "--", folder / "program.py")
        overview = summarize_memory(read_memory(folder / "run"))
        if is_within_limits(overview):
            break
    (rank,) = overview.ranks
    assert is_within_limits(overview)
    assert {point.step for point in rank.points[1:]} == {2}
    parameter_bytes = 4 * (2 * 256 * 512 + 512 + 256)
    assert rank.peak.categories_bytes["parameters"] == parameter_bytes
    assert rank.peak.categories_bytes["optimizer_state"] == 2 * parameter_bytes + 4 * 4
    assert (folder / "run" / "memory" / "index.html").is_file()
    journal = (folder / "run" / "rank00000" / "attempt000" / "journal.jsonl").read_text()
    assert '"kind":"health"' not in journal
