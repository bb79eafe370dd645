"""A model of stated times: true gradients, exact times on a clock that only sleeping moves."""

import time

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from meshscope.core.config.timed_model_config import TimedModelConfig  # noqa: E402
from meshscope.core.schedule import ActionKind  # noqa: E402
from meshscope.core.schedule_builders import build_schedule  # noqa: E402
from meshscope.core.schedule_replay import replay_schedule  # noqa: E402
from meshscope.engine import count_parameters  # noqa: E402
from meshscope.engine.model.timed_model import (  # noqa: E402
    MAX_GAP_NS,
    DeadlineSleeper,
    TimedStage,
    build_timed_stage,
)
from meshscope.engine.pipeline.pipeline import ActionLog, PipelineExecutor  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402

MS = 1_000_000
CONFIG = TimedModelConfig(
    num_layers=4,
    forward_ms=(1.0, 2.0, 3.0, 4.0),
    input_grad_ms=10.0,
    weight_grad_ms=(5.0, 6.0, 7.0, 8.0),
)
INSTANT = TimedModelConfig(num_layers=4, forward_ms=0, input_grad_ms=0, weight_grad_ms=0)


class FakeTime:
    """Stands still unless someone sleeps, who then wakes a stated time too late."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 5_000 * MS
        self.late_ns = late_ns

    def clock(self) -> int:
        self.now_ns += 1  # so that spinning ends
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9) + self.late_ns


def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def put_on(fake: FakeTime, *stages: TimedStage) -> None:
    sleeper = DeadlineSleeper(fake.clock, fake.sleep)
    for stage in stages:
        for layer in stage.layers.values():
            layer.sleeper = sleeper


def compute_plainly(
    weights: dict[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by autograd alone."""
    own = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    x = own["token_embedding.weight"][tokens]
    for index in range(4):
        x = x * own[f"layers.{index}.weight"]
    logits = x @ own["head.weight"].T
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in own.items()}


def test_loss_and_gradients_are_those_of_autograd() -> None:
    stage = build_timed_stage(INSTANT, seed=3)
    tokens, targets = make_batch()
    loss = stage(tokens, targets)
    loss.backward()
    expected_loss, expected = compute_plainly(dict(stage.named_parameters()), tokens, targets)
    assert torch.allclose(loss, expected_loss, atol=1e-6)
    found = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert set(found) == set(expected)
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-6), name
        assert grad.abs().max() > 1e-3, "a wrong gradient must be seen"


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_stages_under_a_schedule_have_the_whole_models_gradients(name: str) -> None:
    schedule = build_schedule(name, 1, 3)
    stages = {i: build_timed_stage(INSTANT, i, schedule.num_stages, seed=3)
              for i in range(schedule.num_stages)}  # fmt: skip
    put_off = {i: stage.put_off_weight_gradients() for i, stage in stages.items()}
    executor = PipelineExecutor(schedule, stages, put_off=put_off)
    batches = [make_batch(seed) for seed in range(3)]
    executor.run_step(batches)
    whole = dict(build_timed_stage(INSTANT, seed=3).named_parameters())
    parts = [compute_plainly(whole, *batch)[1] for batch in batches]
    for stage in stages.values():
        for key, parameter in stage.named_parameters():
            expected = sum(part[key] for part in parts) / 3
            assert torch.allclose(parameter.grad, expected, atol=1e-6), key


def test_each_action_takes_the_stated_time_of_its_stage() -> None:
    schedule = build_schedule("zb_v", 1, 2)
    sizes = (3, 1)
    stages = {i: build_timed_stage(CONFIG, i, 2, stage_sizes=sizes) for i in range(2)}
    fake = FakeTime()
    put_on(fake, *stages.values())
    log = ActionLog(fake.clock)
    put_off = {i: stage.put_off_weight_gradients() for i, stage in stages.items()}
    executor = PipelineExecutor(schedule, stages, record=log, put_off=put_off)
    executor.run_step([make_batch(), make_batch(1)])
    costs = CONFIG.costs.for_schedule(schedule, sizes)
    assert costs.by_stage == {
        (ActionKind.FORWARD, 0): 6 * MS, (ActionKind.FORWARD, 1): 4 * MS,
        (ActionKind.INPUT_GRAD, 0): 30 * MS, (ActionKind.INPUT_GRAD, 1): 10 * MS,
        (ActionKind.WEIGHT_GRAD, 0): 18 * MS, (ActionKind.WEIGHT_GRAD, 1): 8 * MS,
    }  # fmt: skip
    for span in log.runs:
        took_ns = span.end_host_mono_ns - span.begin_host_mono_ns
        assert round(took_ns / MS, 1) == costs.duration_ns(span.action) / MS, span.action
    makespan_ns = log.runs[-1].end_host_mono_ns - log.runs[0].begin_host_mono_ns
    replay = replay_schedule(schedule, costs)
    assert round(makespan_ns / MS, 1) == replay.makespan_ns / MS == 2 * (6 + 4 + 40 + 26)


def test_backward_in_one_takes_input_and_weight_gradient() -> None:
    stage = build_timed_stage(CONFIG)
    fake = FakeTime()
    put_on(fake, stage)
    loss = stage(*make_batch())
    begin_ns = fake.now_ns
    loss.backward()
    assert round((fake.now_ns - begin_ns) / MS, 1) == 40 + 26


def test_late_wake_ups_are_not_added_up() -> None:
    config = TimedModelConfig(num_layers=4, forward_ms=10, input_grad_ms=10, weight_grad_ms=10)
    stage = build_timed_stage(config)
    fake = FakeTime(late_ns=3 * MS)
    put_on(fake, stage)
    begin_ns = fake.now_ns
    stage(*make_batch()).backward()
    # 120 ms stated; each of twelve sleeps wakes 3 ms late less the 50 us it aims ahead.
    assert 120 <= (fake.now_ns - begin_ns) / MS < 123


def test_what_begins_after_a_wait_owes_nothing() -> None:
    fake = FakeTime(late_ns=3 * MS)
    sleeper = DeadlineSleeper(fake.clock, fake.sleep)
    sleeper.sleep_until(fake.now_ns + 10 * MS)
    fake.now_ns += MAX_GAP_NS + 10
    now_ns = fake.now_ns
    assert sleeper.find_start_ns() == now_ns + 1


def test_real_sleeps_are_no_shorter_and_need_no_processor() -> None:
    config = TimedModelConfig(num_layers=4, forward_ms=20, input_grad_ms=0, weight_grad_ms=0)
    stage = build_timed_stage(config)
    begin_ns, cpu_begin_ns = time.monotonic_ns(), time.thread_time_ns()
    stage(make_batch()[0])
    elapsed_ns = time.monotonic_ns() - begin_ns
    assert elapsed_ns >= 80 * MS
    assert time.thread_time_ns() - cpu_begin_ns < elapsed_ns / 2


def test_weights_do_not_depend_on_the_layout() -> None:
    whole = dict(build_timed_stage(CONFIG, seed=7).named_parameters())
    parts: dict[str, Tensor] = {}
    for index, sizes in ((0, (1, 3)), (1, (1, 3))):
        parts |= dict(build_timed_stage(CONFIG, index, 2, stage_sizes=sizes, seed=7)
                      .named_parameters())  # fmt: skip
    assert set(parts) == set(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    other = build_timed_stage(CONFIG, seed=8)
    assert not torch.equal(other.layers["0"].weight, whole["layers.0.weight"])


def test_stages_have_what_an_engine_asks_of_the_transformers() -> None:
    first, last = (build_timed_stage(CONFIG, i, 2) for i in range(2))
    assert (first.layer_range, last.layer_range) == (range(2), range(2, 4))
    assert (first.is_first, first.is_last) == (True, False)
    assert (last.is_first, last.is_last) == (False, True)
    assert first.hidden_shape(3) == (3, 8, 8)
    assert first.hidden_shape(3, 5) == (3, 5, 8)
    assert first.tied_weight is None
    assert first.tp_group is None
    assert not first.sequence_parallel
    counts = CONFIG.count_stage_parameters(2)
    assert counts == tuple(count_parameters(stage).full for stage in (first, last))
    assert CONFIG.num_parameters == sum(counts) == 4 * 8 + 2 * 64 * 8


def test_the_loss_counts_targets_as_the_transformer_does() -> None:
    stage = build_timed_stage(INSTANT)
    tokens, targets = make_batch()
    some = targets.clone()
    some[:, 4:] = -100
    logits = stage(tokens)
    expected = F.cross_entropy(logits[:, :4].flatten(0, 1), targets[:, :4].flatten())
    assert torch.allclose(stage(tokens, some), expected, atol=1e-6)
    assert torch.allclose(stage(tokens, some, 16), expected / 2, atol=1e-6)
    assert stage(tokens, torch.full_like(targets, -100)).item() == 0


def test_training_learns() -> None:
    stage = build_timed_stage(INSTANT)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = stage(*make_batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_all_problems_are_found_at_once() -> None:
    config = TimedModelConfig(
        num_layers=2, forward_ms=(1.0,), input_grad_ms=-1.0, weight_grad_ms=1.0, vocab_size=0
    )
    assert config.validate(1, 3, sequence_parallel=True) == [
        "vocab_size is 0, expected at least 1",
        "forward_ms has 1 times for 2 layers; give one for each, or a single number for all",
        "input_grad_ms has -1.0, expected a finite time of at least 0 ms",
        "a timed model has nothing to cut under sequence parallel; turn sequence_parallel off",
        "2 layers cannot fill 3 stages; every stage needs a layer, lower the number of stages",
    ]
    assert CONFIG.validate(2, 2, stage_sizes=(1, 3)) == []
    with pytest.raises(UsageError, match=r"stage 4 is outside 0\.\.1"):
        build_timed_stage(CONFIG, 4, 2)
