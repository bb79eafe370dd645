from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

import torch.distributed as dist  # noqa: E402
from tests.unit.engine.fake_group import FakeGroup  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshscope.core.schedule import Action, ActionKind, Schedule  # noqa: E402
from meshscope.core.schedule_builders import build_schedule  # noqa: E402
from meshscope.engine.data_parallel.limits import find_ddp_problems  # noqa: E402
from meshscope.engine.data_parallel.torch_ddp import (  # noqa: E402
    ReducedDataParallel,
    TorchDdp,
)
from meshscope.engine.step_actions import StepActions  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402


@pytest.fixture
def two_ranks() -> Iterator[dist.ProcessGroup]:
    """The first of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_problems_are_all_named_and_a_plain_configuration_has_none() -> None:
    assert find_ddp_problems(schedule=build_schedule("interleaved_1f1b", 2, 4)) == []
    problems = find_ddp_problems(
        schedule=build_schedule("zb_h1", 2, 4),
        compression="int8",
        strategy="tree",
        uses_dtensor=True,
        uses_torch_schedule=True,
    )
    assert [problem.split(",")[0] for problem in problems] == [
        "schedule zb_h1 computes weight gradients apart from backward",
        "compression is 'int8'",
        "the communication strategy is 'tree'",
        "DDP loses DTensor parameters; use FSDP2",
        "torch's own schedules announce last backwards to DDP themselves; use one of the "
        "engine's schedules",
    ]


def list_announced(schedule: Schedule, rank: int) -> dict[Action, int]:
    """The stages whose last backward data parallelism is told of, by the action that it is."""
    told: list[int] = []
    parallel = SimpleNamespace(start_accumulating=told.clear, start_last_backward=told.append)
    actions = StepActions(schedule, dict.fromkeys(schedule.stages_of(rank)), parallel)
    actions.begin_step()
    found = {}
    for action in schedule.actions[rank]:
        with actions.run(action):
            found |= {action: told.pop()} if told else {}
    return found


def test_last_backwards_are_those_after_which_a_stage_runs_none() -> None:
    for name in ("gpipe", "1f1b", "interleaved_1f1b"):
        schedule = build_schedule(name, 2, 4)
        for rank in range(2):
            last = list_announced(schedule, rank)
            assert sorted(last.values()) == list(schedule.stages_of(rank))
            row = schedule.actions[rank]
            for action, stage in last.items():
                later = row[row.index(action) + 1 :]
                assert action.kind is ActionKind.BACKWARD
                assert not any(a.kind is ActionKind.BACKWARD and a.stage == stage for a in later)


def test_with_weight_gradients_apart_nothing_is_announced() -> None:
    assert list_announced(build_schedule("zb_h1", 2, 4), 0) == {}


def run_backward(stage: nn.Module) -> None:
    stage(torch.ones(1, 2)).sum().backward()


def test_the_reducer_sends_when_the_last_stage_is_announced(two_ranks: dist.ProcessGroup) -> None:
    stages = {0: nn.Linear(2, 2), 3: nn.Linear(2, 2)}
    parallel = ReducedDataParallel(stages, two_ranks, bucket_bytes=1)
    num_early = []
    parallel.start_accumulating()
    for index in (3, 0):
        parallel.start_last_backward(index)
        num_early.append(parallel.statistics.num_early_buckets)
        run_backward(parallel.module(index))
        num_early.append(parallel.statistics.num_early_buckets)
    # A bucket for each weight and bias; stage 3's, complete by then, go with the announcement of 0.
    assert num_early == [0, 0, 2, 4]
    parallel.finish()
    # The other rank's gradients are nothing here, so the average is half of ones.
    assert stages[3].bias.grad.tolist() == [0.5, 0.5]
    assert parallel.shard_group is None


def test_the_reducer_sends_all_in_finish_when_nothing_is_announced(
    two_ranks: dist.ProcessGroup,
) -> None:
    stage = nn.Linear(2, 2)
    parallel = ReducedDataParallel({0: stage}, two_ranks)
    for num_steps in (1, 2):
        stage.zero_grad()
        parallel.start_accumulating()
        run_backward(stage)
        run_backward(stage)
        parallel.finish()
        assert stage.bias.grad.tolist() == [1.0, 1.0]
        assert parallel.statistics.num_steps == num_steps
    assert parallel.statistics.num_early_buckets == 0


def test_an_announcement_without_a_stage_is_for_all(two_ranks: dist.ProcessGroup) -> None:
    stages = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    parallel = ReducedDataParallel(stages, two_ranks, bucket_bytes=1)
    parallel.start_accumulating()
    run_backward(stages[1])
    parallel.start_last_backward()
    run_backward(stages[1])
    run_backward(stages[0])
    assert parallel.statistics.num_early_buckets == 4
    parallel.finish()


def test_the_reducer_refuses_dtensors_over_several_ranks() -> None:
    stage = nn.Linear(2, 2)
    stage.weight.to_local = lambda: stage.weight  # what the reducer knows DTensors by
    with pytest.raises(UsageError, match="does not average DTensors over dp; use FSDP2"):
        ReducedDataParallel({0: stage}, FakeGroup(2))
    ReducedDataParallel({0: stage}, FakeGroup(1))


def test_ddp_on_one_rank_leaves_gradients_as_they_are(group: dist.ProcessGroup) -> None:
    stage = nn.Linear(3, 1, bias=False)
    parallel = TorchDdp({0: stage}, group)
    for _ in range(3):
        stage.zero_grad()
        parallel.start_accumulating()
        outputs = [parallel.module(0)(torch.full((1, 3), x)).sum() for x in (1.0, 10.0)]
        outputs[0].backward()
        parallel.start_last_backward(0)
        outputs[1].backward()
        parallel.finish()
        assert stage.weight.grad.tolist() == [[11.0, 11.0, 11.0]]
    assert parallel.statistics.num_steps == 3
    assert parallel.statistics.gradient_bytes == 12
    parallel.close()


def test_ddp_raises_at_buckets_of_nothing(group: dist.ProcessGroup) -> None:
    with pytest.raises(UsageError, match="bucket_bytes is 0; expected at least 1"):
        TorchDdp({0: nn.Linear(2, 2)}, group, bucket_bytes=0)


def test_parameters_without_gradient_are_named_before_a_step_is_taken(
    group: dist.ProcessGroup,
) -> None:
    stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stage.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    parallel = TorchDdp({0: stage}, group)
    parallel.start_accumulating()
    loss = parallel.module(0)(torch.ones(2, 3)).sum()
    parallel.start_last_backward(0)
    loss.backward()
    message = r"1 parameters got no gradient in this step \(stage 0's unused\), for which DDP waits"
    with pytest.raises(UsageError, match=message):
        parallel.finish()
