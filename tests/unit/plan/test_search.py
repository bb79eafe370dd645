"""The search finds what replaying everything finds, and says why the rest is not chosen."""

from dataclasses import replace

import numpy as np
import pytest
from jobs import make_job

from meshscope.errors import UsageError
from meshscope.plan.candidate import Candidate
from meshscope.plan.memory.memory import estimate_ranks
from meshscope.plan.search.bounds import bound_memory, bound_steps
from meshscope.plan.search.request import make_request
from meshscope.plan.search.search import search
from meshscope.plan.timing.layer_time import make_columns
from meshscope.plan.timing.pricing import price_candidates

SCHEDULES = (
    "1f1b", "interleaved_1f1b", "gpipe", "round_robin", "looped_bfs", "zb_h1", "zb_h2", "zb_v",
)  # fmt: skip


def name_layouts(found):
    return [(one.candidate.describe(), round(one.price.step_s, 9)) for one in found.best]


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "megatron-2021", "meshscope"])
def test_the_best_ten_are_those_of_replaying_everything(stack):
    device = "A100-SXM4-80GB" if stack == "megatron-2021" else "H100-80GB"
    job = make_job("llama-3-8b", device, 16, stack)
    request = make_request(
        job, 32, tp=(1, 2, 4), pp=(1, 2, 4), microbatch_sizes=(1, 2), chunks=(1, 2),
        schedules=SCHEDULES,
    )  # fmt: skip
    by_bounds = search(job, request)
    exhaustive = search(job, request, is_exhaustive=True)
    assert exhaustive.num_replayed >= 100
    assert name_layouts(by_bounds) == name_layouts(exhaustive)
    assert len(by_bounds.best) == 10
    assert name_layouts(search(job, request)) == name_layouts(by_bounds)


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3"])
def test_bounds_are_below_the_replay_and_the_memory(model):
    job = make_job(model, "H100-80GB", 64)
    candidates = [
        Candidate(
            dp=8, tp=2, pp=4, ep=8 if model == "deepseek-v3" else 1, microbatch_size=b,
            num_microbatches=m, schedule=name,
            chunks=2 if name in ("interleaved_1f1b", "round_robin", "looped_bfs", "zb_v") else 1,
            zero_stage=zero, recompute=how, sequence_parallel=True,
        )
        for name in SCHEDULES
        for b, m in ((1, 4), (2, 16), (1, 64))
        for zero, how in ((0, "none"), (1, "selective"), (3, "full"), (0, "every-2"))
    ]  # fmt: skip
    columns = make_columns(candidates, job.recipe)
    schedules = np.array([one.schedule for one in candidates])
    lower = bound_steps(job, columns, schedules)
    least = bound_memory(
        job.model, job.recipe, columns, schedules, np.array([one.recompute for one in candidates])
    ).total_bytes
    prices = price_candidates(job, candidates)
    for index, candidate in enumerate(candidates):
        assert lower[index] <= prices[index].step_s * (1 + 1e-9), candidate
        ranks = estimate_ranks(job.model, candidate, job.recipe)
        assert least[index] <= max(one.total_bytes for one in ranks), candidate


def test_every_combination_is_accounted_for():
    job = make_job("llama-3-8b", num_devices=16)
    found = search(job, make_request(job, 64))
    rejected = sum(one.count for one in found.rejections)
    large = sum(one.count for one in found.rejections if "the schedule holds" in one.reason)
    # Those too large were replayed first, and are counted in both.
    assert rejected + found.num_replayed - large == found.num_combinations


def test_where_nothing_fits_the_leanest_is_named():
    job = make_job("llama-3.1-405b", num_devices=8)
    found = search(job, make_request(job, 64))
    assert not found.best
    assert found.least_memory_bytes > job.cluster.memory_bytes
    assert found.least_memory_layout


def test_chosen_layouts_fit_and_use_all_devices():
    job = make_job("llama-3-70b", num_devices=64)
    found = search(job, make_request(job, 128))
    assert found.best
    for choice in found.best:
        assert choice.peak_bytes <= job.cluster.memory_bytes
        assert choice.candidate.world_size == 64
        assert choice.candidate.global_batch_size == 128
    sizes = [one.peak_bytes for one in found.pareto]
    times = [one.price.step_s for one in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


def test_nonsense_is_refused_with_everything_at_once():
    job = make_job()
    request = make_request(
        job, 64, tp=(0,), schedules=("later",), recomputes=("some",), zero_stages=(7,)
    )
    with pytest.raises(UsageError) as raised:
        search(job, replace(request, global_batch_size=-1, memory_ratio=3.0))
    for word in ("global batch", "memory ratio", "tp has 0", "later", "some", "zero has 7"):
        assert word in str(raised.value)
