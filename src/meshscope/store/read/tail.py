"""The end of a run that is being written: the last records of a table, without reading it all.

A live file ends in zeros: space is made 64 KiB at a time. Records fill it from the front, so the
first empty slot is found by bisection, some twenty reads of 64 bytes for a million records; what
stands before it is checked against its checksum, and a torn or damaged last record is passed over.
Standard library only, so that the launcher can use it on a bare cluster image.

A rank that stops growing may be killed, waiting or closed: this module does not tell which.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from meshscope.store.read.files import ByteFile, exists, list_names
from meshscope.store.read.table_files import live_file, table_files
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, STEPS
from meshscope.store.write.table_file import CLOSE_OFFSET, HEADER_BYTES, record_check, unpack_slot
from meshscope.store.write.writer import attempt_dir_name

_STEP, _END_NS, _TOKENS = (
    STEPS.column(name).word - 1 for name in ("step", "end_host_mono_ns", "input_tokens")
)
_RECORD = struct.Struct(f"<Q{NUM_WORDS - 1}q")
_EMPTY = bytes(RECORD_BYTES)
_RANK_DIR = re.compile(r"rank(\d{5,})$")
_ATTEMPT_DIR = re.compile(r"attempt(\d{3,})$")
_MAX_BAD_RECORDS = 64
"""How many bad records before the end are passed over in search of a good one."""
_PACE_STEPS = 16
"""Step time is the mean over the last this many steps."""
_SAMPLED_RANKS = 3
"""Ranks whose tables are read: the first, the middle one and the last."""

Record = tuple[int, ...]
"""The seven payload words of a record."""


def read_last_records(path: Path, count: int) -> list[Record]:
    """The last `count` valid records of a table file, oldest first; fewer when it holds fewer.

    Raises OSError when the file cannot be read. A file without records gives an empty list.
    """
    with ByteFile(path) as file:
        num_written = _count_written(file)
        first = max(0, num_written - count - _MAX_BAD_RECORDS)
        data = file.read(_offset_of(first), (num_written - first) * RECORD_BYTES)
    found = (_check(data, index, first + index) for index in range(len(data) // RECORD_BYTES))
    return [words for words in found if words is not None][-count:]


def read_last_rows(directory: Path, table: str, count: int) -> list[Record]:
    """The last records of a table, whichever of its files they are in. Raises OSError when it has
    none that can be read."""
    live, found = live_file(directory, table), list[Record]()
    for path in reversed(table_files(directory, table) or [live]):
        found = read_last_records(path, count - len(found)) + found
        if len(found) >= count:
            break
    return found


def _offset_of(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD_BYTES


def _count_written(file: ByteFile) -> int:
    """Slots from the front that were written to, valid or not."""
    header = file.read(0, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return 0
    num_slots = max(0, file.size_bytes - HEADER_BYTES) // RECORD_BYTES
    try:
        closed = unpack_slot(header, CLOSE_OFFSET)
    except ValueError:  # damaged: the records still say where they end
        closed = None
    if closed is not None:
        return min(max(closed[0], 0), num_slots)
    low, high = 0, num_slots
    while low < high:
        middle = (low + high) // 2
        if file.read(_offset_of(middle), RECORD_BYTES).ljust(RECORD_BYTES, b"\0") == _EMPTY:
            high = middle
        else:
            low = middle + 1
    return low


def _check(data: bytes, index: int, slot: int) -> Record | None:
    check, *words = _RECORD.unpack_from(data, index * RECORD_BYTES)
    return tuple(words) if check == record_check(slot, tuple(words)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTail:
    """Where one rank's step table ends."""

    last_step: int
    end_host_mono_ns: int
    mean_step_ns: int | None
    """From one step's end to the next one's, gaps included; None before the second step."""
    input_tokens: int | None
    """Tokens the rank's model was given in the last step; None when they were not counted."""


def read_step_tail(attempt_dir: Path) -> StepTail | None:
    """The last finished step of a rank and its recent pace; None when there is none yet."""
    try:
        records = read_last_rows(attempt_dir, STEPS.name, _PACE_STEPS + 1)
    except OSError:  # not made yet, or just being moved away: there will be a next look
        return None
    if not records:
        return None
    first, last = records[0], records[-1]
    num_steps = last[_STEP] - first[_STEP]
    elapsed_ns = last[_END_NS] - first[_END_NS]
    return StepTail(
        last_step=last[_STEP],
        end_host_mono_ns=last[_END_NS],
        mean_step_ns=elapsed_ns // num_steps if num_steps > 0 else None,
        input_tokens=last[_TOKENS] if last[_TOKENS] >= 0 else None,
    )


def list_ranks(run_dir: Path) -> list[int]:
    """Ranks that have a folder in the run, in order."""
    return sorted(_numbers_in(run_dir, _RANK_DIR))


def list_attempts(rank_dir: Path) -> list[int]:
    """Attempts of one rank, in order."""
    return sorted(_numbers_in(rank_dir, _ATTEMPT_DIR))


def _numbers_in(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = list_names(directory)
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := pattern.match(name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """A running launch at one moment. What is not known yet is None."""

    num_ranks: int
    """Ranks that have begun to record in this launch."""
    last_step: int | None
    """Last step finished by all sampled ranks."""
    mean_step_ns: int | None
    tokens_per_s: float | None
    """Input tokens per second of one rank (ranks of a tensor-parallel group share theirs)."""


class RunTail:
    """Looks at the end of a run again and again, at a cost that hardly depends on its size."""

    def __init__(self, run_dir: Path) -> None:
        """Attempts that exist now belong to earlier launches and are not counted."""
        self._run_dir = run_dir
        self._earlier = {
            rank: len(list_attempts(self._rank_dir(rank))) for rank in list_ranks(run_dir)
        }
        self._seen: set[int] = set()

    def _rank_dir(self, rank: int) -> Path:
        return self._run_dir / f"rank{rank:05d}"

    def look(self) -> LiveView:
        """One listing of the run directory and a few small reads."""
        for rank in list_ranks(self._run_dir):
            if rank not in self._seen and self._has_begun(rank):
                self._seen.add(rank)
        ranks = sorted(self._seen)
        sampled = sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]}) if ranks else []
        directories = [self._latest_attempt(rank) for rank in sampled[:_SAMPLED_RANKS]]
        tails = [read_step_tail(directory) for directory in directories]
        known = [tail for tail in tails if tail is not None]
        slowest = min(known, key=lambda tail: tail.last_step, default=None)
        pace_ns = slowest.mean_step_ns if slowest else None
        tokens = slowest.input_tokens if slowest else None
        return LiveView(
            num_ranks=len(ranks),
            last_step=slowest.last_step if slowest and len(known) == len(tails) else None,
            mean_step_ns=pace_ns,
            tokens_per_s=tokens * 1e9 / pace_ns if tokens and pace_ns else None,
        )

    def _has_begun(self, rank: int) -> bool:
        earlier = self._earlier.get(rank, 0)
        return not earlier or exists(self._rank_dir(rank) / attempt_dir_name(earlier))

    def _latest_attempt(self, rank: int) -> Path:
        attempts = list_attempts(self._rank_dir(rank))
        return self._rank_dir(rank) / attempt_dir_name(attempts[-1] if attempts else 0)
