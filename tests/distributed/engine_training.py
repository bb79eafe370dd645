"""Trains with real processes, breaks them in chosen ways, and leaves what happened.

    python -m tests.distributed.engine_training FOLDER [SCENARIO …]

torch is imported once; ranks are forked, and so are the processes that run the `meshscope train`
command. Each scenario has a folder of its own in FOLDER with recordings, checkpoints and JSON;
`curves/plain.json` has what a plain torch loop in one process computes. `test_engine_training`
judges.
"""

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.distributed.fork_ranks import import_everything, run_ranks
from tests.distributed.one_process import TINY_GPT, TINY_LLAMA
from torch import Tensor, nn

from meshscope.capture.default import start as start_recording
from meshscope.core.config.train_config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecordingConfig,
    TrainConfig,
)
from meshscope.core.layout import Layout
from meshscope.engine import build_stage, find_parameter_shards, gather_parameter
from meshscope.engine.data.token_data import make_data
from meshscope.engine.engine import Engine
from meshscope.engine.faults.injector import InjectedFault
from meshscope.engine.faults.text import parse_fault
from meshscope.engine.mesh import Mesh, Role
from meshscope.engine.model.model_source import UserModel
from meshscope.engine.model.user_model import LayerPlan
from meshscope.engine.worker import run_worker

NUM_STEPS = 12
SAVED_STEP = 6
SEED = 7
GLOBAL_BATCH = 8
NUM_SAMPLES = 42
"""Of the token file: 12 steps of 8 take more than two epochs, and steps reach over their ends."""
NUM_WARMUP_STEPS = 3
PEAK_RATE = 0.01
FINAL_RATIO = 0.1
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
COMMAND_TIMEOUT_S = 60.0
"""Then it is killed, and its exit code tells."""

MODELS = {"llama": TINY_LLAMA, "tied": dataclasses.replace(TINY_GPT, num_layers=8)}
OPTIMIZER = OptimizerConfig(
    kind="adamw",
    learning_rate=PEAK_RATE,
    weight_decay=WEIGHT_DECAY,
    max_gradient_norm=MAX_NORM,
    rate_schedule="cosine",
    num_warmup_steps=NUM_WARMUP_STEPS,
    final_rate_ratio=FINAL_RATIO,
)
TOML = f"""
num_steps = {NUM_STEPS}
seed = {SEED}
device = "cpu"
[model]
vocab_size = 61
num_layers = 4
hidden_size = 16
num_heads = 4
num_kv_heads = 2
ffn_hidden_size = 24
sequence_length = 8
init_std = 0.14
[batch]
global_batch_size = {GLOBAL_BATCH}
[optimizer]
learning_rate = {PEAK_RATE}
weight_decay = {WEIGHT_DECAY}
max_gradient_norm = {MAX_NORM}
rate_schedule = "cosine"
num_warmup_steps = {NUM_WARMUP_STEPS}
final_rate_ratio = {FINAL_RATIO}
[data]
kind = "file"
path = "tokens.bin"
"""
"""What `make_config("llama", …)` is, as a file."""


def make_config(model: str, folder: Path, *, run: str, **tables: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "model": MODELS[model],
            "num_steps": NUM_STEPS,
            "seed": SEED,
            "device": "cpu",
            "batch": BatchConfig(global_batch_size=GLOBAL_BATCH),
            "optimizer": OPTIMIZER,
            "data": DataConfig(kind="file", path=folder / "tokens.bin"),
            "recording": RecordingConfig(run_dir=folder / run),
            **tables,
        }
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


# --- what one process computes -------------------------------------------------------------------


def find_rate(step: int) -> float:
    """Linear up to the peak, then half a cosine down to a tenth in the last step."""
    if step < NUM_WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / (NUM_STEPS - 1 - NUM_WARMUP_STEPS)
    low = PEAK_RATE * FINAL_RATIO
    return low + (PEAK_RATE - low) * (1 + cos(pi * progress)) / 2


def train_plainly(model: str, folder: Path) -> dict[str, list[float]]:
    """torch and nothing else: one loss over the whole batch, AdamW, clipping."""
    module = build_stage(MODELS[model], seed=SEED)
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    data = make_data(
        "file",
        path=folder / "tokens.bin",
        vocab_size=61,
        sequence_length=8,
        global_batch_size=GLOBAL_BATCH,
        microbatch_size=GLOBAL_BATCH,
        seed=SEED,
    )
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(NUM_STEPS):
        (tokens,) = data.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = find_rate(step)
        optimizer.zero_grad()
        loss = module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(weights, MAX_NORM))
        optimizer.step()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm)
        found["lr"].append(find_rate(step))
    return found


# --- loss curves over layouts --------------------------------------------------------------------


def run_curves(folder: Path) -> None:
    write_tokens(folder)

    def run_plainly(rank: int, world_size: int) -> None:
        write_json(folder / "plain.json", {m: train_plainly(m, folder) for m in MODELS})

    start(run_plainly, 1)
    every = CheckpointConfig(folder=folder / "llama_kept", every=SAVED_STEP, keep=None)
    mesh = ParallelConfig(dp=2, tp=2, pp=2)
    train(folder, make_config("llama", folder, run="llama_2x2x2", parallel=mesh, checkpoint=every))
    every = CheckpointConfig(folder=folder / "tied_kept", every=SAVED_STEP, keep=None)
    mesh = dataclasses.replace(mesh, schedule="zb_v")
    train(folder, make_config("tied", folder, run="tied_2x2x2", parallel=mesh, checkpoint=every))
    run_resumes(folder)


def run_resumes(folder: Path) -> None:
    """From the checkpoint in the middle, on other layouts."""
    name = f"step-{SAVED_STEP:08d}"
    shutil.copytree(folder / "llama_kept" / name, folder / "llama_resumed" / name)
    train(
        folder,
        make_config(
            "llama",
            folder,
            run="llama_4x1x2",
            parallel=ParallelConfig(dp=4, pp=2, schedule="gpipe"),
            # The folder's own checkpoint counts, not the one to begin with.
            checkpoint=CheckpointConfig(
                folder=folder / "llama_resumed", load=folder / "llama_kept" / "step-00000012"
            ),
        ),
    )
    train(
        folder,
        make_config(
            "llama",
            folder,
            run="llama_1x1x1",
            # A folder with checkpoints, which resume=False leaves alone.
            checkpoint=CheckpointConfig(
                folder=folder / "llama_kept", resume=False, load=folder / "llama_kept" / name
            ),
        ),
    )
    train(
        folder,
        make_config(
            "tied",
            folder,
            run="tied_1x2x4",
            parallel=ParallelConfig(tp=2, pp=4, schedule="interleaved_1f1b"),
            batch=BatchConfig(global_batch_size=GLOBAL_BATCH, microbatch_size=2),
            checkpoint=CheckpointConfig(load=folder / "tied_kept" / name),
        ),
    )
    train(folder, make_config("llama", folder, run="llama_single"))


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(3).integers(0, 61, NUM_SAMPLES * 8 + 1, dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")


def train(folder: Path, config: TrainConfig) -> None:
    def work(rank: int, world_size: int) -> None:
        with open(os.devnull, "w", encoding="utf-8") as stream:
            summary = run_worker(config, device="cpu", stream=stream)
        assert config.recording.run_dir is not None
        name = f"{config.recording.run_dir.name}_{rank}.json"
        write_json(folder / name, dataclasses.asdict(summary))

    start(work, config.layout.world_size)


def start(function: Callable[[int, int], None], world_size: int) -> None:
    codes = run_ranks(function, world_size)
    assert codes == [0] * world_size, codes


# --- the command ---------------------------------------------------------------------------------


def start_command(folder: Path, arguments: Sequence[object], *, max_file: int | None = None) -> int:
    """`meshscope train` in a process group of its own; its output goes to files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.toml").write_text(TOML, encoding="utf-8")
    write_tokens(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        if max_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))
        from meshscope.cli import main

        main(["train", "train.toml", *map(str, arguments)])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(folder: Path, pid: int, name: str = "outcome") -> None:
    """Leaves how the command ended, and whether any process of its group is left."""
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    try:
        os.killpg(pid, 0)
        has_orphans = True
    except ProcessLookupError:
        has_orphans = False
    outcome = {"code": os.waitstatus_to_exitcode(status), "has_orphans": has_orphans}
    write_json(folder / f"{name}.json", outcome)


def run_command(folder: Path, arguments: Sequence[object], **options: Any) -> None:
    wait_for(folder, start_command(folder, arguments, **options))


def run_kill(folder: Path) -> None:
    """A rank is killed in step 8; all start again from the checkpoint of step 6."""
    arguments = [
        *("--dp", 2, "--tp", 2, "--pp", 2, "-o", "run"),
        *("--set", "max_restarts=1", "--set", "checkpoint.folder=kept"),
        *("--set", "checkpoint.every=3", "--fault", "crash rank=5 steps=8 how=SIGKILL"),
    ]
    run_command(folder, arguments)


def run_stop(folder: Path) -> None:
    """SIGTERM to the launcher alone; then the same command again, to the end."""
    arguments = ["--dp", 2, "--pp", 2, "-o", "run", "--set", "checkpoint.folder=kept"]
    pid = start_command(folder, [*arguments, "--fault", "slow rank=0 phase=step ms=300"])
    wait_for_line(folder / "stderr.txt", "step  2/")
    os.kill(pid, signal.SIGTERM)
    wait_for(folder, pid, "stopped")
    wait_for(folder, start_command(folder, arguments), "resumed")


def wait_for_line(path: Path, begin: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if any(line.startswith(begin) for line in text.splitlines()):
            return
        time.sleep(0.02)
    raise TimeoutError(f"no line with {begin!r} in 60 s")


def run_exception(folder: Path) -> None:
    fault = "crash rank=2 steps=3 how=exception phase=backward"
    run_command(folder, ["--dp", 2, "--pp", 2, "-o", "run", "--fault", fault])


def run_full_disk(folder: Path) -> None:
    """Files cannot grow beyond 16 kB: a checkpoint does not fit."""
    arguments = ["--dp", 2, "--pp", 2, "-o", "run", "--no-record"]
    settings = ["--set", "checkpoint.folder=kept", "--set", "checkpoint.every=2"]
    run_command(folder, [*arguments, *settings], max_file=16_384)


def start_hang(folder: Path) -> Callable[[], None]:
    """A rank sleeps for ever; most of the time nothing happens, so others run beside it."""
    arguments = ["--dp", 2, "--pp", 2, "-o", "run", "--set", "communication.timeout_s=5"]
    pid = start_command(folder, [*arguments, "--fault", "hang rank=3 steps=2"])
    return partial(wait_for, folder, pid)


# --- precision and steps that are skipped --------------------------------------------------------


def run_precision(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def work(rank: int, world_size: int) -> None:
        found: dict[str, Any] = {}
        for axis in ("dp", "tp", "pp"):
            mesh = Mesh(Layout(**{axis: 2}))
            for compute in ("fp32", "bf16", "fp16") if axis != "tp" else ():
                precision = PrecisionConfig(compute=compute, initial_loss_scale=1024.0)
                found[f"{axis} {compute}"] = run_steps(make_precise(axis, precision), mesh, 6)
            huge = PrecisionConfig(
                compute="fp16", initial_loss_scale=2.0**20, loss_scale_growth_steps=3
            )
            found[f"{axis} huge"] = run_steps(make_precise(axis, huge), mesh, 8)
            # A norm's weight is whole on every rank, and counted by one of them.
            fault = "nan rank=1 target=gradient parameter=norm steps=2"
            found[f"{axis} nan"] = run_steps(make_precise(axis, fault=fault), mesh, 5)
        write_json(folder / f"rank_{rank}.json", found)

    start(work, 2)


def make_precise(
    axis: str, precision: PrecisionConfig | None = None, *, fault: str | None = None
) -> TrainConfig:
    return TrainConfig(
        model=TINY_LLAMA,
        seed=SEED,
        num_steps=20,
        device="cpu",
        parallel=ParallelConfig(**{axis: 2}),
        batch=BatchConfig(global_batch_size=4),
        precision=precision or PrecisionConfig(),
        optimizer=OptimizerConfig(learning_rate=PEAK_RATE),
        faults=() if fault is None else (parse_fault(fault),),
    )


def run_steps(config: TrainConfig, mesh: Mesh, num_steps: int) -> list[dict[str, Any]]:
    """The same batch in every step: a loss changes if, and only if, weights do."""
    shape = (4, 1, TINY_LLAMA.sequence_length + 1)
    tokens = torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))
    steps = []
    with Engine(config, mesh=mesh, device="cpu") as engine:
        own = tokens.chunk(config.parallel.dp)[engine.mesh.here.dp]
        for _ in range(num_steps):
            before = digest(engine)
            result = engine.train_step(own)
            steps.append(
                {
                    "loss": result.loss,
                    "loss_scale": result.loss_scale,
                    "is_skipped": result.is_skipped,
                    "is_unchanged": digest(engine) == before,
                }
            )
        statistics = engine.statistics
    steps[-1]["num_skipped_steps"] = statistics.num_skipped_steps
    return steps


def digest(engine: Engine) -> str:
    """Of every bit of weights and optimizer states on this rank."""
    found = hashlib.sha256()
    tensors = [weight for stage in engine.stages.values() for weight in stage.parameters()]
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    # States are made in the first step that is taken: before, there are none.
    return f"{len(tensors)} {found.hexdigest()}"


# --- a user's model ------------------------------------------------------------------------------

USER_STEPS = 5
USER_RATE = 0.2


class Block(nn.Module):
    """A residual MLP; nothing in it knows of meshscope."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def take_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


USER_LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Embedding(61, 16),
    Block,
    Block,
    Block,
    lambda: nn.Linear(16, 62),
]
USER_PLAN = {
    "layers.0": LayerPlan("vocab"),
    "layers.[123].up": LayerPlan("column"),
    "layers.[123].down": LayerPlan("row"),
    "layers.4": LayerPlan("column", gather_output=True),
}


def run_user_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = (4, 2, 9)
    tokens = torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(2))
    config = TrainConfig(
        model=TINY_LLAMA,
        seed=SEED,
        num_steps=USER_STEPS,
        device="cpu",
        parallel=ParallelConfig(tp=2, pp=2),
        batch=BatchConfig(microbatch_size=2, num_microbatches=4),
        optimizer=OptimizerConfig(
            kind="sgd", learning_rate=USER_RATE, momentum=0.5, max_gradient_norm=None
        ),
    )
    model = UserModel(USER_LAYERS, USER_PLAN, take_loss, lambda size: (size, 8, 16))

    def work(rank: int, world_size: int) -> None:
        found: dict[str, Any] = {}
        with Engine(config, model=model, device="cpu") as engine:
            first = gather_weights(engine)
            found["losses"] = [engine.train_step(tokens).loss for _ in range(3)]
            engine.save(folder / "kept")
            found["losses"] += [engine.train_step(tokens).loss for _ in range(2)]
            last = gather_weights(engine)
            found["evaluated"] = engine.evaluate(tokens)
            found["is_evaluation_free"] = same_weights(last, gather_weights(engine))
            found["statistics"] = read_statistics(engine)
        with Engine(config, model=model, device="cpu") as engine:
            found["by_hand"] = [step_by_hand(engine, tokens) for _ in range(2)]
            engine.load(folder / "kept" / "step-00000003")
            found["loaded_step"] = engine.step
            found["by_hand_after_load"] = [step_by_hand(engine, tokens) for _ in range(2)]
            found["statistics_after_load"] = read_statistics(engine)
        torch.save({"first": first, "last": last}, folder / f"weights_{rank}.pt")
        write_json(folder / f"rank_{rank}.json", found)

    start(work, 4)
    start(partial(compare_user_model, folder, tokens), 1)
    start(partial(fail_by_hand, folder), 1)


def step_by_hand(engine: Engine, tokens: Tensor) -> float:
    engine.begin_step()
    for index, part in enumerate(tokens):
        engine.forward(index, part[:, :-1], part[:, 1:])
        engine.backward(index)
    return engine.finish_step().loss


def fail_by_hand(folder: Path, rank: int, world_size: int) -> None:
    """The second of two steps by hand, whose optimizer raises."""
    config = make_precise("dp", fault="crash steps=1 how=exception phase=optimizer")
    config = dataclasses.replace(config, parallel=ParallelConfig())
    recorder = start_recording(folder / "failed_by_hand", layout=config.layout)
    tokens = torch.zeros((4, 1, TINY_LLAMA.sequence_length + 1), dtype=torch.int64)
    with Engine(config, device="cpu", recorder=recorder) as engine:
        step_by_hand(engine, tokens)
        with suppress(InjectedFault):
            step_by_hand(engine, tokens)
    recorder.close()


def read_statistics(engine: Engine) -> dict[str, Any]:
    statistics = engine.statistics
    return {
        "num_steps": statistics.num_steps,
        "num_tokens": statistics.num_tokens,
        "peak_activations": statistics.peak_activations,
        "texts": [str(statistics.gradients), str(statistics.memory)],
    }


def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Full ones, of this rank's stages."""
    found = {}
    for stage in engine.stages.values():
        shards = find_parameter_shards(stage)
        for name, weight in stage.named_parameters():
            full = gather_parameter(
                weight.detach(), shards[name], engine.mesh.group_of(Role.MATRICES)
            )
            found[name] = full.clone()
    return found


def same_weights(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(weight, others[name]) for name, weight in some.items())


def compare_user_model(folder: Path, tokens: Tensor, rank: int, world_size: int) -> None:
    """The user's own modules, one after the other, from the weights that the ranks began with."""
    saved = [torch.load(folder / f"weights_{rank}.pt") for rank in range(4)]
    first = {name: weight for part in saved for name, weight in part["first"].items()}
    module = nn.ModuleDict({"layers": nn.Sequential(*(make() for make in USER_LAYERS))})
    module.load_state_dict(first)
    optimizer = torch.optim.SGD(module.parameters(), USER_RATE, momentum=0.5)
    losses = []
    flat = tokens.flatten(0, 1)
    for _ in range(USER_STEPS):
        optimizer.zero_grad()
        loss = take_loss(module["layers"](flat[:, :-1]), flat[:, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    with torch.no_grad():
        evaluated = take_loss(module["layers"](flat[:, :-1]), flat[:, 1:]).item()
    weights = dict(module.named_parameters())
    differences = [
        float((weight - weights[name].detach()).abs().max())
        for part in saved
        for name, weight in part["last"].items()
    ]
    found = {"losses": losses, "evaluated": evaluated, "weight_difference": max(differences)}
    write_json(folder / "plain.json", {**found, "num_weights": len(first)})


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "curves": run_curves,
    "kill": run_kill,
    "stop": run_stop,
    "exception": run_exception,
    "full_disk": run_full_disk,
    "precision": run_precision,
    "user_model": run_user_model,
}


def main(folder: Path, names: Sequence[str]) -> None:
    import_everything()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in SCENARIOS if not names or name in names]
    finish_hang = start_hang(folder / "hang") if not names or "hang" in names else None
    for name in chosen:
        begin_s = time.monotonic()
        SCENARIOS[name](folder / name)
        print(f"{name} {time.monotonic() - begin_s:.1f} s", file=sys.stderr)
    if finish_hang is not None:
        finish_hang()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
