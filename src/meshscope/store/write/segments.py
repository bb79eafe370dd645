"""A table that goes on in a new pack when the one it is in is to be thinned.

    tables.old.pack      thinned
    tables.sealed.pack   complete and not yet thinned
    tables.pack          being written

Only `put` belongs to the training; everything else is called by the thread that thins. Standard
library only.
"""

from meshscope.store.write.table_file import Put, TableWriter


class SegmentedTable:
    """Stands for the `TableWriter` of the newest segment."""

    __slots__ = ("_current", "_num_dropped", "_sealing")

    def __init__(self, current: TableWriter) -> None:
        self._current = current
        self._num_dropped = 0
        self._sealing: TableWriter | None = None

    @property
    def put(self) -> Put:
        """The newest segment's; it changes, so it is asked for with each record."""
        return self._current.put

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

    def make_room(self) -> None:
        self._current.make_room()

    def flush(self) -> None:
        sealing = self._sealing
        if sealing is not None:
            sealing.flush()
        self._current.flush()

    def switch(self, after: TableWriter) -> None:
        """Records go there from now on; those of threads that are about to write, where they did
        before."""
        self._sealing, self._current = self._current, after

    def seal(self) -> None:
        """Completes the segment before the newest. Some time after `switch`: threads that had asked
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
