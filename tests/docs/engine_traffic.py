"""Trains a tiny 2×2×2 mesh in a few ways, recorded, for the page that says what ranks send.

    python -m tests.docs.engine_traffic FOLDER

Leaves a run `FOLDER/<case>` for each case, and `FOLDER/sizes-<rank>.json` with what formulas need.
"""

import json
import sys
from pathlib import Path

import torch
from tests.distributed.fork_ranks import run_ranks

import meshscope
from meshscope.engine import (
    BatchConfig,
    Engine,
    Mesh,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

NUM_STEPS = 1
DEGREES = {"dp": 2, "tp": 2, "pp": 2}
MODEL = ModelConfig(
    vocab_size=64,
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=32,
    sequence_length=8,
    tie_embeddings=True,
)
CASES = {
    "reducer": (ParallelConfig(**DEGREES), "fp32"),
    "sequence parallel": (ParallelConfig(**DEGREES, sequence_parallel=True), "bf16"),
    "zero 1": (ParallelConfig(**DEGREES, data_parallel="fsdp", zero_stage=1), "fp32"),
    "zero 3": (ParallelConfig(**DEGREES, data_parallel="fsdp", sequence_parallel=True), "bf16"),
}


def make_config(parallel: ParallelConfig, compute: str) -> TrainConfig:
    """Four microbatches of two sequences on each dp rank."""
    return TrainConfig(
        model=MODEL,
        num_steps=NUM_STEPS,
        device="cpu",
        parallel=parallel,
        precision=PrecisionConfig(compute=compute),  # type: ignore[arg-type]  # a literal
        batch=BatchConfig(microbatch_size=2, num_microbatches=4),
    )


def count_sizes(engine: Engine) -> dict[str, int]:
    """Elements on this tp rank, before dp cuts them: all, and those that see a part of the
    sequence."""
    shards = engine.shards
    counts = {"P": 0, "N": 0}
    for stage in engine.stages.values():
        for name, parameter in stage.named_parameters():
            counts["P"] += parameter.numel()  # of a DTensor of FSDP2: of the uncut one
            counts["N"] += parameter.numel() * shards[name].is_sequence_parallel
    return counts


def train(folder: Path, rank: int) -> None:
    """All cases on this rank."""
    sizes = {}
    mesh = Mesh(ParallelConfig(**DEGREES).layout)  # one for all: making groups takes a second
    for case, (parallel, compute) in CASES.items():
        config = make_config(parallel, compute)
        recorder = meshscope.start(folder / case, layout=config.layout)
        with Engine(config, mesh=mesh, recorder=recorder) as engine:
            for _ in range(NUM_STEPS):
                engine.train_step(torch.zeros(4, 2, MODEL.sequence_length + 1, dtype=torch.long))
            sizes[case] = count_sizes(engine)
        recorder.close()
    (folder / f"sizes-{rank}.json").write_text(json.dumps(sizes), encoding="utf-8")


def main() -> int:
    """The number of ranks that failed."""
    folder = Path(sys.argv[1])
    codes = run_ranks(lambda rank, _: train(folder, rank), 8)
    return sum(code != 0 for code in codes)


if __name__ == "__main__":
    sys.exit(main())
