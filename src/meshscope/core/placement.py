"""Who this process is, read from the launcher's environment and never guessed.

A rank is claimed only from a pair of variables that one launcher sets together. What is no claim:
LOCAL_RANK alone (it repeats on every node), and SLURM_PROCID outside an srun step (a batch script
sees 0 of N tasks and is none of them). Wrong when a program starts further processes itself and
they inherit these variables unchanged.

The environment comes in as a mapping, so that nothing here depends on the process it runs in.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """This process among the processes of its launch."""

    rank: int
    """Global rank, 0..world_size-1."""
    world_size: int
    """Number of ranks in the launch, at least 1."""
    local_rank: int | None
    """Rank among the ranks of this node; None when the launcher does not say."""
    local_world_size: int | None
    """Number of ranks on this node; None when the launcher does not say."""
    node_rank: int | None
    """Index of this node; None when the launcher does not say."""
    source: str
    """Where this was read, such as `torchrun environment (RANK, WORLD_SIZE)`."""


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """The environment does not say which rank this is."""

    reason: str
    """What was looked for and what to do, in one or two sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchIdentity:
    """Which launch this process belongs to: the same value on every rank of it."""

    launch_id: str | None
    """The launcher's own name for the launch; None when it gives none."""
    restart_count: int
    """How often the launcher has restarted it, 0 for the first attempt."""
    source: str
    """The variables this was read from."""
    attempt: int | None = None
    """Which attempt of the job this is, where the launcher tells all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    name: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    node_rank: str | None = None


_TORCHRUN = _Launcher(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
)
_SLURM = _Launcher(
    name="Slurm",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    node_rank="SLURM_NODEID",
)
# OMPI_COMM_WORLD_NODE_RANK is left out on purpose: despite its name it is the rank of the process
# on its node across all jobs, not the index of the node (Open MPI manual, section 11.1).
_OPEN_MPI = _Launcher(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = _Launcher(name="PMI", rank="PMI_RANK", world_size="PMI_SIZE")

_LAUNCHERS = (_TORCHRUN, _SLURM, _OPEN_MPI, _PMI)
"""In order of trust: torchrun often runs inside Slurm or MPI, and then only its rank is right."""

# slurm.h: ids from here up are the interactive shell, the batch script and such, not srun steps.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFFA

_LAUNCH_ID_VARIABLES = (
    "MESHSCOPE_LAUNCH_ID",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
)
_ATTEMPT_VARIABLE = "MESHSCOPE_ATTEMPT"
_RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def placement_from_environment(env: Mapping[str, str]) -> Placement | NoPlacement:
    """This process's rank as its launcher states it, or why there is none.

    Raises LayoutError when a launcher's variables are there but contradict themselves.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in env and (launcher is not _SLURM or _is_in_slurm_step(env)):
            return _read_placement(launcher, env)
    return NoPlacement(_explain_no_placement(env))


def launch_identity(env: Mapping[str, str]) -> LaunchIdentity:
    """The launcher's name for this launch and its restart count.

    Two launches inside one Slurm allocation share SLURM_JOB_ID; MESHSCOPE_LAUNCH_ID, which comes
    first, tells them apart. torchrun's default run id, `none`, counts as absent. Restart counts of
    torchrun differ between nodes; set MESHSCOPE_ATTEMPT where one number reaches all ranks.
    """
    id_variable = next((name for name in _LAUNCH_ID_VARIABLES if _names_a_launch(env, name)), None)
    restart_variable = next((name for name in _RESTART_VARIABLES if name in env), None)
    attempt_variable = _ATTEMPT_VARIABLE if env.get(_ATTEMPT_VARIABLE, "").strip() else None
    variables = (attempt_variable, id_variable, restart_variable)
    used = [name for name in variables if name is not None]
    return LaunchIdentity(
        launch_id=None if id_variable is None else env[id_variable].strip(),
        restart_count=0 if restart_variable is None else _read_count(env, restart_variable),
        source=", ".join(used) or "no launcher variable is set",
        attempt=None if attempt_variable is None else _read_count(env, attempt_variable),
    )


def _is_in_slurm_step(env: Mapping[str, str]) -> bool:
    step = _whole_number(env.get("SLURM_STEP_ID", ""))
    return step is not None and step < _FIRST_RESERVED_SLURM_STEP


def _read_placement(launcher: _Launcher, env: Mapping[str, str]) -> Placement:
    if launcher.world_size not in env:
        raise LayoutError(
            f"{launcher.rank} is {env[launcher.rank]!r} but {launcher.world_size} is not set; "
            f"{launcher.name} sets both, so set {launcher.world_size} or unset {launcher.rank}"
        )
    names = (
        launcher.rank,
        launcher.world_size,
        launcher.local_rank,
        launcher.local_world_size,
        launcher.node_rank,
    )
    problems = [
        f"{name} is {env[name]!r}, but a whole number of at least 0 is expected; "
        f"correct it or let {launcher.name} set it"
        for name in names
        if name is not None and name in env and _whole_number(env[name]) is None
    ]
    rank, world_size, local_rank, local_world_size, node_rank = (
        None if name is None else _whole_number(env.get(name, "")) for name in names
    )
    problems += _find_range_problems(env, launcher.rank, launcher.world_size)
    problems += _find_range_problems(env, launcher.local_rank, launcher.local_world_size)
    if problems or rank is None or world_size is None:
        raise LayoutError("\n".join(problems))
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        source=f"{launcher.name} environment ({launcher.rank}, {launcher.world_size})",
    )


def _find_range_problems(
    env: Mapping[str, str], rank_name: str | None, size_name: str | None
) -> list[str]:
    rank = _whole_number(env.get(rank_name or "", ""))
    size = _whole_number(env.get(size_name or "", ""))
    if rank is None or size is None or rank < size:
        return []
    return [
        f"{rank_name} is {rank}, but with {size_name}={size} it must be below {size}; "
        f"set both from the same launch"
    ]


def _explain_no_placement(env: Mapping[str, str]) -> str:
    remedy = "start the program with torchrun, srun or mpirun, or set RANK and WORLD_SIZE"
    if "LOCAL_RANK" in env:
        return (
            f"LOCAL_RANK is {env['LOCAL_RANK']!r} but RANK is not set, and a local rank repeats on "
            f"every node; {remedy}"
        )
    if "SLURM_PROCID" in env:
        return (
            f"SLURM_PROCID is {env['SLURM_PROCID']!r}, but this is not an srun step "
            f"(SLURM_STEP_ID is {env.get('SLURM_STEP_ID', 'not set')}), so it is not this "
            f"process's rank; {remedy}"
        )
    looked_for = ", ".join(launcher.rank for launcher in _LAUNCHERS)
    return f"none of {looked_for} is set; {remedy}"


def _names_a_launch(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable, "").strip()
    return bool(value) and not (variable == "TORCHELASTIC_RUN_ID" and value == "none")


def _read_count(env: Mapping[str, str], variable: str) -> int:
    count = _whole_number(env[variable])
    if count is None:
        raise LayoutError(
            f"{variable} is {env[variable]!r}, but a whole number of at least 0 is expected; "
            f"correct it or unset it"
        )
    return count


def _whole_number(text: str) -> int | None:
    # int() alone would also take "1_0", "+1" and digits of other scripts.
    return int(text) if re.fullmatch(r"\s*[0-9]+\s*", text) else None
