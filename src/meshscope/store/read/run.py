"""Opens a run directory, finished or still being written, and gives its tables as columns.

Ranks and attempts are found by listing folders; nothing else ties them together, so a rank that
never started, stopped early or wrote damaged bytes costs only itself and is listed in `problems`.
Attempts of different ranks belong together when they carry the same launch identity; a recording
whose journal has no readable header goes with those of the other ranks that have its number.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError, RunEmpty, RunError, RunNotFound, SchemaTooNew
from meshscope.store.read.columns import Problem, ProblemKind, schema_too_new_text
from meshscope.store.read.files import exists, is_file, is_folder, list_names, read_file
from meshscope.store.read.parquet import open_compacted
from meshscope.store.read.rank_ranges import RankRanges
from meshscope.store.read.recording import (
    MAX_JOURNAL_BYTES,
    JsonFields,
    Recording,
    as_int,
    describe_unreadable,
    is_int64,
    last_sign_of_life_ns,
    open_recording,
)
from meshscope.store.schema import SCHEMA_VERSION, TABLES
from meshscope.store.write.attempts import CLOCK_SKEW_NS, Extent, settle_by_time, stated_attempt
from meshscope.store.write.manifest import unseal
from meshscope.store.write.writer import (
    MANIFEST_NAME,
    RUN_FORMAT,
    attempt_dir_name,
    rank_dir_name,
)

_RANK_DIR = re.compile(r"rank([0-9]{5,12})")
_ATTEMPT_DIR = re.compile(r"attempt([0-9]{3,9})")

_HOW_TO_DECLARE = "pass layout=… or `meshscope run --layout`"
MAX_WORLD_SIZE = 1 << 20
"""Ranks a run can have; a header or a folder that claims more is not believed."""
_MAX_KEPT_ROWS = 500_000
"""Rows of all tables and ranks together that are kept in memory: about 60 megabytes."""
_GroupKey = tuple[str, int, int]
"""Launch, restart, and how many earlier recordings of a rank carry the same two."""
_Groups = dict[_GroupKey, dict[int, Recording]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the job: at most one recording per rank."""

    index: int
    launch_id: str
    restart_count: int
    ranks: dict[int, Recording]
    world_size: int
    """As the ranks report it; a rank may be missing from `ranks`."""
    missing_ranks: RankRanges
    layout: Layout | Unavailable
    problems: tuple[Problem, ...]

    def __iter__(self) -> Iterator[Recording]:
        return iter(self.ranks.values())

    @property
    def is_from_traces(self) -> bool:
        """Whether it was made of a profiler's traces rather than recorded."""
        return any(recording.is_from_trace for recording in self)

    def choose_warmup(self, asked: int | None) -> int | None:
        """First steps to leave out; None leaves the choice to statistics. A profiler warms up by
        itself before its first step."""
        return 0 if asked is None and self.is_from_traces else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: its manifest and its attempts, oldest first."""

    path: Path
    """Its folder; for a run in memory, the traces it was made of."""
    manifest: JsonFields
    attempts: tuple[Attempt, ...]
    problems: tuple[Problem, ...] = ()
    """What belongs to no attempt: the manifest, folders that cannot be read. Also in each attempt's
    `problems`."""

    @property
    def last_attempt(self) -> Attempt:
        """The most recent launch."""
        return self.attempts[-1]


def keep_tables(attempt: Attempt) -> Attempt:
    """The same attempt, whose tables are read once, where they all fit.

    An attempt with more rows is left as it is: each reader reads its tables again.
    """
    num_rows = 0
    for recording in attempt:
        num_rows += sum(recording.count_rows(name) for name in TABLES)
        if num_rows > _MAX_KEPT_ROWS:
            return attempt
    kept = {
        rank: one if one.kept is not None else replace(one, kept={})
        for rank, one in attempt.ranks.items()
    }
    return replace(attempt, ranks=kept)


def forget_tables(attempt: Attempt) -> None:
    """Tables that were kept are read again when somebody asks for them; any thread may call it."""
    for recording in attempt:
        if recording.kept is not None:
            recording.kept.clear()


def open_run(path: Path | str) -> Run:
    """Opens a run directory; RunError says in one line why not."""
    directory = Path(path)
    _check_is_run_directory(directory)
    problems: list[Problem] = []
    manifest = _read_manifest(directory, problems)
    compacted = open_compacted(directory, problems)
    recordings = [
        open_recording(rank, attempt, folder, compacted)
        for rank, attempt, folder in _find_recordings(directory, problems)
    ]
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
        attempts=group_attempts(recordings, tuple(problems)),
        problems=tuple(problems),
    )


def is_run_directory(path: Path) -> bool:
    """Whether `path` looks like a run, cheaply."""
    return is_file(path / MANIFEST_NAME) or has_ranks(path)


def has_ranks(path: Path) -> bool:
    """Whether ranks recorded in `path`; a `run.json` alone may be another program's."""
    return is_folder(path) and any(map(_RANK_DIR.fullmatch, list_names(path)))


def _check_is_run_directory(path: Path) -> None:
    try:
        if not exists(path):
            raise RunNotFound(f"{path} does not exist; give the directory of a recorded run")
        if not is_folder(path):
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
        manifest, is_intact = unseal(read_file(path, MAX_JOURNAL_BYTES))
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise RunError(f"{path} cannot be read: permission denied; check its mode") from error
    except OSError as error:
        problems.append(describe_unreadable(path, error))
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
            problems.append(describe_unreadable(rank_dir, error, rank))
            continue
        for attempt in attempts:
            yield rank, attempt, rank_dir / attempt_dir_name(attempt)


def _list_numbers(
    directory: Path, pattern: re.Pattern[str], name_of: Callable[[int], str]
) -> list[int]:
    """Numbers in the names that a writer would have given them, in order."""
    names = list_names(directory)
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(number for match in matches if name_of(number := int(match[1])) == match[0])


def group_attempts(
    recordings: Sequence[Recording], run_problems: tuple[Problem, ...] = ()
) -> tuple[Attempt, ...]:
    """Recordings of the same launch and restart, oldest first."""
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


def _extent_of(recording: Recording) -> Extent | None:
    """When it was made; None when its header does not say."""
    if not _says_when(recording):
        return None
    return Extent(
        host=recording.header.get("host"),
        start_unix_ns=recording.start_unix_ns,
        end_unix_ns=max(last_sign_of_life_ns(recording), recording.start_unix_ns),
    )


def _says_when(recording: Recording) -> bool:
    return all(
        is_int64(recording.header.get(name)) for name in ("start_unix_ns", "start_host_mono_ns")
    )


def _find_home(recording: Recording, groups: _Groups) -> _GroupKey | None:
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


def _find_overlap(first: Recording, second: Recording) -> Problem | None:
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


def _first_start(ranks: dict[int, Recording]) -> int:
    """When an attempt began, by the ranks that say so; unknown comes first."""
    return min((start for r in ranks.values() if (start := r.start_unix_ns)), default=0)


def _make_attempt(
    index: int,
    key: _GroupKey,
    ranks: dict[int, Recording],
    known_problems: Iterable[Problem],
) -> Attempt:
    problems = list(known_problems)
    claims = {as_int(recording.header.get("world_size")) for recording in ranks.values()}
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
        is_traced = any(recording.is_from_trace for recording in ranks.values())
        have_nothing = "have no trace" if is_traced else "recorded nothing"
        problems.append(
            Problem(
                kind=ProblemKind.MISSING_RANK,
                text=f"{len(missing)} of {world_size} ranks {have_nothing}: {missing}",
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


def _agreed_layout(ranks: dict[int, Recording], world_size: int) -> Layout | Unavailable:
    """The layout the ranks recorded, if they agree and it fits the world."""
    found: dict[str, object] = {}
    for recording in ranks.values():
        for fields in (recording.header, *recording.updates):
            layout = fields.get("layout")
            if layout is not None:
                found[_layout_text(layout)] = layout
    if not found:
        is_traced = any(one.is_from_trace for one in ranks.values())
        how = "use `meshscope import --layout`" if is_traced else _HOW_TO_DECLARE
        return Unavailable(f"no layout was declared or found; {how}")
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
