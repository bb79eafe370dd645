"""What produced a run: code, packages, settings, devices. No secrets: the environment is an
allow-list, and the command line is stored as `store/write/redaction.py` lets it.

Everything here is read once, when the run is opened. What cannot be read is left out, not guessed.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshscope.store.write.redaction import redact_arguments

_ENVIRONMENT_ALLOW_LIST = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_NTASKS", "SLURM_NNODES", "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "KMP_AFFINITY", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE", "TORCH_LOGS", "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO",
    "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_NSOCKS_PERTHREAD",
    "GLOO_SOCKET_IFNAME", "KINETO_USE_DAEMON",
)  # fmt: skip

_GIT_TIMEOUT_SECONDS = 2.0


def collect_provenance(*, in_full: bool) -> dict[str, object]:
    """Facts about this process; `in_full` adds what is the same on every rank and slower to get."""
    facts: dict[str, object] = {
        "argv": redact_arguments(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cwd_name": Path.cwd().name,
        "environment": {
            name: os.environ[name] for name in _ENVIRONMENT_ALLOW_LIST if name in os.environ
        },
        "torch": _torch_facts(sys.modules.get("torch")),
    }
    if in_full:
        facts["git"] = _git_state(_program_folder())
        facts["packages"] = _installed_packages()
    return facts


def _program_folder() -> Path:
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path.cwd()
    return script.resolve().parent if script.is_file() else Path.cwd()


def _git_state(folder: Path) -> dict[str, object]:
    """Revision and whether tracked files were changed; `reason` says why when it is not known."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return {"reason": "the program is not in a git work tree, or git is not installed"}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "is_dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=False,
            close_fds=False,  # lets Python use vfork: no copy of a large training process
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_packages() -> dict[str, str]:
    """Name and version of every installed distribution, read from folder names alone."""
    packages: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").rpartition("-")
                packages.setdefault(package, version)
    return dict(sorted(packages.items()))


def _torch_facts(torch: Any) -> dict[str, object] | None:
    """Versions, determinism and seed of a torch the program has imported; None without one."""
    if torch is None:
        return None
    backends = torch.backends
    facts: dict[str, object] = {
        "version": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "initial_seed": torch.initial_seed(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
    }
    if torch.cuda.is_initialized():
        facts["devices"] = _device_facts(torch)
    return facts


def _device_facts(torch: Any) -> list[dict[str, object]]:
    facts = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts.append(
            {
                "index": index,
                "name": properties.name,
                "total_bytes": properties.total_memory,
                "num_multiprocessors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    driver = Path("/proc/driver/nvidia/version")
    if facts and driver.exists():
        facts[0]["driver"] = driver.read_text(encoding="utf-8", errors="replace").split("\n")[0]
    return facts
