"""`python -m meshscope.capture [options] -- command …`: the launcher without click and rich.

For cluster images where nothing can be installed: with the source folder on PYTHONPATH it needs
the standard library only. `meshscope run` is the same with a progress display and a report.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from meshscope.capture.launching.launch import Launch, prepare_launch, run_command
from meshscope.capture.launching.launch_outcome import describe_outcome, discard_empty_run
from meshscope.errors import MeshscopeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command recorded; its exit code."""
    options = _make_parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        launch = prepare_launch(
            command,
            os.environ,
            run_dir=options.run_dir,
            name=options.name,
            layout=options.layout,
        )
        return _run(launch)
    except MeshscopeError as error:
        _say(str(error))
        return error.exit_code


def _run(launch: Launch) -> int:
    for note in launch.notes:
        _say(note)
    try:
        exit_code = run_command(launch)
        for line in describe_outcome(launch, exit_code):
            _say(line)
    finally:
        discard_empty_run(launch)
    return exit_code


def _say(text: str) -> None:
    sys.stderr.write(f"meshscope: {text}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshscope.capture",
        description="Runs a command and records every process below it that trains with torch.",
    )
    parser.add_argument("-o", "--run-dir", help="where to record; an existing run gets an attempt")
    parser.add_argument("--name", help="name of the run (default: the script's)")
    parser.add_argument("--layout", help="the mesh, such as dp=4,tp=2")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
