"""Windows of steps as they end, and which of them are noteworthy. Standard library only.

Looks at table `steps` alone, which is read while it is written, and goes on in a new file when
the one before has been read to its end.
"""

import struct
from array import array
from bisect import bisect_left
from pathlib import Path

from meshscope.store.retention_tables import WINDOW_STEPS, KeptReason
from meshscope.store.schema import RECORD_BYTES, StepFlag
from meshscope.store.write.pack import PACK_NAME, SEALED_PACK, PackFile
from meshscope.store.write.table_file import CLOSE_OFFSET, HEADER_BYTES, record_check, unpack_slot

_RECORD = struct.Struct("<Q7q")
_CHUNK_RECORDS = 128
_HISTORY_STEPS = 256
"""Steps before a window that it is compared with."""
_MIN_HISTORY_STEPS = 8
_SLOW_RATIO = 1.5
_SHIFT_RATIO = 0.1
_NO_WINDOW = 1 << 62
_MAX_PASSED = 8
"""Bad records that are passed over where good ones follow."""
_MARGIN_STEPS = 4
"""What happens so near to a window's border makes the window beyond noteworthy, too."""


class StepWindows:
    """What is known of a rank's steps so far."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PACK_NAME
        self._sealed = directory / SEALED_PACK
        self._file: object = None
        """Which one `_next_slot` is in."""
        self._next_slot = 0
        self._ends = array("q")
        """Per window from the first one: when its last step ended."""
        self._first = -1
        self.last_step = -1
        self._last_end_ns = 0
        self._history: list[int] = []
        self._open: list[tuple[int, int, int]] = []
        """Step, period and flags, of the last window seen."""
        self.reasons: dict[int, int] = {}
        """Noteworthy windows that nobody has taken yet: their `KeptReason`s."""

    def read(self) -> bool:
        """Takes some new steps in; whether there may be more."""
        data = self._read_chunk()
        count = len(data) // RECORD_BYTES
        first, num_passed = self._next_slot, 0
        for index, (check, *words) in enumerate(_RECORD.iter_unpack(data[: count * RECORD_BYTES])):
            if check == record_check(first + index, tuple(words)):
                self._next_slot = first + index + 1
                self._add(words[0], words[1], words[2], words[3] >> 32)
                num_passed = 0
            elif num_passed >= _MAX_PASSED:
                return False  # not written yet, and nothing behind it
            else:
                num_passed += 1  # damaged, or drawn by a thread that is about to write it
        return self._next_slot - first == _CHUNK_RECORDS

    def _read_chunk(self) -> bytes:
        data, is_other = self._read_from(self._path)
        if not is_other:
            return data
        # The table went on in a new file; what is left of the one before comes first.
        data, is_other = self._read_from(self._sealed)
        if data or not is_other:
            return data
        self._file, self._next_slot = None, 0
        return self._read_from(self._path)[0]

    def _read_from(self, path: Path) -> tuple[bytes, bool]:
        """The next records, and whether they are in another file: this is not the one, or it is
        complete and has been read."""
        try:
            with PackFile(path) as file:
                self._file = self._file or file.identity
                if file.identity != self._file:
                    return b"", True
                offset = HEADER_BYTES + self._next_slot * RECORD_BYTES
                page = file.read("steps", HEADER_BYTES, 0)
                closed = _find_end(page)
                num_bytes = _CHUNK_RECORDS * RECORD_BYTES
                if closed is not None:
                    num_bytes = min(num_bytes, (closed - self._next_slot) * RECORD_BYTES)
                if num_bytes <= 0:
                    return b"", path == self._sealed
                return file.read("steps", num_bytes, offset), False
        except OSError:
            return b"", True

    def _add(self, step: int, start_ns: int, end_ns: int, flags: int) -> None:
        if step < self.last_step or step < 0:
            return  # void, or a row for an earlier step, which nothing here depends on
        window = step // WINDOW_STEPS
        if self._first < 0:
            self._first = window
            self.reasons[window] = KeptReason.FIRST
        while len(self._ends) <= window - self._first:
            self._judge()
            self._ends.append(self._last_end_ns)
        if step == self.last_step and self._open:  # a later row replaces an earlier one
            _, period_ns, before = self._open.pop()
            period_ns, flags = period_ns + end_ns - self._last_end_ns, flags | before
        else:
            period_ns = end_ns - (self._last_end_ns or start_ns)
        self._open.append((step, period_ns, flags))
        self.last_step, self._last_end_ns = step, end_ns
        self._ends[-1] = end_ns

    def _judge(self) -> None:
        """The last window is over: is it noteworthy?"""
        steps, self._open = self._open, []
        if not steps:
            return
        window = steps[0][0] // WINDOW_STEPS
        periods = [period for _, period, _ in steps]
        usual = _median(self._history) if len(self._history) >= _MIN_HISTORY_STEPS else None
        if usual is not None and abs(_median(periods) - usual) > _SHIFT_RATIO * usual:
            self.note(window, KeptReason.SHIFT)
        for step, period, flags in steps:
            reason = 0
            if flags & (StepFlag.ABORTED | StepFlag.SKIPPED):
                reason |= KeptReason.FLAGGED
            if usual is not None and period > _SLOW_RATIO * usual:
                reason |= KeptReason.SLOW
            if reason:
                self._note_around(step, reason)
        self._history = (self._history + periods)[-_HISTORY_STEPS:]

    def _note_around(self, step: int, reason: int) -> None:
        window = step // WINDOW_STEPS
        self.note(window, reason)
        for near in (step - _MARGIN_STEPS, step + _MARGIN_STEPS):
            if near // WINDOW_STEPS != window and near >= 0:
                self.note(near // WINDOW_STEPS, KeptReason.NEIGHBOUR)

    def note(self, window: int, reason: int) -> None:
        self.reasons[window] = self.reasons.get(window, 0) | reason

    @property
    def last_judged(self) -> int:
        """The last window of which is known whether it and its neighbours are noteworthy; may be
        before any."""
        return self._first + len(self._ends) - 3

    def find(self, time_ns: int) -> int:
        """The window of a moment; a later one than any for what came after the last step."""
        if not self._ends:
            return _NO_WINDOW
        return self._first + bisect_left(self._ends, time_ns)


def _find_end(page: bytes) -> int | None:
    """How many records a complete table has; None of one that is being written."""
    try:
        closed = unpack_slot(page, CLOSE_OFFSET) if len(page) == HEADER_BYTES else None
    except ValueError:
        return 0
    return None if closed is None else closed[0]


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]
