"""`meshscope train`: trains what a TOML file says, on local processes or under a launcher."""

import os
import re
import secrets
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshscope.cli.jobs.memory_pages import write_memory_pages
from meshscope.cli.jobs.profiling_options import profiling_options, profiling_text
from meshscope.cli.terminal_screen import say
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError, UsageError

if TYPE_CHECKING:
    from meshscope.core.config.device_fit import TargetDevice
    from meshscope.core.config.train_config import TrainConfig
    from meshscope.core.placement import Placement
    from meshscope.core.prediction import Prediction
    from meshscope.engine.launch.stop_request import StopRequest

EXIT_RANK_FAILED = 6

_FLAG_KEYS = {
    "dp": "parallel.dp",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "schedule": "parallel.schedule",
    "steps": "num_steps",
    "device": "device",
    "memory": "memory.strategy",
    "seed": "seed",
}
"""Flags that stand for a --set."""


@click.command("train", short_help="Train a model from a TOML file.")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), metavar="CONFIG.toml")
@click.option(
    "-o",
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to record; an existing run gets another attempt. "
    "[default: runs/<name>/<time>-<id>]",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of the file, such as parallel.dp=4 or model.preset=gpt2-small; "
    "may be given several times.",
)
@click.option(
    "--check", is_flag=True, help="Print the plan, its memory and every problem; train nothing."
)
@click.option("--no-record", is_flag=True, help="Record nothing.")
@click.option(
    "--ignore-memory", is_flag=True, help="Start even if the memory estimate says it cannot fit."
)
@click.option(
    "--predict-from",
    "predict_from",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Fit the predicted step time, which is stored with the run, to this recorded run of "
    "meshscope train; on CPUs several may be given.",
)
@click.option("--dp", type=int, help="Data-parallel degree.")
@click.option("--tp", type=int, help="Tensor-parallel degree.")
@click.option("--pp", type=int, help="Pipeline-parallel degree.")
@click.option("--schedule", help="Pipeline schedule, such as gpipe, 1f1b or zb_v.")
@click.option("--steps", type=int, help="Steps to train.")
@click.option(
    "--device",
    help="auto, cpu or cuda; with --check also a device that is not here, such as H100-80GB, or a "
    "memory size, such as 80GiB.",
)
@click.option(
    "--memory", help="Memory strategy: basic, standard, aggressive, extreme or cpu_offload."
)
@click.option("--seed", type=int, help="Seed of weights and data.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="TEXT",
    help="Inject a fault, such as 'slow rank=5 ms=20 steps=10-20' (docs/faults.md), in addition "
    "to the file's faults; may be given several times.",
)
@profiling_options
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    config: Path,
    run_dir: Path | None,
    settings: tuple[str, ...],
    check: bool,
    no_record: bool,
    ignore_memory: bool,
    predict_from: tuple[Path, ...],
    faults: tuple[str, ...],
    profiling: bool,
    trace_windows: str | None,
    **flags: Any,
) -> None:
    """Trains the model that CONFIG.toml describes; docs/training.md lists every key.

    It starts dp·tp·pp processes on this machine; under torchrun, srun or mpirun it is one of their
    ranks. Everything is checked before the first process starts.

    \b
        meshscope train examples/train_2x2x2.toml --check
        meshscope train examples/train_2x2x2.toml --steps 50 --set optimizer.learning_rate=1e-3
        torchrun --nproc-per-node 8 -m meshscope train examples/train_2x2x2.toml
    """
    from meshscope.engine.launch.rendezvous import find_placement

    target = _find_target(flags, is_check=check)
    given = [f"{_FLAG_KEYS[name]}={value}" for name, value in flags.items() if value is not None]
    placement = find_placement(os.environ)
    try:
        loaded = _load(config, [*settings, *given], faults)
        recording = replace(
            loaded.recording,
            enabled=loaded.recording.enabled and not no_record,
            run_dir=run_dir or loaded.recording.run_dir,
            profiling=profiling_text(is_wanted=profiling, text=trace_windows)
            or loaded.recording.profiling,
        )
        loaded = replace(loaded, recording=recording)
        _check(loaded, placement, config, target, ignores_memory=ignore_memory)
        is_first = placement is None or placement.rank == 0
        prediction = None
        if is_first and not check and loaded.recording.enabled:
            from meshscope.cli.jobs.prediction import predict

            device = _find_device(loaded, None if placement is None else placement.local_world_size)
            prediction = predict(loaded, device, placement, predict_from)
    except MeshscopeError as error:
        # All ranks find the same problems; one of them reports them.
        if placement is None or placement.rank == 0:
            raise
        context.exit(error.exit_code)
    if check:
        if placement is None or placement.rank == 0:
            click.echo(_describe_plan(loaded, target))
        return
    if placement is None:
        context.exit(_train_locally(loaded, prediction))
    context.exit(_train_as_one_rank(loaded, placement, prediction))


# --- before it starts ----------------------------------------------------------------------------


def _load(path: Path, overrides: list[str], fault_texts: tuple[str, ...]) -> "TrainConfig":
    """The file with the overrides of the command line; UsageError with all problems of both."""
    from meshscope.engine.config.toml_file import load_config
    from meshscope.engine.faults.text import parse_fault

    faults, problems = [], []
    for text in fault_texts:
        try:
            faults.append(parse_fault(text))
        except UsageError as error:
            problems.append(str(error))
    try:
        loaded = load_config(path, overrides)
    except UsageError as error:
        raise UsageError("; ".join([str(error), *problems])) from None
    if problems:
        raise UsageError("; ".join(problems))
    return replace(loaded, faults=(*loaded.faults, *faults))


def _find_target(flags: dict[str, Any], *, is_check: bool) -> "TargetDevice | None":
    """The device to check against, taken out of the flags; None for one of this machine."""
    from meshscope.core.config.device_fit import find_target_device

    device = flags.get("device")
    if device is None or device in ("auto", "cpu", "cuda"):
        return None
    found = find_target_device(device)
    if isinstance(found, Unavailable):
        raise UsageError(f"--device: {found.reason}; to train: auto, cpu or cuda")
    if not is_check:
        raise UsageError(
            f"--device {device} can only be checked against; add --check, or train on auto, cpu or "
            "cuda"
        )
    flags["device"] = None
    return found


def _check(
    config: "TrainConfig",
    placement: "Placement | None",
    path: Path,
    target: "TargetDevice | None",
    *,
    ignores_memory: bool,
) -> None:
    from meshscope.engine.config.problems import find_notes, find_problems

    world_size = None if placement is None else placement.world_size
    local_world_size = None if placement is None else placement.local_world_size
    device_type: str
    memory_bytes: int | None
    num_gpus: int | None
    if target is not None:
        device_type, memory_bytes, num_gpus = target.device_type, target.memory_bytes, None
    else:
        device_type, memory_bytes, num_gpus = _find_device(config, local_world_size)
    problems = find_problems(
        config,
        world_size=world_size,
        local_world_size=local_world_size,
        device_type=device_type,
        device_memory_bytes=None if ignores_memory else memory_bytes,
        num_gpus=num_gpus,
    )
    if len(problems) == 1 and problems[0].startswith("memory: pipeline rank") and memory_bytes:
        problems.append(_name_nearest(config, device_type, memory_bytes))
    if problems:
        raise UsageError(f"{path}: {'; '.join(problems)}")
    if placement is None or placement.rank == 0:
        for note in find_notes(config, local_world_size=local_world_size):
            say(f"note: {note}")


def _name_nearest(config: "TrainConfig", device_type: str, memory_bytes: int) -> str:
    """What would fit in place of a configuration that does not."""
    from meshscope.core.config.device_fit import TargetDevice
    from meshscope.plan.fits import find_nearest
    from meshscope.report.format import memory

    cap_gib = config.memory.cap_gib
    limit = memory_bytes if cap_gib is None else min(memory_bytes, round(cap_gib * 2**30))
    device = TargetDevice(label="", memory_bytes=limit, device_type=device_type)
    nearest = find_nearest(config, device)
    if isinstance(nearest, Unavailable):
        return f"{nearest.reason}; --ignore-memory starts it all the same"
    sets = " ".join(f"--set {one}" for one in nearest.change.split(", "))
    return (
        f"the nearest that fits needs {memory(nearest.peak_bytes)}: {sets} (the same global "
        "batch); --ignore-memory starts it all the same"
    )


def _find_device(
    config: "TrainConfig", local_world_size: int | None
) -> tuple[str, int | None, int]:
    """The device type, the memory a rank may use of it, and the number of GPUs."""
    from meshscope.engine.launch.local_ranks import (
        DeviceProbe,
        find_host_memory_bytes,
        probe_devices,
    )

    try:
        num_ranks = max(1, local_world_size or config.layout.world_size)
    except MeshscopeError:
        num_ranks = 1  # the degrees are wrong, which is reported with the other problems
    probe = DeviceProbe(num_gpus=0, memory_bytes=None)
    if config.device != "cpu":
        probe = probe_devices()
    if config.device != "cuda" and not probe.num_gpus:
        return "cpu", find_host_memory_bytes() // num_ranks, 0
    if probe.memory_bytes is None:
        return "cuda", None, probe.num_gpus
    num_sharing = -(-num_ranks // max(1, probe.num_gpus))
    return "cuda", probe.memory_bytes // num_sharing, probe.num_gpus


def _describe_plan(config: "TrainConfig", target: "TargetDevice | None") -> str:
    """The output of --check for a configuration without problems."""
    from meshscope.core.config.timed_model_config import TimedModelConfig
    from meshscope.report.format import align, plural

    model, layout = config.model, config.layout
    tokens = config.global_batch_size * model.sequence_length
    batch = (
        f"{plural(config.global_batch_size, 'sequence')} in {config.num_microbatches} microbatches "
        f"of {config.batch.microbatch_size} on each of {config.parallel.dp} dp ranks"
    )
    layers = plural(model.num_layers, "layer")
    lines = [
        f"ranks      {plural(layout.world_size, 'process', 'processes')}, {layout.describe()}",
        f"model      {plural(model.num_parameters, 'parameter')}, {layers}",
        f"step       {plural(tokens, 'token')}: {batch}",
        f"schedule   {_describe_schedule(config)}",
        "",
        align(_stage_rows(config)),
        align(_memory_rows(config, target)).rstrip(),
    ]
    if target is not None:
        lines += ["", _describe_fit(config, target)]
    if config.parallel.tp > 1 and not isinstance(model, TimedModelConfig):
        lines += ["", align(_tensor_parallel_rows(config)).rstrip()]
    return "\n".join(lines)


def _describe_fit(config: "TrainConfig", target: "TargetDevice") -> str:
    from meshscope.core.config.device_fit import estimate_fit
    from meshscope.report.format import memory, ratio

    fit = estimate_fit(config, target)
    worst = fit.estimate.worst
    how = "hardly fits: context and libraries need room, too" if fit.is_tight else "fits"
    return (
        f"device     {target.label}, {memory(target.memory_bytes)}: {how}; pp rank {worst.pp_rank} "
        f"needs about {memory(worst.total_bytes)}, {ratio(fit.ratio)} of it"
    )


def _tensor_parallel_rows(config: "TrainConfig") -> list[list[str]]:
    from meshscope.core.config.tensor_plan import list_tensor_plan

    rows = [["module", f"over tp {config.parallel.tp}", "on each rank"]]
    return rows + [
        [part.module, part.split, " × ".join(map(str, part.shape))]
        for part in list_tensor_plan(config)
    ]


def _describe_schedule(config: "TrainConfig") -> str:
    from meshscope.core.schedule_replay import replay_schedule
    from meshscope.report.format import ratio

    schedule = config.schedule
    if schedule.num_ranks == 1:
        return f"{schedule.name}, one pipeline rank: no bubble"
    costs, basis = _find_costs(config)
    replay = replay_schedule(schedule, costs)
    return (
        f"{schedule.name}, {schedule.num_stages} stages: bubble "
        f"{ratio(replay.bubble_of_total_ratio)} of a step, ranks idle "
        f"{ratio(replay.idle_of_makespan_ratio)} of the time, {basis}, transfers in no time"
    )


def _find_costs(config: "TrainConfig") -> tuple[Any, str]:
    from meshscope.core.config.model_config import split_layers
    from meshscope.core.config.timed_model_config import TimedModelConfig
    from meshscope.core.schedule import ActionKind
    from meshscope.core.schedule_replay import ActionCosts

    schedule, sizes = config.schedule, config.parallel.stage_sizes
    if isinstance(config.model, TimedModelConfig):
        return config.model.costs.for_schedule(schedule, sizes), "with the times of the model"
    ranges = split_layers(config.model.num_layers, schedule.num_stages, sizes)
    kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
    by_stage = {(kind, s): len(layers) for s, layers in enumerate(ranges) for kind in kinds}
    basis = "if each layer's forward, input and weight gradients take equally long"
    return ActionCosts(by_stage=by_stage), basis


def _stage_rows(config: "TrainConfig") -> list[list[str]]:
    from meshscope.core.config.memory_model import count_stage_parameters
    from meshscope.core.config.model_config import split_layers
    from meshscope.report.format import count

    schedule = config.schedule
    ranges = split_layers(config.model.num_layers, schedule.num_stages, config.parallel.stage_sizes)
    rows = [["stage", "pp rank", "layers", "parameters on each tp rank"]]
    for stage, number in enumerate(count_stage_parameters(config)):
        layers = ranges[stage]
        rows.append(
            [
                str(stage),
                str(schedule.rank_of(stage)),
                f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start),
                count(number),
            ]
        )
    return rows


def _memory_rows(config: "TrainConfig", target: "TargetDevice | None") -> list[list[str]]:
    from meshscope.core.config.memory_model import estimate_memory
    from meshscope.report.format import memory

    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "communication")
    device_type = _find_device(config, None)[0] if target is None else target.device_type
    estimate = estimate_memory(config, device_type=device_type)
    rows = [["pp rank", *parts, "total, estimated"]]
    for rank in estimate.ranks:
        sizes = [getattr(rank, f"{part}_bytes") for part in parts]
        mark = " (most)" if rank is estimate.worst and len(estimate.ranks) > 1 else ""
        rows.append([str(rank.pp_rank), *map(memory, sizes), memory(rank.total_bytes) + mark])
    return rows


# --- running -------------------------------------------------------------------------------------


def train_rank(
    config: "TrainConfig", stop: "StopRequest", prediction: "Prediction | None" = None
) -> None:
    from meshscope.engine.launch.rendezvous import joined
    from meshscope.engine.worker import run_worker

    with joined(config.device, timeout_s=config.communication.timeout_s) as joined_rank:
        run_worker(config, device=joined_rank.device, stop=stop, prediction=prediction)


def _train_locally(config: "TrainConfig", prediction: "Prediction | None") -> int:
    from meshscope.engine.launch.local_ranks import LocalLaunch, run_local_ranks

    import_module("meshscope.engine.worker")  # once, before ranks are forked
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    config = _with_run_dir(config, name)
    run_dir = _run_dir(config)
    outcome = run_local_ranks(
        partial(train_rank, config, prediction=prediction),
        LocalLaunch(
            world_size=config.layout.world_size,
            run_dir=run_dir,
            run_id=f"{config.name}-{name}",
            label=config.layout.label,
            say=say,
            max_restarts=config.max_restarts,
        ),
    )
    if outcome.message is not None:
        say(outcome.message)
    _say_where(config, run_dir)
    if config.recording.enabled and config.recording.profiling is not None:
        write_memory_pages(run_dir, say)
    return outcome.exit_code


def _train_as_one_rank(
    config: "TrainConfig", placement: "Placement", prediction: "Prediction | None"
) -> int:
    """Under a launcher: the rank that caused the end reports it in one line."""
    from meshscope.core.placement import launch_identity
    from meshscope.engine.launch.failures import (
        attempt_folder,
        explain,
        find_failure,
        is_consequence,
        write_failure,
    )
    from meshscope.engine.launch.rendezvous import joined, share_from_first
    from meshscope.engine.launch.stop_request import StopRequest
    from meshscope.engine.worker import run_worker

    identity = launch_identity(os.environ)
    run_dir: Path | None = config.recording.run_dir
    with StopRequest.on_signals() as stop:
        try:
            with joined(config.device, timeout_s=config.communication.timeout_s) as joined_rank:
                name = share_from_first(_name_launch(identity.launch_id))
                config = _with_run_dir(config, name)
                run_dir = _run_dir(config)
                run_worker(config, device=joined_rank.device, stop=stop, prediction=prediction)
        except Exception as error:  # noqa: BLE001 - reported in one line, its traceback in a file
            failure = find_failure(error, placement.rank)
            if run_dir is not None:
                folder = attempt_folder(run_dir, identity.restart_count)
                failure = write_failure(folder, failure, error)
            if not is_consequence(error):
                say(explain([failure], label=config.layout.label))
            sys.last_value = error  # the recorder looks for it there
            return EXIT_RANK_FAILED
    if placement.rank == 0 and run_dir is not None:
        _say_where(config, run_dir)
    return 0


def _with_run_dir(config: "TrainConfig", name: str) -> "TrainConfig":
    """With the run directory, the same for every rank and restart."""
    if config.recording.run_dir is not None:
        return config
    launched = os.environ.get("MESHSCOPE_RUN_DIR")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", config.name) or "train"
    run_dir = Path(launched) if launched else Path("runs") / stem / name
    return replace(config, recording=replace(config.recording, run_dir=run_dir))


def _run_dir(config: "TrainConfig") -> Path:
    assert config.recording.run_dir is not None, "set before anything starts"
    return config.recording.run_dir


def _name_launch(launch_id: str | None) -> str:
    """The launcher's id; torchrun gives none by default, and then its process stands for it."""
    if launch_id is not None:
        return re.sub(r"[^A-Za-z0-9._-]", "_", launch_id)[:100]
    agent = os.getppid()
    try:
        stat = Path(f"/proc/{agent}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return f"launch-{agent}"
    return f"launch-{agent}-{stat.rpartition(')')[2].split()[19]}"


def _say_where(config: "TrainConfig", run_dir: Path) -> None:
    if config.recording.enabled and (run_dir / "run.json").exists():
        say(f"to see the run: meshscope report {shlex.quote(str(run_dir))}")
