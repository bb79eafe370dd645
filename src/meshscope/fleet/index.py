"""Lines of runs that were read before, so that ten thousand runs are listed again in seconds.

Kept in the user's cache, one file for each folder that is listed. A line is used again if the run's
manifest and the files of its first and last rank have the size and time they had, and if the run
had ended then: one that goes on, or was killed within the last hour, is always read.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from meshscope import __version__
from meshscope.core.unavailable import Unavailable
from meshscope.fleet.summary import add_report, describe_run, is_running
from meshscope.report.goodput import Goodput
from meshscope.report.listings import ListedReport, Listing
from meshscope.store.read.files import sign_file
from meshscope.store.read.table_files import live_file
from meshscope.store.read.tail import list_attempts, list_ranks
from meshscope.store.remote.mirror import name_place
from meshscope.store.write.journal import JOURNAL_NAME
from meshscope.store.write.manifest import replace_whole
from meshscope.store.write.writer import MANIFEST_NAME, attempt_dir_name, rank_dir_name

_TEXTS = ("worst", "severity")
QUIET_NS = 3600 * 10**9
"""An open run that recorded nothing for so long is taken for killed."""


class Index:
    """The lines of one folder."""

    def __init__(self, folder: Path, *, is_used: bool = True) -> None:
        self._path = _choose_path(folder) if is_used else None
        self._kept: dict[str, dict[str, object]] = self._load()
        self._is_changed = False
        self.num_read = 0
        """Runs that were not in it."""

    def describe(self, path: Path, *, with_report: bool) -> Listing:
        key, signature = str(path.absolute()), sign(path)
        kept = self._kept.get(key)
        listing = None
        if kept is not None and kept.get("signature") == signature:
            listing = _restore(kept.get("line"))
        if listing is None:
            self.num_read += 1
            listing = describe_run(path, name_place(path))
        is_new = kept is None or kept.get("signature") != signature
        if with_report and isinstance(listing.report, Unavailable) and not _is_live(listing):
            listing, is_new = add_report(listing, path), True
        if is_new and not _is_live(listing):
            self._kept[key] = {"signature": signature, "line": _plain(listing)}
            self._is_changed = True
        return listing

    def save(self, seen: Iterable[Path]) -> None:
        """Forgets runs that are gone; an index that cannot be written is done without."""
        there = {str(path.absolute()) for path in seen}
        gone = self._kept.keys() - there
        for key in gone:
            del self._kept[key]
        if self._path is None or not (gone or self._is_changed):
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept = msgspec.msgpack.encode({"version": __version__, "runs": self._kept})
            replace_whole(self._path, kept)

    def _load(self) -> dict[str, dict[str, object]]:
        if self._path is None:
            return {}
        try:
            found = msgspec.msgpack.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        if not isinstance(found, dict) or found.get("version") != __version__:
            return {}
        runs = found.get("runs")
        return runs if isinstance(runs, dict) else {}


def sign(path: Path) -> list[int]:
    """Changes when a run is recorded on, ends or is started again."""
    try:
        ranks = list_ranks(path)
    except OSError:
        return []
    found = [len(ranks), *sign_file(path / MANIFEST_NAME)]
    for rank in dict.fromkeys((*ranks[:1], *ranks[-1:])):
        folder = path / rank_dir_name(rank)
        attempts = list_attempts(folder)
        found.append(len(attempts))
        for attempt in attempts[-1:]:
            files = folder / attempt_dir_name(attempt)
            found += [*sign_file(files / JOURNAL_NAME), *sign_file(live_file(files, "steps"))]
    return found


def _is_live(listing: Listing) -> bool:
    last = listing.last_sign_unix_ns
    is_recent = last is None or time.time_ns() - last < QUIET_NS
    return listing.is_open and (is_recent or is_running(listing.state))


def _plain(listing: Listing) -> dict[str, object]:
    plain = asdict(listing)
    for name in ("goodput", "report", "regression"):
        value = getattr(listing, name)
        if isinstance(value, Unavailable):
            plain[name] = value.reason
    report = plain["report"]
    if isinstance(report, dict) and not isinstance(listing.report, Unavailable):
        for name in ("saved_ratio", "mfu_ratio", "joules"):
            value = getattr(listing.report, name)
            report[name] = value.reason if isinstance(value, Unavailable) else value
    del plain["regression"]
    return plain


def _restore(line: object) -> Listing | None:
    """None for what another version wrote, or somebody changed."""
    if not isinstance(line, dict):
        return None
    fields = dict(line)
    goodput, report = fields.pop("goodput", ""), fields.pop("report", "")
    try:
        return Listing(
            **fields,
            goodput=Goodput(**goodput) if isinstance(goodput, dict) else Unavailable(str(goodput)),
            report=_restore_report(report),
        )
    except TypeError:
        return None


def _restore_report(report: object) -> ListedReport | Unavailable:
    if not isinstance(report, dict):
        return Unavailable(str(report))
    numbers: dict[str, Any] = {
        name: Unavailable(value) if isinstance(value, str) else value
        for name, value in report.items()
        if name not in _TEXTS
    }
    return ListedReport(worst=report.get("worst"), severity=report.get("severity"), **numbers)


def _choose_path(folder: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return Path(base) / "meshscope" / "fleet" / f"{key}.msgpack"
