"""`meshscope run` around real training: torchrun, restarts, plain Python, spawned ranks."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import Run, open_run

REPOSITORY = Path(__file__).parents[2]
TRAIN_GPT = str(REPOSITORY / "examples" / "train_gpt.py")
SMALL = ["--layers=1", "--width=32", "--heads=2", "--sequence=8", "--batch=2", "--device=cpu"]
NUM_STEPS = 5

pytest.importorskip("torch", reason="the launcher is tested around real training")


@dataclass(frozen=True)
class Launched:
    """A finished `meshscope run`."""

    exit_code: int
    output: str
    """stdout and stderr."""
    run_dir: Path

    @property
    def run(self) -> Run:
        return open_run(self.run_dir)


def launch(run_dir: Path, *command: str, options: tuple[str, ...] = (), **env: str) -> Launched:
    launcher = [sys.executable, "-m", "meshscope", "run", "--run-dir", str(run_dir), *options]
    done = subprocess.run(
        [*launcher, "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=150,
    )
    return Launched(done.returncode, done.stdout, run_dir)


def steps_of(run: Run, attempt: int) -> dict[int, list[int]]:
    """Rank to recorded steps."""
    return {
        recording.rank: recording.read("steps")["step"].tolist()
        for recording in run.attempts[attempt]
    }


DIES_ONCE = """
import os, signal, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if (rank, attempt, step) == (1, 0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
time.sleep(0.5)  # see examples/train_gpt.py
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def torchrun_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launched, Launched]:
    """One run directory: a healthy launch, then one whose rank 1 dies once and is restarted."""
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2")
    healthy = launch(
        folder / "run", *torchrun, TRAIN_GPT, *SMALL, f"--steps={NUM_STEPS}", "--eval-every=2"
    )
    script = folder / "dies_once.py"
    script.write_text(DIES_ONCE)
    restarted = launch(
        folder / "run",
        *torchrun,
        "--max-restarts=1",
        str(script),
        options=("--no-progress",),
        # Without it restarted gloo ranks are given the addresses of dead ones.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    return healthy, restarted


@pytest.mark.gloo
def test_every_rank_of_torchrun_is_recorded_and_nothing_else(
    torchrun_twice: tuple[Launched, Launched],
) -> None:
    healthy, _ = torchrun_twice
    assert healthy.exit_code == 0, healthy.output
    attempt = healthy.run.attempts[0]
    assert attempt.world_size == 2
    assert steps_of(healthy.run, 0) == {0: list(range(NUM_STEPS)), 1: list(range(NUM_STEPS))}
    for recording in attempt:
        assert recording.closing is not None
        assert recording.closing["num_errors"] == 0
        assert recording.header["world_size"] == 2
        assert set(recording.read("steps")["num_microbatches"].tolist()) == {1}


@pytest.mark.gloo
def test_the_launcher_says_where_the_run_is(torchrun_twice: tuple[Launched, Launched]) -> None:
    healthy, restarted = torchrun_twice
    assert f"recorded 2 ranks in {healthy.run_dir}\n" in healthy.output
    assert f"meshscope report {healthy.run_dir}\n" in healthy.output
    assert f"recorded 2 ranks in {healthy.run_dir}, as a further attempt" in restarted.output


@pytest.mark.gloo
def test_a_launch_into_an_existing_run_and_a_restart_add_attempts(
    torchrun_twice: tuple[Launched, Launched],
) -> None:
    _, restarted = torchrun_twice
    assert restarted.exit_code == 0, restarted.output
    run = restarted.run
    assert len(run.attempts) == 3
    assert [attempt.restart_count for attempt in run.attempts] == [0, 0, 1]
    assert run.attempts[0].launch_id != run.attempts[1].launch_id == run.attempts[2].launch_id
    assert steps_of(run, 0)[0] == list(range(NUM_STEPS)), "the first launch is as it was"
    assert steps_of(run, 1)[1] == [0, 1], "killed after its second step"
    assert run.attempts[1].ranks[1].closing is None
    assert steps_of(run, 2) == {0: [0, 1, 2], 1: [0, 1, 2]}


FAILS = """
import os, signal, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if sys.argv[1] == "raise":
    raise ValueError("the loss is a walrus")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "exit_code", "text"),
    [
        ("raise", 1, "rank 0 ended abnormally: last step 2, ValueError: the loss is a walrus\n"),
        ("kill", 137, "rank 0 ended abnormally: last step 2, no closing line"),
    ],
)
def test_a_rank_that_ends_abnormally_is_named(
    tmp_path: Path, how: str, exit_code: int, text: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    options = ("--layout", "dp=1", "--report")
    failed = launch(tmp_path / "run", str(script), how, options=options)
    assert failed.exit_code == exit_code, "the report leaves the exit code alone"
    assert text in failed.output
    assert "3 steps on 1 rank" in failed.output
    assert steps_of(failed.run, 0) == {0: [0, 1, 2]}
    assert failed.run.last_attempt.layout == Layout(dp=1)


SPAWNS = """
import sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 + rank):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.gloo
def test_spawned_ranks_are_recorded_under_the_rank_of_their_group(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    spawned = launch(
        tmp_path / "run",
        sys.executable,
        str(script),
        f"file://{tmp_path / 'store'}",
        options=("--no-progress",),
    )
    assert spawned.exit_code == 0, spawned.output
    assert len(spawned.run.attempts) == 1
    assert steps_of(spawned.run, 0) == {0: [0, 1], 1: [0, 1, 2]}
    assert isinstance(spawned.run.last_attempt.layout, Unavailable)


def test_torch_without_training_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    idle = launch(tmp_path / "run", sys.executable, "-c", "import torch; print(torch.ones(1))")
    assert idle.exit_code == 0
    assert "nothing was recorded: no Python process" in idle.output
    assert not idle.run_dir.exists()
