"""The cases of the fault matrix: what is done to which run, and what has to be said of it.

Delays are large against what a busy machine does by itself (10 ms and more in a step, a quarter of
it and more). Pipelines have enough microbatches for their bubble not to be a fault of its own. Real
models have as many ranks as the smallest machine has cores, or a fault that is taken away would win
less than it took: others compute while a rank sleeps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.distributed.fault_matrix import Case, Link, Recipe, Scripted, Trained
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from meshscope.core.layout import Layout
from meshscope.engine.faults.text import parse_fault

SMALL = ModelConfig(
    vocab_size=128,
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    ffn_hidden_size=128,
    sequence_length=32,
)
"""A real transformer, of a few milliseconds."""


def timed(
    *,
    num_layers: int = 4,
    layer_ms: float = 2.5,
    num_steps: int = 40,
    faults: Sequence[str] = (),
    **parallel: Any,
) -> TrainConfig:
    """The engine with a model that sleeps: F, I and W of a layer take `layer_ms` each."""
    model = TimedModelConfig(
        num_layers=num_layers,
        forward_ms=layer_ms,
        input_grad_ms=layer_ms,
        weight_grad_ms=layer_ms,
    )
    return engine(model, num_steps=num_steps, faults=faults, **parallel)


def engine(
    model: ModelConfig | TimedModelConfig,
    *,
    num_steps: int = 40,
    faults: Sequence[str] = (),
    microbatches: int = 1,
    microbatch_size: int = 1,
    **parallel: Any,
) -> TrainConfig:
    return TrainConfig(
        model=model,
        num_steps=num_steps,
        device="cpu",
        parallel=ParallelConfig(**parallel),
        batch=BatchConfig(microbatch_size=microbatch_size, num_microbatches=microbatches),
        optimizer=OptimizerConfig(kind="sgd", learning_rate=0.001),
        faults=tuple(parse_fault(text) for text in faults),
    )


def with_faults(name: str, truth: Truth, config: TrainConfig, *faults: str, **options: Any) -> Case:
    """Of the engine: the same configuration with and without its faults."""
    faulty = replace(config, faults=tuple(parse_fault(text) for text in faults))
    return Case(
        name=name,
        truth=truth,
        faulty=Trained(config=faulty),
        clean=Trained(config=config),
        **options,
    )


def with_delays(name: str, truth: Truth, program: Program, *delays: Delay, **options: Any) -> Case:
    """Of plain torch: the same program with and without its delays."""
    return Case(
        name=name,
        truth=truth,
        faulty=Scripted(program=replace(program, delays=delays)),
        clean=Scripted(program=program),
        **options,
    )


def with_link(name: str, truth: Truth, recipe: Recipe, link: Link) -> Case:
    return Case(name=name, truth=truth, faulty=replace(recipe, link=link), clean=recipe)


def healthy(name: str, recipe: Recipe) -> Case:
    return Case(name=name, truth=Truth(kind="healthy"), faulty=recipe, clean=None)


# --- what has to be said -------------------------------------------------------------------------


def slow(rank: int, phase: str) -> Truth:
    return Truth(kind="slow rank", codes=("ST001",), ranks=(rank,), phase=phase)


def slow_stage(stage: int, *ranks: int) -> Truth:
    """A stage that takes longer looks the same, whatever it is that makes it."""
    return Truth(kind="slow stage", codes=("PP003", "PP002"), ranks=ranks, stage=stage)


def uneven(stage: int, *ranks: int) -> Truth:
    return Truth(kind="uneven stages", codes=("PP002", "PP003"), ranks=ranks, stage=stage)


def slow_link(axis: str, *ranks: int) -> Truth:
    """Without ranks: the whole axis."""
    return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)


def slow_loader(*ranks: int, all_ranks: bool = False) -> Truth:
    code = "IN002" if all_ranks else "IN001"
    return Truth(kind="slow loader", codes=(code,), ranks=ranks, phase="data")


def pauses(rank: int, every: int, *, is_collection: bool) -> Truth:
    """Garbage collections are seen as such; of a mere sleep nobody can say what it was."""
    code = "PA001" if is_collection else "PA002"
    return Truth(kind="pauses", codes=(code,), ranks=(rank,), every=every)


def beside(rank: int, word: str) -> Truth:
    """Something else than training, after the step: the rule that knows it, or the ledger's own."""
    codes = ("TI005", "LT001", "ST001")
    return Truth(kind="between steps", codes=codes, ranks=(rank,), phase=word)


TOO_FEW = Truth(kind="too few microbatches", codes=("PP001",))
NAN = Truth(kind="nan", codes=("CV001",))
NAN_GRADIENT = Truth(kind="nan", codes=("CV005",))
"""Where the loss stays a number: the gradients' norm is none."""
HEALTHY = Truth(kind="healthy")


def leak(rank: int) -> Truth:
    return Truth(kind="leak", codes=("ME001",), ranks=(rank,))


# --- cases ---------------------------------------------------------------------------------------


def list_cases() -> dict[str, Case]:
    """The matrix of the test suite, by name."""
    groups = (
        list_data_parallel(),
        list_pipelines(),
        list_memory(),
        list_real_models(),
        list_plain_torch(),
    )
    return {case.name: case for group in groups for case in group}


def list_data_parallel() -> list[Case]:
    """The timed model under DDP: who is slow, where, and when."""
    config = timed(dp=4, data_parallel="ddp", num_layers=2, layer_ms=4.0, num_steps=21)
    return [
        with_faults("forward", slow(2, "forward"), config, "slow rank=2 phase=forward ms=50"),
        with_faults("backward", slow(1, "backward"), config, "slow rank=1 phase=backward ms=50"),
        with_faults("optimizer", slow(3, "optimizer"), config, "slow rank=3 phase=optimizer ms=50"),
        with_faults("loader", slow_loader(2), config, "stalled_loader rank=2 ms=50"),
        with_faults(
            "pauses",
            pauses(1, 4, is_collection=False),
            config,
            "gc_pause rank=1 ms=200 steps=*/4",
        ),
        with_faults("nan", NAN, config, "nan rank=1 target=loss steps=12", is_timed=False),
    ]


def list_pipelines() -> list[Case]:
    """The timed model in pipelines, with dp and tp."""
    grid = timed(dp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=20)
    mesh = timed(dp=2, tp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=16)
    row = timed(pp=2, microbatches=8, num_layers=6, layer_ms=1.0, num_steps=20)
    return [
        with_faults("stage", slow_stage(1, 2, 3), grid, "slow pp=1 phase=forward ms=6"),
        with_link(
            "link", slow_link("dp", 0, 1), Trained(config=grid), Link(axis="dp", ms=50, pair=(0, 1))
        ),
        with_faults("mesh", slow(5, "forward"), mesh, "slow rank=5 phase=forward ms=8"),
        Case(
            name="uneven",
            truth=uneven(0, 0),
            faulty=Trained(config=replace(row, parallel=replace(row.parallel, stage_sizes=(5, 1)))),
            clean=Trained(config=row),
        ),
        Case(
            name="microbatches",
            truth=TOO_FEW,
            faulty=Trained(config=timed(pp=4, microbatches=2, layer_ms=9.0, num_steps=16)),
            clean=Trained(config=timed(pp=4, microbatches=6, layer_ms=3.0, num_steps=16)),
        ),
    ]


def list_memory() -> list[Case]:
    config = timed(dp=2, data_parallel="ddp", layer_ms=5.0, num_steps=32)
    return [
        with_faults("leak", leak(1), config, "leak rank=1 mb=1", is_timed=False),
        with_faults("jump", HEALTHY, config, "leak rank=1 mb=100 steps=16", is_timed=False),
    ]


def list_real_models() -> list[Case]:
    """A transformer of the engine, which really computes."""
    tp = engine(SMALL, tp=2, microbatch_size=4, num_steps=20)
    return [with_faults("tp_model", slow(1, "backward"), tp, "slow rank=1 phase=backward ms=80")]


def list_plain_torch() -> list[Case]:
    """Programs that do not use the engine."""
    gc = Program(loop="ddp", num_ranks=2, num_steps=21)
    fsdp = Program(loop="fsdp", num_ranks=2, num_steps=20)
    ddp = Program(loop="ddp2", num_ranks=4, num_steps=24)
    tp = Program(loop="dtensor", num_ranks=4, layout=Layout(dp=2, tp=2), num_layers=2, layer_ms=8.0)
    row = Program(loop="pipelining", num_ranks=3, layout=Layout(pp=3), num_layers=3, layer_ms=2.0)
    row = replace(row, num_steps=16, options={"microbatches": 12})
    hidden = with_delays(
        "plain_hidden",
        slow(0, "forward"),
        ddp,
        Delay(where="forward", ranks=(0,), ms=40),
        Delay(where="between", ranks=(2,), ms=40),
        also=(beside(2, "between"),),
    )
    return [
        with_delays(
            "plain_gc", pauses(1, 5, is_collection=True), gc, Delay(where="gc", ranks=(1,), every=5)
        ),
        with_delays(
            "plain_fsdp", slow(1, "backward"), fsdp, Delay(where="backward", ranks=(1,), ms=50)
        ),
        hidden,
        with_delays(
            "plain_logging", beside(3, "logging"), ddp, Delay(where="logging", ranks=(3,), ms=40)
        ),
        with_delays(
            "plain_drift",
            replace(slow(1, "forward"), codes=("ST001", "ST003", "LT001"), is_uneven=True),
            ddp,
            Delay(where="forward", ranks=(1,), ms=80, shape="drift"),
        ),
        with_delays(
            "torch_mesh",
            slow(2, "forward"),
            replace(tp, num_steps=20),
            Delay(where="forward", ranks=(2,), ms=50),
        ),
        with_delays(
            "plain_root",
            slow(1, "forward"),
            Program(
                loop="summed", num_ranks=3, num_steps=20, options={"flat": True, "via": "root"}
            ),
            Delay(where="forward", ranks=(1,), ms=40),
        ),
        with_delays("torch_stage", slow_stage(1, 1), row, Delay(where="forward", ranks=(1,), ms=7)),
    ]
