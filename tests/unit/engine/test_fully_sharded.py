import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from meshscope.engine import ModelConfig, build_stage, find_parameter_shards  # noqa: E402
from meshscope.engine.data_parallel.fully_sharded import (  # noqa: E402
    FullyShardedDataParallel,
)
from meshscope.engine.data_parallel.limits import find_fsdp_problems  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=16,
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=12,
    sequence_length=4,
    tie_embeddings=True,
)
IDS = torch.arange(8).view(2, 4)


def test_problems_are_all_named_and_a_plain_configuration_has_none() -> None:
    assert find_fsdp_problems(zero_stage=2) == []
    assert find_fsdp_problems(zero_stage=3, device_type="cuda", cpu_offload=True) == []
    problems = find_fsdp_problems(
        zero_stage=0,
        cpu_offload=True,
        compression="int8",
        strategy="ring",
        uses_torch_schedule=True,
    )
    assert [problem.split(",")[0] for problem in problems] == [
        "zero_stage is 0",
        "cpu_offload is on",
        "compression is 'int8'",
        "the communication strategy is 'ring'",
        "torch's own schedules set FSDP2's options themselves",
    ]


def test_stages_without_parameters_or_on_several_devices_are_refused() -> None:
    for stage, found in (
        (nn.ReLU(), "no device"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "cpu, meta"),
    ):
        with pytest.raises(UsageError, match=f"parameters are on {found}, expected one device"):
            FullyShardedDataParallel({0: stage}, None)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_tied_table_stays_one_parameter_and_shards_are_found_in_every_state(
    group: dist.ProcessGroup, zero_stage: int
) -> None:
    stage, whole = build_stage(CONFIG), build_stage(CONFIG)
    expected = find_parameter_shards(whole)
    parallel = FullyShardedDataParallel({0: stage}, group, zero_stage=zero_stage)
    assert parallel.module(0) is stage
    loss = stage(IDS, IDS)
    assert find_parameter_shards(stage) == expected
    loss.backward()
    parallel.finish()
    assert stage.head.weight is stage.token_embedding.weight
    assert find_parameter_shards(stage) == expected
    whole(IDS, IDS).backward()
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), whole.get_parameter(name).grad, msg=name
        )


def test_without_announcing_or_gradients_the_optimizer_still_sees_its_parameters(
    group: dist.ProcessGroup,
) -> None:
    stage = build_stage(CONFIG)
    parallel = FullyShardedDataParallel({0: stage}, group, zero_stage=1)
    before = list(stage.parameters())
    with torch.no_grad():
        stage(IDS, IDS)
    assert all(a is b for a, b in zip(stage.parameters(), before, strict=True))
    stage(IDS, IDS).backward()
    assert not any(a is b for a, b in zip(stage.parameters(), before, strict=True))
    parallel.finish()
    assert all(a is b for a, b in zip(stage.parameters(), before, strict=True))
    assert all(parameter.grad is not None for parameter in before)
    assert parallel.statistics.num_steps == 1
    assert parallel.statistics.num_groups == 3


def test_a_stage_without_layers_is_one_group(group: dist.ProcessGroup) -> None:
    parallel = FullyShardedDataParallel({4: nn.Linear(2, 2)}, group)
    assert parallel.statistics.num_groups == 1
    assert parallel.statistics.shard_bytes == parallel.statistics.whole_bytes == 24
