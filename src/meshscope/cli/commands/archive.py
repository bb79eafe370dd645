"""`meshscope archive`: copies a run to other storage, with checksums."""

from pathlib import Path

import click

from meshscope.cli.locate import locate_run
from meshscope.cli.places import LOCAL
from meshscope.cli.terminal_screen import say, tell_work
from meshscope.core.byte_text import parse_bytes
from meshscope.core.unit_text import memory, plural
from meshscope.errors import RunNotFound, UsageError
from meshscope.store.remote.storage import is_url
from meshscope.store.remote.upload import Uploader


@click.command("archive", short_help="Copy a run to other storage, checked.")
@click.argument("run", type=LOCAL)
@click.argument("url")
@click.option("--max-rate", metavar="SIZE", help="Bytes a second at most, such as 50MB.")
@click.option("--no-verify", is_flag=True, help="Do not read back what was sent.")
def command(*, run: Path, url: str, max_rate: str | None, no_verify: bool) -> None:
    """Copies RUN to URL, such as s3://bucket/runs/a; every command reads it from there.

    Only what is not there yet is sent: an archive that was cut off goes on where it was, and one of
    a run that is still recorded gets what is new. Then all of it is read back and compared with its
    checksums. Exit codes: 0 fine, 2 usage, 3 the run cannot be read or the storage not written.
    """
    uploader = make_uploader(run, url, max_rate)
    with tell_work("copying"):
        done = uploader.send(is_final=True)
    say(
        f"{url}: {plural(done.num_files, 'file')}, {memory(done.total_bytes)}; "
        f"sent {memory(done.sent_bytes)} in {plural(done.num_sent, 'chunk')}"
    )
    if not no_verify:
        with tell_work("reading it back"):
            num_bytes = uploader.verify()
        say(f"{url}: {memory(num_bytes)} read back, all checksums match")


def make_uploader(run: Path, url: str, max_rate: str | None) -> Uploader:
    """Of the run that a path means. Raises UsageError, RunNotFound and StorageError."""
    if not is_url(url):
        raise UsageError(f"{url!r} is no URL; expected one such as s3://bucket/runs/a")
    rate = None if max_rate is None else parse_bytes(max_rate, "--max-rate")
    directory = locate_run(run)
    if not directory.is_dir():
        raise RunNotFound(f"{directory} is not there; give the directory of a recorded run")
    return Uploader(directory, url, bytes_per_s=rate)
