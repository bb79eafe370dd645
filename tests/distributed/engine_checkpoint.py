"""Saves models on one layout, loads them on others, and writes what differs.

    python -m tests.distributed.engine_checkpoint FOLDER

Every layout trains on the same samples. One process trains six steps and saves after three; what
each layout holds is compared, bit by bit, with full tensors that were written without checkpoints,
and its further losses with those of the process that never stopped. Leaves
`FOLDER/<ranks>_<rank>.json` with what each rank found, `failed_<rank>.json` and
`killed_<rank>.json` with what became of saves that failed on one rank.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import import_everything, run_ranks
from tests.distributed.one_process import TINY_GPT, TINY_LLAMA
from torch import Tensor, nn

from meshscope.core.schedule_builders import build_schedule
from meshscope.engine import (
    ModelConfig,
    build_stage,
    find_parameter_shards,
    gather_parameter,
)
from meshscope.engine.checkpoint.folder import find_latest
from meshscope.engine.checkpoint.save_load import CheckpointError, load_checkpoint, save_checkpoint
from meshscope.engine.data.token_data import TokenData, make_data, split_tokens
from meshscope.engine.data_parallel.data_parallel import GradientReducer
from meshscope.engine.pipeline.pipeline import PipelineExecutor
from meshscope.engine.update.gradient_norm import sync_tied_gradients

NUM_STEPS = 3
SEED = 5
OTHER_SEED = 6
MICROBATCH_SIZE = 1
GLOBAL_BATCH = 8

CONFIGS = {"llama": TINY_LLAMA, "gpt": TINY_GPT}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
CASES = [("llama", "sgd"), ("gpt", "adamw")]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this rank stands."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    stage_sizes: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    is_fully_sharded: bool = False

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def make_groups(self) -> dict[str, dist.ProcessGroup | None]:
        """This rank's groups; tp is the innermost axis, dp the outermost."""
        if self.size == 1:
            return dict.fromkeys(("dp", "pp", "tp"))
        mesh = dist.device_mesh.init_device_mesh(
            "cpu", (self.dp, self.pp, self.tp), mesh_dim_names=("dp", "pp", "tp")
        )
        return {axis: mesh.get_group(axis) for axis in ("dp", "pp", "tp")}


class Trainer:
    """A small training loop over any layout."""

    def __init__(self, model: str, kind: str, layout: Layout, groups: Mapping[str, Any]) -> None:
        self.layout, self.groups = layout, groups
        config = CONFIGS[model]
        self.data = make_tokens(config)
        self.dp_rank = 0 if groups["dp"] is None else groups["dp"].rank()
        pp_rank = 0 if groups["pp"] is None else groups["pp"].rank()
        num_microbatches = GLOBAL_BATCH // layout.dp // MICROBATCH_SIZE
        schedule = build_schedule(layout.schedule, layout.pp, num_microbatches)
        self.stages = {
            index: build_stage(
                config,
                index,
                schedule.num_stages,
                stage_sizes=layout.stage_sizes,
                tp_group=groups["tp"],
                seed=SEED,
            )
            for index in schedule.stages_of(pp_rank)
        }
        if layout.is_fully_sharded:
            self.shard_fully()
        parameters = list(
            dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters())
        )
        self.optimizer = OPTIMIZERS[kind](parameters)
        self.reducer = GradientReducer(parameters, groups["dp"])
        self.executor = PipelineExecutor(
            schedule,
            self.stages,
            groups["pp"],
            hidden_shape=(MICROBATCH_SIZE, config.sequence_length, config.hidden_size),
        )

    def shard_fully(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.DeviceMesh.from_group(self.groups["dp"], "cpu")
        for stage in self.stages.values():
            for block in stage.layers.values():
                fully_shard(block, mesh=mesh)
            fully_shard(stage, mesh=mesh)

    def spoil(self) -> None:
        """Other weights, so that loading must bring all of them."""
        with torch.no_grad():
            for stage in self.stages.values():
                for parameter in stage.parameters():
                    parameter.fill_(float("nan"))

    def train(self, first_step: int, num_steps: int) -> list[float]:
        """The mean loss of each step over all dp ranks, where the last stage is."""
        losses = []
        for step in range(first_step, first_step + num_steps):
            self.optimizer.zero_grad()
            batch = self.data.batch(step, self.dp_rank, self.layout.dp)
            self.reducer.start_accumulating()
            found = self.executor.run_step([split_tokens(tokens) for tokens in batch])
            self.reducer.finish()
            self.sync_tied()
            self.optimizer.step()
            if found:
                loss = torch.stack(found).detach().mean()
                if self.groups["dp"] is not None:
                    dist.all_reduce(loss, group=self.groups["dp"])
                losses.append(loss.item() / self.layout.dp)
        return losses

    def sync_tied(self) -> None:
        tied = [s.tied_weight for s in self.stages.values() if s.tied_weight is not None]
        if len(tied) == 2:  # first and last stage on one rank
            total = tied[0].grad + tied[1].grad
            for weight in tied:
                weight.grad = total.clone()
        elif tied and self.layout.pp == 2:
            sync_tied_gradients(tied[0], self.groups["pp"])

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and optimizer state by name, put together without checkpoints."""
        for stage in self.stages.values():
            shards = find_parameter_shards(stage)
            for name, parameter in stage.named_parameters():
                name_in_model = shards[name].tied_to or name
                tensors = {"": parameter.detach(), **self.optimizer.state[parameter]}
                for key, tensor in tensors.items():
                    if tensor.ndim:
                        tensor = tensor.full_tensor() if hasattr(tensor, "to_local") else tensor
                        tensor = gather_parameter(tensor, shards[name], self.groups["tp"])
                    yield f"{key}/{name_in_model}", tensor.clone()


def list_names(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, but for the lock that the jobs there share."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def make_tokens(config: ModelConfig) -> TokenData:
    return make_data(
        "synthetic",
        vocab_size=config.vocab_size,
        sequence_length=config.sequence_length,
        global_batch_size=GLOBAL_BATCH,
        microbatch_size=MICROBATCH_SIZE,
        seed=3,
    )


def find_differing(trainer: Trainer, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which of this rank's full tensors are not bit for bit the expected ones."""
    found = dict(trainer.full_tensors())
    return {
        "differing": [k for k, v in found.items() if not torch.equal(v, expected[k])],
        "names": sorted(found),
        "largest": max(tensor.abs().max().item() for tensor in found.values()),
    }


def compare_loaded(
    folder: Path,
    saved: str,
    case: tuple[str, str],
    layout: Layout,
    groups: Mapping[str, Any],
    *,
    save_as: str | None = None,
) -> dict[str, Any]:
    """Loads what another layout saved, compares it, may save it again, and goes on training."""
    name = "_".join(case)
    trainer = Trainer(*case, layout, groups)
    trainer.spoil()
    loaded = load_checkpoint(
        folder / f"{saved}_{name}" / f"step-{NUM_STEPS:08d}",
        stages=trainer.stages,
        optimizer=trainer.optimizer,
    )
    if save_as is not None:
        save_checkpoint(
            folder / f"{save_as}_{name}",
            step=NUM_STEPS,
            stages=trainer.stages,
            optimizer=trainer.optimizer,
            state=loaded.state,
        )
    # What was saved again must be what the first layout had.
    expected = torch.load(folder / f"{saved.split('_')[0]}_{name}.pt", weights_only=True)
    return {
        **find_differing(trainer, expected),
        "step": loaded.step,
        "state": loaded.state,
        "has_random_state": loaded.has_random_state,
        "losses": trainer.train(NUM_STEPS, NUM_STEPS),
    }


def save_trained(
    folder: Path, saved: str, case: tuple[str, str], layout: Layout, groups: Mapping[str, Any]
) -> Trainer:
    """Trains, saves, and leaves the full tensors in a file, each rank for its stages."""
    name = "_".join(case)
    trainer = Trainer(*case, layout, groups)
    losses = trainer.train(0, NUM_STEPS)
    save_checkpoint(
        folder / f"{saved}_{name}",
        step=NUM_STEPS,
        stages=trainer.stages,
        optimizer=trainer.optimizer,
        state={"case": name, "num_tokens": NUM_STEPS * GLOBAL_BATCH * 8, "losses": losses},
    )
    tensors = dict(trainer.full_tensors())
    if dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, tensors)
        tensors = {key: tensor for found in gathered for key, tensor in found.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(tensors, folder / f"{saved}_{name}.pt")
    if dist.is_initialized():
        dist.barrier()
    return trainer


# --- the runs -------------------------------------------------------------------------------------


def run_single(folder: Path) -> Callable[[int, int], None]:
    """One process without a process group: saves for the others, and never stops."""

    def job(rank: int, num_ranks: int) -> None:
        dist.destroy_process_group()
        groups = Layout().make_groups()
        losses = {}
        for case in CASES:
            trainer = save_trained(folder, "single", case, Layout(), groups)
            losses["_".join(case)] = trainer.train(NUM_STEPS, NUM_STEPS)
        write(folder / "single.json", losses)
        leave()

    return job


def run_eight(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        mesh = Layout(dp=2, tp=2, pp=2)
        mesh_groups = mesh.make_groups()
        wide = Layout(dp=4, tp=1, pp=2, stage_sizes=(1, 3))
        wide_groups = wide.make_groups()
        found: dict[str, Any] = {}
        for case in CASES:
            name = "_".join(case)
            save_trained(folder, "mesh", case, mesh, mesh_groups)
            found[f"{name}: single on 2×2×2"] = compare_loaded(
                folder, "single", case, mesh, mesh_groups
            )
            found[f"{name}: mesh on 4×1×2 uneven"] = compare_loaded(
                folder, "mesh", case, wide, wide_groups
            )
        write(folder / f"8_{rank}.json", found)

    return job


def run_four(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        found: dict[str, Any] = {}
        for case, name, layout in (
            ("llama sgd", "1×2×2 uneven", Layout(tp=2, pp=2, stage_sizes=(3, 1))),
            ("gpt adamw", "2×1×2 zb_v", Layout(dp=2, pp=2, schedule="zb_v")),
            ("llama sgd", "FSDP2 4×1×1", Layout(dp=4, is_fully_sharded=True)),
            ("gpt adamw", "FSDP2 2×2×1", Layout(dp=2, tp=2, is_fully_sharded=True)),
        ):
            model, kind = case.split()
            found[f"{model}_{kind}: mesh on {name}"] = compare_loaded(
                folder,
                "mesh",
                (model, kind),
                layout,
                layout.make_groups(),
                save_as="mesh_sharded" if layout.is_fully_sharded else None,
            )
        write(folder / f"4_{rank}.json", found)

    return job


def run_one(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        dist.destroy_process_group()
        found = {
            f"{'_'.join(case)}: {saved} on 1×1×1": compare_loaded(
                folder, saved, case, Layout(), Layout().make_groups()
            )
            for case in CASES
            for saved in ("mesh", "mesh_sharded", "single")
        }
        write(folder / "1_0.json", found)
        leave()

    return job


def run_failing(folder: Path, *, kills: bool) -> Callable[[int, int], None]:
    """A save in the middle of which one rank may write no further, or is killed."""

    def job(rank: int, num_ranks: int) -> None:
        name = "killed" if kills else "failed"
        layout = Layout(dp=2, tp=2)
        trainer = Trainer("gpt", "adamw", layout, layout.make_groups())
        trainer.train(0, 1)
        saves = {"stages": trainer.stages, "optimizer": trainer.optimizer}
        save_checkpoint(folder / name, step=1, **saves)
        weights = dict(trainer.full_tensors())
        trainer.train(1, 1)
        if rank == 2:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            # The kernel says so at the first byte that is too many, with part of the file written.
            signal.signal(signal.SIGXFSZ, kill_oneself if kills else signal.SIG_IGN)
        message = ""
        try:
            save_checkpoint(folder / name, step=2, **saves)
        except CheckpointError as error:
            message = str(error)
        if rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        latest = find_latest(folder / name)
        found: dict[str, Any] = {
            "message": message,
            "latest": latest.step,
            "left": list_names(folder / name),
        }
        if not kills:
            trainer.spoil()
            load_checkpoint(latest.path, **saves)
            found |= find_differing(trainer, weights)
            save_checkpoint(folder / name, step=3, **saves)
            found["after"] = list_names(folder / name)
        write(folder / f"{name}_{rank}.json", found)
        if kills:
            leave()

    return job


def run_after_kill(folder: Path) -> Callable[[int, int], None]:
    """Other ranks find what the killed ones left, load it and save again."""

    def job(rank: int, num_ranks: int) -> None:
        layout = Layout(dp=2)
        trainer = Trainer("gpt", "adamw", layout, layout.make_groups())
        trainer.spoil()
        saves = {"stages": trainer.stages, "optimizer": trainer.optimizer}
        # As a rank killed in the middle leaves it, whatever the survivors managed to clean up.
        if rank == 0:
            left = folder / "killed" / ".incomplete-step-00000002"
            left.mkdir(exist_ok=True)
            (left / "__2_0.distcp").write_bytes(b"begun")
        dist.barrier()
        latest = find_latest(folder / "killed")
        dist.barrier()
        loaded = load_checkpoint(latest.path, **saves)
        losses = trainer.train(1, 1)
        save_checkpoint(folder / "killed", step=2, keep=1, **saves)
        found = {
            "step": loaded.step,
            "losses": losses,
            "left": list_names(folder / "killed"),
        }
        write(folder / f"after_kill_{rank}.json", found)

    return job


def kill_oneself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(path: Path, found: object) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")


def leave() -> None:
    """Without the barrier that others, or other groups, would have to come to."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(0)


def main(folder: Path) -> None:
    import_everything()
    jobs: list[tuple[Callable[[int, int], None], int, list[int]]] = [
        (run_single(folder), 1, [0]),
        (run_eight(folder), 8, [0] * 8),
        (run_four(folder), 4, [0] * 4),
        (run_one(folder), 1, [0]),
        (run_failing(folder, kills=False), 4, [0] * 4),
        (run_failing(folder, kills=True), 4, [0, 0, -signal.SIGKILL, 0]),
        (run_after_kill(folder), 2, [0] * 2),
    ]
    for job, num_ranks, expected in jobs:
        exit_codes = run_ranks(job, num_ranks)
        if exit_codes != expected:
            sys.exit(f"{job.__qualname__} ended with {exit_codes} instead of {expected}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
