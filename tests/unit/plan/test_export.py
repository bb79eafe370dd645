"""Layouts in the words of other programs."""

from meshscope.core.unavailable import Unavailable
from meshscope.plan.candidate import Candidate
from meshscope.plan.export import list_megatron_flags, list_torchtitan_keys
from meshscope.plan.model.known_models import find_model

MODEL = find_model("llama-3-8b")


def list_flags(**options):
    return list_megatron_flags(MODEL, Candidate(dp=8, **options))


def list_keys(**options):
    return list_torchtitan_keys(MODEL, Candidate(dp=8, zero_stage=3, **options))


def test_hsdp_is_optimizer_instances_of_megatron_and_replicas_of_torchtitan():
    assert "--num-distributed-optimizer-instances 4" in list_flags(zero_stage=1, shard_size=2)
    assert not any("instances" in flag for flag in list_flags(zero_stage=1))
    keys = list_keys(shard_size=2)
    assert "--parallelism.data_parallel_replicate_degree 4" in keys
    assert "--parallelism.data_parallel_shard_degree 2" in keys


def test_uneven_stages_are_a_layout_of_megatron():
    flags = list_flags(pp=4, stage_sizes=(7, 9, 9, 7))
    assert "--pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'" in flags
    even = list_flags(pp=4, schedule="interleaved_1f1b", chunks=2)
    assert "--num-layers-per-virtual-pipeline-stage 4" in even
    assert not any("layout" in flag for flag in even)


def test_of_torchtitan_they_are_fewer_layers_at_both_ends():
    keys = list_keys(pp=4, stage_sizes=(7, 9, 9, 7))
    assert "--parallelism.pipeline_parallel_first_stage_less_layers 2" in keys
    assert "--parallelism.pipeline_parallel_last_stage_less_layers 2" in keys
    # It would take one off each by itself.
    assert "--parallelism.pipeline_parallel_first_stage_less_layers 0" in list_keys(pp=4)
    other = list_keys(pp=4, stage_sizes=(9, 7, 9, 7))
    assert isinstance(other, Unavailable)
    assert "module_fqns_per_model_part" in other.reason
