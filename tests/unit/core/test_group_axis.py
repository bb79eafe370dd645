"""Descriptions of groups as frameworks write them."""

import pytest

from meshscope.core.group_axis import OTHER, AxisSource, name_axis
from meshscope.core.layout import Layout


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP", "dp"),
        ("DATA_PARALLEL_GROUP_GLOO", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp+cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "dp+cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp+cp"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp+cp"),
        ("HYBRID_DP_CP_GROUP_4", "dp+cp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", "cp"),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L2", "expert_dp"),
        ("MODEL_PARALLEL_GROUP", "tp+pp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dp+tp+cp"),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp+cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert_tp+ep"),
        ("EMBEDDING_GROUP", "embedding"),
        ("mesh_data_parallel", "dp"),
        ("mesh_dp_shard_mod_ep", "dp_shard_mod_ep"),
        ("mesh_efsdp", "efsdp"),
    ],
)
def test_a_description_names_the_axis_without_any_ranks(description, axis) -> None:
    found = name_axis((), description, layout=None, world_size=8)
    assert found == (axis, AxisSource.DESCRIPTION)


@pytest.mark.parametrize(
    "description", ["TENSOR_MODEL_PARALLEL_GROUP_2", "undefined", "TEST_GROUP"]
)
def test_what_is_no_known_description_names_nothing(description) -> None:
    assert name_axis((0, 3), description, layout=None, world_size=8) == (OTHER, AxisSource.NONE)


def test_a_dim_by_another_name_is_the_axis_that_the_layout_has():
    layout = Layout(dp=2, tp=2)
    named = {"layout": layout, "world_size": 4}
    assert name_axis((0, 1), "mesh_model", **named) == ("tp", AxisSource.DESCRIPTION)
    assert name_axis((0, 2), "mesh_fsdp", **named) == ("dp", AxisSource.DESCRIPTION)
    assert name_axis((0, 2), "mesh_model", **named) == ("model", AxisSource.DESCRIPTION)
    assert name_axis((0, 1), "mesh_model", layout=None, world_size=4)[0] == "model"
