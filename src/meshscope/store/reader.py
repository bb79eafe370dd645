"""Opens a run directory, finished or still being written, and gives its tables as columns.

Ranks and attempts are found by listing folders; nothing else ties them together, so a rank that
never started, stopped early or wrote damaged bytes costs only itself and is listed in `problems`.
Attempts of different ranks belong together when they carry the same launch identity.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError, RunEmpty, RunError, RunNotFound, SchemaTooNew
from meshscope.store.columns import (
    Columns,
    Problem,
    ProblemKind,
    empty_columns,
    read_table_file,
    schema_too_new_text,
    select_rows,
)
from meshscope.store.journal import JOURNAL_NAME, read_journal
from meshscope.store.schema import BUILTIN_NAMES, SCHEMA_VERSION, TABLES
from meshscope.store.writer import MANIFEST_NAME, RUN_FORMAT, TABLE_SUFFIX

_RANK_DIR = re.compile(r"rank(\d{5,})$")
_ATTEMPT_DIR = re.compile(r"attempt(\d{3,})$")

JsonFields = Mapping[str, object]


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
    problems: list[Problem] = field(default_factory=list)

    @property
    def launch_key(self) -> tuple[str, int]:
        """Launch and restart this attempt belongs to; unnamed launches go by their ordinal."""
        launch = self.header.get("launch_id")
        restart = self.header.get("restart_count")
        number = restart if isinstance(restart, int) else 0
        return (launch, number) if isinstance(launch, str) else ("", self.attempt)

    @property
    def start_unix_ns(self) -> int:
        """Wall clock at the start of the recording, for ordering attempts."""
        return _as_int(self.header.get("start_unix_ns"))

    def has_table(self, name: str) -> bool:
        """Whether the rank wrote any record of this table."""
        return (self.directory / f"{name}{TABLE_SUFFIX}").exists()

    def read(self, name: str) -> Columns:
        """A table's columns; no rows when the rank wrote none. Adds to `problems`."""
        table = TABLES[name]
        path = self.directory / f"{name}{TABLE_SUFFIX}"
        try:
            read = read_table_file(path, table, self.rank)
        except FileNotFoundError:
            return empty_columns(table)
        except OSError as error:
            self._note(
                Problem(
                    kind=ProblemKind.UNREADABLE,
                    rank=self.rank,
                    path=path,
                    text=f"cannot be read: {error.strerror}",
                )
            )
            return empty_columns(table)
        for problem in read.problems:
            self._note(problem)
        return _last_per_step(read.columns) if name == "steps" else read.columns

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
    missing_ranks: tuple[int, ...]
    layout: Layout | Unavailable
    problems: tuple[Problem, ...]

    def __iter__(self) -> Iterator[RankRecording]:
        return iter(self.ranks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory: its manifest and its attempts, oldest first."""

    path: Path
    manifest: JsonFields
    attempts: tuple[Attempt, ...]

    @property
    def last_attempt(self) -> Attempt:
        """The most recent launch."""
        return self.attempts[-1]


def open_run(path: Path | str) -> Run:
    """Opens a run directory; RunError says in one line why not."""
    directory = Path(path)
    _check_is_run_directory(directory)
    manifest = _read_manifest(directory)
    try:
        recordings = [_read_rank(*found) for found in _find_recordings(directory)]
    except PermissionError as error:
        raise RunError(
            f"{error.filename} cannot be read: permission denied; ask its owner or check its mode"
        ) from error
    if not recordings:
        raise RunEmpty(
            f"{directory} is a run in which no rank has recorded anything yet; check that the "
            "job started and that its ranks can write there"
        )
    return Run(path=directory, manifest=manifest, attempts=_group_attempts(recordings))


def is_run_directory(path: Path) -> bool:
    """Whether `path` looks like a run, cheaply."""
    if (path / MANIFEST_NAME).is_file():
        return True
    return path.is_dir() and any(_RANK_DIR.match(child.name) for child in path.iterdir())


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


def _read_manifest(directory: Path) -> JsonFields:
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}  # ranks are there; the manifest is a convenience and may have been lost
    except PermissionError as error:
        raise RunError(f"{path} cannot be read: permission denied; check its mode") from error
    except ValueError as error:
        raise RunError(
            f"{path} is not valid JSON ({error}); restore it, or delete it to open the run without"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != RUN_FORMAT:
        raise RunNotFound(f'{path} is not a meshscope manifest ("format" is not "{RUN_FORMAT}")')
    version = manifest.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(path, version))
    return manifest


def _find_recordings(directory: Path) -> Iterator[tuple[int, int, Path]]:
    for rank_dir in sorted(directory.iterdir()):
        rank_match = _RANK_DIR.match(rank_dir.name)
        if rank_match is None:
            continue
        for attempt_dir in sorted(rank_dir.iterdir()):
            attempt_match = _ATTEMPT_DIR.match(attempt_dir.name)
            if attempt_match is not None:
                yield int(rank_match[1]), int(attempt_match[1]), attempt_dir


def _read_rank(rank: int, attempt: int, directory: Path) -> RankRecording:
    path = directory / JOURNAL_NAME
    problems: list[Problem] = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    lines, damage = read_journal(data)
    if not lines or lines[0]["kind"] != "header":
        problems.append(
            Problem(
                kind=ProblemKind.UNREADABLE,
                rank=rank,
                path=path,
                text="the journal has no readable header: times and names of this rank are unknown",
            )
        )
    problems += [
        Problem(
            kind=ProblemKind.TORN_TAIL if spot.is_tail else ProblemKind.DAMAGED,
            rank=rank,
            path=path,
            offset=spot.offset,
            text=f"the journal line at byte {spot.offset} does not match its checksum and is "
            "left out",
        )
        for spot in damage
    ]
    header = lines[0] if lines and lines[0]["kind"] == "header" else {}
    version = header.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(path, version))
    return RankRecording(
        rank=rank,
        attempt=attempt,
        directory=directory,
        header=header,
        names=_read_names(lines),
        health=tuple(line for line in lines if line["kind"] == "health"),
        updates=tuple(line for line in lines if line["kind"] == "update"),
        closing=next((line for line in reversed(lines) if line["kind"] == "close"), None),
        problems=problems,
    )


def _read_names(lines: list[dict[str, object]]) -> dict[int, str]:
    names = {name_id: text for text, name_id in BUILTIN_NAMES.items()}
    for line in lines:
        if line["kind"] == "name" and isinstance(line.get("id"), int):
            names[_as_int(line["id"])] = str(line.get("text"))
    return names


def _group_attempts(recordings: list[RankRecording]) -> tuple[Attempt, ...]:
    groups: dict[tuple[str, int, int], dict[int, RankRecording]] = {}
    for recording in recordings:
        # A launcher that reuses its id gives one rank two recordings with one key: the second
        # belongs to a second launch.
        repeat = 0
        while recording.rank in groups.get((*recording.launch_key, repeat), {}):
            repeat += 1
        groups.setdefault((*recording.launch_key, repeat), {})[recording.rank] = recording
    ordered = sorted(groups.items(), key=lambda item: _first_start(item[1]))
    return tuple(
        _make_attempt(index, key, dict(sorted(ranks.items())))
        for index, (key, ranks) in enumerate(ordered)
    )


def _first_start(ranks: dict[int, RankRecording]) -> int:
    return min(recording.start_unix_ns for recording in ranks.values())


def _make_attempt(
    index: int, key: tuple[str, int, int], ranks: dict[int, RankRecording]
) -> Attempt:
    worlds = {_as_int(recording.header.get("world_size")) for recording in ranks.values()}
    world_size = max(*worlds, max(ranks) + 1, 0)
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    problems = []
    if missing:
        problems.append(
            Problem(
                kind=ProblemKind.MISSING_RANK,
                text=f"{len(missing)} of {world_size} ranks recorded nothing: "
                + abbreviate_ranks(missing),
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
                found[json.dumps(layout, sort_keys=True)] = layout
    if not found:
        return Unavailable("no layout was declared; pass layout=… or `meshscope run --layout`")
    if len(found) > 1:
        return Unavailable("ranks declared different layouts: " + "; ".join(sorted(found)))
    try:
        layout = Layout.from_dict(next(iter(found.values())))  # type: ignore[arg-type]
    except LayoutError as error:
        return Unavailable(f"the recorded layout is invalid: {error}")
    if layout.world_size != world_size:
        return Unavailable(
            f"the declared layout {layout.describe()} has {layout.world_size} ranks, "
            f"the run {world_size}"
        )
    return layout


def _last_per_step(columns: Columns) -> Columns:
    """Keeps the last row of each step, in step order (see the meaning of table `steps`)."""
    steps = columns["step"]
    if len(steps) < 2 or bool((np.diff(steps.astype(np.int64)) > 0).all()):
        return columns
    _, first_from_end = np.unique(steps[::-1], return_index=True)
    return select_rows(columns, len(steps) - 1 - first_from_end)


def abbreviate_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """`0-3, 7, 9-11`, cut after a few stretches."""
    stretches: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1] = (stretches[-1][0], rank)
        else:
            stretches.append((rank, rank))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in stretches[:8]]
    return ", ".join(shown) + (" …" if len(stretches) > 8 else "")


def _as_int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
