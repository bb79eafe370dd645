"""Rows for intervals that may overlap: as few as keep apart what does not nest."""

NEVER_NS = 1 << 62
"""The end of what did not end."""
MAX_LANES = 64


class Lanes:
    """Rows of one kind of intervals."""

    def __init__(self, *, nests: bool) -> None:
        """With `nests`, an interval may lie inside another one of the same row."""
        self._nests = nests
        self._open: list[list[int]] = []
        """By row: ends of what is open, the outermost first."""
        self._last: list[int] = []
        """By row: the last start."""
        self.num_crowded = 0
        """Intervals without a row, because there were too many at once."""

    def place(self, start_ns: int, end_ns: int) -> int:
        """The row, -1 for none. Intervals come by start, longer ones first; one that comes too late
        for a row gets another."""
        for lane, ends in enumerate(self._open):
            if start_ns < self._last[lane]:
                continue
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or (self._nests and end_ns <= ends[-1]):
                ends.append(end_ns)
                self._last[lane] = start_ns
                return lane
        if len(self._open) == MAX_LANES:
            self.num_crowded += 1
            return -1
        self._open.append([end_ns])
        self._last.append(start_ns)
        return len(self._open) - 1
