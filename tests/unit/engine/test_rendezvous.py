import json
import sys
from pathlib import Path

import pytest
import torch

from ended_process import run_process
from meshscope.engine.launch.rendezvous import (
    _find_master,
    _find_place,
    choose_backend,
    choose_device,
    find_placement,
    joined,
    share_from_first,
)
from meshscope.errors import LayoutError, UsageError

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "local_rank", "num_gpus", "device"),
    [
        ("auto", 3, 0, "cpu"),
        ("cpu", 3, 8, "cpu"),
        ("auto", 3, 8, "cuda:3"),
        ("cuda", 3, 1, "cuda:0"),  # ranks share what there is
        ("cuda", 5, 4, "cuda:1"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(kind, local_rank, num_gpus, device):
    assert choose_device(kind, local_rank, num_gpus) == torch.device(device)


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(UsageError, match="torch finds no GPU here"):
        choose_device("cuda", 0, 0)


@pytest.mark.parametrize(
    ("device", "local_world_size", "num_gpus", "backend"),
    [
        ("cpu", 8, 8, "gloo"),
        ("cuda:0", 8, 8, "nccl"),
        ("cuda:0", 4, 8, "nccl"),
        ("cuda:0", 8, 1, "gloo"),  # NCCL refuses two ranks on one GPU
    ],
)
def test_nccl_only_where_each_rank_has_a_gpu(device, local_world_size, num_gpus, backend):
    assert choose_backend(torch.device(device), local_world_size, num_gpus) == backend


# --- places --------------------------------------------------------------------------------------


def test_a_rank_alone_has_no_process_group():
    with joined("cpu", env={}) as place:
        assert (place.rank, place.world_size, place.backend, place.device) == (0, 1, None, CPU)
        assert not torch.distributed.is_initialized()
        assert share_from_first("mine") == "mine"


def test_so_has_the_only_rank_of_a_launcher():
    with joined("cpu", env={"RANK": "0", "WORLD_SIZE": "1"}) as place:
        assert place.backend is None


def test_a_rank_outside_of_its_world_is_refused():
    """The founding library made rank 8 of 8 into dp 2."""
    with pytest.raises(LayoutError, match="RANK is 8, but with WORLD_SIZE=8 it must be below 8"):
        find_placement({"RANK": "8", "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("tasks", "local_world_size"), [("4(x2)", 4), ("4,3", 4), ("2(x3),1", 2), ("", 8)]
)
def test_slurm_says_how_many_ranks_a_node_has(tasks, local_world_size):
    env = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    place = _find_place("cpu", find_placement(env), env)
    assert (place.rank, place.local_rank) == (5, 1)
    assert (place.local_world_size, place.backend) == (local_world_size, "gloo")


# --- where to meet -------------------------------------------------------------------------------


def test_what_the_launcher_says_counts():
    assert _find_master({"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}) == ("node7", 1234)


def test_on_one_node_a_place_is_made_up_that_is_the_same_for_all_ranks_of_the_job():
    env = {"SLURM_JOB_ID": "41234", "SLURM_NNODES": "1"}
    assert _find_master(env) == ("127.0.0.1", 21_234)


def test_on_several_nodes_one_must_be_named():
    with pytest.raises(UsageError, match="MASTER_ADDR is not set, and the job has several nodes"):
        _find_master({"SLURM_JOB_ID": "4", "SLURM_NNODES": "2"})


@pytest.mark.parametrize("port", ["0", "x", "70000", "-1"])
def test_a_port_must_be_one(port):
    with pytest.raises(UsageError, match="expected a number from 1 to 65535"):
        _find_master({"MASTER_ADDR": "a", "MASTER_PORT": port})


# --- with real ranks -----------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
def test_restarted_by_torchrun_ranks_meet_again(tmp_path):
    """Without the prefix gloo reads the dead ranks' addresses and fails or hangs."""
    done = run_process(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"),
            *("-m", "tests.distributed.engine_rendezvous", str(tmp_path)),
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    expected = {"sum": 3.0, "shared": "from rank 0", "backend": "gloo"}
    assert found == {f"attempt_1_rank_{rank}.json": expected for rank in range(2)}


@pytest.mark.gloo
def test_what_two_tp_ranks_keep_is_as_estimated(tmp_path):
    """Here, not with the estimate's other tests, since it needs ranks."""
    done = run_process(
        [sys.executable, "-m", "tests.distributed.engine_rendezvous", str(tmp_path), "memory"],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "memory.json").read_text())
    assert len(rows) == 8
    for measured, estimated in rows:
        assert estimated == pytest.approx(measured, rel=0.02)
