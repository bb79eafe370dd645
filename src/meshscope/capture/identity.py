"""Who this process is and where it records, resolved when the first record is written.

Late on purpose: a program may set up torch.distributed after it started the recorder. An
initialised process group is asked first, then the launcher's environment; nothing is guessed.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.core.placement import (
    LaunchIdentity,
    NoPlacement,
    Placement,
    launch_identity,
    placement_from_environment,
)
from meshscope.errors import CaptureError

RUN_DIR_VARIABLE = "MESHSCOPE_RUN_DIR"
LAYOUT_VARIABLE = "MESHSCOPE_LAYOUT"
PROFILING_VARIABLE = "MESHSCOPE_PROFILING"
"""Holds a text of `capture.profiling.settings`, which `meshscope run` hands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This process among the ranks of its job."""

    placement: Placement
    launch: LaunchIdentity
    host: str
    pid: int


def resolve_identity(env: Mapping[str, str]) -> Identity:
    """Rank and launch of this process; CaptureError when ranks exist but ours is not known."""
    placement = _placement_from_group() or placement_from_environment(env)
    if isinstance(placement, NoPlacement):
        placement = _alone_unless_told_otherwise(env, placement)
    return Identity(
        placement=placement,
        launch=launch_identity(env),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _placement_from_group() -> Placement | None:
    dist = initialized_distributed()
    if dist is None:
        return None
    from_env = placement_from_environment(os.environ)
    local = from_env if isinstance(from_env, Placement) else None
    rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
    if local is not None and (local.rank, local.world_size) != (rank, world_size):
        local = None  # the program numbered its ranks itself
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local.local_rank if local else None,
        local_world_size=local.local_world_size if local else None,
        node_rank=local.node_rank if local else None,
        source="torch.distributed's default process group",
    )


def initialized_distributed() -> Any | None:
    """`torch.distributed` if the program has set it up, without importing anything."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not getattr(dist, "is_available", lambda: False)():
        return None
    return dist if dist.is_initialized() else None


def _alone_unless_told_otherwise(env: Mapping[str, str], missing: NoPlacement) -> Placement:
    world = env.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        raise CaptureError(
            f"WORLD_SIZE is {world} but this process's rank is not known ({missing.reason}); "
            "set RANK, or start meshscope after torch.distributed.init_process_group"
        )
    return Placement(
        rank=0,
        world_size=1,
        local_rank=None,
        local_world_size=None,
        node_rank=None,
        source="no launcher and no process group: a single process",
    )


def resolve_run_dir(given: str | os.PathLike[str] | None, identity: Identity) -> Path:
    """Where this rank records. Ranks must agree without talking, or not record at all."""
    if given is not None:
        return Path(given)
    from_environment = os.environ.get(RUN_DIR_VARIABLE)
    if from_environment:
        return Path(from_environment)
    name = Path(sys.argv[0] or "python").stem or "python"
    if identity.launch.launch_id is not None:
        return Path("runs") / name / _path_safe(identity.launch.launch_id)
    if identity.placement.world_size > 1:
        raise CaptureError(
            f"{identity.placement.world_size} ranks have no run directory in common; pass "
            f"run_dir=… to meshscope.start, or set {RUN_DIR_VARIABLE}"
        )
    return Path("runs") / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _path_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:100]


def clock_id() -> str | None:
    """Names the machine's boot: processes that share it share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def process_start_ticks() -> int | None:
    """When the kernel started this process: with the pid it names the process for good."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def pid_namespace() -> int | None:
    """Within which a process id means this process: two containers may both have a pid 7."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
