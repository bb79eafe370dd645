"""One process holds all stages: whatever the order, the whole model's numbers exactly."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import count, pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from meshscope.core.schedule import (  # noqa: E402
    Action,
    ActionKind,
    Schedule,
    count_peak_activations,
    output_of,
)
from meshscope.core.schedule_builders import BUILDERS, build_schedule  # noqa: E402
from meshscope.core.schedule_transfers import order_transfers  # noqa: E402
from meshscope.engine import ModelConfig, build_stage  # noqa: E402
from meshscope.engine.model.put_off_gradients import PutOffGradients  # noqa: E402
from meshscope.engine.pipeline.pipeline import (  # noqa: E402
    ActionLog,
    ActionSpan,
    PipelineError,
    PipelineExecutor,
)
from meshscope.errors import UsageError  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=31,
    num_layers=3,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=24,
    sequence_length=8,
    bias=True,
)
NUM_MICROBATCHES = 4


def make_microbatches(num: int = NUM_MICROBATCHES) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, 31, (num, 2, 9), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def build_all(schedule: Schedule, config: ModelConfig = CONFIG) -> dict[int, nn.Module]:
    num_stages = schedule.num_stages
    return {i: build_stage(config, i, num_stages, seed=2) for i in range(num_stages)}


def run_plainly(order: list[int], weights: list[float]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The whole model, its backwards in the given order of microbatches."""
    model = build_stage(CONFIG, seed=2)
    losses = [model(*microbatch) for microbatch in make_microbatches(len(weights))]
    for index in order:
        losses[index].backward(torch.tensor(weights[index]))
    return losses, {name: p.grad for name, p in model.named_parameters()}


def find_backward_order(schedule: Schedule) -> list[int]:
    """Of stage 0; the builders run all stages' backwards in the same order."""
    kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
    return [a.microbatch for a in schedule.actions[0] if a.stage == 0 and a.kind in kinds]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]])
def test_stages_in_one_process_equal_the_whole_model_exactly(
    name: str, weights: list[float] | None
) -> None:
    schedule = build_schedule(name, 1, NUM_MICROBATCHES)
    stages = build_all(schedule)
    losses = PipelineExecutor(schedule, stages).run_step(make_microbatches(), loss_weights=weights)
    expected_losses, expected = run_plainly(
        find_backward_order(schedule), weights or [0.25] * NUM_MICROBATCHES
    )
    assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
    found = {n: p.grad for stage in stages.values() for n, p in stage.named_parameters()}
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_more_chunks_than_two_are_handed_over_as_well() -> None:
    schedule = build_schedule("interleaved_1f1b", 1, NUM_MICROBATCHES, 3)
    stages = build_all(schedule)
    PipelineExecutor(schedule, stages).run_step(make_microbatches())
    _, expected = run_plainly(find_backward_order(schedule), [0.25] * NUM_MICROBATCHES)
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name


def test_steps_add_to_the_gradients() -> None:
    schedule = build_schedule("zb_v", 1, NUM_MICROBATCHES)
    stages = build_all(schedule)
    executor = PipelineExecutor(schedule, stages)
    executor.run_step(make_microbatches())
    once = [p.grad.clone() for stage in stages.values() for p in stage.parameters()]
    executor.run_step(make_microbatches())
    twice = [p.grad for stage in stages.values() for p in stage.parameters()]
    for first, both in zip(once, twice, strict=True):
        torch.testing.assert_close(both, 2 * first)


def test_weight_gradients_appear_with_w() -> None:
    text = "own microbatches=1 stage_ranks=0\n0F0 0I0 0W0\n"
    stage = build_stage(CONFIG, seed=2)
    seen: dict[str, bool] = {}

    class Watch:
        @contextmanager
        def run(self, action: Action) -> Iterator[None]:
            yield
            seen[str(action)] = stage.head.weight.grad is not None

        def wait(self, action: Action) -> Any:
            raise AssertionError("nothing is waited for on one rank")

    PipelineExecutor(Schedule.parse(text), {0: stage}, record=Watch()).run_step(
        make_microbatches(1)
    )
    assert seen == {"0F0": False, "0I0": False, "0W0": True}


@pytest.mark.parametrize("name", BUILDERS)
def test_actions_are_recorded_in_the_order_of_the_schedule(name: str) -> None:
    schedule = build_schedule(name, 1, NUM_MICROBATCHES)
    log = ActionLog(clock=count().__next__)
    PipelineExecutor(schedule, build_all(schedule), record=log).run_step(make_microbatches())
    assert log.runs == [
        ActionSpan(action, 2 * index, 2 * index + 1)
        for index, action in enumerate(schedule.actions[0])
    ]
    assert log.waits == []


def test_evaluation_gives_losses_or_outputs_and_no_gradients() -> None:
    schedule = build_schedule("zb_v", 1, NUM_MICROBATCHES)
    stages = build_all(schedule)
    executor = PipelineExecutor(schedule, stages)
    model = build_stage(CONFIG, seed=2)
    microbatches = make_microbatches()
    expected = [model(*microbatch) for microbatch in microbatches]
    assert torch.equal(torch.stack(executor.evaluate(microbatches)), torch.stack(expected))
    logits = executor.evaluate([(inputs, None) for inputs, _ in microbatches])
    assert torch.equal(logits[3], model(microbatches[3][0]))
    assert not any(logit.requires_grad for logit in logits)
    assert all(p.grad is None for stage in stages.values() for p in stage.parameters())


# --- memory -----------------------------------------------------------------------------------


class Scale(nn.Module):
    """Notes how many of the hidden states it was given are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.inputs: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    @property
    def num_alive(self) -> int:
        return sum(one() is not None for one in self.inputs)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        self.inputs.append(weakref.ref(x))
        self.most_alive = max(self.most_alive, self.num_alive)
        y = x * self.weight
        return y if targets is None else (y - targets).square().sum()


@pytest.mark.parametrize("name", ["interleaved_1f1b", "round_robin", "looped_bfs"])
def test_what_a_microbatch_holds_goes_with_its_backward(name: str) -> None:
    schedule = build_schedule(name, 1, 5, 2)
    stages = {0: Scale(), 1: Scale()}
    executor = PipelineExecutor(schedule, stages)
    executor.run_step([(torch.ones(3), torch.zeros(3)) for _ in range(5)])
    assert (executor.peak_activations,) == count_peak_activations(schedule)
    second = [action for action in schedule.actions[0] if action.stage == 1]
    (peak,) = count_peak_activations(replace(schedule, actions=(tuple(second),)))
    assert stages[1].most_alive == peak
    assert stages[1].num_alive == 0


def test_modules_may_put_off_in_their_own_way() -> None:
    put_off = PutOffGradients()
    ran = []

    class Own(Scale):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            y = super().forward(x, targets)
            y.register_hook(lambda _: put_off.later.add((), lambda: ran.append("W") or ()))
            return y

    schedule = Schedule.parse("own microbatches=1 stage_ranks=0\n0F0 0I0 0W0\n")
    stage = Own()
    executor = PipelineExecutor(schedule, {0: stage}, put_off={0: put_off})
    executor.run_step([(torch.ones(3), torch.zeros(3))])
    assert ran == ["W"]


def test_frozen_stages_and_unused_inputs_do_not_stop_the_backward() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            return self.weight.sum()

    first = Scale()
    schedule = build_schedule("interleaved_1f1b", 1, 2)
    PipelineExecutor(schedule, {0: first, 1: Constant()}).run_step(
        [(torch.ones(3), torch.zeros(3))] * 2
    )
    assert first.weight.grad == 0
    frozen, last = Scale(), Scale()
    frozen.requires_grad_(False)
    PipelineExecutor(schedule, {0: frozen, 1: last}).run_step([(torch.ones(3), torch.zeros(3))] * 2)
    assert frozen.weight.grad is None
    assert last.weight.grad == 48


# --- transfers --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(BUILDERS)),
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 14),
)
def test_ranks_that_issue_transfers_in_order_never_wait_for_each_other_in_a_circle(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    """The strictest way: a rank's transfers run one after the other, over all its peers."""
    try:
        schedule = build_schedule(name, num_ranks, num_microbatches)
    except UsageError:
        return
    transfers = order_transfers(schedule)
    received = {one.output: one for one in transfers}
    assert len(received) == len(transfers)
    waits: dict[Any, list[Any]] = {}
    for rank, row in enumerate(schedule.actions):
        own = [one for one in transfers if rank in (one.source, one.target)]
        for before, after in [*pairwise(own), *pairwise(row)]:
            waits.setdefault(after, []).append(before)
        for action in row:
            if output_of(action) in received:
                waits.setdefault(received[output_of(action)], []).append(action)
            needs = [received[one] for one in schedule.needs(action) if one in received]
            waits.setdefault(action, []).extend(one for one in needs if one.target == rank)
    TopologicalSorter(waits).prepare()  # raises where there is a circle


# --- mistakes ---------------------------------------------------------------------------------


def test_an_error_names_stage_and_microbatch_and_the_executor_can_go_on() -> None:
    schedule = build_schedule("interleaved_1f1b", 1, NUM_MICROBATCHES)
    stages = build_all(schedule)
    executor = PipelineExecutor(schedule, stages)
    microbatches = make_microbatches()
    broken = [*microbatches[:2], (microbatches[2][0] + 1000, None), microbatches[3]]
    with pytest.raises(PipelineError, match=r"0F2 \(forward of stage 0, microbatch 2\)") as caught:
        executor.run_step(broken)
    assert isinstance(caught.value.__cause__, IndexError)
    assert len(executor.run_step(microbatches)) == NUM_MICROBATCHES


@pytest.mark.parametrize(
    ("microbatch", "message"),
    [
        ((None, torch.zeros(2, 8, dtype=torch.long)), "microbatch 0 has no inputs"),
        ((torch.zeros(2, 8, dtype=torch.long), None), "microbatch 0 has no targets"),
    ],
)
def test_missing_inputs_and_targets_are_named(microbatch: Any, message: str) -> None:
    executor = PipelineExecutor(build_schedule("1f1b", 1, 1), {0: build_stage(CONFIG)})
    with pytest.raises(PipelineError, match=message):
        executor.run_step([microbatch])


def test_what_does_not_fit_the_schedule_is_refused() -> None:
    schedule = build_schedule("1f1b", 1, 2)
    stage = build_stage(CONFIG)
    with pytest.raises(UsageError, match=r"got stages \[0, 1\], but schedule 1f1b places \[0\]"):
        PipelineExecutor(schedule, {0: stage, 1: stage})
    with pytest.raises(UsageError, match="is for 2 pipeline ranks, but the group has 1"):
        PipelineExecutor(build_schedule("1f1b", 2, 2), {0: stage})
    with pytest.raises(UsageError, match="or I and W"):
        PipelineExecutor(Schedule.parse("own microbatches=1 stage_ranks=0\n0F0\n"), {0: stage})
    executor = PipelineExecutor(schedule, {0: stage})
    with pytest.raises(UsageError, match="got 3 microbatches"):
        executor.run_step(make_microbatches(3))
    with pytest.raises(UsageError, match="got 1 loss_weights"):
        executor.run_step(make_microbatches(2), loss_weights=[1.0])
    with torch.no_grad(), pytest.raises(UsageError, match="call evaluate instead"):
        executor.run_step(make_microbatches(2))


def test_a_step_by_hand_says_what_is_out_of_turn_and_goes_on() -> None:
    schedule = build_schedule("interleaved_1f1b", 1, 2)
    stages = build_all(schedule)
    microbatches = make_microbatches(2)
    step = PipelineExecutor(schedule, stages).begin_by_hand(microbatches, [0.5, 0.5])

    def run(kind: ActionKind, index: int) -> None:
        for stage in sorted(stages, reverse=kind is ActionKind.BACKWARD):
            step.run(Action(kind, stage, index))

    with pytest.raises(UsageError, match=r"1B0 .* was called, but it had no forward"):
        run(ActionKind.BACKWARD, 0)
    run(ActionKind.FORWARD, 0)
    with pytest.raises(UsageError, match=r"0F0 .* has been called before"):
        run(ActionKind.FORWARD, 0)
    message = "no forward of microbatches 1 and no backward of microbatches 0; call these first"
    with pytest.raises(UsageError, match=message):
        step.finish()
    run(ActionKind.BACKWARD, 0)
    with pytest.raises(UsageError, match=r"1B0 .* but its backward has been called"):
        run(ActionKind.BACKWARD, 0)
    run(ActionKind.FORWARD, 1)
    run(ActionKind.BACKWARD, 1)
    step.finish()
    _, expected = run_plainly([0, 1], [0.5, 0.5])
    found = {n: p.grad for stage in stages.values() for n, p in stage.named_parameters()}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
