"""The engine on a CUDA device: the same numbers, steps that wait for nothing, memory that falls."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.distributed.engine_equality import LLAMA, make_cuda_selection  # noqa: E402

from meshscope.engine import (  # noqa: E402
    BatchConfig,
    Engine,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshscope.engine.faults import parse_fault  # noqa: E402

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
"""Sums on a GPU are in another order than on the CPU."""


@pytest.fixture(scope="module")
def equality(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.engine_equality", str(folder), "--cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["case"]: line for line in map(json.loads, lines)}, done.stderr


@pytest.mark.parametrize("case", make_cuda_selection(), ids=lambda case: case.name)
def test_it_learns_what_one_cpu_process_learns(equality, case):
    results, stderr = equality
    assert case.name in results, stderr[-3000:]
    found = results[case.name]
    assert "error" not in found, found["error"]
    for what in ("loss", "gradient", "weight", "norm"):
        assert found["differences"][what] <= TOLERANCE, found["differences"]


def make_engine(**changes) -> Engine:
    config = TrainConfig(
        model=LLAMA,
        num_steps=8,
        device="cuda",
        batch=BatchConfig(microbatch_size=2, num_microbatches=2),
        optimizer=OptimizerConfig(kind="adamw", learning_rate=1e-2),
        **changes,
    )
    return Engine(config)


def make_tokens(config: ModelConfig = LLAMA, size: int = 2):
    shape = (2, size, config.sequence_length + 1)
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision(compute):
    engine = make_engine(precision=PrecisionConfig(compute=compute, initial_loss_scale=1024.0))
    losses = [engine.train_step(make_tokens()).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert engine.statistics.num_skipped_steps == 0


def test_fp16_skips_steps_until_the_scale_fits():
    engine = make_engine(precision=PrecisionConfig(compute="fp16", initial_loss_scale=2.0**40))
    results = [engine.train_step(make_tokens()) for _ in range(8)]
    assert results[0].is_skipped
    assert engine.statistics.num_skipped_steps == sum(r.is_skipped for r in results)
    assert engine.loss_scale.value == 2.0 ** (40 - engine.statistics.num_skipped_steps)


def test_a_step_that_is_not_finite_changes_nothing():
    engine = make_engine(faults=(parse_fault("nan target=gradient steps=1"),))
    engine.train_step(make_tokens())
    before = [p.detach().clone() for p in engine.stages[0].parameters()]
    counts = [state["step"].item() for state in engine.optimizer.state.values()]
    result = engine.train_step(make_tokens())
    after = list(engine.stages[0].parameters())
    assert result.is_skipped
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert counts == [state["step"].item() for state in engine.optimizer.state.values()]
    assert not engine.train_step(make_tokens()).is_skipped
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_makes_the_host_wait_for_nothing():
    engine = make_engine()
    tokens = make_tokens().cuda()
    for _ in range(2):
        engine.train_step(tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = engine.train_step(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss > 0


def test_peak_memory_falls_from_strategy_to_strategy(tmp_path):
    model = ModelConfig(
        vocab_size=8192,
        num_layers=8,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=8,
        ffn_hidden_size=704,
        sequence_length=512,
    )
    peaks = {}
    for name in ("basic", "standard", "aggressive", "extreme"):
        gc.collect()
        before = torch.cuda.memory_allocated()  # what earlier engines have not given back
        config = TrainConfig(
            model=model,
            device="cuda",
            parallel=ParallelConfig(schedule="gpipe"),  # all microbatches in flight
            batch=BatchConfig(microbatch_size=8, num_microbatches=4),
            precision=PrecisionConfig(compute="bf16"),
            memory=MemoryConfig(strategy=name, offload_dir=tmp_path),
        )
        with Engine(config) as engine:
            tokens = make_tokens(model, 8).repeat(2, 1, 1)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                engine.train_step(tokens).loss  # noqa: B018 - waits for the step
            peaks[name] = torch.cuda.max_memory_allocated() - before
        del engine
    assert peaks["basic"] > peaks["standard"] > peaks["aggressive"] > peaks["extreme"], peaks
