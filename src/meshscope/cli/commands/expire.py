"""`meshscope expire`: deletes runs by rule, or says what it would delete."""

import re
from pathlib import Path

import click

from meshscope.cli.places import LOCAL
from meshscope.errors import UsageError
from meshscope.fleet.expiry import Rule, delete_run, judge
from meshscope.fleet.index import Index
from meshscope.report import format as form
from meshscope.store.read.run_folders import find_runs

_UNITS = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([hdw])")


@click.command("expire", short_help="Delete runs by rule; says what it would do by default.")
@click.argument("folder", type=LOCAL)
@click.option("--older-than", metavar="AGE", help="Since the last sign of life: 12h, 30d, 8w.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["finished", "failed", "interrupted", "killed"]),
    help="Only runs that ended so; may be given more than once.",
)
@click.option("--job", help="Only runs of this job.")
@click.option(
    "--keep-last", type=click.IntRange(min=0), default=0, help="Keep the newest N of each job."
)
@click.option(
    "--idle",
    metavar="AGE",
    default="24h",
    show_default=True,
    help="A run without an end is live unless its files are older than this.",
)
@click.option("--delete", is_flag=True, help="Delete them. Without it nothing is changed.")
def command(
    *,
    folder: Path,
    older_than: str | None,
    states: tuple[str, ...],
    job: str | None,
    keep_last: int,
    idle: str,
    delete: bool,
) -> None:
    """Lists the runs below FOLDER that a rule applies to; with --delete they are deleted.

    A run that may still go on is never deleted, nor are files that are not its own.

    \b
        meshscope expire runs --older-than 30d --keep-last 3
        meshscope expire runs --older-than 7d --state failed --delete
    """
    if older_than is None and not states:
        raise UsageError("give --older-than or --state: a rule that says which runs go")
    rule = Rule(
        older_than_s=None if older_than is None else _read_age(older_than, "--older-than"),
        states=states,
        job=job,
        keep_last=keep_last,
        idle_s=_read_age(idle, "--idle"),
    )
    paths = find_runs(folder)
    index = Index(folder)
    runs = [(path, index.describe(path, with_report=False)) for path in paths]
    index.save(paths)
    verdicts = judge(runs, rule)
    for one in verdicts:
        name = form.clean_path(str(one.path))
        if one.kept_why:
            click.echo(f"keep    {name}  {form.clean_text(one.kept_why)}")
        elif delete:
            left = delete_run(one.path, rule.idle_s)
            click.echo(f"deleted {name}" if not left else f"partly  {name}  {left}")
        else:
            click.echo(f"delete  {name}  {form.clean_text(one.listing.state)}")
    num_going = sum(not one.kept_why for one in verdicts)
    what = "deleted" if delete else "would be deleted; add --delete"
    click.echo(f"{form.plural(num_going, 'run')} of {len(paths)} {what}", err=True)


def _read_age(text: str, flag: str) -> float:
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{flag}: {text!r} is no age; give a number and h, d or w, such as 30d")
    return float(found[1]) * _UNITS[found[2]]
