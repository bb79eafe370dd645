"""Opens a run directory, finished or still being written, and gives its tables as columns.

Ranks and attempts are found by listing folders; nothing else ties them together, so a rank that
never started, stopped early or wrote damaged bytes costs only itself and is listed in `problems`.
Attempts of different ranks belong together when they carry the same launch identity; a recording
whose journal has no readable header goes with those of the other ranks that have its number.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TypeGuard

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError, RunEmpty, RunError, RunNotFound, SchemaTooNew
from meshscope.store.read.columns import (
    Columns,
    Problem,
    ProblemKind,
    concatenate_columns,
    decode_words,
    empty_columns,
    read_regular_file,
    read_table_file,
    schema_too_new_text,
    select_rows,
)
from meshscope.store.read.parquet import CompactedRun, open_compacted
from meshscope.store.read.rank_ranges import RankRanges
from meshscope.store.read.table_window import (
    TIME_OF,
    TimeWindows,
    find_step_extent,
    read_step_windows,
    read_time_windows,
)
from meshscope.store.read.usual_phases import expand_phases, is_recorded, open_phase_rows
from meshscope.store.schema import BUILTIN_NAMES, NUM_WORDS, RECORD_BYTES, SCHEMA_VERSION, TABLES
from meshscope.store.write.attempts import CLOCK_SKEW_NS, Extent, settle_by_time, stated_attempt
from meshscope.store.write.groups import Group, groups_from_journal
from meshscope.store.write.in_flight import IN_FLIGHT_NAME, InFlight, read_in_flight
from meshscope.store.write.journal import JOURNAL_NAME, JournalDamage, read_journal
from meshscope.store.write.manifest import unseal
from meshscope.store.write.open_step import OPEN_STEP_NAME, OpenPhase, read_open_step
from meshscope.store.write.table_file import HEADER_BYTES
from meshscope.store.write.writer import (
    MANIFEST_NAME,
    RUN_FORMAT,
    TABLE_SUFFIX,
    attempt_dir_name,
    rank_dir_name,
)

_RANK_DIR = re.compile(r"rank([0-9]{5,12})")
_ATTEMPT_DIR = re.compile(r"attempt([0-9]{3,9})")

_HOW_TO_DECLARE = "pass layout=… or `meshscope run --layout`"
TRACE_SOURCE = "torch.profiler"
"""What the headers of a run that was made of traces name as its source."""
SHOWN_PATH = "shown_path"
"""In the manifest of such a run: the traces, where the run itself is there for a moment only."""
MAX_WORLD_SIZE = 1 << 20
"""Ranks a run can have; a header or a folder that claims more is not believed."""
MAX_JOURNAL_BYTES = 64 << 20
"""Of a journal that is longer, this much is read."""

JsonFields = Mapping[str, object]
_GroupKey = tuple[str, int, int]
"""Launch, restart, and how many earlier recordings of a rank carry the same two."""
_Groups = dict[_GroupKey, "dict[int, RankRecording]"]


@dataclass(slots=True, kw_only=True)
class RankRecording:
    """What one rank recorded in one attempt. Tables are read when asked for."""

    rank: int
    attempt: int
    """Ordinal of the directory; attempts across ranks are matched by `launch_key`."""
    directory: Path
    header: JsonFields
    names: dict[int, str]
    health: tuple[JsonFields, ...]
    updates: tuple[JsonFields, ...]
    """Journal lines that change what the header says (a layout learned later, new settings)."""
    closing: JsonFields | None
    """The closing line; None while the rank is running, or when it was killed."""
    tables: frozenset[str] = frozenset()
    """Tables the rank made, as its journal says."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Process groups by the rank's own numbers."""
    problems: list[Problem] = field(default_factory=list)
    compacted: CompactedRun | None = field(default=None, repr=False, compare=False)
    windows: TimeWindows | None = field(default=None, repr=False, compare=False)
    """Read only what lies in these stretches of the rank's clock, of tables that have times."""

    @property
    def launch_key(self) -> tuple[str, int]:
        """Launch and restart this attempt belongs to; unnamed launches go by their ordinal.

        An attempt that the job stated itself comes before both.
        """
        launch = self.header.get("launch_id")
        stated = stated_attempt(self.header)
        if stated is not None:
            return (launch if isinstance(launch, str) else "", stated)
        number = _as_int(self.header.get("restart_count"))
        return (launch, number) if isinstance(launch, str) else ("", self.attempt)

    @property
    def start_unix_ns(self) -> int:
        """Wall clock at the start of the recording, for ordering attempts."""
        return _as_int(self.header.get("start_unix_ns"))

    def has_table(self, name: str) -> bool:
        """Whether the rank wrote any record of this table."""
        return self._table_path(name).exists() or self._is_compacted(name)

    def read(self, name: str) -> Columns:
        """A table's columns; no rows when the rank wrote none. Adds to `problems`.

        `spans` holds all phases: those with a record of their own, those packed into the step's
        record, and those of the step that was open when the process died. `collectives` holds
        those that were under way, too. Of `faults` the last row of each fault is given.
        """
        if name == "collectives":
            return self._read_collectives()
        if name == "faults":
            return keep_last_per_fault(self.read_raw(name))
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

    def open_phases(self) -> list[OpenPhase]:
        """Phases stamped since the last step's end, the one going on included.

        Some may have a record in a table already: see `is_recorded`.
        """
        path = self.directory / OPEN_STEP_NAME
        try:
            data = read_regular_file(path, MAX_JOURNAL_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note(_unreadable(path, error, self.rank))
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

    def _read_collectives(self) -> Columns:
        # Slots before the table, for the same reason as the stamps.
        is_open = self.closing is None and self.windows is None
        found = self.in_flight() if is_open else None
        table = self.read_raw("collectives")
        if found is None or not found.records:
            return table
        words = np.frombuffer(b"".join(found.records), dtype="<i8").reshape(-1, NUM_WORDS)
        open_rows = decode_words(TABLES["collectives"], words)
        is_new = ~np.isin(open_rows["enqueue_host_mono_ns"], table["enqueue_host_mono_ns"])
        return concatenate_columns(
            TABLES["collectives"], [table, select_rows(open_rows, np.flatnonzero(is_new))]
        )

    def in_flight(self) -> InFlight | None:
        """Operations under way and what was entered last; None when the rank recorded none."""
        path = self.directory / IN_FLIGHT_NAME
        try:
            found = read_in_flight(read_regular_file(path, MAX_JOURNAL_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(_unreadable(path, error, self.rank))
            return None
        except ValueError as error:
            self._note_problem(ProblemKind.UNREADABLE, path, str(error))
            return None
        if found.num_damaged:
            text = f"{found.num_damaged} row(s) or operation(s) under way are damaged and left out"
            self._note_problem(ProblemKind.DAMAGED, path, text)
        return found

    def count_rows(self, name: str) -> int:
        """About how many rows a table has: of a table that is being written, a few more."""
        try:
            size = self._table_path(name).stat().st_size
        except OSError:
            if self.compacted is None or not self._is_compacted(name):
                return 0
            return self.compacted.count_rows(name, self.rank, self.attempt)
        return max(size - HEADER_BYTES, 0) // RECORD_BYTES

    def find_step_extent(self) -> tuple[int, int] | None:
        """The first and the last step number; None when no step was finished."""
        try:
            return find_step_extent(self._table_path("steps"))
        except OSError:
            steps = self.read_raw("steps")["step"]
            return (int(steps[0]), int(steps[-1])) if len(steps) else None

    def read_steps(self, numbers: Sequence[tuple[int, int]]) -> Columns:
        """The rows of `steps` in some ranges of step numbers, both ends included."""
        table = TABLES["steps"]
        try:
            return keep_last_per_step(read_step_windows(self._table_path("steps"), table, numbers))
        except OSError:
            columns = self.read_raw("steps")
        step = columns["step"].astype(np.int64, copy=False)
        is_inside = np.zeros(len(step), dtype=np.bool_)
        for low, high in numbers:
            is_inside |= (step >= low) & (step <= high)
        return select_rows(columns, is_inside)

    def narrow(self, windows: TimeWindows) -> "RankRecording":
        """The same recording, of which only rows inside the windows are read."""
        if self.compacted is not None:
            self.compacted.note_windows(self.rank, self.attempt, windows)
        return replace(self, windows=windows)

    def _read_windows(self, name: str, windows: TimeWindows) -> Columns:
        """A table's rows inside the windows. What is damaged is named when all is read."""
        try:
            return read_time_windows(self._table_path(name), TABLES[name], windows)
        except OSError:
            if self.compacted is None or not self._is_compacted(name):
                return empty_columns(TABLES[name])
        return self.compacted.read_windows(name, self.rank, self.attempt, windows)

    def read_raw(self, name: str) -> Columns:
        """A table's columns as stored."""
        if self.windows is not None and name in TIME_OF:
            return self._read_windows(name, self.windows)
        table = TABLES[name]
        path = self._table_path(name)
        try:
            read = read_table_file(path, table, self.rank)
        except FileNotFoundError:
            return self._read_compacted(name)
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
            self._note_problem(ProblemKind.UNREADABLE, path, text)
            return empty_columns(table)
        for problem in read.problems:
            self._note(problem)
        if read.is_closed and self.closing is None and self.header:
            # Tables are completed before the closing line is written.
            text = "the closing line is missing: the process was killed at its end"
            self._note_problem(ProblemKind.TORN_TAIL, self.directory / JOURNAL_NAME, text)
        return keep_last_per_step(read.columns) if name == "steps" else read.columns

    def _table_path(self, name: str) -> Path:
        return self.directory / f"{name}{TABLE_SUFFIX}"

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

    def name_of(self, name_id: int) -> str:
        """The text behind a name id; an id without one says so."""
        return self.names.get(name_id, f"(unnamed {name_id})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the job: at most one recording per rank."""

    index: int
    launch_id: str
    restart_count: int
    ranks: dict[int, RankRecording]
    world_size: int
    """As the ranks report it; a rank may be missing from `ranks`."""
    missing_ranks: RankRanges
    layout: Layout | Unavailable
    problems: tuple[Problem, ...]

    def __iter__(self) -> Iterator[RankRecording]:
        return iter(self.ranks.values())

    @property
    def is_from_traces(self) -> bool:
        """Whether it was made of a profiler's traces rather than recorded."""
        return any(recording.header.get("source") == TRACE_SOURCE for recording in self)

    def choose_warmup(self, asked: int | None) -> int | None:
        """First steps to leave out; None leaves the choice to statistics. A profiler warms up by
        itself before its first step."""
        return 0 if asked is None and self.is_from_traces else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory: its manifest and its attempts, oldest first."""

    path: Path
    manifest: JsonFields
    attempts: tuple[Attempt, ...]
    problems: tuple[Problem, ...] = ()
    """What belongs to no attempt: the manifest, folders that cannot be read. Also in each attempt's
    `problems`."""

    @property
    def shown_path(self) -> str:
        """Where it is, or where the traces are that it was made of for the moment."""
        shown = self.manifest.get(SHOWN_PATH)
        return shown if isinstance(shown, str) else str(self.path)

    @property
    def last_attempt(self) -> Attempt:
        """The most recent launch."""
        return self.attempts[-1]


def open_run(path: Path | str) -> Run:
    """Opens a run directory; RunError says in one line why not."""
    directory = Path(path)
    _check_is_run_directory(directory)
    problems: list[Problem] = []
    manifest = _read_manifest(directory, problems)
    compacted = open_compacted(directory, problems)
    recordings = []
    for rank, attempt, attempt_dir in _find_recordings(directory, problems):
        recording = _read_rank(rank, attempt, attempt_dir)
        recording.compacted = compacted
        recordings.append(recording)
    if not recordings:
        if problems:
            raise RunError(
                f"{directory} has no rank that can be read: {problems[0].path}: {problems[0].text}"
            )
        raise RunEmpty(
            f"{directory} is a run in which no rank has recorded anything yet; check that the "
            "job started and that its ranks can write there"
        )
    return Run(
        path=directory,
        manifest=manifest,
        attempts=_group_attempts(recordings, tuple(problems)),
        problems=tuple(problems),
    )


def is_run_directory(path: Path) -> bool:
    """Whether `path` looks like a run, cheaply."""
    if (path / MANIFEST_NAME).is_file():
        return True
    return path.is_dir() and any(_RANK_DIR.fullmatch(child.name) for child in path.iterdir())


def _check_is_run_directory(path: Path) -> None:
    try:
        if not path.exists():
            raise RunNotFound(f"{path} does not exist; give the directory of a recorded run")
        if not path.is_dir():
            raise RunNotFound(
                f"{path} is a file, a run is a directory (with {MANIFEST_NAME} and rank00000 …); "
                "give that directory"
            )
        if not is_run_directory(path):
            raise RunNotFound(
                f"{path} is not a run: no {MANIFEST_NAME} and no rank00000 … in it; record one "
                "with `meshscope run -- torchrun … train.py`"
            )
    except PermissionError as error:
        raise RunError(
            f"{error.filename or path} cannot be read: permission denied; ask its owner or check "
            "its mode"
        ) from error


def _read_manifest(directory: Path, problems: list[Problem]) -> JsonFields:
    """The manifest's fields; none when it is lost or damaged: the ranks say enough themselves."""
    path = directory / MANIFEST_NAME
    try:
        manifest, is_intact = unseal(read_regular_file(path, MAX_JOURNAL_BYTES))
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise RunError(f"{path} cannot be read: permission denied; check its mode") from error
    except OSError as error:
        problems.append(_unreadable(path, error))
        return {}
    except ValueError as error:
        text = f"the manifest is not valid JSON: {error}"
        problems.append(Problem(kind=ProblemKind.DAMAGED, path=path, offset=0, text=text))
        return {}
    if not is_intact:
        text = "the manifest was changed after it was written: its checksum does not match"
        problems.append(Problem(kind=ProblemKind.DAMAGED, path=path, offset=0, text=text))
    if manifest.get("format") != RUN_FORMAT:
        if is_intact or "crc32" not in manifest:
            raise RunNotFound(
                f'{path} is not a meshscope manifest ("format" is not "{RUN_FORMAT}")'
            )
        return {}
    version = manifest.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(path, version))
    return manifest


def _unreadable(path: Path, error: OSError, rank: int | None = None) -> Problem:
    text = f"cannot be read: {error.strerror}"
    return Problem(kind=ProblemKind.UNREADABLE, rank=rank, path=path, text=text)


def _find_recordings(directory: Path, problems: list[Problem]) -> Iterator[tuple[int, int, Path]]:
    """Rank, attempt and folder of every recording, by rank and then by attempt."""
    for rank in _list_numbers(directory, _RANK_DIR, rank_dir_name):
        rank_dir = directory / rank_dir_name(rank)
        if rank >= MAX_WORLD_SIZE:
            text = f"no run has that many ranks (at most {MAX_WORLD_SIZE}); the folder is left out"
            problems.append(Problem(kind=ProblemKind.MISPLACED, path=rank_dir, text=text))
            continue
        try:
            attempts = _list_numbers(rank_dir, _ATTEMPT_DIR, attempt_dir_name)
        except OSError as error:
            problems.append(_unreadable(rank_dir, error, rank))
            continue
        for attempt in attempts:
            yield rank, attempt, rank_dir / attempt_dir_name(attempt)


def _list_numbers(
    directory: Path, pattern: re.Pattern[str], name_of: Callable[[int], str]
) -> list[int]:
    """Numbers in the names that a writer would have given them, in order."""
    names = os.listdir(directory)
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(number for match in matches if name_of(number := int(match[1])) == match[0])


def _read_rank(rank: int, attempt: int, directory: Path) -> RankRecording:
    path = directory / JOURNAL_NAME
    problems: list[Problem] = []
    try:
        data = read_regular_file(path, MAX_JOURNAL_BYTES)
        lines, damage = read_journal(data)
        if damage and not _is_closing(lines):  # it may just be written: look again
            data = read_regular_file(path, MAX_JOURNAL_BYTES)
            lines, damage = read_journal(data)
    except FileNotFoundError:
        data, lines, damage = b"", [], []
    except OSError as error:
        data, lines, damage = b"", [], []
        problems.append(_unreadable(path, error, rank))
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
    return RankRecording(
        rank=rank,
        attempt=attempt,
        directory=directory,
        header=header,
        names=_read_names(lines),
        health=tuple(line for line in lines if line["kind"] == "health"),
        updates=tuple(line for line in lines if line["kind"] == "update"),
        closing=next((line for line in reversed(lines) if line["kind"] == "close"), None),
        tables=frozenset(
            name
            for line in lines
            if line["kind"] == "table" and isinstance(name := line.get("name"), str)
        ),
        groups=groups_from_journal(lines),
        problems=problems,
    )


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
            names[_as_int(line.get("id"))] = text
    return names


def _group_attempts(
    recordings: list[RankRecording], run_problems: tuple[Problem, ...]
) -> tuple[Attempt, ...]:
    groups: _Groups = {}
    duplicates: dict[_GroupKey, list[Problem]] = {}
    for recording in recordings:
        if not recording.header:
            continue
        # A launcher that reuses its id gives one rank two recordings with one key: the second
        # belongs to a second launch, unless both were made at the same time.
        repeat = 0
        while (twin := groups.get((*recording.launch_key, repeat), {}).get(recording.rank)) is not (
            None
        ):
            problem = _find_overlap(twin, recording)
            if problem is not None:
                duplicates.setdefault((*recording.launch_key, repeat), []).append(problem)
                duplicates.setdefault((*recording.launch_key, repeat + 1), []).append(problem)
            repeat += 1
        groups.setdefault((*recording.launch_key, repeat), {})[recording.rank] = recording
    groups = _settle(groups)
    for recording in recordings:
        if not recording.header:
            key = _find_home(recording, groups) or (*recording.launch_key, 0)
            groups.setdefault(key, {})[recording.rank] = recording
    ordered = sorted(groups.items(), key=lambda item: _first_start(item[1]))
    return tuple(
        _make_attempt(
            index, key, dict(sorted(ranks.items())), (*run_problems, *duplicates.get(key, ()))
        )
        for index, (key, ranks) in enumerate(ordered)
    )


def _settle(groups: _Groups) -> _Groups:
    """Corrects by their times what the numbers of recordings got wrong, launch by launch."""
    settled: _Groups = {}
    launches: dict[str, _Groups] = {}
    for key, group in groups.items():
        is_stated = any(
            stated_attempt(recording.header) is not None for recording in group.values()
        )
        (settled if is_stated else launches.setdefault(key[0], {}))[key] = group
    for launch in launches.values():
        for (name, number, repeat), group in settle_by_time(launch, _extent_of):
            free = next(r for r in count(repeat) if (name, number, r) not in settled)
            settled[name, number, free] = group
    return settled


def _extent_of(recording: RankRecording) -> Extent | None:
    """When it was made; None when its header does not say."""
    if not _says_when(recording):
        return None
    return Extent(
        host=recording.header.get("host"),
        start_unix_ns=recording.start_unix_ns,
        end_unix_ns=max(last_sign_of_life_ns(recording), recording.start_unix_ns),
    )


def _says_when(recording: RankRecording) -> bool:
    return all(
        _is_int64(recording.header.get(name)) for name in ("start_unix_ns", "start_host_mono_ns")
    )


def _find_home(recording: RankRecording, groups: _Groups) -> _GroupKey | None:
    """The attempt that a recording without a header belongs to, by what the other ranks have."""
    lacking = {key: ranks for key, ranks in groups.items() if recording.rank not in ranks}
    same_number = {
        key: count
        for key, ranks in lacking.items()
        if (count := sum(other.attempt == recording.attempt for other in ranks.values()))
    }
    if same_number:
        return max(same_number, key=lambda key: same_number[key])
    return next(iter(lacking)) if len(lacking) == 1 else None


def _find_overlap(first: RankRecording, second: RankRecording) -> Problem | None:
    """Two processes that recorded as one rank of one launch at the same time.

    Not told of recordings whose headers do not say when they began.
    """
    if not (_says_when(first) and _says_when(second)):
        return None
    first, second = sorted((first, second), key=lambda recording: recording.start_unix_ns)
    is_one_host = first.header.get("host") == second.header.get("host")
    overlap_ns = last_sign_of_life_ns(first) - second.start_unix_ns
    if overlap_ns <= (0 if is_one_host else CLOCK_SKEW_NS):
        return None
    processes = " and ".join(
        f"{attempt_dir_name(recording.attempt)} (pid {recording.header.get('pid')})"
        for recording in (first, second)
    )
    return Problem(
        kind=ProblemKind.DUPLICATE_RANK,
        rank=first.rank,
        path=second.directory,
        text=f"two processes recorded as rank {first.rank} of one launch at the same time: "
        f"{processes}; check the RANK each was given",
    )


def last_sign_of_life_ns(recording: RankRecording) -> int:
    """Wall clock of the closing line, else of the last record."""
    offset_ns = recording.start_unix_ns - _as_int(recording.header.get("start_host_mono_ns"))
    if recording.closing is not None and "end_host_mono_ns" in recording.closing:
        return _as_int(recording.closing["end_host_mono_ns"]) + offset_ns
    for table, column in (
        ("steps", "end_host_mono_ns"),
        ("spans", "start_host_mono_ns"),
        ("scalars", "time_host_mono_ns"),
    ):
        times = recording.read(table)[column]
        if len(times):
            return int(times.max()) + offset_ns
    return recording.start_unix_ns


def _first_start(ranks: dict[int, RankRecording]) -> int:
    """When an attempt began, by the ranks that say so; what nobody knows comes first."""
    return min((start for r in ranks.values() if (start := r.start_unix_ns)), default=0)


def _make_attempt(
    index: int,
    key: _GroupKey,
    ranks: dict[int, RankRecording],
    known_problems: Iterable[Problem],
) -> Attempt:
    problems = list(known_problems)
    claims = {_as_int(recording.header.get("world_size")) for recording in ranks.values()}
    for claim in sorted(claims):
        if claim > MAX_WORLD_SIZE:
            text = (
                f"a rank says that there are {claim} ranks; at most {MAX_WORLD_SIZE} are believed"
            )
            problems.append(Problem(kind=ProblemKind.MISPLACED, text=text))
    believed = [claim for claim in claims if claim <= MAX_WORLD_SIZE]
    world_size = max(*believed, max(ranks) + 1, 0)
    missing = RankRanges.absent_from(ranks, world_size)
    if missing:
        problems.append(
            Problem(
                kind=ProblemKind.MISSING_RANK,
                text=f"{len(missing)} of {world_size} ranks recorded nothing: {missing}",
            )
        )
    return Attempt(
        index=index,
        launch_id=key[0],
        restart_count=key[1],
        ranks=ranks,
        world_size=world_size,
        missing_ranks=missing,
        layout=_agreed_layout(ranks, world_size),
        problems=tuple(problems),
    )


def _agreed_layout(ranks: dict[int, RankRecording], world_size: int) -> Layout | Unavailable:
    """The layout the ranks recorded, if they agree and it fits the world."""
    found: dict[str, object] = {}
    for recording in ranks.values():
        for fields in (recording.header, *recording.updates):
            layout = fields.get("layout")
            if layout is not None:
                found[_layout_text(layout)] = layout
    if not found:
        is_traced = any(one.header.get("source") == TRACE_SOURCE for one in ranks.values())
        how = "use `meshscope import --layout`" if is_traced else _HOW_TO_DECLARE
        return Unavailable(f"no layout was declared; {how}")
    if len(found) > 1:
        texts = [text[:200] for text in sorted(found)[:4]]
        return Unavailable("ranks declared different layouts: " + "; ".join(texts))
    try:
        declared = next(iter(found.values()))
        if not isinstance(declared, dict):
            raise LayoutError(f"it is a {type(declared).__name__}, not an object")
        layout = Layout.from_dict(declared)
    except LayoutError as error:
        return Unavailable(f"the recorded layout is invalid: {error}")
    if layout.world_size != world_size:
        return Unavailable(
            f"the declared layout {layout.describe()} has {layout.world_size} ranks, "
            f"the run {world_size}"
        )
    return layout


def _layout_text(layout: object) -> str:
    try:
        return json.dumps(layout, sort_keys=True)
    except RecursionError:
        return "(nested too deeply)"


def keep_last_per_step(columns: Columns) -> Columns:
    """Keeps the last row of each step, in step order (see the meaning of table `steps`)."""
    steps = columns["step"]
    if len(steps) < 2 or bool((np.diff(steps.astype(np.int64)) > 0).all()):
        return columns
    _, first_from_end = np.unique(steps[::-1], return_index=True)
    return select_rows(columns, len(steps) - 1 - first_from_end)


def keep_last_per_fault(columns: Columns) -> Columns:
    """Keeps the last row of each kind and begin, in order of begin (see table `faults`)."""
    begins, kinds = columns["begin_host_mono_ns"], columns["kind_id"]
    rows = {
        (int(at), int(kind)): row for row, (at, kind) in enumerate(zip(begins, kinds, strict=True))
    }
    return select_rows(columns, np.array([rows[key] for key in sorted(rows)], dtype=np.int64))


def _is_int64(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _as_int(value: object) -> int:
    return value if _is_int64(value) else 0
