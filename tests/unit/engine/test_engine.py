"""The engine in one process: what it refuses, what can be read from it, and steps by hand."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from torch import nn  # noqa: E402

from meshscope.core.layout import Layout  # noqa: E402
from meshscope.engine import (  # noqa: E402
    BatchConfig,
    Engine,
    Mesh,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    UserModel,
    build_stage,
)
from meshscope.engine.faults import parse_fault  # noqa: E402
from meshscope.errors import MeshscopeError, UsageError  # noqa: E402

MODEL = ModelConfig(
    vocab_size=32,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=24,
    sequence_length=8,
)
CONFIG = TrainConfig(
    model=MODEL,
    num_steps=4,
    device="cpu",
    batch=BatchConfig(microbatch_size=2, num_microbatches=3),
    optimizer=OptimizerConfig(kind="sgd", learning_rate=0.5, momentum=0.9, max_gradient_norm=0.5),
)


def make_tokens():
    shape = (3, 2, MODEL.sequence_length + 1)
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(2))


def train_plain(num_steps: int) -> tuple[list[float], list[float], nn.Module]:
    model = build_stage(MODEL, seed=CONFIG.seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    losses, norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        tokens = make_tokens().flatten(0, 1)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def test_steps_are_those_of_a_plain_loop_with_clipping():
    losses, norms, model = train_plain(4)
    engine = Engine(CONFIG)
    results = [engine.train_step(make_tokens()) for _ in range(4)]
    assert [r.loss for r in results] == pytest.approx(losses, abs=1e-5)
    assert [r.gradient_norm for r in results] == pytest.approx(norms, abs=1e-5)
    assert results[0].clip_ratio == pytest.approx(0.5 / norms[0], rel=1e-4)
    for ours, theirs in zip(engine.stages[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_microbatches_by_hand_give_the_same_step():
    at_once, by_hand = Engine(CONFIG), Engine(CONFIG)
    expected = [at_once.train_step(make_tokens()) for _ in range(2)]
    for result in expected:
        by_hand.begin_step()
        losses = []
        for index, part in enumerate(make_tokens()):
            losses.append(by_hand.forward(index, part[:, :-1], part[:, 1:]).item())
            by_hand.backward(index)
        found = by_hand.finish_step()
        assert found.loss == pytest.approx(result.loss, abs=1e-6)
        assert sum(losses) / 3 == pytest.approx(result.loss, abs=1e-6)
        assert found.gradient_norm == pytest.approx(result.gradient_norm, abs=1e-6)


def test_what_it_is_made_of_can_be_read():
    engine = Engine(CONFIG)
    engine.train_step(make_tokens())
    assert engine.config is CONFIG
    assert engine.layout == Layout()
    assert engine.schedule.num_microbatches == 3
    assert sum(shard.num_full for shard in engine.shards.values()) == MODEL.num_parameters
    statistics = engine.statistics
    assert (statistics.num_steps, statistics.num_skipped_steps) == (1, 0)
    assert statistics.num_tokens == 6 * 8
    assert statistics.peak_activations == 1
    assert "loss=" in repr(engine.train_step(make_tokens()))


def test_evaluation_is_the_loss_and_changes_nothing():
    engine = Engine(CONFIG)
    before = [p.detach().clone() for p in engine.stages[0].parameters()]
    found = engine.evaluate(make_tokens())
    assert found == pytest.approx(engine.train_step(make_tokens()).loss, abs=1e-6)
    engine = Engine(CONFIG)
    engine.evaluate(make_tokens())
    after = engine.stages[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_weights_of_microbatches_average_unequal_numbers_of_targets():
    tokens = make_tokens()
    inputs, targets = tokens[..., :-1], tokens[..., 1:].clone()
    targets[0, :, 2:] = -100
    counts = [(part != -100).sum().item() for part in targets]
    model = build_stage(MODEL, seed=CONFIG.seed)
    expected = model(inputs.flatten(0, 1), targets.flatten(0, 1)).item()
    weights = [count / sum(counts) for count in counts]
    batch = list(zip(inputs, targets, strict=True))
    assert Engine(CONFIG).train_step(batch, loss_weights=weights).loss == pytest.approx(
        expected, abs=1e-6
    )


def test_a_step_that_is_not_finite_is_skipped_and_the_next_taken():
    engine = Engine(replace(CONFIG, faults=(parse_fault("nan target=gradient steps=0"),)))
    before = [p.detach().clone() for p in engine.stages[0].parameters()]
    assert engine.train_step(make_tokens()).is_skipped
    after = engine.stages[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not engine.train_step(make_tokens()).is_skipped
    assert engine.statistics.num_skipped_steps == 1


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_short_floats_learn_what_float32_learns(compute):
    precise = Engine(CONFIG)
    short = Engine(replace(CONFIG, precision=PrecisionConfig(compute=compute)))
    for _ in range(4):
        expected = precise.train_step(make_tokens()).loss
        # Both have at least 8 bits of mantissa: losses of about 3.5 to two digits.
        assert short.train_step(make_tokens()).loss == pytest.approx(expected, abs=0.05)
    assert all(p.dtype == torch.float32 for p in short.stages[0].parameters())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: make_tokens()[:2], r"shape \(2, 2, 9\), expected .* \(3, 2, 9\)"),
        (lambda: make_tokens().float(), "torch.float32"),
        (lambda: [(make_tokens()[0, :, :-1], make_tokens()[0, :, 1:])], "got 1 microbatches"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_the_engine_goes_on(batch, message):
    engine = Engine(CONFIG)
    with pytest.raises(MeshscopeError, match=message):
        engine.train_step(batch)
    assert engine.train_step(make_tokens()).step == 0


def test_wrong_order_of_calls_is_refused():
    engine = Engine(CONFIG)
    with pytest.raises(UsageError, match="call begin_step first"):
        engine.forward(0)
    engine.begin_step()
    with pytest.raises(UsageError, match="call finish_step first"):
        engine.train_step(make_tokens())
    with pytest.raises(UsageError, match=r"microbatch 3 is outside 0\.\.2"):
        engine.forward(3)


def test_a_closed_engine_takes_no_step():
    with Engine(CONFIG) as engine:
        engine.train_step(make_tokens())
    with pytest.raises(UsageError, match="closed"):
        engine.train_step(make_tokens())


def test_a_mesh_of_another_layout_or_ranks_that_are_missing_are_refused():
    wide = replace(CONFIG, parallel=ParallelConfig(dp=2))
    with pytest.raises(UsageError, match="the mesh is"):
        Engine(wide, mesh=Mesh(Layout()))
    with pytest.raises(MeshscopeError, match="needs 2 ranks, but there are 1"):
        Engine(wide)


def test_an_invalid_configuration_lists_every_problem():
    wrong = replace(
        CONFIG,
        parallel=ParallelConfig(tp=3, pp=5),
        optimizer=OptimizerConfig(learning_rate=-1.0),
    )
    with pytest.raises(UsageError) as caught:
        Engine(wrong)
    assert all(word in str(caught.value) for word in ("learning_rate", "num_heads", "5 stages"))


def test_a_model_of_ones_own():
    layers = [lambda: nn.Linear(6, 12), nn.Tanh, lambda: nn.Linear(12, 6)]

    def loss(outputs, targets):
        return (outputs - targets).square().mean()

    model = UserModel(layers, {}, loss, lambda size: (size, 12))
    engine = Engine(CONFIG, model=model)
    generator = torch.Generator().manual_seed(0)
    batch = [
        (torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator))
        for _ in range(3)
    ]
    losses = [engine.train_step(batch).loss for _ in range(4)]
    assert losses[-1] < losses[0]


def test_settings_that_no_buffer_depends_on_change_between_steps():
    """An engine whose rate is changed takes the step of one that always had that rate."""
    wanted = replace(CONFIG.optimizer, learning_rate=0.1, max_gradient_norm=None)
    other = Engine(replace(CONFIG, optimizer=wanted))
    changed = Engine(CONFIG)
    changed.configure(learning_rate=0.1, max_gradient_norm=None)
    results = [engine.train_step(make_tokens()) for engine in (other, changed)]
    assert results[0].learning_rate == results[1].learning_rate == 0.1
    assert other.evaluate(make_tokens()) == changed.evaluate(make_tokens())
    assert changed.config.optimizer == wanted
    changed.configure(weight_decay=0.25)
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "adamw", "dp": 2}, "dp cannot change while the engine runs"),
        ({"learning_rate": -1.0}, "optimizer.learning_rate"),
        ({"learning_rate": 0.1}, "ranks gave different settings"),
    ],
)
def test_a_change_that_cannot_be_made_changes_nothing(changes, message, monkeypatch):
    engine = Engine(CONFIG)
    if "different" in message:
        others = torch.tensor([7.0, 49.0, 1.0], dtype=torch.float64)
        monkeypatch.setattr(
            engine._update, "sum_over_mesh", lambda own: torch.stack(list(own)) + others
        )
    with pytest.raises(UsageError, match=message):
        engine.configure(**changes)
    assert engine.config == CONFIG
