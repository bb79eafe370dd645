"""A run that is thinned while it is written keeps what it promises, and sums up the rest."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from builders import table_path
from meshscope.analyze.study import Study
from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable, need
from meshscope.store.read.columns import Columns, ProblemKind, int64_column
from meshscope.store.read.compact import compact_run
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.read.table_files import read_thinnings
from meshscope.store.read.table_tail import TableTail
from meshscope.store.read.tail import read_step_tail
from meshscope.store.retention_tables import (
    AGGREGATE_STEPS,
    THINNED_TABLES,
    WINDOW_STEPS,
    KeptReason,
    bucket_of,
)
from meshscope.store.schema import BUILTIN_NAMES, TABLES, StepFlag
from meshscope.store.write.pack import OLD_PACK, PACK_NAME, SEALED_PACK
from meshscope.store.write.record_sums import merge_rows
from meshscope.store.write.writer import RankWriter

OPERATIONS_PER_STEP = 12
OPERATION_NS = 40_000
MAX_BYTES = 1 << 21
STEP_NS = 1_000_000
HEADER = {"rank": 0, "world_size": 1, "start_unix_ns": 1_000, "start_host_mono_ns": 0}


def open_writer(path: Path, max_bytes: int | None, *, mapped: bool = True) -> RankWriter:
    return RankWriter(path, 0, header=HEADER, mapped=mapped, max_bytes=max_bytes, grace_seconds=0.0)


def operation_words(step: int, index: int, at_ns: int, outcome: int = Outcome.OK) -> list[int]:
    kind = (Kind.ALL_REDUCE, Kind.ALL_GATHER)[index % 2]
    head = kind | outcome << 8 | EndSource.WAIT << 16 | (index % 3) << 32 | 3 << 48
    end_ns = at_ns + OPERATION_NS + 17 * (step % 50)
    return [head, step * 100 + index, at_ns, at_ns, end_ns, 64 + index, step + 1 | 1 << 32]


class Program:
    """Writes steps; thins when that is due."""

    def __init__(self, writer: RankWriter, *, num_operations: int = OPERATIONS_PER_STEP) -> None:
        self.writer = writer
        self.num_operations = num_operations
        self.now_ns = 1_000_000
        self.operations: list[list[int]] = []
        self.peak_bytes = 0
        self.most_files = 0

    def step(self, number: int, *, ratio: float = 1.0, flags: int = 0, fails: bool = False) -> None:
        begin_ns = self.now_ns
        for index in range(self.num_operations):
            outcome = Outcome.ERROR if fails and index == 1 else Outcome.OK
            words = operation_words(number, index, begin_ns + 1 + index * 60_000, outcome)
            self.operations.append(words)
            self.writer.table("collectives").put(*words)
        self.now_ns += int(STEP_NS * ratio)
        self.writer.table("steps").put(number, begin_ns, self.now_ns, 1 | flags << 32, -1, 0, 0)

    def thin_if_due(self, look: Callable[[], object] = lambda: None) -> None:
        look()
        self.writer.flush()  # a recorder does, five times a second
        thinner = self.writer.thinner
        if thinner is not None and thinner.is_due():
            for _ in thinner.work():
                self.note_size()
                look()

    def note_size(self) -> None:
        sizes = [path.stat().st_size for path in self.writer.directory.iterdir()]
        self.peak_bytes = max(self.peak_bytes, sum(sizes))
        self.most_files = max(self.most_files, len(sizes))

    def run(self, numbers: range, **settings: object) -> None:
        for number in numbers:
            self.step(number, **settings)  # type: ignore[arg-type]
            if number % 16 == 0:
                self.thin_if_due()


def read(path: Path) -> Recording:
    return open_run(path).last_attempt.ranks[0]


def sequences(columns: Columns) -> list[int]:
    return sorted(int64_column(columns, "sequence").tolist())


def whole_steps(recording: Recording) -> list[int]:
    columns = recording.read("steps")
    is_whole = (columns["flags"].astype(int) & StepFlag.THINNED) == 0
    return [int(step) for step in columns["step"][is_whole]]


def sums_of(operations: list[list[int]]) -> Counter[tuple[int, ...]]:
    """What `aggregates` must say of some operations: by key, (count, ns, bytes) as three counts."""
    found: Counter[tuple[int, ...]] = Counter()
    for head, _, _, start_ns, end_ns, size_bytes, last in operations:
        step, duration_ns = (last & 0xFFFFFFFF) - 1, end_ns - start_ns
        key = (
            head & 0xFF, head >> 32 & 0xFFFF, head >> 48, bucket_of(duration_ns),
            step // AGGREGATE_STEPS * AGGREGATE_STEPS,
        )  # fmt: skip
        found[(*key, 0)] += 1
        found[(*key, 1)] += duration_ns
        found[(*key, 2)] += size_bytes
    return found


def read_sums(recording: Recording) -> Counter[tuple[int, ...]]:
    columns = recording.read("aggregates")
    found: Counter[tuple[int, ...]] = Counter()
    is_operation = columns["source"] == THINNED_TABLES.index("collectives")
    names = ("kind", "group_id", "phase_id", "bucket", "first_step")
    for row in np.flatnonzero(is_operation).tolist():
        key = tuple(int(columns[name][row]) for name in names)  # type: ignore[call-overload]
        for index, name in enumerate(("num_records", "total_ns", "total_bytes")):
            found[(*key, index)] += int(columns[name][row])  # type: ignore[call-overload]
    return found


@pytest.fixture(params=[True, False], ids=["mapped", "append"])
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Program]:
    """4,000 steps into 2 MiB, with a slow step, an aborted one and a failed operation."""
    program = Program(open_writer(tmp_path / "run", MAX_BYTES, mapped=request.param))
    program.run(range(1000))
    program.step(1000, ratio=3.0)
    program.run(range(1001, 2000))
    program.step(2000, flags=StepFlag.ABORTED)
    program.run(range(2001, 3001))
    program.step(3001, fails=True)
    program.run(range(3002, 4000))
    program.writer.flush()
    return tmp_path / "run", program


def test_a_long_run_stays_within_its_size_and_keeps_the_newest(
    long_run: tuple[Path, Program],
) -> None:
    path, program = long_run
    assert program.peak_bytes <= MAX_BYTES
    # Of six: a recorder has one more, for what the process is in.
    assert program.most_files == 5
    recording = read(path)
    kept = set(sequences(recording.read("collectives")))
    newest = {step * 100 + index for step in range(3800, 4000) for index in range(12)}
    assert newest <= kept
    assert len(kept) < len(program.operations) / 2
    program.writer.close(end_host_mono_ns=program.now_ns)
    assert not read(path).problems
    assert set(sequences(read(path).read("collectives"))) == kept


def test_steps_that_are_called_whole_have_all_their_operations(
    long_run: tuple[Path, Program],
) -> None:
    path, _ = long_run
    recording = read(path)
    whole, kept = whole_steps(recording), set(sequences(recording.read("collectives")))
    assert 300 < len(whole) < 3000
    for step in whole:
        assert all(step * 100 + index in kept for index in range(OPERATIONS_PER_STEP))
    assert len(recording.read("steps")["step"]) == 4000  # steps themselves are never thinned


def test_noteworthy_steps_stay(long_run: tuple[Path, Program]) -> None:
    path, _ = long_run
    recording = read(path)
    kept = set(sequences(recording.read("collectives")))
    for step in (1, 1000, 2000, 3001):
        assert all(step * 100 + index in kept for index in range(OPERATIONS_PER_STEP)), step
    windows = recording.read("kept_windows")
    reasons = dict(
        zip(
            (windows["first_step"] // WINDOW_STEPS).tolist(),
            windows["reason"].tolist(),
            strict=True,
        )  # type: ignore[operator]
    )
    assert reasons[0] & KeptReason.FIRST
    assert reasons[1000 // WINDOW_STEPS] & KeptReason.SLOW
    assert reasons[2000 // WINDOW_STEPS] & KeptReason.FLAGGED
    assert reasons[3001 // WINDOW_STEPS] & KeptReason.FAILED


def test_sums_are_exact_over_all_that_is_no_longer_newest(long_run: tuple[Path, Program]) -> None:
    path, program = long_run
    thinning = read_thinnings(path / "rank00000" / "attempt000")["collectives"]
    assert thinning is not None
    old = [
        words
        for words in program.operations
        if (words[6] & 0xFFFFFFFF) - 1 < thinning.first_undecided_step
    ]
    assert read_sums(read(path)) == sums_of(old)


def test_a_round_that_was_not_finished_changes_nothing(tmp_path: Path) -> None:
    """A kill between any two slices of a round: nothing is lost but what the last whole round of
    each table thinned, nothing is there twice, and sums and flags agree with the files."""
    program = Program(open_writer(tmp_path / "run", 1 << 20))
    program.run(range(1500))
    for number in range(1500, 3000):
        program.step(number)
        thinner = program.writer.thinner
        assert thinner is not None
        if not thinner.is_due():
            continue
        for _ in thinner.work():
            recording = read(tmp_path / "run")
            found = sequences(recording.read("collectives"))
            assert len(found) == len(set(found))
            for step in whole_steps(recording)[-40:]:
                assert step * 100 + 3 in found
            thinning = read_thinnings(program.writer.directory)["collectives"]
            assert thinning is not None
            assert sum(n for key, n in read_sums(recording).items() if key[-1] == 0) == sum(
                (words[6] & 0xFFFFFFFF) - 1 < thinning.first_undecided_step
                for words in program.operations
            )
        break
    else:
        pytest.fail("no round was due")


def test_a_sealed_segment_that_is_already_in_the_thinned_file_is_not_read_twice(
    tmp_path: Path,
) -> None:
    program = Program(open_writer(tmp_path / "run", 1 << 20))
    kept_bytes = b""
    directory = program.writer.directory
    for number in range(2000):
        program.step(number)
        thinner = program.writer.thinner
        assert thinner is not None
        if thinner.is_due():
            for _ in thinner.work():
                sealed = directory / SEALED_PACK
                kept_bytes = sealed.read_bytes() if sealed.exists() else kept_bytes
    before = sequences(read(tmp_path / "run").read("collectives"))
    (directory / SEALED_PACK).write_bytes(kept_bytes)  # as a kill would leave it
    assert sequences(read(tmp_path / "run").read("collectives")) == before


def test_without_a_size_there_is_nothing_new(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run", None)
    Program(writer).run(range(200))
    writer.close(end_host_mono_ns=1)
    names = sorted(path.name for path in writer.directory.iterdir())
    assert names == ["journal.jsonl", PACK_NAME]


def test_lost_operations_are_never_compute(long_run: tuple[Path, Program]) -> None:
    """The budget of a thinned run is that of steps that have all their operations."""
    path, program = long_run
    program.writer.close(end_host_mono_ns=program.now_ns)
    study = Study(open_run(path).last_attempt)
    timeline = study.timeline
    whole = set(whole_steps(read(path)))
    assert hasattr(timeline, "steps")
    assert set(timeline.steps.tolist()) <= whole


@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    num_steps=st.integers(600, 2500),
    num_operations=st.integers(4, 16),
    max_bytes=st.integers(800_000, 2_000_000),
    slow=st.sets(st.integers(10, 2400), max_size=12),
)
def test_every_promised_record_is_there_whatever_the_run(
    tmp_path_factory: pytest.TempPathFactory,
    num_steps: int,
    num_operations: int,
    max_bytes: int,
    slow: set[int],
) -> None:
    path = tmp_path_factory.mktemp("run")
    program = Program(open_writer(path, max_bytes), num_operations=num_operations)
    for number in range(num_steps):
        program.step(number, ratio=2.5 if number in slow else 1.0)
        if number % 8 == 0:
            program.thin_if_due()
    recording = read(path)
    found = sequences(recording.read("collectives"))
    assert len(found) == len(set(found))
    kept = set(found)
    for step in whole_steps(recording):
        assert all(step * 100 + index in kept for index in range(num_operations))
    thinning = read_thinnings(program.writer.directory).get("collectives")
    bound = 0 if thinning is None else thinning.first_undecided_step
    is_old = [(words[6] & 0xFFFFFFFF) - 1 < bound for words in program.operations]
    old = [words for words, yes in zip(program.operations, is_old, strict=True) if yes]
    assert read_sums(recording) == sums_of(old)
    newer = [words for words, yes in zip(program.operations, is_old, strict=True) if not yes]
    assert {words[1] for words in newer} <= kept


def test_a_thinned_run_that_was_compacted_tells_the_same(long_run: tuple[Path, Program]) -> None:
    path, program = long_run
    program.writer.close(end_host_mono_ns=program.now_ns)
    before = read(path)
    whole, kept, sums = (
        whole_steps(before),
        sequences(before.read("collectives")),
        read_sums(before),
    )
    compact_run(path, remove_raw=True)
    after = read(path)
    assert not list((path / "rank00000" / "attempt000").glob("*.pack"))
    assert (whole_steps(after), sequences(after.read("collectives"))) == (whole, kept)
    assert read_sums(after) == sums
    steps = np.arange(4000)
    assert np.flatnonzero(~after.find_thinned(steps)).tolist() == whole


def test_a_missing_segment_is_told(long_run: tuple[Path, Program]) -> None:
    path, program = long_run
    program.writer.close(end_host_mono_ns=program.now_ns)
    whole = read(path)
    whole.read("collectives")
    assert not whole.problems
    (path / "rank00000" / "attempt000" / OLD_PACK).unlink()
    recording = read(path)
    recording.read("collectives")
    assert [problem.kind for problem in recording.problems] == [ProblemKind.UNREADABLE]
    timeline = Study(open_run(path).last_attempt).timeline
    assert isinstance(timeline, Unavailable) or int(timeline.steps.min()) > 3000


# --- tables of steps -----------------------------------------------------------------------------

NUM_MANY = 40_000
SLOW_STEP = 12_345


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Program, Counter[str]]:
    """40,000 steps, 192 bytes each, into 2 MiB: four times what it may take."""
    path = tmp_path_factory.mktemp("endless") / "run"
    program, wrong = Program(open_writer(path, MAX_BYTES), num_operations=0), Counter[str]()
    tail = TableTail(table_path(path / "rank00000" / "attempt000", "steps"), TABLES["steps"])
    seen: list[int] = []
    for number in range(NUM_MANY):
        at = program.now_ns
        program.writer.table("scalars").put(64, number, at + 1, 0, -1, 0, 0)
        program.writer.table("phases").put(at, at + 10, at + 10, at + 400, at + 400, at + 900, 50)
        program.step(number, ratio=30.0 if number == SLOW_STEP else 1.0)
        if number % 64 == 0:
            program.thin_if_due(lambda: seen.extend(tail.read()["step"].tolist()))
    wrong["seen"] = seen != list(range(seen[-1] + 1))
    return path, program, wrong


def test_an_endless_run_stays_within_its_size(endless_run: tuple[Path, Program, object]) -> None:
    path, program, _ = endless_run
    assert program.peak_bytes < MAX_BYTES
    assert program.writer.thinner is not None
    assert program.writer.thinner.excess_bytes == 0
    recording = read(path)
    steps = int64_column(recording.read("steps"), "step")
    assert len(steps) < NUM_MANY / 8
    assert (np.diff(steps) > 0).all()
    assert steps[:32].tolist() == list(range(32))
    assert steps[-1000:].tolist() == list(range(NUM_MANY - 1000, NUM_MANY))  # the newest
    assert SLOW_STEP in steps  # the noteworthy
    scalars = int64_column(recording.read("scalars"), "step")
    assert np.isin(steps, scalars).all()
    assert recording.find_step_extent() == (0, NUM_MANY - 1)
    assert not recording.problems


def test_sums_of_steps_and_phases_are_exact(endless_run: tuple[Path, Program, object]) -> None:
    path, program, _ = endless_run
    recording = read(path)
    sums = recording.read("aggregates")
    thinned = read_thinnings(program.writer.directory)["steps"]
    assert thinned is not None
    num_old = thinned.first_undecided_step
    assert num_old > NUM_MANY / 2
    is_step = sums["source"] == THINNED_TABLES.index("steps")
    assert int(int64_column(sums, "num_records")[is_step].sum()) == num_old
    expected = STEP_NS * (num_old + 29)  # one was 30 times as long
    assert int(int64_column(sums, "total_ns")[is_step].sum()) == expected
    is_phase = sums["source"] == THINNED_TABLES.index("phases")
    for name, each in (("data", 10), ("forward", 390), ("backward", 500), ("optimizer", 50)):
        own = is_phase & (sums["phase_id"] == BUILTIN_NAMES[name])
        assert int(int64_column(sums, "total_self_ns")[own].sum()) == each * num_old


def test_a_reader_that_follows_misses_no_step(
    endless_run: tuple[Path, Program, Counter[str]],
) -> None:
    _, program, wrong = endless_run
    assert not wrong["seen"]
    tail = read_step_tail(program.writer.directory)
    assert tail is not None
    assert (tail.last_step, tail.mean_step_ns) == (NUM_MANY - 1, STEP_NS)


def test_pace_and_step_time_of_an_endless_run_are_those_of_all_steps(
    endless_run: tuple[Path, Program, object],
) -> None:
    path, _, _ = endless_run
    study = Study(open_run(path).last_attempt)
    assert need(study.steps_per_s) == pytest.approx(1e9 / STEP_NS, rel=0.002)
    assert need(study.step_ns) == STEP_NS
    budget = need(study.budget)
    assert budget.total_wall_ns == pytest.approx(STEP_NS * (NUM_MANY + 29), rel=0.01)
    assert study.time.between.wall_ns == 0


def test_sums_are_joined_to_longer_blocks_and_stay_exact() -> None:
    rows = [(5 | 3 << 16, 512 * n, n, 2, 10 * n, 1, 0) for n in range(64)]
    merged = merge_rows(rows, 3)
    assert len(merged) == 8
    assert merged[0] == (5 | 3 << 16 | 3 << 24, 0, 7, 16, 280, 8, 0)
    assert [row[1] for row in merged] == [4096 * n for n in range(8)]
    again = merge_rows(merged + rows[:1], 3)
    assert len(again) == 8
    assert again[0][3] == 18
