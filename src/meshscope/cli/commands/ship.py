"""`meshscope ship`: copies a run to other storage while it is recorded."""

import signal
import time
from pathlib import Path
from types import FrameType

import click

from meshscope.cli.commands.archive import make_uploader
from meshscope.cli.places import LOCAL
from meshscope.cli.terminal_screen import say
from meshscope.core.unit_text import memory, plural
from meshscope.errors import RunError, StorageError
from meshscope.store.read.run import open_run
from meshscope.store.remote.upload import Passed, Uploader

_LONGEST_PAUSE_S = 60.0
_LAST_TRIES = 5


@click.command("ship", short_help="Copy a run to other storage while it is recorded.")
@click.argument("run", type=LOCAL)
@click.argument("url")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="Seconds between two copies.",
)
@click.option("--max-rate", metavar="SIZE", help="Bytes a second at most, such as 50MB.")
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="End when every rank wrote its end and nothing was new for so many seconds.",
)
def command(*, run: Path, url: str, every_s: float, max_rate: str | None, idle_s: float) -> None:
    """Copies RUN to URL until it is over; SIGTERM or Ctrl-C copy once more and end.

    It only reads the run, and needs nothing but the two places: it may be ended and started at any
    time. Storage that does not answer is tried again, and nothing is lost meanwhile. Exit codes: 0
    all is there, 2 usage, 3 the run or the storage cannot be used.
    """
    shipping = _Shipping(run, make_uploader(run, url, max_rate), every_s=every_s, idle_s=idle_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, shipping.stop)
    done = shipping.follow()
    say(f"{url}: {plural(done.num_files, 'file')}, {memory(done.total_bytes)}, all there")


class _Shipping:
    def __init__(self, run: Path, uploader: Uploader, *, every_s: float, idle_s: float) -> None:
        self._run = run
        self._uploader = uploader
        self._every_s = every_s
        self._idle_s = idle_s
        self._is_over = uploader.is_over

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over.is_set():
            raise KeyboardInterrupt  # asked twice: at once
        self._is_over.set()

    def follow(self) -> Passed:
        news_at = time.monotonic()
        pause_s = self._every_s
        while not self._is_over.is_set():
            try:
                done = self._uploader.send(is_final=False)
                pause_s = self._every_s
                if done.num_sent:
                    news_at = time.monotonic()
                elif time.monotonic() - news_at >= self._idle_s and self._has_ended():
                    break
            except (StorageError, OSError) as error:
                if pause_s <= self._every_s:
                    say(f"{error}; trying again")
                pause_s = min(max(2 * pause_s, 1.0), max(_LONGEST_PAUSE_S, self._every_s))
            self._is_over.wait(pause_s)
        return self._send_last()

    def _send_last(self) -> Passed:
        for tries_left in reversed(range(_LAST_TRIES)):
            try:
                return self._uploader.send(is_final=True)
            except (StorageError, OSError) as error:
                if not tries_left:
                    raise StorageError(
                        f"{error}; the rest is sent by `meshscope archive` with the same two places"
                    ) from error
                time.sleep(2.0 ** (_LAST_TRIES - tries_left) / 2)
        raise AssertionError

    def _has_ended(self) -> bool:
        try:
            return all(rank.closing is not None for rank in open_run(self._run).last_attempt)
        except RunError:
            return False
