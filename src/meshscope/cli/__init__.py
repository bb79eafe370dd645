"""The command line: the list of commands, and the one place where errors become exit codes.

Commands are loaded when they are called, so `meshscope --help` imports neither numpy nor duckdb
nor torch.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NoReturn

import click

from meshscope import __version__
from meshscope.errors import MeshscopeError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("jobs.run", "Run a training command and record every rank."),
    "train": ("jobs.train", "Train a model from a TOML file, in 3D, and record it."),
    "plan": ("commands.plan", "Find the best layout for a model on a cluster."),
    "report": ("commands.report", "Explain a recorded run."),
    "rules": ("commands.rules", "List the rules of the diagnosis."),
    "schedule": ("commands.schedule", "Search a pipeline schedule for given or recorded times."),
    "simulate": ("commands.simulate", "Replay a run with other durations."),
    "trace": ("commands.traces", "Explain traces of torch.profiler."),
    "import": ("commands.trace_import", "Turn traces of torch.profiler into a run."),
    "memory": ("commands.memory", "Show what the memory of ranks was used for."),
    "snapshot": ("commands.snapshot", "Explain a memory snapshot of torch.cuda."),
    "trigger": (
        "jobs.trigger",
        "Ask a running job for a trace of its next steps.",
    ),
    "compare": (
        "commands.compare",
        "Compare two runs: step time, budget, loss, settings.",
    ),
    "hang": ("commands.hang", "Name the rank that a stuck or dead job waits for."),
    "serve": ("commands.serve", "Show the runs below folders in a browser, live."),
    "watch": ("commands.watch", "Follow a run in the terminal."),
    "ls": ("commands.ls", "List the runs below a folder."),
    "expire": ("commands.expire", "Delete runs by rule; says what it would do by default."),
    "sql": ("commands.sql", "Run a SQL query on a run."),
    "export": ("commands.export", "Write a run for other tools: Perfetto, CSV, Parquet."),
    "archive": ("commands.archive", "Copy a run to other storage, checked, and again what is new."),
    "ship": ("commands.ship", "Copy a run to other storage while it is recorded."),
    "compact": ("commands.compact", "Turn a finished run into Parquet files."),
    "doctor": ("commands.doctor", "Say what is installed and what would be recorded here."),
    "glossary": ("commands.glossary", "Explain the words and clocks on the screens."),
}
"""Name to the module below `cli` that holds `command`, and the line that --help shows."""

_STAYING = frozenset(("run", "train", "trigger", "serve", "watch", "ship"))
"""Commands that run until something else ends, or say themselves what they do."""
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
_EXIT_MISSING_PACKAGE = 4

_EXIT_CODES = """\b
Exit codes:
  0    success
  1    with --strict: the recording has problems; from doctor: recording or reading cannot work
  2    a flag, argument or setting is wrong
  3    the run cannot be read
  4    an optional package is missing
  5    only from hang: the job hangs, or a rank died
  6    only from train: a rank failed
  7    only with --fail-on: report has such a finding, or compare finds B that slow
  130  interrupted
`meshscope run` returns the exit code of the command it ran."""

_PACKAGES = {
    "torch": "meshscope[torch]",
    "duckdb": "duckdb",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "rich": "rich",
    "textual": "textual",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "backports": "backports.zstd",
    "opentelemetry": "meshscope[otel]",
    "tensorboard": "meshscope[tensorboard]",
    "wandb": "meshscope[wandb]",
    "mlflow": "meshscope[mlflow]",
    "s3fs": "meshscope[s3]",
    "gcsfs": "meshscope[gs]",
    "ray": "meshscope[ray]",
    "distributed": "meshscope[dask]",
}
"""Packages a command may find missing, and what to install for them."""


class CommandLine(click.Group):
    """Imports commands when they are called and turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = import_module(f"meshscope.cli.{entry[0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a closed pipe is not reported as an error."""
        try:
            with self._tell(ctx):
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes stdout once more at exit and must not fail there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_EXIT_BROKEN_PIPE)
        return result

    def _tell(self, ctx: click.Context) -> AbstractContextManager[None]:
        """A command that takes longer than two seconds says that it is at work."""
        if not ctx._protected_args or ctx._protected_args[0] in _STAYING:
            return nullcontext()
        from meshscope.cli.terminal_screen import tell_work

        return tell_work("reading")

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001 - click's signature
        **extra: Any,
    ) -> Any:
        """Runs the command line and exits; with `standalone_mode=False` errors are raised."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(_EXIT_INTERRUPTED)
        except MeshscopeError as error:
            _fail(str(error), error.exit_code)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _PACKAGES:
                raise
            _fail(
                f"this command needs {package}, which is not installed; "
                f"pip install '{_PACKAGES[package]}'",
                _EXIT_MISSING_PACKAGE,
            )
        sys.exit(result if isinstance(result, int) else 0)


def _fail(text: str, exit_code: int) -> NoReturn:
    """Writes one line to stderr, whatever the text contains."""
    from meshscope.store.remote.mirror import name_places  # errors are rare

    click.echo(f"meshscope: {plain(name_places(text))}", err=True)
    sys.exit(exit_code)


def plain(text: str) -> str:
    """One line without what acts on a terminal: errors and names may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text)


def is_color_wanted(context: click.Context) -> bool:
    """Whether to write colours to stdout: --no-color, NO_COLOR, FORCE_COLOR, then the terminal."""
    env = os.environ
    if context.find_root().params.get("no_color") or env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR"):
        return env["FORCE_COLOR"] != "0"
    return sys.stdout.isatty() and env.get("TERM") != "dumb"


@click.group(
    cls=CommandLine,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="meshscope")
@click.option("--no-color", is_flag=True, help="Write no colours (NO_COLOR does the same).")
def main(*, no_color: bool) -> None:
    """Records, explains and diagnoses distributed training, on every rank of the mesh.

    \b
        meshscope run -- torchrun --nproc-per-node 8 train.py
        meshscope report runs/train/…
    """
