"""`meshscope compact`: turns a finished run into Parquet files."""

from pathlib import Path

import click

from meshscope.cli.locate import locate_run
from meshscope.cli.places import LOCAL
from meshscope.store.read.compact import compact_run
from meshscope.store.read.parquet import COMPACT_DIR


@click.command("compact", short_help="Turn a finished run into Parquet files.")
@click.argument("run", type=LOCAL)
@click.option(
    "--remove-raw",
    is_flag=True,
    help="Remove the ranks' own table files once the Parquet files have been read back and "
    "compared. Damaged files are kept.",
)
@click.option(
    "--include-unfinished",
    is_flag=True,
    help="Also take recordings that may still be written; later records are not included.",
)
def command(*, run: Path, remove_raw: bool, include_unfinished: bool) -> None:
    """Writes one Parquet file per table into RUN/compact. Reports read the run as before."""
    directory = locate_run(run)
    done = compact_run(directory, remove_raw=remove_raw, include_unfinished=include_unfinished)
    num_rows = sum(done.num_rows.values())
    click.echo(
        f"{done.num_recordings} recordings, {num_rows:,} rows, {done.compact_bytes:,} bytes "
        f"in {directory / COMPACT_DIR}"
    )
    if remove_raw:
        click.echo(f"removed {done.removed_bytes:,} bytes of table files")
    if done.kept_raw:
        click.echo(f"kept {len(done.kept_raw)} damaged table files, the first: {done.kept_raw[0]}")
    if done.skipped:
        ranks = ", ".join(str(rank) for rank, _ in done.skipped[:8])
        more = " …" if len(done.skipped) > 8 else ""
        click.echo(
            f"left out {len(done.skipped)} recordings that may still be written "
            f"(ranks {ranks}{more}); --include-unfinished includes them"
        )
