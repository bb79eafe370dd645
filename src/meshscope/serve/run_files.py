"""What the files of a run tell unread: whether they changed, whether they are its own."""

import os
from collections.abc import Sequence
from pathlib import Path

from meshscope.ingest.kineto.trace_files import list_own_traces
from meshscope.store.read.files import sign_file
from meshscope.store.read.table_files import live_file
from meshscope.store.read.tail import list_attempts, list_ranks
from meshscope.store.write.journal import JOURNAL_NAME
from meshscope.store.write.writer import MANIFEST_NAME, attempt_dir_name, rank_dir_name

_MAX_DEPTH = 3
"""A run, its ranks, their attempts."""
_MAX_ENTRIES = 1_000_000


def sign_run(path: Path) -> tuple[tuple[int, int], ...]:
    """Changes when a rank records on, ends or is started again; when a trace is other or new."""
    found = [sign_file(path / MANIFEST_NAME)]
    for rank in list_ranks(path):
        folder = path / rank_dir_name(rank)
        for attempt in list_attempts(folder)[-1:]:
            files = folder / attempt_dir_name(attempt)
            found += [sign_file(files / JOURNAL_NAME), sign_file(live_file(files, "steps"))]
    if len(found) == 1:  # traces have no ranks
        found += map(sign_file, list_own_traces(path))
    return tuple(found)


def find_way_out(run: Path, roots: Sequence[Path]) -> Path | None:
    """A link in a run's folder that leads out of all served folders; None where there is none.

    Runs may come from others: a link could show what only the server's user may read.
    """
    allowed = [root.resolve() for root in roots]
    if not _is_below(run.resolve(), allowed):
        return run
    pending = [(run, 0)]
    num_entries = 0
    while pending:
        folder, depth = pending.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > _MAX_ENTRIES:
                        return None
                    here = folder / entry.name
                    if entry.is_symlink() and not _is_below(here.resolve(), allowed):
                        return here
                    if depth + 1 < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                        pending.append((here, depth + 1))
        except OSError:
            continue
    return None


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
