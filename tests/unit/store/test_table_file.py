"""One table file: what `put` leaves on disk, with threads, forks, limits and full disks."""

import errno
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ended_process import run_process
from meshscope.store.read.columns import ProblemKind, TableRead, read_table_file
from meshscope.store.read.files import file_size, read_file
from meshscope.store.schema import TABLES
from meshscope.store.write import table_file
from meshscope.store.write.native import SWITCH_VARIABLE, load_native
from meshscope.store.write.pack import PACK_NAME, PackedTable, PackWriter
from meshscope.store.write.table_file import (
    CHECK_SALT,
    HEADER_BYTES,
    WINDOW_BYTES,
    TableWriter,
    pack_header,
    pack_record,
    record_check,
    unpack_header,
)

SCALARS = TABLES["scalars"]
FIRST_WINDOW_RECORDS = (WINDOW_BYTES - HEADER_BYTES) // 64
SINKS = pytest.mark.parametrize("mapped", [1, True, False], ids=["mapped", "plain", "append"])
BOTH_WAYS = pytest.mark.parametrize("way", ["mapped", "plain"])


@pytest.fixture(autouse=True)
def _written_in_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose id says plain does without the compiled writer, in its processes too."""
    if "plain" in request.node.name:
        monkeypatch.setenv(SWITCH_VARIABLE, "0")


def make_writer(path: Path, *, mapped: bool = True, max_detail_bytes: int = 1 << 40) -> TableWriter:
    """Of a table in a pack of its own."""
    place = PackedTable(PackWriter(path.parent, {"rank": 0}, mapped=mapped), path.stem)
    return TableWriter(place, TABLES["spans"], {"rank": 0}, max_detail_bytes=max_detail_bytes)


def put_numbers(writer: TableWriter, numbers: range) -> None:
    for number in numbers:
        writer.put(1, number, 2 * number, 3 * number, -1, 0, 0)


def read_numbers(path: Path) -> tuple[list[int], TableRead]:
    read = read_table_file(path, TABLES["spans"], 0)
    return read.columns["start_host_mono_ns"].tolist(), read


@SINKS
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("count", [0, 1, 959, 960, 961, 5000])
def test_what_is_put_is_read_back(
    tmp_path: Path, mapped: bool, is_closed: bool, count: int
) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path, mapped=mapped)
    put_numbers(writer, range(count))
    writer.flush()
    if is_closed:
        assert writer.close() == count
    numbers, read = read_numbers(path)
    assert numbers == list(range(count))
    assert read.problems == ()
    assert read.is_closed is is_closed


def test_the_worked_example_of_the_documentation() -> None:
    """docs/store.md shows these bytes."""
    record = pack_record(2, (64, 7, 1_000_000_000, 4_607_182_418_800_017_408, -1, 0, 0))
    assert record.hex(" ", 8) == (
        "853e7ab92c6d961a 4000000000000000 0700000000000000 00ca9a3b00000000 "
        "000000000000f03f ffffffffffffffff 0000000000000000 0000000000000000"
    )
    check = (64 + 7 + 1_000_000_000 + 4_607_182_418_800_017_408 - 1 + 3 * CHECK_SALT) % 2**64
    assert struct.unpack("<Q", record[:8])[0] == check


@BOTH_WAYS
def test_no_record_is_lost_or_doubled_when_many_threads_put(tmp_path: Path, way: str) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path)
    num_threads, each = 8, 12_000

    def work(thread: int) -> None:
        for number in range(each):
            writer.put(1, thread * each + number, 0, 0, 0, 0, 0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    writer.close()
    numbers, read = read_numbers(path)
    assert sorted(numbers) == list(range(num_threads * each))
    assert read.problems == ()


@SINKS
def test_closing_while_threads_put_leaves_a_whole_file(tmp_path: Path, mapped: bool) -> None:
    for round_number in range(10):
        path = tmp_path / f"{round_number}.pack" / "spans.tbl"
        writer = make_writer(path, mapped=mapped)
        is_over = threading.Event()

        def work(writer: TableWriter = writer, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                writer.put(1, 1, 0, 0, 0, 0, 0)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        count = writer.close()
        is_over.set()
        for thread in threads:
            thread.join()
        numbers, read = read_numbers(path)
        assert read.is_closed
        assert len(numbers) == count
        assert read.problems == ()


@BOTH_WAYS
def test_a_slot_drawn_before_the_disk_was_full_is_not_written_into_a_later_epoch(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path, max_detail_bytes=WINDOW_BYTES)
    put_numbers(writer, range(FIRST_WINDOW_RECORDS + 5))  # five do not fit
    writer._max_bytes = 1 << 40  # room again
    stale = FIRST_WINDOW_RECORDS + 3  # as a thread would hold that drew it and then slept
    writer._retry_at = 0.0
    put_numbers(writer, range(1000, 1010))
    writer._put_outside(stale, pack_record(stale, (1, 77, 0, 0, 0, 0, 0)))
    writer._put_outside(
        5, pack_record(5, (1, 5, 10, 15, -1, 0, 0))
    )  # one it was granted is still its own
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == [*range(FIRST_WINDOW_RECORDS), *range(1000, 1010)]
    assert [(p.kind, p.num_records) for p in read.problems] == [(ProblemKind.DROPPED, 6)]


@SINKS
@pytest.mark.parametrize("bad", [1 << 70, None, 1.5, "x"])
def test_a_value_that_is_no_64_bit_integer_raises_and_costs_only_itself(
    tmp_path: Path, mapped: bool, bad: object
) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path, mapped=mapped)
    put_numbers(writer, range(3))
    with pytest.raises((struct.error, TypeError)):
        writer.put(1, 3, bad, 0, 0, 0, 0)  # type: ignore[arg-type]
    put_numbers(writer, range(4, 2000))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == [0, 1, 2, *range(4, 2000)]
    assert all(problem.kind is ProblemKind.DROPPED for problem in read.problems)


@SINKS
def test_a_detail_table_stops_at_its_limit_and_counts_the_rest(
    tmp_path: Path, mapped: bool
) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path, mapped=mapped, max_detail_bytes=2 * WINDOW_BYTES)
    num_fitting = (2 * WINDOW_BYTES - HEADER_BYTES) // 64
    put_numbers(writer, range(num_fitting + 100))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == list(range(num_fitting))
    assert [(p.kind, p.num_records) for p in read.problems] == [(ProblemKind.DROPPED, 100)]
    assert "limit" in writer.error
    assert file_size(path) <= 2 * WINDOW_BYTES


@SINKS
def test_a_forked_child_writes_nothing_and_the_parent_goes_on(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    writer = make_writer(path, mapped=mapped)
    put_numbers(writer, range(10))
    child = os.fork()
    if child == 0:
        try:
            writer.disarm()
            put_numbers(writer, range(100, 200))
            writer.flush()
            writer.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    put_numbers(writer, range(10, 20))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == list(range(20))
    assert read.problems == ()


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    path.parent.write_bytes(b"someone else's")
    writer = make_writer(path)
    put_numbers(writer, range(3))
    writer.close()
    assert path.parent.read_bytes() == b"someone else's"
    assert writer.num_dropped == 3
    assert "EEXIST" in writer.error


def test_a_table_whose_folder_is_not_there_yet_starts_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "later" / PACK_NAME / "spans.tbl"
    writer = make_writer(path)
    put_numbers(writer, range(3))
    path.parent.parent.mkdir()
    writer._retry_at = 0.0
    put_numbers(writer, range(3, 6))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == [3, 4, 5]
    assert [(p.kind, p.num_records) for p in read.problems] == [(ProblemKind.DROPPED, 3)]


FULL_DISK_LOOP = """
import resource, sys, time
from pathlib import Path
from meshscope.store.write import table_file
from meshscope.store.schema import TABLES
from meshscope.store.write.pack import PackedTable, PackWriter
from meshscope.store.write.table_file import TableWriter
table_file.RETRY_SECONDS = 0.05
path, mapped = Path(sys.argv[1]), sys.argv[2] != "append"
place = PackedTable(PackWriter(path.parent, {}, mapped=mapped), "spans")
writer = TableWriter(place, TABLES["spans"], {"rank": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
for number in range(90_000):
    writer.put(1, number, 0, 0, 0, 0, 0)
writer.flush()
dropped_while_full = writer.num_dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(0.1)
for number in range(100_000, 130_000):
    writer.put(1, number, 0, 0, 0, 0, 0)
writer.close()
print(dropped_while_full, writer.num_dropped, writer.error, sep=";")
"""


@pytest.mark.parametrize("sink", ["mapped", "plain", "append"])
def test_recording_goes_on_over_a_file_size_limit_and_resumes(tmp_path: Path, sink: str) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    done = run_process([sys.executable, "-c", FULL_DISK_LOOP, str(path), sink], check=True)
    while_full, at_end, error = done.stdout.strip().split(";")
    assert int(while_full) > 0
    assert int(at_end) == int(while_full)
    assert "EFBIG" in error
    numbers, read = read_numbers(path)
    assert [(p.kind, p.num_records) for p in read.problems] == [(ProblemKind.DROPPED, int(at_end))]
    assert len(numbers) + int(at_end) == 120_000
    assert numbers[-30_000:] == list(range(100_000, 130_000))
    early = numbers[:-30_000]
    assert early == list(range(len(early)))
    assert len(early) >= (131_072 - HEADER_BYTES) // 64


WORDS = (0, 1, -1, 7, 2**62, 2**63 - 1, -(2**63))
NO_WORDS = (2**63, -(2**63) - 1, True, 1.5, None, "1")


def test_both_ways_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over windows, limits and epochs, with numbers that fit and some that do not."""
    if load_native("meshscope.store.write._record_slots_native") is None:
        pytest.skip("no compiled writer here: meshscope was installed without a compiler")

    def write(way: str) -> tuple[bytes, list[object]]:
        writer = make_writer(
            tmp_path / f"{way}.pack" / "spans.tbl", max_detail_bytes=2 * WINDOW_BYTES
        )
        chance, outcomes = random.Random(5), []
        for number in range(6000):
            words: list[Any] = [chance.choice(WORDS) for _ in range(7)]
            if chance.random() < 0.002:
                words[chance.randrange(7)] = chance.choice(NO_WORDS)
            if number == 4000:  # room again: what follows is of another epoch
                writer._max_bytes, writer._retry_at = 1 << 40, 0.0
            try:
                writer.put(*words)
            except (struct.error, TypeError) as error:
                outcomes.append((number, type(error)))
        outcomes += [writer.num_dropped, writer.error, writer.close()]
        return read_file(tmp_path / f"{way}.pack" / "spans.tbl")[HEADER_BYTES:], outcomes

    native = write("native")
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    assert native == write("python")
    assert len(native[1]) > 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, if this process may mount one."""
    point = tmp_path / "small"
    point.mkdir()
    mounted = run_process(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)])
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@SINKS
def test_recording_goes_on_when_the_disk_is_full_and_resumes(
    small_disk: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_file, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(table_file, "MAX_HELD_BYTES", 1 << 18)
    monkeypatch.setattr(table_file, "INLINE_FLUSH_BYTES", 1 << 16)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(600_000))
    path = small_disk / PACK_NAME / "spans.tbl"
    writer = make_writer(path, mapped=mapped)
    put_numbers(writer, range(90_000))
    writer.flush()
    num_dropped = writer.num_dropped
    assert num_dropped > 0
    assert "ENOSPC" in writer.error
    numbers, read = read_numbers(path)
    assert numbers == list(range(len(numbers)))
    assert numbers
    assert {problem.kind for problem in read.problems} <= {
        ProblemKind.DROPPED,
        ProblemKind.TORN_TAIL,  # of the append sink: half a record fitted
    }
    ballast.unlink()
    time.sleep(0.05)
    writer.flush()
    put_numbers(writer, range(100_000, 101_000))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers[-1000:] == list(range(100_000, 101_000))
    assert len(numbers) + writer.num_dropped == 91_000
    assert [problem.kind for problem in read.problems] == [ProblemKind.DROPPED]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017  # how it ends


def test_a_table_that_could_not_be_made_on_a_full_disk_starts_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_file, "RETRY_SECONDS", 0.02)
    ballast = small_disk / "ballast"
    fill(ballast)
    path = small_disk / PACK_NAME / "spans.tbl"
    writer = make_writer(path)
    put_numbers(writer, range(5))
    assert not path.parent.exists()
    ballast.unlink()
    time.sleep(0.03)
    put_numbers(writer, range(5, 10))
    writer.close()
    numbers, read = read_numbers(path)
    assert numbers == [5, 6, 7, 8, 9]
    assert [(p.kind, p.num_records) for p in read.problems] == [(ProblemKind.DROPPED, 5)]


@BOTH_WAYS
def test_nothing_is_lost_when_the_process_is_killed_between_puts(tmp_path: Path, way: str) -> None:
    path = tmp_path / PACK_NAME / "spans.tbl"
    child = os.fork()
    if child == 0:
        put_numbers(make_writer(path), range(3000))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    numbers, read = read_numbers(path)
    assert numbers == list(range(3000))
    assert read.problems == ()


@BOTH_WAYS
def test_a_signal_handler_that_raises_does_not_leave_a_hole(tmp_path: Path, way: str) -> None:
    """Control-C in the middle of a put: the interrupted record is there or not, others are."""
    code = textwrap.dedent("""
        import signal, sys
        from pathlib import Path
        from meshscope.store.schema import TABLES
        from meshscope.store.write.pack import PackedTable, PackWriter
        from meshscope.store.write.table_file import TableWriter
        class Interrupt(BaseException): pass
        def handler(number, frame): raise Interrupt
        signal.signal(signal.SIGALRM, handler)
        place = PackedTable(PackWriter(Path(sys.argv[1]).parent, {}, mapped=True), "spans")
        writer = TableWriter(place, TABLES["spans"], {"rank": 0})
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        number = hits = 0
        while hits < 200:
            try:
                while hits < 200:
                    writer.put(1, number, 0, 0, 0, 0, 0)
                    number += 1
            except Interrupt:
                hits += 1
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + hits * 1e-6)
        signal.setitimer(signal.ITIMER_REAL, 0)
        writer.close()
        print(number)
    """)
    path = tmp_path / PACK_NAME / "spans.tbl"
    done = run_process([sys.executable, "-c", code, str(path)])
    if done.returncode:
        pytest.skip(f"an interrupt hit the script outside the loop: {done.stderr[-200:]}")
    numbers, read = read_numbers(path)
    assert sorted(set(numbers)) == list(
        range(int(done.stdout) + (max(numbers) >= int(done.stdout)))
    )
    assert [p for p in read.problems if p.kind is ProblemKind.DAMAGED] == []


def test_a_header_that_does_not_fit_its_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 3952 fit"):
        pack_header(SCALARS, {"note": "x" * 4000})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 3900, "nested too deeply"),
        (b"[1, 2]", "not a JSON object"),
        (b"{", "Expecting"),
    ],
)
def test_a_hostile_header_is_a_value_error(text: bytes, reason: str) -> None:
    import zlib

    page = bytearray(pack_header(SCALARS, {}))
    body = text.ljust(HEADER_BYTES - 16 - 128, b"\0")
    page[:16] = struct.pack("<8sII", table_file.MAGIC, len(text), zlib.crc32(body))
    page[16 : HEADER_BYTES - 128] = body
    with pytest.raises(ValueError, match=reason):
        unpack_header(bytes(page))


def test_the_checksum_depends_on_the_slot() -> None:
    words = (1, 2, 3, 4, 5, 6, 7)
    assert len({record_check(slot, words) for slot in range(1000)}) == 1000


def test_the_limit_on_file_size_does_not_outlive_the_tests() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
