"""`meshscope run`: runs a command with every training process below it recorded.

It starts before every training, on every node: what a launch may not need is imported late.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from meshscope.capture.launching.launch import Launch, prepare_launch, run_command
from meshscope.capture.launching.launch_outcome import (
    describe_outcome,
    discard_empty_run,
    find_recording_ranks,
)
from meshscope.cli.jobs.profiling_options import profiling_options, profiling_text
from meshscope.cli.options import flops_options
from meshscope.cli.terminal_screen import say
from meshscope.core.byte_text import parse_bytes
from meshscope.core.config.given_flops import check_given
from meshscope.errors import MeshscopeError

_NO_CONTROL = ("dumb", "unknown")
"""Terminals by their TERM that have no rows to go back to."""


@click.command(
    "run",
    short_help="Run a command and record it.",
    # Options end at the first word of the command: what follows is the command's own.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to record; an existing run gets another attempt. "
    "[default: runs/<script>/<time>-<id>]",
)
@click.option("--layout", help="The mesh, such as dp=4,tp=2; recorded by every rank.")
@click.option("--name", help="Name of the run.  [default: the script's]")
@click.option(
    "--total-steps", type=click.IntRange(min=1), help="Steps of the job, to show the time left."
)
@click.option("--no-progress", is_flag=True, help="Show no progress while it runs.")
@click.option(
    "--report/--no-report", default=False, show_default=True, help="Print the report at the end."
)
@click.option(
    "--ship",
    "ship_url",
    metavar="URL",
    help="Copy the run to this storage while it is recorded, such as s3://bucket/run "
    "(meshscope ship; docs/storage.md).",
)
@click.option("--ship-rate", metavar="SIZE", help="Bytes a second of --ship at most.")
@click.option(
    "--max-disk",
    metavar="SIZE",
    help="What all ranks of the job may write together, such as 200GB; old operations are thinned "
    "to keep within it (docs/store.md).",
)
@profiling_options
@flops_options
@click.option(
    "--off",
    metavar="NAMES",
    help="Settings of the recorder to turn off, such as stack_samples,memory (docs/recorder.md).",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.pass_context
def command(
    context: click.Context,
    *,
    run_dir: Path | None,
    layout: str | None,
    name: str | None,
    total_steps: int | None,
    no_progress: bool,
    report: bool,
    ship_url: str | None,
    ship_rate: str | None,
    max_disk: str | None,
    profiling: bool,
    trace_windows: str | None,
    flops_per_step: str | None,
    peak_tflops: str | None,
    off: str | None,
    command: tuple[str, ...],
) -> None:
    """Runs COMMAND and records every process below it that trains with torch.

    The program needs no change: torchrun, accelerate, deepspeed, a shell script or python all
    work. A COMMAND that starts with a .py file is run with this Python. Exits with the command's
    own exit code (128 + signal if a signal ended it).

    \b
        meshscope run -- torchrun --nproc-per-node 8 train.py --steps 1000
        meshscope run --layout dp=4,tp=2 -o runs/tp2 -- torchrun --nproc-per-node 8 train.py
        meshscope run --profiling -- torchrun --nproc-per-node 8 train.py
    """
    launch = prepare_launch(
        command,
        os.environ,
        run_dir=run_dir,
        name=name,
        layout=layout,
        profiling=profiling_text(is_wanted=profiling, text=trace_windows),
        off=off,
        flops=check_given(flops_per_step, peak_tflops),
        max_disk_bytes=None if max_disk is None else parse_bytes(max_disk, "--max-disk"),
    )
    for note in launch.notes:
        say(note)
    try:
        with _shipped(launch.run_dir, ship_url, ship_rate):
            exit_code = _run(launch, total_steps=total_steps, shows_progress=not no_progress)
        for line in describe_outcome(launch, exit_code):
            say(line)
        if profiling or trace_windows:
            from meshscope.cli.jobs.memory_pages import write_memory_pages

            write_memory_pages(launch.run_dir, say)
        if report and find_recording_ranks(launch):
            _print_report(context, launch.run_dir)
    finally:
        discard_empty_run(launch)
    context.exit(exit_code)


def _run(launch: Launch, *, total_steps: int | None, shows_progress: bool) -> int:
    if not shows_progress:
        return run_command(launch)
    from meshscope.cli.jobs.progress import PlainProgress, StatusLine
    from meshscope.store.read.tail import RunTail

    is_interactive = sys.stderr.isatty() and os.environ.get("TERM") not in _NO_CONTROL
    kind = StatusLine if is_interactive else PlainProgress
    with kind(RunTail(launch.run_dir), sys.stderr, total_steps) as progress:
        return run_command(launch, on_tick=progress.update, tick_s=progress.tick_s)


@contextmanager
def _shipped(run_dir: Path, url: str | None, rate: str | None) -> Iterator[None]:
    """`meshscope ship` beside the command, in a process of its own; what is new at the end is sent
    before it ends, by another one where that was killed."""
    if url is None:
        yield
        return
    import signal
    import subprocess

    run_dir.mkdir(parents=True, exist_ok=True)
    meshscope = [sys.executable, "-m", "meshscope"]
    places = [str(run_dir.absolute()), url, *(["--max-rate", rate] if rate is not None else [])]
    # Signals that end the command are not meant for it: it sends what the command wrote last.
    shipping = subprocess.Popen(
        [*meshscope, "ship", *places, "--idle", "31536000"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        shipping.send_signal(signal.SIGTERM)
        was_killed = shipping.wait() < 0
        rest = [*meshscope, "archive", *places, "--no-verify"]
        if was_killed:
            was_killed = subprocess.run(rest, stdin=subprocess.DEVNULL, check=False).returncode != 0
        if was_killed or shipping.returncode > 0:
            say(f"not all of the run is at {url}; send the rest: meshscope archive {run_dir} {url}")


def _print_report(context: click.Context, run_dir: Path) -> None:
    """Prints the report; its exit code is ignored."""
    try:
        report: click.Command = importlib.import_module("meshscope.cli.commands.report").command
        report.main([str(run_dir)], "report", standalone_mode=False, parent=context.parent)
    except (MeshscopeError, ModuleNotFoundError) as error:
        say(f"no report: {error}")
