"""`meshscope ls`: the runs below a folder, one line each."""

from pathlib import Path

import click

from meshscope.cli.options import engine_option
from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import show_document
from meshscope.core.unavailable import known
from meshscope.fleet.index import Index
from meshscope.fleet.summary import search
from meshscope.fleet.trend import add_regressions
from meshscope.report import format as form
from meshscope.report.listings import RUNS, Listing, RunsDocument
from meshscope.store.read.run_folders import find_runs
from meshscope.store.remote.mirror import name_place


@click.command("ls", short_help="List the runs below a folder.")
@click.argument("folder", type=READ, default=Path())
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option("--findings", is_flag=True, help="Also make reports: worst finding, MFU, energy.")
@click.option("--job", help="Only runs of this job: the folder above one named by a time.")
@click.option("--search", "text", help="Only runs with these words in path, state or finding.")
@click.option("--trend", is_flag=True, help="By job and start, each against the last good run.")
@click.option("--no-index", is_flag=True, help="Read every run again; keep nothing.")
@engine_option
def command(
    *,
    folder: Path,
    as_json: bool,
    findings: bool,
    job: str | None,
    text: str | None,
    trend: bool,
    no_index: bool,
) -> None:
    """Lists the runs at or below FOLDER (default: here): when, ranks, steps, pace, state.

    Ranks, steps and state are those of the last attempt; steps are counted on its first rank.
    GOODPUT is the share of the allocation, over all attempts, in steps that were not done again;
    RANK-H is the allocation of all ranks in hours. Lines of runs that ended are kept in an index.
    """
    paths = find_runs(folder)
    index = Index(folder, is_used=not no_index)
    listings = [index.describe(path, with_report=findings) for path in paths]
    index.save(paths)
    if job is not None:
        listings = [one for one in listings if one.job == job]
    if text is not None:
        listings = search(listings, text)
    if trend:
        listings = add_regressions(listings)
    if as_json:
        show_document(RUNS, RunsDocument(runs=tuple(listings)))
        return
    if not listings:
        place = form.clean_path(name_place(folder))
        what = "no run" if job is None and text is None else "no such run"
        click.echo(f"meshscope: {what} at or below {place}", err=True)
        return
    titles = ["RUN", "ID", "STARTED", "RANKS", "STEPS", "PACE", "GOODPUT", "RANK-H", "STATE"]
    titles += ["MFU", "ENERGY", "WORST"] if findings else []
    titles += ["AGAINST LAST GOOD"] if trend else []
    rows = [_row(one, with_report=findings, with_trend=trend) for one in listings]
    click.echo(form.align([titles, *rows]), nl=False)


def _row(listing: Listing, *, with_report: bool, with_trend: bool) -> list[str]:
    ranks = "n/a"
    if listing.num_ranks is not None and listing.world_size is not None:
        ranks = form.count(listing.num_ranks)
        if listing.num_ranks != listing.world_size:
            ranks += f"/{form.count(listing.world_size)}"
    goodput = known(listing.goodput)
    row = [
        form.clean_path(listing.path),
        form.clean_text(listing.run_id or "n/a", 16),
        "n/a" if listing.started_unix_ns is None else form.moment(listing.started_unix_ns),
        ranks,
        "n/a" if listing.num_steps is None else form.count(listing.num_steps),
        "n/a" if not listing.step_ns else f"{1e9 / listing.step_ns:.3g}/s",
        "n/a" if goodput is None else form.ratio(goodput.useful_ratio),
        "n/a" if goodput is None else f"{goodput.rank_ns / 3.6e12:.3g}",
        form.clean_text(listing.state),
    ]
    if with_report:
        report = known(listing.report)
        mfu = None if report is None else known(report.mfu_ratio)
        joules = None if report is None else known(report.joules)
        worst = "n/a" if report is None else report.worst or "-"
        row += [
            "n/a" if mfu is None else form.ratio(mfu),
            "n/a" if joules is None else form.energy(joules),
            form.clean_text(worst, 80),
        ]
    return [*row, _describe_trend(listing)] if with_trend else row


def _describe_trend(listing: Listing) -> str:
    found = known(listing.regression)
    if found is None:
        return "n/a"
    mark = " SLOWER" if found.is_slower else ""
    name = form.clean_text(Path(found.against).name, 40)
    return f"{found.slower_ratio:+.1%} ± {found.error_ratio:.1%} a step{mark} ({name})"
