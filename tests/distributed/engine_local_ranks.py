"""Ranks that fail, hang, are killed and are asked to stop, under the real launcher.

`python -m tests.distributed.engine_local_ranks FOLDER` writes what happened to FOLDER/results.json;
with `forever` as a second argument it starts ranks that go on until somebody ends them.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from meshscope.engine.launch.failures import note_step
from meshscope.engine.launch.local_ranks import LocalLaunch, run_local_ranks
from meshscope.engine.launch.rendezvous import joined
from meshscope.errors import UsageError

FOLDER = Path(sys.argv[1])
NUM_STEPS = 5


def sum_over_ranks(value):
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(value)])
    dist.all_reduce(x)
    return int(x.item())


def train(stop, *, at_step=None, timeout_s=20.0, num_steps=NUM_STEPS):
    """Steps of one all-reduce each; `at_step(rank, step)` is called at the begin of each."""
    with joined("cpu", timeout_s=timeout_s) as place:
        for step in range(num_steps):
            note_step(step)
            if at_step is not None:
                at_step(place.rank, step)
            sum_over_ranks(1)
            if sum_over_ranks(stop.is_set):
                (FOLDER / f"stopped_{place.rank}").write_text(str(step))
                return


def raise_in_rank_2(stop):
    def at_step(rank, step):
        if (rank, step) == (2, 3):
            raise ValueError("the loader\nis empty")

    train(stop, at_step=at_step)


def kill_rank_1(stop):
    def at_step(rank, step):
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    train(stop, at_step=at_step)


def hang_rank_1(stop):
    def at_step(rank, step):
        if (rank, step) == (1, 1):
            time.sleep(60)

    train(stop, at_step=at_step, timeout_s=1.0)


def fail_on_the_first_attempt(stop):
    def at_step(rank, step):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and (rank, step) == (0, 1):
            raise RuntimeError("only once")

    train(stop, at_step=at_step)
    place = {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    (FOLDER / f"place_{os.environ['RANK']}").write_text(json.dumps(place))


def be_told_wrong(stop):
    raise UsageError("momentum is -1, expected at least 0")


def leave_without_a_word(stop):
    if os.environ["RANK"] == "1":
        os._exit(9)
    train(stop)


def ask_the_launcher_to_stop(stop):
    def at_step(rank, step):
        time.sleep(0.01)
        if (rank, step) == (3, 2):
            os.kill(os.getppid(), signal.SIGTERM)

    train(stop, at_step=at_step, num_steps=10_000)


def interrupt_twice(stop):
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)  # nobody looks at stop here


def go_on_forever(stop):
    (FOLDER / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(120)


LAUNCH = LocalLaunch(
    world_size=4,
    run_dir=FOLDER,
    run_id="test",
    label=lambda rank: f"dp{rank}",
    say=lambda line: said.append(line),
    grace_s=1.0,
    kill_after_s=0.5,
)
said: list[str] = []

SCENARIOS = {
    "raise": (raise_in_rank_2, {}),
    "kill": (kill_rank_1, {}),
    "hang": (hang_rank_1, {}),
    "restart": (fail_on_the_first_attempt, {"max_restarts": 2}),
    "permanent": (be_told_wrong, {"max_restarts": 2}),
    "silent": (leave_without_a_word, {"max_restarts": 1}),
    "stop": (ask_the_launcher_to_stop, {"max_restarts": 1}),
    "interrupt": (interrupt_twice, {"world_size": 2}),
}


def main():
    if len(sys.argv) > 2:
        run_local_ranks(go_on_forever, LAUNCH)
        return
    results = {}
    for name, (function, changes) in SCENARIOS.items():
        said.clear()
        launch = replace(LAUNCH, run_dir=FOLDER / name, **changes)
        outcome = run_local_ranks(function, launch)
        results[name] = {**asdict(outcome), "said": list(said)}
    (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
