"""A table that goes on in a new file when the one it is in is to be thinned.

    collectives.old.tbl      thinned
    collectives.sealed.tbl   complete and not yet thinned
    collectives.tbl          being written

Only `put` belongs to the training; everything else is called by the thread that thins. Standard
library only.
"""

import os
from pathlib import Path

from meshscope.store.table import Table
from meshscope.store.write.table_file import HEADER_BYTES, Put, TableWriter

OLD_SUFFIX = ".old.tbl"
SEALED_SUFFIX = ".sealed.tbl"


class SegmentedTable:
    """Stands for the `TableWriter` of the newest segment."""

    __slots__ = (
        "_current",
        "_fields",
        "_mapped",
        "_max_bytes",
        "_num_dropped",
        "_sealing",
        "segment",
    )

    def __init__(
        self,
        path: Path,
        table: Table,
        fields: dict[str, object],
        *,
        mapped: bool,
        max_detail_bytes: int,
    ) -> None:
        self._fields = fields
        self._mapped = mapped
        self._max_bytes = max_detail_bytes
        self.segment = 0
        self._num_dropped = 0
        self._current = self._open(path, table)
        self._sealing: TableWriter | None = None

    def _open(self, path: Path, table: Table) -> TableWriter:
        return TableWriter(
            path,
            table,
            {**self._fields, "segment": self.segment},
            mapped=self._mapped,
            max_detail_bytes=self._max_bytes,
        )

    @property
    def put(self) -> Put:
        """The newest segment's; it changes, so it is asked for with each record."""
        return self._current.put

    @property
    def path(self) -> Path:
        return self._current.path

    @path.setter
    def path(self, path: Path) -> None:
        self._current.path = path

    @property
    def table(self) -> Table:
        return self._current.table

    @property
    def error(self) -> str:
        return self._current.error

    @property
    def num_dropped(self) -> int:
        """Of all segments."""
        sealing = self._sealing
        return (
            self._num_dropped + self._current.num_dropped + (sealing.num_dropped if sealing else 0)
        )

    @property
    def old_path(self) -> Path:
        return self.path.with_name(f"{self.table.name}{OLD_SUFFIX}")

    @property
    def sealed_path(self) -> Path:
        return self.path.with_name(f"{self.table.name}{SEALED_SUFFIX}")

    def make_room(self) -> None:
        self._current.make_room()

    def flush(self) -> None:
        sealing = self._sealing
        if sealing is not None:
            sealing.flush()
        self._current.flush()

    def live_bytes(self) -> int:
        """Length of the newest segment's file."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def roll(self) -> bool:
        """Begins a new segment; False, and all as before, where that is not possible now.

        The file gets its new name first and is written on under it, so that a kill finds every
        record in one file or the other.
        """
        before = self._current
        if self._sealing is not None or before.error or self.live_bytes() <= HEADER_BYTES:
            return False
        path, sealed = before.path, self.sealed_path
        if sealed.exists():  # left by a thinning that failed
            return False
        os.rename(path, sealed)
        self.segment += 1
        after = self._open(path, before.table)
        if after.error:
            after.disarm()
            path.unlink(missing_ok=True)
            os.rename(sealed, path)
            self.segment -= 1
            return False
        after.make_room()
        before.path = sealed
        self._sealing, self._current = before, after
        return True

    def seal(self) -> None:
        """Completes the segment before the newest. Some time after `roll`: threads that had asked
        for its `put` must have called it."""
        sealing = self._sealing
        if sealing is not None:
            sealing.close()
            self._sealing = None
            self._num_dropped += sealing.num_dropped

    def close(self) -> int:
        self.seal()
        return self._current.close()

    def disarm(self) -> None:
        if self._sealing is not None:
            self._sealing.disarm()
        self._current.disarm()


AnyTable = TableWriter | SegmentedTable
