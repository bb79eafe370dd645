"""Messages on disk until a receiver has them: in order, bounded, and kept over restarts.

A message is one file with a number as its name, written whole or not at all. Where the queue is
full the oldest message goes, and is counted.
"""

import fcntl
import os
from pathlib import Path

from meshscope.errors import UsageError
from meshscope.store.write.manifest import replace_whole

_SUFFIX = ".json"
_LOCK_NAME = ".lock"


class DiskQueue:
    """One process at a time."""

    def __init__(self, folder: Path, *, max_messages: int) -> None:
        self._folder, self._max = folder, max_messages
        self.num_dropped = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(
                f"the queue {folder} cannot be made: {error.strerror}; give another with queue = …"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UsageError(
                f"another watcher uses the queue {folder}; end it, or give another with queue = …"
            ) from error
        self._numbers = sorted(
            int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()
        )
        self._next = self._numbers[-1] + 1 if self._numbers else 0

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, message: bytes) -> None:
        """Raises OSError where it cannot be written."""
        replace_whole(self._path(self._next), message)
        self._numbers.append(self._next)
        self._next += 1
        while len(self._numbers) > self._max:
            self._remove(self._numbers.pop(0))
            self.num_dropped += 1

    def first(self) -> tuple[int, bytes] | None:
        """The oldest message and its number; None where there is none."""
        while self._numbers:
            number = self._numbers[0]
            try:
                return number, self._path(number).read_bytes()
            except FileNotFoundError:  # somebody tidied up
                self._numbers.pop(0)
        return None

    def done(self, number: int) -> None:
        """This message was received."""
        if number in self._numbers:  # it may have been dropped meanwhile
            self._numbers.remove(number)
        self._remove(number)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{_SUFFIX}"

    def _remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
