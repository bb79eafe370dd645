"""One rank's tables, wherever they are.

`Recording` is what analyses read. `FolderRecording` reads a rank's own files, or the Parquet files
they were compacted to; `meshscope.store.read.memory` has those that were never written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeGuard

import numpy as np

from meshscope.errors import SchemaTooNew
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import (
    Columns,
    Problem,
    ProblemKind,
    concatenate_columns,
    decode_words,
    empty_columns,
    int64_column,
    read_table_file,
    schema_too_new_text,
    select_rows,
)
from meshscope.store.read.files import ByteFile, pack_of, read_file
from meshscope.store.read.now_parts import read_in_flight_part, read_open_step_part
from meshscope.store.read.parquet import CompactedRun
from meshscope.store.read.table_files import (
    lacks_segment,
    list_names_within,
    live_file,
    read_thinnings,
    sign_files,
    table_files,
)
from meshscope.store.read.table_window import (
    TIME_OF,
    TimeWindows,
    count_records,
    find_step_extent,
    read_step_windows,
    read_time_windows,
)
from meshscope.store.read.usual_phases import expand_phases, is_recorded, open_phase_rows
from meshscope.store.read.whole_steps import mark_thinned
from meshscope.store.retention_tables import THINNED_TABLES
from meshscope.store.schema import (
    BUILTIN_NAMES,
    NUM_WORDS,
    SCHEMA_VERSION,
    TABLES,
    StepFlag,
)
from meshscope.store.write.attempts import stated_attempt
from meshscope.store.write.groups import Group, groups_from_journal
from meshscope.store.write.in_flight import InFlight, read_in_flight
from meshscope.store.write.journal import EXIT_LINE, JOURNAL_NAME, JournalDamage, read_journal
from meshscope.store.write.now_file import NOW_NAME
from meshscope.store.write.open_step import OpenPhase, read_open_step

MAX_JOURNAL_BYTES = 64 << 20
"""Bytes that are read of a longer journal."""

_NUM_LOOKS = 3
"""How often a table is read whose files are being replaced."""

TRACE_SOURCE = "torch.profiler"
"""What the header of a rank that was made of traces names as its source."""

JsonFields = Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class Recording(ABC):
    """What one rank recorded in one attempt. Tables are read when asked for."""

    rank: int
    attempt: int
    """Ordinal of the directory; attempts across ranks are matched by `launch_key`."""
    directory: Path
    """The rank's own folder; for a recording in memory, the file it was made of."""
    header: JsonFields
    names: dict[int, str]
    health: tuple[JsonFields, ...] = ()
    updates: tuple[JsonFields, ...] = ()
    """Journal lines that change what the header says (a layout learned later, new settings)."""
    closing: JsonFields | None
    """The closing line; None while the rank is running, or when it was killed."""
    exception: str | None = None
    """The uncaught exception the rank's program ended with, type first; None: none is known."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Process groups by the rank's own numbers."""
    problems: list[Problem] = field(default_factory=list)
    windows: TimeWindows | None = field(default=None, repr=False, compare=False)
    """Read only what lies in these windows of the rank's clock, of tables that have times."""
    kept: dict[str, Columns] | None = field(default=None, repr=False, compare=False)
    """Whole tables that were read; None: they are not kept. See `run.keep_tables`."""

    @property
    def is_from_trace(self) -> bool:
        """Whether it was made of a profiler's traces rather than recorded."""
        return self.header.get("source") == TRACE_SOURCE

    @property
    def launch_key(self) -> tuple[str, int]:
        """Launch and restart this attempt belongs to; unnamed launches go by their ordinal.

        An attempt that the job stated itself comes before both.
        """
        launch = self.header.get("launch_id")
        stated = stated_attempt(self.header)
        if stated is not None:
            return (launch if isinstance(launch, str) else "", stated)
        number = as_int(self.header.get("restart_count"))
        return (launch, number) if isinstance(launch, str) else ("", self.attempt)

    @property
    def start_unix_ns(self) -> int:
        """Wall clock at the start of the recording, for ordering attempts."""
        return as_int(self.header.get("start_unix_ns"))

    @property
    def unix_offset_ns(self) -> int:
        """From the rank's clock to the wall clock of its host."""
        return self.start_unix_ns - as_int(self.header.get("start_host_mono_ns"))

    def name_of(self, name_id: int) -> str:
        """The text behind a name id; an id without one says so."""
        return self.names.get(name_id, f"(unnamed {name_id})")

    @abstractmethod
    def has_table(self, name: str) -> bool:
        """Whether the rank wrote any record of this table."""

    @abstractmethod
    def read_raw(self, name: str) -> Columns:
        """A table's columns as stored."""

    @abstractmethod
    def count_rows(self, name: str) -> int:
        """About how many rows a table has: of a table that is being written, a few more."""

    def read(self, name: str) -> Columns:
        """A table's columns; no rows when the rank wrote none. Adds to `problems`.

        `spans` holds all phases: those with their own record, those packed into the step's
        record, and those of the step that was open when the process died. `collectives` holds
        those that were under way, too. Of `faults` the last row of each fault is given.
        """
        if self.kept is None or self.windows is not None:
            return self._assemble(name)
        found = self.kept.get(name)
        if found is None:
            found = self.kept[name] = self._assemble(name)
            for array in found.values():
                array.flags.writeable = False
        return found

    def _assemble(self, name: str) -> Columns:
        if name == "collectives":
            return self._read_collectives()
        if name == "faults":
            return _keep_last_per_fault(self.read_raw(name))
        if name != "spans":
            return self.read_raw(name)
        # Stamps before tables: what a running process finishes in between is then in a table,
        # and is left out here. The other way round it would be in neither.
        is_open = self.closing is None and self.windows is None
        stamped = self.open_phases() if is_open else []
        parts = [expand_phases(self.read_raw("phases")), self.read_raw("spans")]
        unwritten = [p for p in stamped if not any(is_recorded(p, part) for part in parts)]
        parts.append(open_phase_rows(unwritten))
        return concatenate_columns(TABLES["spans"], [part for part in parts if len(part["depth"])])

    def _read_collectives(self) -> Columns:
        # Slots before the table, for the same reason as the stamps. They are few: windows or not.
        found = self.in_flight() if self.closing is None else None
        table = self.read_raw("collectives")
        if found is None or not found.records:
            return table
        words = np.frombuffer(b"".join(found.records), dtype="<i8").reshape(-1, NUM_WORDS)
        open_rows = decode_words(TABLES["collectives"], words)
        is_new = ~np.isin(open_rows["enqueue_host_mono_ns"], table["enqueue_host_mono_ns"])
        return concatenate_columns(
            TABLES["collectives"], [table, select_rows(open_rows, np.flatnonzero(is_new))]
        )

    def open_phases(self) -> list[OpenPhase]:
        """Phases stamped since the last step's end, the one going on included.

        Some may have a record in a table already: see `is_recorded`.
        """
        return []

    def in_flight(self) -> InFlight | None:
        """Operations under way and what was entered last; None when the rank recorded none."""
        return None

    @property
    def notes_operations(self) -> bool:
        """Whether the rank recorded communication, finished or under way."""
        return self.has_table("collectives")

    def find_step_extent(self) -> tuple[int, int] | None:
        """The first and the last step number; None when no step was finished."""
        steps = self.read_raw("steps")["step"]
        return (int(steps[0]), int(steps[-1])) if len(steps) else None

    def read_steps(self, numbers: Sequence[tuple[int, int]]) -> Columns:
        """The rows of `steps` in some ranges of step numbers, both ends included."""
        columns = self.read_raw("steps")
        step = columns["step"].astype(np.int64, copy=False)
        is_inside = np.zeros(len(step), dtype=np.bool_)
        for low, high in numbers:
            is_inside |= (step >= low) & (step <= high)
        return select_rows(columns, is_inside)

    def find_thinned(self, steps: Int64s) -> Bools:
        """Which of some steps lack operations or spans, as of now: a run that is recorded may have
        been thinned since its steps were read."""
        if not self.has_table("kept_windows"):
            return np.zeros(len(steps), dtype=np.bool_)
        columns = self.read("steps")
        is_thinned = (columns["flags"].astype(np.int64) & StepFlag.THINNED) != 0
        return np.isin(steps, columns["step"][is_thinned])

    def narrow(self, windows: TimeWindows) -> Self:
        """The same recording, of which only rows inside the windows are read."""
        return replace(self, windows=windows)


@dataclass(slots=True, kw_only=True)
class FolderRecording(Recording):
    """A rank's own files, or the Parquet files they were compacted to."""

    tables: frozenset[str] = frozenset()
    """Tables the rank made, as its journal says."""
    compacted: CompactedRun | None = field(default=None, repr=False, compare=False)
    _paths: dict[str, Path] = field(default_factory=dict, repr=False, compare=False)
    _checked: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Packs that were looked at as a whole."""
    _has_all_packs: bool = field(default=False, repr=False, compare=False)
    """Seen of a rank that has ended: all its tables are in the same packs."""
    _listed: frozenset[str] | None = field(default=None, repr=False, compare=False)

    @property
    def _names(self) -> frozenset[str] | None:
        """What is in the folder of a rank that has ended: nobody adds to it, so it is listed once.
        None of one that may still record."""
        if self.closing is not None and self._listed is None:
            try:
                self._listed = list_names_within(self.directory)
            except OSError:
                return None
        return self._listed

    def has_table(self, name: str) -> bool:
        return bool(table_files(self.directory, name, self._names)) or self._is_compacted(name)

    def open_phases(self) -> list[OpenPhase]:
        path, data = self._read_now(read_open_step_part)
        if data is None:
            return []
        ends = self.read_raw("steps")["end_host_mono_ns"]
        try:
            phases, num_damaged = read_open_step(data, int(ends.max()) if len(ends) else 0)
        except ValueError as error:
            self._note_problem(ProblemKind.UNREADABLE, path, str(error))
            return []
        if num_damaged:
            text = f"{num_damaged} stamp(s) of the unfinished step are damaged and are left out"
            self._note_problem(ProblemKind.DAMAGED, path, text)
        return phases

    def in_flight(self) -> InFlight | None:
        path, data = self._read_now(read_in_flight_part)
        if data is None:
            return None
        try:
            found = read_in_flight(data)
        except ValueError as error:
            self._note_problem(ProblemKind.UNREADABLE, path, str(error))
            return None
        if found.num_damaged:
            text = f"{found.num_damaged} row(s) or operation(s) under way are damaged and left out"
            self._note_problem(ProblemKind.DAMAGED, path, text)
        return found

    @property
    def notes_operations(self) -> bool:
        if self.has_table("collectives"):
            return True
        return self._read_now(read_in_flight_part)[1] is not None

    def _read_now(
        self, read: Callable[[Path], tuple[Path, bytes | None]]
    ) -> tuple[Path, bytes | None]:
        """A part of the file of what the process is in; None where there is none to be read."""
        path = self.directory / NOW_NAME
        try:
            return read(self.directory)
        except OSError as error:
            self._note(describe_unreadable(path, error, self.rank))
        except ValueError as error:
            self._note_problem(ProblemKind.CUT, path, str(error))
        return path, None

    def count_rows(self, name: str) -> int:
        """As the files say, or the compacted run does."""
        num_rows, has_files = 0, False
        for path in table_files(self.directory, name, self._names):
            try:
                num_rows += count_records(path)
            except OSError:
                continue
            has_files = True
        if has_files or self.compacted is None or not self._is_compacted(name):
            return num_rows
        return self.compacted.count_rows(name, self.rank, self.attempt)

    def find_step_extent(self) -> tuple[int, int] | None:
        paths = table_files(self.directory, "steps")
        try:
            found = [find_step_extent(path) for path in paths]
        except OSError:
            return Recording.find_step_extent(self)
        extents = [extent for extent in found if extent is not None]
        if not paths:
            return Recording.find_step_extent(self)
        if not extents:
            return None
        return min(low for low, _ in extents), max(high for _, high in extents)

    def read_steps(self, numbers: Sequence[tuple[int, int]]) -> Columns:
        table = TABLES["steps"]
        paths = table_files(self.directory, table.name)
        try:
            parts = [read_step_windows(path, table, numbers) for path in paths]
        except OSError:
            parts = []
        if not parts:
            return Recording.read_steps(self, numbers)
        found = parts[0] if len(parts) == 1 else concatenate_columns(table, parts)
        return self._flag_thinned(_keep_last_per_step(found))

    def narrow(self, windows: TimeWindows) -> Self:
        if self.compacted is not None:
            self.compacted.note_windows(self.rank, self.attempt, windows)
        return replace(self, windows=windows)

    def _read_windows(self, name: str, windows: TimeWindows) -> Columns:
        """A table's rows inside the windows. What is damaged is named when all is read; what was
        not stored at all, here too."""
        parts = self._read_files(name, lambda path: self._read_file_windows(path, name, windows))
        if parts is not None:
            return parts
        if self.compacted is None or not self._is_compacted(name):
            return empty_columns(TABLES[name])
        return self.compacted.read_windows(name, self.rank, self.attempt, windows)

    def _read_file_windows(self, path: Path, name: str, windows: TimeWindows) -> Columns:
        columns, problems = read_time_windows(path, TABLES[name], windows, self.rank)
        for problem in problems:
            self._note(problem)
        return columns

    def read_raw(self, name: str) -> Columns:
        if self.windows is not None and name in TIME_OF:
            return self._read_windows(name, self.windows)
        found = self._read_files(name, lambda path: self._read_file(path, name))
        if found is None:
            return self._read_compacted(name)
        if name == "steps":
            return self._flag_thinned(_keep_last_per_step(found))
        return self._leave_out_later(found) if name == "aggregates" else found

    def _read_files(self, name: str, read: Callable[[Path], Columns]) -> Columns | None:
        """The rows of a table's files; None where it has none. Read again where they were replaced
        meanwhile: rows would be missing, or there twice."""
        is_limited = "max_bytes" in self.header
        for look in range(_NUM_LOOKS):
            is_growing = is_limited and self.closing is None
            before = sign_files(self.directory, name) if is_growing else ()
            paths = table_files(self.directory, name, self._names)
            parts = []
            for path in list(paths):
                try:
                    parts.append(read(path))
                except FileNotFoundError:
                    paths.remove(path)
                except OSError as error:
                    self._note(describe_unreadable(pack_of(path) or path, error, self.rank))
            if not before or before == sign_files(self.directory, name) or look + 1 == _NUM_LOOKS:
                break
        if not paths:
            return None
        self._check_packs(paths)
        if is_limited and not self._has_all_packs:
            if lacks_segment(self.directory, name):
                text = "a file of this table is missing: records between two segments are lost"
                self._note_problem(ProblemKind.UNREADABLE, self._table_path(name), text)
            else:
                self._has_all_packs = self.closing is not None and pack_of(paths[0]) is not None
        return parts[0] if len(parts) == 1 else concatenate_columns(TABLES[name], parts)

    def _check_packs(self, paths: list[Path]) -> None:
        for pack in {pack for path in paths if (pack := pack_of(path)) is not None}:
            if pack in self._checked:
                continue
            self._checked.add(pack)
            try:
                with ByteFile(pack) as file:
                    found = file.find_problems()
            except OSError:  # its tables say why
                continue
            for offset, text in found:
                kind = ProblemKind.DAMAGED
                problem = Problem(kind=kind, rank=self.rank, path=pack, offset=offset, text=text)
                self._note(problem)

    def _read_file(self, path: Path, name: str) -> Columns:
        read = read_table_file(path, TABLES[name], self.rank)
        for problem in read.problems:
            self._note(problem)
        is_last = path == self._table_path(name)
        if read.is_closed and is_last and self.closing is None and self.header:
            # Tables are completed before the closing line is written.
            text = "the closing line is missing: the process was killed at its end"
            self._note_problem(ProblemKind.TORN_TAIL, self.directory / JOURNAL_NAME, text)
        return read.columns

    def find_thinned(self, steps: Int64s) -> Bools:
        thinnings = read_thinnings(self.directory, self._names)
        if not thinnings:
            return Recording.find_thinned(self, steps)
        kept = self.read_raw("kept_windows")
        return mark_thinned(
            steps,
            list(thinnings.values()),
            int64_column(kept, "first_step"),
            int64_column(kept, "ordinal"),
        )

    def _flag_thinned(self, columns: Columns) -> Columns:
        """Says in the flags of steps which are not whole."""
        thinnings = read_thinnings(self.directory, self._names)
        if not thinnings:
            return columns
        is_thinned = self.find_thinned(int64_column(columns, "step"))
        flags = columns["flags"].astype(np.uint16)
        flags[is_thinned] |= StepFlag.THINNED
        columns["flags"] = flags
        return columns

    def _leave_out_later(self, columns: Columns) -> Columns:
        """Sums of a round that a killed process had not finished do not count."""
        rounds = np.full(256, -1, dtype=np.int64)
        for name, thinning in read_thinnings(self.directory, self._names).items():
            rounds[THINNED_TABLES.index(name)] = -1 if thinning is None else thinning.round
        return select_rows(columns, int64_column(columns, "round") <= rounds[columns["source"]])

    def _table_path(self, name: str) -> Path:
        path = self._paths.get(name)
        if path is None:  # asked for often, and slow to join
            path = self._paths[name] = live_file(self.directory, name)
        return path

    def _is_compacted(self, name: str) -> bool:
        compacted = self.compacted
        return compacted is not None and compacted.covers(name, self.rank, self.attempt)

    def _read_compacted(self, name: str) -> Columns:
        if self.compacted is None or not self._is_compacted(name):
            if name in self.tables:
                text = "the file is missing; the journal says that it was made"
                self._note_problem(ProblemKind.UNREADABLE, self._table_path(name), text)
            return empty_columns(TABLES[name])
        columns, problems = self.compacted.read(name, self.rank, self.attempt)
        for problem in problems:
            self._note(problem)
        return columns

    def _note_problem(self, kind: ProblemKind, path: Path, text: str) -> None:
        self._note(Problem(kind=kind, rank=self.rank, path=path, text=text))

    def _note(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def open_recording(
    rank: int, attempt: int, directory: Path, compacted: CompactedRun | None
) -> FolderRecording:
    """A rank's journal; its tables are read when asked for."""
    path = directory / JOURNAL_NAME
    problems: list[Problem] = []
    try:
        data = read_file(path, MAX_JOURNAL_BYTES)
        lines, damage = read_journal(data)
        if damage and not _is_closing(lines):  # it may just be written: look again
            data = read_file(path, MAX_JOURNAL_BYTES)
            lines, damage = read_journal(data)
    except FileNotFoundError:
        data, lines, damage = b"", [], []
    except OSError as error:
        data, lines, damage = b"", [], []
        problems.append(describe_unreadable(path, error, rank))
    has_header = bool(lines) and lines[0]["kind"] == "header"
    if not has_header and not problems:
        problems.append(_no_header_problem(rank, path, is_empty=not data))
    problems += [_describe_damage(rank, path, spot) for spot in damage]
    header = lines[0] if has_header else {}
    version = header.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(path, version))
    recorded_rank = header.get("rank", rank)
    if recorded_rank != rank:
        text = f"the journal is of rank {str(recorded_rank)[:20]}, the folder of rank {rank}"
        problems.append(Problem(kind=ProblemKind.MISPLACED, rank=rank, path=path, text=text))
    return FolderRecording(
        rank=rank,
        attempt=attempt,
        directory=directory,
        header=header,
        names=_read_names(lines),
        health=tuple(line for line in lines if line["kind"] == "health"),
        updates=tuple(line for line in lines if line["kind"] == "update"),
        closing=next((line for line in reversed(lines) if line["kind"] == "close"), None),
        exception=_find_exception(lines),
        tables=frozenset(
            name
            for line in lines
            if line["kind"] == "table" and isinstance(name := line.get("name"), str)
        ),
        groups=groups_from_journal(lines),
        problems=problems,
        compacted=compacted,
    )


def _find_exception(lines: list[dict[str, object]]) -> str | None:
    texts = (line.get("exception") for line in reversed(lines) if line["kind"] == EXIT_LINE)
    return next((text for text in texts if isinstance(text, str)), None)


def _is_closing(lines: list[dict[str, object]]) -> bool:
    return bool(lines) and lines[-1]["kind"] == "close"


def _no_header_problem(rank: int, path: Path, *, is_empty: bool) -> Problem:
    if is_empty:
        text = "nothing was written: the process ended, or is, at the very start of its recording"
        return Problem(kind=ProblemKind.TORN_TAIL, rank=rank, path=path, offset=0, text=text)
    text = "the journal has no readable header: times and names of this rank are unknown"
    return Problem(kind=ProblemKind.UNREADABLE, rank=rank, path=path, text=text)


def _describe_damage(rank: int, path: Path, spot: JournalDamage) -> Problem:
    kind = ProblemKind.TORN_TAIL if spot.is_tail else ProblemKind.DAMAGED
    text = f"the journal line at byte {spot.offset} does not match its checksum and is left out"
    if spot.is_cut:
        kind = ProblemKind.CUT
        text = f"the journal ends at byte {spot.offset}, and was longer"
    return Problem(kind=kind, rank=rank, path=path, offset=spot.offset, text=text)


def _read_names(lines: list[dict[str, object]]) -> dict[int, str]:
    names = {name_id: text for text, name_id in BUILTIN_NAMES.items()}
    for line in lines:
        text = line.get("text")
        if line["kind"] == "name" and isinstance(text, str):
            names[as_int(line.get("id"))] = text
    return names


def describe_unreadable(path: Path, error: OSError, rank: int | None = None) -> Problem:
    """What a file that cannot be read costs."""
    text = f"cannot be read: {error.strerror}"
    return Problem(kind=ProblemKind.UNREADABLE, rank=rank, path=path, text=text)


def last_sign_of_life_ns(recording: Recording) -> int:
    """Wall clock of the closing line, else of the last record."""
    offset_ns = recording.unix_offset_ns
    if recording.closing is not None and "end_host_mono_ns" in recording.closing:
        return as_int(recording.closing["end_host_mono_ns"]) + offset_ns
    for table, column in (
        ("steps", "end_host_mono_ns"),
        ("spans", "start_host_mono_ns"),
        ("scalars", "time_host_mono_ns"),
    ):
        times = recording.read(table)[column]
        if len(times):
            return int(times.max()) + offset_ns
    return recording.start_unix_ns


def _keep_last_per_step(columns: Columns) -> Columns:
    """Keeps the last row of each step, in step order (see the meaning of table `steps`)."""
    steps = columns["step"]
    if len(steps) < 2 or bool((np.diff(steps.astype(np.int64)) > 0).all()):
        return columns
    _, first_from_end = np.unique(steps[::-1], return_index=True)
    return select_rows(columns, len(steps) - 1 - first_from_end)


def _keep_last_per_fault(columns: Columns) -> Columns:
    """Keeps the last row of each kind and begin, in order of begin (see table `faults`)."""
    begins, kinds = columns["begin_host_mono_ns"], columns["kind_id"]
    rows = {
        (int(at), int(kind)): row for row, (at, kind) in enumerate(zip(begins, kinds, strict=True))
    }
    return select_rows(columns, np.array([rows[key] for key in sorted(rows)], dtype=np.int64))


def is_int64(value: object) -> TypeGuard[int]:
    """Whether a field of a header is a number that a column could hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def as_int(value: object) -> int:
    """A field of a header as a number; 0 where it is none."""
    return value if is_int64(value) else 0
