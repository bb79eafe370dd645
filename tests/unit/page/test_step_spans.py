"""One step on the aligned clock, of pipelines with known times."""

import numpy as np
import pytest

from late_runs import STEADY, LateRun
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.page.step_spans import choose_steps, cut_step
from meshscope.store.read.run import open_run
from pipeline_builders import Recipe, make_pipeline_run, stage_cost


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    path = tmp_path_factory.mktemp("piped") / "run"
    cost = stage_cost({0: (2, 4), 1: (3, 5)})
    recipe = Recipe(schedule=build_schedule("1f1b", 2, 4), cost=cost, num_chains=2)
    return Study(open_run(make_pipeline_run(path, recipe)).last_attempt)


def test_pieces_fill_every_period_exactly(piped):
    spans = cut_step(piped, 3)
    pieces = spans.pieces
    for index in range(len(spans.ranks)):
        own = pieces.rank == index
        start, end = pieces.start_ns[own], (pieces.start_ns + pieces.duration_ns)[own]
        assert start[0] == spans.period_start_ns[index]
        assert end[-1] == spans.period_end_ns[index]
        assert (start[1:] == end[:-1]).all()
    assert spans.period_start_ns.min() == 0
    assert spans.merged_below_ns == 0


def test_actions_are_those_of_the_schedule(piped):
    spans = cut_step(piped, 3)
    actions = spans.actions
    kinds = np.array(spans.action_kinds)[actions.kind]
    for index, rank in enumerate(spans.ranks):
        own = actions.rank == index
        stage = rank % 2
        assert set(actions.stage[own].tolist()) == {stage}
        forward = own & (kinds == "F")
        assert actions.microbatch[forward].tolist() == [0, 1, 2, 3]
        assert set(actions.duration_ns[forward].tolist()) == {(2 + stage) * 1_000_000}
    inside = spans.pieces.action >= 0
    work = inside & (np.array([one.share for one in spans.lines])[spans.pieces.line] == "compute")
    begin = actions.start_ns[spans.pieces.action[work]]
    assert (spans.pieces.start_ns[work] >= begin).all()


def test_merging_leaves_no_time_out(piped):
    whole, merged = cut_step(piped, 3), cut_step(piped, 3, max_spans=12)
    assert len(merged.pieces.rank) < len(whole.pieces.rank)
    assert merged.merged_below_ns > 0
    for index in range(len(whole.ranks)):
        sums = [s.pieces.duration_ns[s.pieces.rank == index].sum() for s in (whole, merged)]
        assert sums[0] == sums[1]


def test_some_ranks_only(piped):
    spans = cut_step(piped, 3, ranks=(1, 2, 77))
    assert (spans.ranks, spans.num_ranks) == ((1, 2), 4)
    assert set(spans.pieces.rank.tolist()) == {0, 1}
    assert isinstance(cut_step(piped, 3, ranks=(9,)), Unavailable)
    assert isinstance(cut_step(piped, 10_000), Unavailable)


def test_operations_are_told_with_the_ranks_they_meet(tmp_path):
    LateRun(layout=Layout(dp=3), work=lambda rank, step: STEADY, num_steps=8).record(tmp_path)
    spans = cut_step(Study(open_run(tmp_path).last_attempt), 4)
    used = spans.pieces.operation[spans.pieces.operation >= 0]
    assert {spans.operations.kind[one] for one in used} == {"all_reduce"}
    assert {spans.operations.axis[one] for one in used} == {"dp"}
    assert len({int(spans.operations.match[one]) for one in used}) == 1
    assert len(set(used.tolist())) == 3
    assert spans.actions is None


def test_the_fastest_and_the_slowest_step_are_chosen(tmp_path):
    def work(rank, step):
        return {**STEADY, "forward": {4: 1, 6: 40}.get(step, 10) * 1_000_000}

    LateRun(layout=Layout(dp=2), work=work, num_steps=9).record(tmp_path)
    picked = choose_steps(Study(open_run(tmp_path).last_attempt))
    assert (picked["fastest"], picked["slowest"]) == (4, 6)
    assert picked["median"] not in (4, 6)
