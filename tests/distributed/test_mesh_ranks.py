"""Layouts of real programs that say nothing of them, and what follows: axes, tokens."""

import pytest
from tests.distributed.mesh_ranks import CASES, NUM_STEPS, TOKENS_PER_STEP
from tests.distributed.run_program import run_program

from meshscope.analyze.job.group_axes import merge_groups
from meshscope.analyze.study import Study
from meshscope.store.read.run import open_run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SOURCES = {
    "ddp": "groups of DistributedDataParallel",
    "by_hand": "guessed: sums over all ranks, none inside forward",
    "fsdp": "groups of FSDP2's DeviceMesh",
    "fsdp_tp": "the parameters' DeviceMesh (dp 2, tp 2)",
    "tp": "groups of DTensors' DeviceMesh",
    "pipeline": "groups of pipeline stages",
    "pipeline_fsdp": "groups of FSDP2's DeviceMesh, pipeline stages",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("meshes")
    run_program("mesh_ranks", path, timeout_s=200, is_strict=False)
    return path


@pytest.mark.parametrize("case", CASES)
def test_layout_axes_and_tokens_are_found(folder, case):
    attempt = open_run(folder / case).attempts[-1]
    study, layout = Study(attempt), CASES[case][1]
    assert study.layout == layout
    updates = [update for recording in attempt for update in recording.updates]
    sources = [update["layout_source"] for update in updates if "layout_source" in update]
    assert sources == [SOURCES[case]] * layout.world_size
    for group in merge_groups(attempt)[0]:
        assert group.ranks == layout.group_ranks(group.axis, group.ranks[0])
    # Only replicas have tokens of their own, and the first stage has them all.
    assert (study.tokens.num_ranks, study.tokens.num_steps) == (layout.dp, NUM_STEPS)
    counted = attempt.ranks[0].read("steps")["input_tokens"].tolist()
    assert counted[1:] == [TOKENS_PER_STEP] * (NUM_STEPS - 1)
