"""How ranks find each other: torch.distributed for one rank alone, for local ranks, and launchers.

    with joined(config.device, timeout_s=config.communication.timeout_s) as setup:
        run_worker(…)                      # setup.rank, setup.world_size, setup.device

| started by | ranks meet at |
|---|---|
| none (one rank) | nowhere: there is no process group, and none is needed |
| `local_ranks` | a file of the attempt, named by MESHSCOPE_STORE_FILE |
| torchrun | its store, with a prefix for each restart |
| srun, mpirun | MASTER_ADDR and MASTER_PORT; on one node they are made up if not set |

The prefix is needed: after a restart, gloo would read the dead ranks' addresses from the agent's
store and never connect (torch 2.11 to 2.15). NCCL wants a GPU for each rank; several ranks on one
GPU, and ranks on CPUs, talk over gloo.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshscope.core.placement import NoPlacement, Placement, placement_from_environment
from meshscope.errors import UsageError

STORE_FILE_VARIABLE = "MESHSCOPE_STORE_FILE"
_LEAVE_PAUSE_S = 0.1
"""gloo of torch 2.13 may abort when a peer leaves at once."""

# torch has no types for them.
_stores: Any = dist

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """This rank among the others, and what it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str | None
    """None for a single rank."""


def find_placement(env: Mapping[str, str]) -> Placement | None:
    """The launcher's placement; None without a launcher. LayoutError where it is contradictory."""
    placement = placement_from_environment(env)
    return None if isinstance(placement, NoPlacement) else placement


def choose_device(kind: str, local_rank: int, num_gpus: int) -> torch.device:
    """The rank's device; with more ranks than GPUs, ranks share them in turn."""
    if kind == "cuda" and num_gpus == 0:
        raise UsageError(
            "device is cuda, but torch finds no GPU here; check the driver and "
            "CUDA_VISIBLE_DEVICES, or use device cpu"
        )
    if kind == "cpu" or num_gpus == 0:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % num_gpus)


def choose_backend(device: torch.device, local_world_size: int, num_gpus: int) -> str:
    """NCCL where every rank has its own GPU, else gloo."""
    return "nccl" if device.type == "cuda" and local_world_size <= num_gpus else "gloo"


@contextmanager
def joined(
    device: str = "auto", *, timeout_s: float = 600.0, env: Mapping[str, str] | None = None
) -> Iterator[RankSetup]:
    """Joins the ranks of this launch, and leaves together with them.

    Not after an exception: then the others are no longer where a barrier would meet them.
    """
    env = os.environ if env is None else env
    placement = find_placement(env)
    setup = _find_place(device, placement, env)
    if setup.device.type == "cuda":
        torch.cuda.set_device(setup.device)
    if setup.backend is not None:
        join(setup, timeout_s=timeout_s, env=env)
    yield setup
    if setup.backend is not None:
        leave()


def join(setup: RankSetup, *, timeout_s: float, env: Mapping[str, str]) -> None:
    """Makes the default process group; every rank calls it."""
    timeout = timedelta(seconds=timeout_s)
    is_nccl = setup.backend == "nccl"
    dist.init_process_group(
        setup.backend,
        store=_make_store(setup, timeout, env),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timeout,
        # Tells NCCL the device: without it the first barrier guesses, and warns.
        device_id=setup.device if is_nccl else None,
    )


def leave() -> None:
    """Waits for the others and destroys the process group."""
    dist.barrier()
    time.sleep(_LEAVE_PAUSE_S)
    dist.destroy_process_group()


def share_from_first(text: str) -> str:
    """Rank 0's text on every rank, so that all agree. Collective."""
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _find_place(kind: str, placement: Placement | None, env: Mapping[str, str]) -> RankSetup:
    num_gpus = torch.cuda.device_count() if kind != "cpu" else 0
    if placement is None:
        return RankSetup(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            device=choose_device(kind, 0, num_gpus),
            backend=None,
        )
    local_rank = placement.local_rank
    if local_rank is None:
        local_rank = placement.rank if _is_one_node(env) else placement.rank % max(num_gpus, 1)
    local_world_size = placement.local_world_size or _count_local_ranks(placement, env)
    device = choose_device(kind, local_rank, num_gpus)
    backend = choose_backend(device, local_world_size, num_gpus)
    return RankSetup(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        backend=backend if placement.world_size > 1 else None,
    )


def _count_local_ranks(placement: Placement, env: Mapping[str, str]) -> int:
    """Slurm says how many tasks a node has, as `4(x2)` or `4,3`; the most of them counts."""
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts = [part.partition("(")[0] for part in tasks.split(",")]
    numbers = [int(count) for count in counts if count.isdecimal()]
    return max(numbers, default=placement.world_size)


def _is_one_node(env: Mapping[str, str]) -> bool:
    return env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")) == "1"


def _make_store(setup: RankSetup, timeout: timedelta, env: Mapping[str, str]) -> Any:
    file = env.get(STORE_FILE_VARIABLE)
    if file:
        return _stores.FileStore(file, setup.world_size)
    address, port = _find_master(env)
    # torchrun's agent is the server then; without it, rank 0 is.
    is_agents = env.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    store = _stores.TCPStore(
        address,
        port,
        None if is_agents else setup.world_size,
        is_master=not is_agents and setup.rank == 0,
        timeout=timeout,
        multi_tenant=True,
    )
    return _stores.PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _find_master(env: Mapping[str, str]) -> tuple[str, int]:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if port is None:
        # The same on every rank of the job, and hardly ever that of another job.
        job = env.get("SLURM_JOB_ID", "0")
        port = str(_FIRST_PORT + (int(job) if job.isdecimal() else 0) % _NUM_PORTS)
    if address is None:
        if not _is_one_node(env):
            raise UsageError(
                "MASTER_ADDR is not set, and the job has several nodes; set it to the first: "
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        address = "127.0.0.1"
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"MASTER_PORT is {port!r}, expected a number from 1 to 65535; correct it")
    return address, int(port)
