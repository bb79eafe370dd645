"""Two ranks that meet as a launcher's would, and keep for backward what the estimate says.

`python -m tests.distributed.engine_rendezvous` under torchrun (MESHSCOPE_TEST_DIE makes rank 1 die
in the first attempt), or with `memory` as an argument with ranks of its own.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])


def meet() -> None:
    """Sums ranks over a fresh group; in the first attempt rank 1 dies instead."""
    import torch
    import torch.distributed as dist

    from meshscope.engine.launch.rendezvous import joined, share_from_first

    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with joined("cpu", timeout_s=30.0) as place:
        total = torch.tensor([place.rank + 1.0])
        dist.all_reduce(total)
        if place.rank == 1 and attempt == "0":
            os._exit(3)
        dist.barrier()
        shared = share_from_first(f"from rank {place.rank}")
        found = {"sum": total.item(), "shared": shared, "backend": place.backend}
    assert not dist.is_initialized()
    (FOLDER / f"attempt_{attempt}_rank_{place.rank}.json").write_text(json.dumps(found))


def measure_memory(rank: int, world_size: int) -> None:
    """What a stage on two tp ranks keeps, beside its estimate."""
    import torch
    import torch.distributed as dist
    from tests.unit.core.config.test_memory_model import GPT, LLAMA, measure_kept_bytes

    from meshscope.core.config.layer_memory import LayerShape, estimate_stage
    from meshscope.engine.model.transformer import build_stage

    rows = []
    for model in (LLAMA, GPT):
        for sequence_parallel in (False, True):
            for dtype in (None, torch.bfloat16):
                stage = build_stage(
                    model, tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel
                )
                x = torch.randint(0, model.vocab_size, (4, model.sequence_length))
                measured = measure_kept_bytes(stage, x, x.roll(-1, 1), dtype)
                shape = LayerShape(
                    model=model,
                    microbatch_size=4,
                    compute_bytes=4 if dtype is None else 2,
                    tp=2,
                    sequence_parallel=sequence_parallel,
                )
                estimated = estimate_stage(
                    shape, model.num_layers, "basic", is_first=True, is_last=True
                )
                rows.append([measured, estimated.kept_bytes + estimated.logits_bytes])
    if rank == 0:
        (FOLDER / "memory.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        from tests.distributed.fork_ranks import run_ranks

        sys.exit(max(run_ranks(measure_memory, 2)))
    meet()
