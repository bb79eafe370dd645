"""Deletes runs by rule: never one that may still go on, and nothing that is not a run's own.

A run may go on if a rank wrote no end and any of its files changed lately (a day, unless told
otherwise), if its process lives on this machine, or if it failed minutes ago: a launcher may be
about to start it again. It is looked at again right before it is deleted. Other files in a run's
folder stay, and the folder with them.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import RunError
from meshscope.hang.processes import Life, look_at_process, this_machine
from meshscope.report.listings import Listing
from meshscope.store.read.run import open_run
from meshscope.store.read.tail import list_ranks
from meshscope.store.write.writer import MANIFEST_NAME, rank_dir_name

_RESTART_S = 600.0
_OWN_NAMES = frozenset((MANIFEST_NAME, "trigger", "traces", "memory", "stacks", "compact"))
_OWN = re.compile(r"\.?rank\d{5,}(\..*)?|\.trigger\..*|.*\.meshscope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which runs go: those to which all given parts apply."""

    older_than_s: float | None = None
    """Since their last sign of life."""
    states: tuple[str, ...] = ()
    """Beginnings of states or words in them: `finished`, `failed`, `killed`."""
    job: str | None = None
    keep_last: int = 0
    """Of each job, the newest so many stay."""
    idle_s: float = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rule says of a run that it applies to."""

    listing: Listing
    path: Path
    kept_why: str
    """Why it stays all the same; empty where it goes."""


def judge(runs: Sequence[tuple[Path, Listing]], rule: Rule) -> list[Verdict]:
    """Runs that the rule applies to, oldest first."""
    newest: dict[str | None, list[Path]] = {}
    for path, listing in sorted(runs, key=lambda one: -(one[1].started_unix_ns or 0)):
        newest.setdefault(listing.job, []).append(path)
    safe = {path for paths in newest.values() for path in paths[: rule.keep_last]}
    found = []
    for path, listing in sorted(runs, key=lambda one: one[1].started_unix_ns or 0):
        if path not in safe and _applies(listing, rule):
            why = explain_keeping(path, rule.idle_s)
            found.append(Verdict(listing=listing, path=path, kept_why=why))
    return found


def _applies(listing: Listing, rule: Rule) -> bool:
    if rule.job is not None and listing.job != rule.job:
        return False
    if rule.states and not any(_has_state(listing, state) for state in rule.states):
        return False
    last = listing.last_sign_unix_ns or listing.started_unix_ns
    if rule.older_than_s is None:
        return True
    return last is not None and time.time_ns() - last > rule.older_than_s * 1e9


def _has_state(listing: Listing, state: str) -> bool:
    if state == "failed":
        return "ended with" in listing.state
    if state == "killed":
        return listing.is_open
    return listing.state.startswith(state)


def explain_keeping(path: Path, idle_s: float) -> str:
    """Why a run must not be deleted; empty where it may be."""
    if path.is_symlink():
        return "it is a link"
    try:
        attempt = open_run(path).last_attempt
    except RunError as error:
        return f"it cannot be read: {error}"
    age_s = (time.time_ns() - max(_list_times(path), default=0)) / 1e9
    opened = [one for one in attempt if one.closing is None]
    if not opened:
        if any(one.exception is not None for one in attempt) and age_s < _RESTART_S:
            return f"it failed {age_s / 60:.1f} min ago: it may be started again"
        return ""
    here = this_machine()
    for one in opened:
        process = look_at_process(one.header, here)
        if process.life is not Life.UNKNOWN and not process.is_gone:
            return f"process {process.pid} of rank {one.rank} lives"
    if age_s < idle_s:
        return f"a rank wrote no end and a file changed {age_s / 3600:.1f} h ago: it may go on"
    return ""


def _list_times(path: Path) -> Iterator[int]:
    for rank in list_ranks(path):
        for folder, _, names in os.walk(path / rank_dir_name(rank)):
            for name in names:
                try:
                    yield os.lstat(os.path.join(folder, name)).st_mtime_ns
                except OSError:
                    continue


def delete_run(path: Path, idle_s: float) -> str:
    """Deletes a run; what stays and why, empty where nothing does."""
    why = explain_keeping(path, idle_s)
    if why:
        return f"kept: {why}"
    names = sorted(os.listdir(path))
    own = [name for name in names if name in _OWN_NAMES or _OWN.fullmatch(name)]
    # The manifest goes last: half of a run is still seen as one.
    for name in sorted(own, key=lambda name: name == MANIFEST_NAME):
        target = path / name
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
        except OSError as error:
            return f"{target} cannot be deleted: {error.strerror}"
    left = sorted(set(names) - set(own))
    if left:
        return f"its folder stays: {len(left)} other files are in it ({left[0]})"
    path.rmdir()
    return ""
