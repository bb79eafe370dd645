"""A loop of one's own on the engine: one call for each step, on any layout.

    python examples/train_engine.py                                       # alone, 1×1×1
    torchrun --nproc-per-node 8 examples/train_engine.py --dp 2 --tp 2 --pp 2

The same weights, batches and losses whatever the degrees. `meshscope train` does all this from a
file, with checkpoints, restarts and signals; a loop of one's own is for what it does not do.
"""

import argparse

from torch import Tensor

import meshscope
from meshscope.engine import (
    BatchConfig,
    Engine,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    make_data,
)
from meshscope.engine.launch.rendezvous import joined

MODEL = ModelConfig(
    vocab_size=256,
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=192,
    sequence_length=32,
)
GLOBAL_BATCH_SIZE = 16


def main() -> None:
    """Trains a small Llama on synthetic tokens, recorded on every rank."""
    parser = argparse.ArgumentParser(description="Trains on the engine in a loop of one's own.")
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run-dir", help="default: below runs/train_engine")
    options = parser.parse_args()

    config = TrainConfig(
        model=MODEL,
        num_steps=options.steps,
        parallel=ParallelConfig(dp=options.dp, tp=options.tp, pp=options.pp),
        batch=BatchConfig(microbatch_size=2, global_batch_size=GLOBAL_BATCH_SIZE),
        optimizer=OptimizerConfig(learning_rate=1e-2, num_warmup_steps=2),
    )
    data = make_data(
        "synthetic",
        vocab_size=MODEL.vocab_size,
        sequence_length=MODEL.sequence_length,
        global_batch_size=GLOBAL_BATCH_SIZE,
        microbatch_size=config.batch.microbatch_size,
        seed=config.seed,
    )
    # Every rank runs all of this; joined() makes the process group if a launcher started us.
    with joined(config.device) as place:
        recorder = meshscope.start(options.run_dir, layout=config.layout)
        with Engine(config, device=place.device, recorder=recorder) as engine:

            def read() -> Tensor:
                return data.batch(engine.step, engine.mesh.here.dp, options.dp)

            while engine.step < config.num_steps:
                result = engine.train_step(read)  # asked inside of the step, as its phase data
                if place.rank == 0:  # the result is the same on every rank
                    print(f"step {result.step}  loss {result.loss:.4f}")
            if place.rank == 0:
                print(f"recorded in {recorder.run_dir}")
        recorder.close()


if __name__ == "__main__":
    main()
