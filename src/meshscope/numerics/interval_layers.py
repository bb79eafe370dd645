"""Intervals of time that lie in order and do not overlap, and which of them holds a moment."""

from dataclasses import dataclass

import numpy as np

from meshscope.store.read.arrays import Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Intervals sorted by start, each with a value; none is empty."""

    start_ns: Int64s
    end_ns: Int64s
    value: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    def find(self, moments: Int64s) -> Int64s:
        """Index of the interval that holds each moment; -1 where none does."""
        if not len(self):
            return np.full(len(moments), -1, dtype=np.int64)
        index = np.searchsorted(self.start_ns, moments, side="right") - 1
        return np.where((index >= 0) & (moments < self.end_ns[index]), index, -1)

    def look_up(self, moments: Int64s) -> Int64s:
        """Value of the interval that holds each moment; -1 where none does."""
        index = self.find(moments)
        return np.where(index >= 0, np.append(self.value, 0)[index], -1)


def make_layer(start_ns: Int64s, end_ns: Int64s, value: Int64s) -> Layer:
    """Sorts the intervals; where two overlap, the later one holds from its start."""
    kept = np.flatnonzero(end_ns > start_ns)
    kept = kept[np.argsort(start_ns[kept], kind="stable")]
    return Layer(
        start_ns=start_ns[kept],
        end_ns=end_ns[kept],
        value=value[kept].astype(np.int64, copy=False),
    )


EMPTY_LAYER = make_layer(*(np.empty(0, dtype=np.int64) for _ in range(3)))
