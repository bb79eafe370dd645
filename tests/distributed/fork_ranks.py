"""Runs functions on several forked gloo ranks: torch is imported once, ranks start in no time.

Run as a program of its own (`python -m tests.distributed.…`), never inside pytest: a process whose
torch has used its thread pool hangs its children.
"""

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

RANK_TIMEOUT_SECONDS = 120


def import_everything() -> None:
    """What ranks would otherwise import one by one."""
    import torch

    torch.set_num_threads(1)
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel


def freeze_imports() -> None:
    """Collectors leave alone what was imported: a collection in a forked rank would have to copy
    all of its memory first, which takes 200 ms, and no ordinary process does. Not where memory is
    attributed: that asks the collector what there is."""
    gc.collect()
    gc.freeze()


def run_ranks(
    function: Callable[[int, int], None],
    world_size: int,
    *,
    timeout_s: float = 60.0,
    rank_timeout_s: float = RANK_TIMEOUT_SECONDS,
) -> list[int]:
    """Exit codes of `function(rank, world_size)` in that many processes, with a process group.

    `timeout_s` is for one collective, `rank_timeout_s` for a whole rank.
    """
    import_everything()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _stand_back()
                # Before it is killed from outside, a rank that hangs says where.
                faulthandler.dump_traceback_later(rank_timeout_s - 1, exit=True)
                os._exit(_run_rank(function, rank, world_size, store, timeout_s))
            pids.append(pid)
        return _wait_for_all(pids, rank_timeout_s)


def _stand_back() -> None:
    """One below the program that ends this rank, which needs a core even if all ranks spin."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        priority = max(1, os.sched_getparam(0).sched_priority - 1)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))


def _run_rank(
    function: Callable[[int, int], None], rank: int, world_size: int, store: str, timeout_s: float
) -> int:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        function(rank, world_size)
        dist.barrier()
        _leave_together(rank, world_size)
    except BaseException:  # noqa: BLE001 - the exit code tells
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _leave_together(rank: int, world_size: int) -> None:
    """Gloo of torch 2.13 may abort when a peer leaves while it is still in an operation."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"over/{rank}", "1")
    store.wait([f"over/{other}" for other in range(world_size)], timedelta(seconds=20))
    time.sleep(0.1)


def _wait_for_all(pids: list[int], timeout_s: float) -> list[int]:
    """Exit codes; all that are left are ended together, as one that spins keeps others alive."""
    deadline = time.monotonic() + timeout_s
    codes: dict[int, int] = {}
    is_over = False
    while len(codes) < len(pids):
        for pid in pids:
            done, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline and not is_over:
            is_over = True
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
