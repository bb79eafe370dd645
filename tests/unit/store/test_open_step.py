"""Stamps of the unfinished step: damage is told, earlier steps are not taken for it, live reads."""

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from builders import START_MONO_NS, flip_byte, make_writer, put_span, put_step
from meshscope.analyze.study import Study
from meshscope.store.read.columns import ProblemKind
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.write.now_file import NOW_NAME, OPEN_STEP_BYTES, NowFile
from meshscope.store.write.open_step import (
    FIRST_STAMP_WORD,
    PHASE_IDS,
    STAMP_FACTOR,
    OpenPhase,
    OpenStepWriter,
    read_open_step,
)
from meshscope.store.write.writer import RankWriter

EPOCH = START_MONO_NS
NUM_BYTES = OPEN_STEP_BYTES
STAMPS = (10, 40, 50, 95, 100, None, None, None)
"""Begin and end of data, forward, backward, optimizer after EPOCH: killed inside backward."""
DATA, FORWARD, BACKWARD, OPTIMIZER = PHASE_IDS


def stamp(writer: OpenStepWriter, times: tuple[int | None, ...]) -> None:
    for place, time in enumerate(times):
        if time is not None:
            stamp_ns = EPOCH + time - writer.epoch_ns
            writer.words[FIRST_STAMP_WORD + place] = stamp_ns * STAMP_FACTOR


def make_stamps(path: Path, times: tuple[int | None, ...] = STAMPS) -> bytes:
    stamp(OpenStepWriter(NowFile(path, mapped=True), EPOCH), times)
    return path.read_bytes()[:NUM_BYTES]


def phase(name_id: int, start: int, end: int | None) -> OpenPhase:
    return OpenPhase(
        name_id=name_id,
        start_host_mono_ns=EPOCH + start,
        end_host_mono_ns=None if end is None else EPOCH + end,
    )


def test_stamps_are_read_back(tmp_path: Path) -> None:
    data = make_stamps(tmp_path / NOW_NAME)
    assert len(data) == NUM_BYTES
    expected = [phase(DATA, 10, 40), phase(FORWARD, 50, 95), phase(BACKWARD, 100, None)]
    assert read_open_step(data, EPOCH) == (expected, 0)


def test_a_phase_that_begins_with_the_file_is_there(tmp_path: Path) -> None:
    data = make_stamps(tmp_path / NOW_NAME, (0, 0))
    assert read_open_step(data, 0) == ([phase(DATA, 0, 0)], 0)


def test_a_new_file_holds_no_phase(tmp_path: Path) -> None:
    assert read_open_step(make_stamps(tmp_path / "x", ()), 0) == ([], 0)


@pytest.mark.parametrize("times", [STAMPS, (1, 2, 3, 4, 5, 6, 7, 10**15), ()])
def test_every_changed_byte_is_seen_and_costs_at_most_its_phase(
    tmp_path: Path, times: tuple[int | None, ...]
) -> None:
    data = make_stamps(tmp_path / NOW_NAME, times)
    phases, _ = read_open_step(data, EPOCH)
    for offset, flip in itertools.product(range(NUM_BYTES), range(1, 256)):
        changed = bytearray(data)
        changed[offset] ^= flip
        if offset < 8 * FIRST_STAMP_WORD:
            with pytest.raises(ValueError, match="head"):
                read_open_step(bytes(changed), EPOCH)
            continue
        found, num_damaged = read_open_step(bytes(changed), EPOCH)
        assert num_damaged == 1
        place = (offset // 8 - FIRST_STAMP_WORD) // 2
        touched = PHASE_IDS[place] if place < len(PHASE_IDS) else None
        assert found == [p for p in phases if p.name_id != touched], (offset, flip)


@pytest.mark.parametrize("size", [*range(NUM_BYTES), NUM_BYTES + 1, 4096])
def test_another_length_is_not_read(tmp_path: Path, size: int) -> None:
    data = make_stamps(tmp_path / NOW_NAME).ljust(size, b"\0")[:size]
    with pytest.raises(ValueError, match=f"{size} bytes, expected 128"):
        read_open_step(data, EPOCH)


def test_stamps_of_an_earlier_step_are_not_of_the_open_one(tmp_path: Path) -> None:
    """Data and forward of the open step; backward and optimizer are the step's before."""
    data = make_stamps(tmp_path / NOW_NAME, (110, 120, 130, 95, 40, 60, 65, 99))
    expected = [phase(DATA, 110, 120), phase(FORWARD, 130, None)]
    assert read_open_step(data, EPOCH + 100) == (expected, 0)


# --- in a run ---------------------------------------------------------------------------------


def killed(writer: RankWriter) -> Recording:
    """The rank as it is read after a kill."""
    run_dir = writer.directory.parent.parent
    return open_run(run_dir).last_attempt.ranks[0]


def span_times(recording: Recording) -> list[tuple[int, int, int]]:
    spans = recording.read("spans")
    starts = (spans["start_host_mono_ns"] - EPOCH).tolist()
    ends = (spans["start_host_mono_ns"] - EPOCH + spans["duration_ns"]).tolist()
    return sorted(zip(spans["name_id"].tolist(), starts, ends, strict=True))


def open_phase_of(recording: Recording) -> str | None:
    run = open_run(recording.directory.parent.parent)
    return Study(run.last_attempt).ranks[0].open_phase


@pytest.mark.parametrize("offset", range(NUM_BYTES))
def test_a_changed_byte_is_listed_among_the_problems(tmp_path: Path, offset: int) -> None:
    writer = make_writer(tmp_path)
    path = writer.directory / NOW_NAME
    make_stamps(path)
    flip_byte(path, offset)
    recording = killed(writer)
    recording.read("spans")
    (problem,) = recording.problems
    is_head = offset < 8 * FIRST_STAMP_WORD
    assert problem.kind is (ProblemKind.UNREADABLE if is_head else ProblemKind.DAMAGED)
    assert (problem.path, problem.rank) == (path, 0)


def test_a_damaged_end_does_not_look_like_a_phase_that_goes_on(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    path = writer.directory / NOW_NAME
    make_stamps(path, (10, 40, 50, 95))
    flip_byte(path, 8 * (FIRST_STAMP_WORD + 3))
    recording = killed(writer)
    assert span_times(recording) == [(DATA, 10, 40)]
    assert open_phase_of(recording) is None


def test_after_a_clean_end_stamps_do_not_count(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    make_stamps(writer.directory / NOW_NAME)
    writer.close(end_host_mono_ns=EPOCH + 200)
    recording = killed(writer)
    assert span_times(recording) == []
    assert recording.problems == []


def test_stale_stamps_are_told_by_the_latest_end_whatever_the_step_numbers(tmp_path: Path) -> None:
    """A program may number its steps as it likes: the last row is not the last step in time."""
    writer = make_writer(tmp_path)
    put_step(writer, 7, EPOCH + 1, EPOCH + 5)
    put_step(writer, 3, EPOCH + 6, EPOCH + 100)
    make_stamps(writer.directory / NOW_NAME, (10, 40, 50, 95))
    assert killed(writer).open_phases() == []


def test_phases_written_before_the_steps_record_are_not_read_twice(tmp_path: Path) -> None:
    """Killed between the record of the phases and that of the step, or after a pause."""
    writer = make_writer(tmp_path)
    make_stamps(writer.directory / NOW_NAME, (10, 40, 50, 95, 100, 170, 171, 190))
    times = [EPOCH + time for time in (10, 40, 50, 95, 100, 170)]
    writer.table("phases").put(*times, 1 << 32 | 19)
    expected = [(DATA, 10, 40), (FORWARD, 50, 95), (BACKWARD, 100, 170), (OPTIMIZER, 171, 190)]
    assert span_times(killed(writer)) == expected


def test_an_optimizer_in_a_record_of_its_own_is_not_read_twice(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    make_stamps(writer.directory / NOW_NAME, (10, 40, None, None, None, None, 50, 90))
    put_span(writer, "optimizer", EPOCH + 50, 40)
    assert span_times(killed(writer)) == [(DATA, 10, 40), (OPTIMIZER, 50, 90)]


def test_a_phase_that_has_ended_on_the_stack_does_not_go_on(tmp_path: Path) -> None:
    """Its begin was stamped; then something nested in it, and its end is a row of `spans`."""
    writer = make_writer(tmp_path)
    make_stamps(writer.directory / NOW_NAME, (10, 40, 50, None))
    recording = killed(writer)
    assert open_phase_of(recording) == "forward"
    put_span(writer, "forward", EPOCH + 50, 30)
    assert open_phase_of(recording) is None
    assert span_times(killed(writer)) == [(DATA, 10, 40), (FORWARD, 50, 80)]


# --- while a process writes -------------------------------------------------------------------

WRITING = textwrap.dedent(
    """
    import mmap, sys, time
    from pathlib import Path
    from meshscope.capture.recorder import Recorder, RecorderConfig

    file = open(sys.argv[2], "r+b")
    acknowledged = memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")
    recorder = Recorder(sys.argv[1], config=RecorderConfig(provenance=False, memory=False))
    names = ("data", "forward", "backward", "clip", "optimizer")
    count = 0
    while True:
        time.sleep(0.0003)
        with recorder.step():
            for name in names:
                with recorder.phase(name):
                    pass
                count += 1
                acknowledged[0] = count
                time.sleep(0.0003)
    """
)


def test_a_live_step_is_read_without_damage_holes_or_doubles(tmp_path: Path) -> None:
    """What had ended before a look is in it, once, in whichever of the three places it stood."""
    shared = tmp_path / "acknowledged"
    shared.write_bytes(bytes(4096))
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", WRITING, str(run_dir), str(shared)]
    process = subprocess.Popen(command)
    try:
        num_looks = num_open = 0
        while num_looks < 60:
            count = int.from_bytes(shared.read_bytes()[:8], "little")
            if not count:
                assert process.poll() is None
                continue
            recording = open_run(run_dir).last_attempt.ranks[0]
            spans = recording.read("spans")
            order = (1, 2, 3, 5, 4)
            found = sorted(
                (start, name)
                for start, name in zip(
                    spans["start_host_mono_ns"].tolist(), spans["name_id"].tolist(), strict=True
                )
                if name in order  # a garbage collection may take long beside other work
            )
            assert len(set(found)) == len(found)
            names = [name for _, name in found[:count]]
            assert len(names) == count
            assert names == [order[at % len(order)] for at in range(count)]
            bad = [p for p in recording.problems if p.kind is not ProblemKind.TORN_TAIL]
            assert bad == []
            num_open += bool(recording.open_phases())
            num_looks += 1
        assert num_open  # else the stamps were never looked at
    finally:
        process.kill()
        process.wait()
