from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

import torch.distributed as dist  # noqa: E402
from tests.unit.engine.fake_group import FakeGroup  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshscope.engine import ModelConfig, build_stage, find_parameter_shards  # noqa: E402
from meshscope.engine.model.dtensor_parallel import (  # noqa: E402
    find_model_rows,
    gather_full_tensors,
    load_full_tensors,
    parallelize_stage,
)
from meshscope.engine.model.limits import find_dtensor_problems  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=17,
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=12,
    sequence_length=6,
    bias=True,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The second of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_problems_are_all_named_and_only_fsdp_averages_dtensors_over_dp() -> None:
    assert find_dtensor_problems(dp=2, data_parallel="fsdp") == []
    assert find_dtensor_problems(dp=1, data_parallel="ddp") == []
    first, second, third = find_dtensor_problems(
        dp=2, data_parallel="reducer", is_user_model=True, has_checkpoints=True
    )
    assert first.startswith("data_parallel is 'reducer' with dp 2, which does not average DTensors")
    assert second.startswith("DTensor tensor parallel knows the engine's own model only")
    assert third.startswith("checkpoints are on, but")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_holds_the_part_of_each_parameter_that_the_fast_path_holds(
    mesh: DeviceMesh, sequence_parallel: bool
) -> None:
    stage = build_stage(CONFIG, seed=1)
    parallelize_stage(stage, mesh, sequence_parallel=sequence_parallel)
    plain = build_stage(CONFIG, seed=1, tp_group=FakeGroup(2, 1))
    parts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in stage.named_parameters():
        model_name = name.split(".matrices")[0]
        if ".matrices" in name:
            model_name += "." + name.rsplit(".", 1)[1]
        parts.setdefault(model_name, []).append(parameter.to_local())
    expected = dict(plain.named_parameters())
    assert parts.keys() == expected.keys()
    for name, found in parts.items():
        assert torch.equal(torch.cat(found), expected[name]), name


def test_shards_say_what_is_cut(mesh: DeviceMesh) -> None:
    stage = parallelize_stage(build_stage(CONFIG, seed=1), mesh)
    shards = find_parameter_shards(stage)
    for name, parameter in stage.named_parameters():
        assert shards[name].full_shape == tuple(parameter.shape), name
        assert shards[name].shape == tuple(parameter.to_local().shape), name
        assert (shards[name].num_shards == 2) == parameter.placements[0].is_shard(), name


def test_places_are_the_rows_of_the_models_parameters(mesh: DeviceMesh) -> None:
    whole = build_stage(CONFIG, seed=1)
    values = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    stage = parallelize_stage(whole, mesh)
    shards = find_parameter_shards(stage)
    model_rows = find_model_rows(stage)
    assert {place.name for place in model_rows.values()} == values.keys()
    for name, parameter in stage.named_parameters():
        place = model_rows[name]
        assert place.full_shape == tuple(values[place.name].shape), name
        rows = values[place.name].narrow(0, place.first_row, parameter.shape[0])
        assert torch.equal(shards[name].take(rows), parameter.to_local()), name


def test_hidden_states_are_those_of_the_fast_path(mesh: DeviceMesh) -> None:
    stage = build_stage(CONFIG, 0, 2)
    parallelize_stage(stage, mesh, sequence_parallel=True)
    assert stage.hidden_shape(5) == (5, 3, 8)
    hidden = stage(torch.zeros(5, 6, dtype=torch.long))
    assert hidden.shape == (5, 3, 8)
    assert type(hidden) is torch.Tensor


def test_a_stage_that_does_not_fit_is_refused_with_every_problem(mesh: DeviceMesh) -> None:
    odd = ModelConfig(
        vocab_size=16,
        num_layers=1,
        hidden_size=9,
        num_heads=3,
        num_kv_heads=3,
        ffn_hidden_size=7,
        sequence_length=5,
        position="learned",
    )
    with pytest.raises(UsageError) as caught:
        parallelize_stage(build_stage(odd), mesh, sequence_parallel=True)
    for name in ("num_heads", "ffn_hidden_size", "sequence_length"):
        assert name in str(caught.value)
    with pytest.raises(UsageError, match="tp_mesh has 2 dimensions, expected 1"):
        parallelize_stage(build_stage(CONFIG), init_device_mesh("cpu", (1, 2)))


def test_full_tensors_of_a_stage_that_is_not_spread_are_its_parameters() -> None:
    stage, other = build_stage(CONFIG, seed=1), build_stage(CONFIG, seed=2)
    load_full_tensors(stage, gather_full_tensors(other))
    for name, parameter in other.named_parameters():
        assert torch.equal(stage.get_parameter(name), parameter), name
    assert gather_full_tensors(stage, lambda parameter: parameter.grad) == {}
