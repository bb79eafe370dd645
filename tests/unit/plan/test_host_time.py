"""Processes that share a host's cores: what they send is work of the same cores."""

from dataclasses import replace

import pytest

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.plan.candidate import Candidate
from meshscope.plan.predict import make_host_job
from meshscope.plan.timing.pricing import price_candidates

MODEL = ModelConfig(
    vocab_size=512, num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=8, ffn_hidden_size=128,
    sequence_length=64,
)  # fmt: skip


def price(candidate, *, num_cores=2, **constants):
    job = make_host_job(TrainConfig(model=MODEL), num_cores=num_cores, memory_bytes=0)
    cluster = replace(job.cluster, num_devices=candidate.world_size, num_processors=num_cores)
    job = replace(job, cluster=cluster, constants=replace(job.constants, **constants))
    return price_candidates(job, [candidate])[0]


LATENCY = {"network_ratio": 1e9, "collective_latency_s": 1e-3, "p2p_latency_s": 0.0}


def test_an_all_reduce_waits_for_every_message_of_its_ring():
    """Four a layer, three around it and its table's, each of 2(n−1) messages, on shared cores."""
    few, many = (price(Candidate(tp=tp), num_cores=tp / 4, **LATENCY).tp_s for tp in (4, 8))
    number = 4 * 4 + 4
    assert few == pytest.approx(4 * number * 6e-3, rel=1e-3)
    assert many == pytest.approx(4 * number * 14e-3, rel=1e-3)


def test_nothing_hides_on_cores_that_also_send():
    """Gradients take as long beside a backward as after it."""
    shown = price(Candidate(dp=8), collective_latency_s=1e-2, network_ratio=1e9)
    assert shown.dp_s == pytest.approx(4 * 14e-2, rel=1e-3)
    hidden = price(
        Candidate(dp=8), collective_latency_s=1e-2, network_ratio=1e9, overlap_cost_ratio=0.0
    )
    assert hidden.dp_s < shown.dp_s


def test_a_reduce_scatter_costs_what_an_all_reduce_does():
    """With sequence parallel: forward 2 gathers and 2 of them, backward 2 more gathers."""
    plain, cut = (
        price(Candidate(tp=4, sequence_parallel=one), num_cores=1, **LATENCY).tp_s
        for one in (False, True)
    )
    passes = 3e-3 * 4
    assert plain == pytest.approx(passes * (4 * 8 + 8), rel=1e-3)
    assert cut == pytest.approx(passes * (4 * 14 + 8), rel=1e-3)


def test_zero_3_gathers_the_tables_too():
    """For each of five groups of weights: two gathers and a reduce-scatter of two passes."""
    found = price(Candidate(dp=8, zero_stage=3), **LATENCY)
    assert found.dp_s == pytest.approx(4 * 7e-3 * (4 * 4 + 3), rel=1e-3)


def test_zero_1_sends_layer_by_layer():
    """Five groups of a reduce-scatter of two passes and a gather, after the last backward."""
    found = price(Candidate(dp=8, zero_stage=1), cut_step_s=0.0, **LATENCY)
    assert found.dp_s == pytest.approx(4 * 7e-3 * 5 * 3, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "name", "times"), [(1, "cut_step_s", 1), (1, "cut_pass_s", 2), (3, "cut_whole_s", 2)]
)
def test_fsdp2_works_for_each_group(stage, name, times):
    """Four layers and what is outside of them; two microbatches; four ranks a core."""
    layout = Candidate(dp=8, zero_stage=stage, num_microbatches=2)
    without, more = (price(layout, **{name: one}).step_s for one in (0.0, 1e-3))
    assert more - without == pytest.approx(4 * 5 * times * 1e-3, rel=1e-6)


def test_copying_hides_behind_waking():
    """A transfer takes the longer of its bytes and its messages, not both."""
    both, waking, copying = (
        price(Candidate(tp=4, dp=2), collective_latency_s=wake, network_ratio=ratio).tp_s
        for wake, ratio in ((1e-3, 4e-3), (1e-3, 1e9), (1e-12, 4e-3))
    )
    assert max(waking, copying) < both < 0.9 * (waking + copying)


def test_messages_of_a_pipeline_are_work():
    """Each is sent by a core that could have computed: four messages on one core."""
    quick, slow = (
        price(
            Candidate(pp=2, num_microbatches=2), num_cores=1, network_ratio=1e9, p2p_latency_s=one
        ).step_s
        for one in (0.0, 1e-2)
    )
    assert slow - quick == pytest.approx(4e-2, rel=1e-5)
