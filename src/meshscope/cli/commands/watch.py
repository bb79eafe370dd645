"""`meshscope watch`: follows a run in the terminal, in lines, or headless with alarms."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshscope.cli import is_color_wanted
from meshscope.cli.locate import locate_run
from meshscope.cli.places import READ
from meshscope.errors import UsageError

if TYPE_CHECKING:
    from meshscope.watch.watched import Watched

_LINE_S = 10.0
_FLAGS = {
    "webhook": ("webhook", "url"),
    "slack": ("slack", "url"),
    "on_finding": ("on_finding", "command"),
    "prometheus": ("prometheus", "port"),
    "otlp": ("otel", "endpoint"),
    "tensorboard": ("tensorboard", "folder"),
    "wandb": ("wandb", "project"),
    "mlflow": ("mlflow", "uri"),
    "trace_steps": ("trace", "steps"),
}
"""Flag to the table and key of the settings that it stands for."""


@click.command("watch", short_help="Follow a run in the terminal, or send alarms about it.")
@click.argument("run", type=READ)
@click.option("--once", is_flag=True, help="Write one line and end; headless: look twice and end.")
@click.option(
    "--plain",
    is_flag=True,
    help="Write a line every 10 s instead of drawing; so it is without a terminal.",
)
@click.option("--headless", is_flag=True, help="Diagnose while it runs; send alarms to sinks.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Headless: a TOML file with thresholds, cool-downs and sinks.",
)
@click.option("--json", "as_json", is_flag=True, help="Headless: write every event as JSON.")
@click.option("--on-finding", metavar="CMD", help="Headless: run CMD with each event on stdin.")
@click.option("--webhook", metavar="URL", help="Headless: POST every event as JSON.")
@click.option("--slack", metavar="URL", help="Headless: POST messages that Slack takes.")
@click.option(
    "--prometheus",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Headless: serve /metrics on 127.0.0.1.",
)
@click.option("--otlp", metavar="URL", help="Headless: send metrics by OTLP over HTTP.")
@click.option("--tensorboard", metavar="DIR", help="Headless: write scalars to an event file.")
@click.option("--wandb", metavar="PROJECT", help="Headless: log to Weights & Biases.")
@click.option("--mlflow", metavar="URI", help="Headless: log to an MLflow tracking server.")
@click.option(
    "--trace-steps",
    type=click.IntRange(0, 1000),
    metavar="N",
    help="Headless: ask the culprits for a trace of N steps when a high alarm is raised.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    run: Path,
    once: bool,
    plain: bool,
    headless: bool,
    config: Path | None,
    as_json: bool,
    **flags: object,
) -> None:
    """Follows RUN while it is recorded: state, verdict, where a step goes, slow ranks.

    It only reads files, so it works over ssh and beside the job. On a terminal it draws a screen
    (q ends it, ? lists the keys); otherwise it writes a line every 10 s until the run is over.
    With --headless it diagnoses the last steps again and again and tells what begins and ends.
    """
    path = locate_run(run)
    given = {name: value for name, value in flags.items() if value is not None}
    if headless:
        _watch_headless(path, config, given, as_json=as_json, once=once)
        return
    if given or config is not None or as_json:
        first = next(iter(given), "config" if config is not None else "json")
        raise UsageError(f"--{first.replace('_', '-')} is for watching without a screen; "
                         "add --headless")  # fmt: skip
    from meshscope.watch.watched import Watched

    watched = Watched.of(path)
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if once or plain or not is_screen:
        _write_lines(watched, once=once)
        return
    if not is_color_wanted(context):
        os.environ["NO_COLOR"] = "1"  # what Textual looks at
    from meshscope.watch.app import WatchApp

    watched.poll()  # a path that is no run is told before the screen is taken
    app = WatchApp(watched)
    app.run()
    if app.error is not None:
        raise app.error


def _watch_headless(
    path: Path, config: Path | None, given: dict[str, object], *, as_json: bool, once: bool
) -> None:
    from meshscope.alarms.headless import watch_headless
    from meshscope.alarms.settings import read_settings

    tables: dict[str, dict[str, object]] = {}
    for name, value in given.items():
        table, key = _FLAGS[name]
        tables.setdefault(table, {})[key] = value

    def write(line: str) -> None:
        click.echo(line)
        sys.stdout.flush()

    def warn(line: str) -> None:
        click.echo(f"meshscope: {line}", err=True)

    settings = read_settings(config, tables)
    watch_headless(path, settings, write=write, warn=warn, as_json=as_json, once=once)


def _write_lines(watched: "Watched", *, once: bool) -> None:
    from meshscope.watch.plain import write_line

    is_first = True
    while True:
        watched.poll()
        moment = watched.moment
        is_over = moment is not None and moment.is_over
        if moment is not None:
            watched.analyze(now=once or is_first or is_over)
        click.echo(write_line(watched))
        if once or is_over:
            return
        is_first = False
        time.sleep(_LINE_S)
