import os
from pathlib import Path

import pytest

from builders import overwrite
from meshscope.store.read.tail import LiveView, RunTail, StepTail, read_last_records, read_step_tail
from meshscope.store.schema import RECORD_BYTES, STEPS
from meshscope.store.write.pack import PACK_NAME, PackedTable, PackWriter
from meshscope.store.write.table_file import HEADER_BYTES, WINDOW_BYTES, TableWriter
from meshscope.store.write.writer import RankWriter

FIRST_WINDOW_RECORDS = (WINDOW_BYTES - HEADER_BYTES) // RECORD_BYTES


def write_steps(
    path: Path, num_steps: int, *, mapped: bool = True, closes: bool = False
) -> TableWriter:
    """Steps of 10 ns that start every 100 ns, 32 tokens each."""
    place = PackedTable(PackWriter(path.parent, {}, mapped=mapped), path.stem)
    writer = TableWriter(place, STEPS, {})
    for step in range(num_steps):
        writer.put(step, 1000 + step * 100, 1010 + step * 100, 1, -1, 32, 0)
    if closes:
        writer.close()
    else:
        writer.flush()
    return writer


def last_steps(path: Path, count: int) -> list[int]:
    return [words[0] for words in read_last_records(path, count)]


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "num_steps",
    [1, 2, 5, FIRST_WINDOW_RECORDS - 1, FIRST_WINDOW_RECORDS, FIRST_WINDOW_RECORDS + 1, 5000],
)
def test_the_last_records_are_found(
    tmp_path: Path, num_steps: int, mapped: bool, closes: bool
) -> None:
    path = tmp_path / PACK_NAME / "steps.tbl"
    write_steps(path, num_steps, mapped=mapped, closes=closes)
    expected = list(range(num_steps))[-3:]
    assert last_steps(path, 3) == expected


def test_a_file_without_records_has_no_tail(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME / "steps.tbl"
    write_steps(path, 0)
    assert read_last_records(path, 3) == []


def test_a_file_cut_inside_its_header_has_no_tail(tmp_path: Path) -> None:
    path = tmp_path / "steps.tbl"
    path.write_bytes(b"MSHSCOPE")
    assert read_last_records(path, 3) == []


def test_a_missing_file_is_an_error_for_the_file_and_no_tail_for_the_rank(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_last_records(tmp_path / PACK_NAME / "steps.tbl", 1)
    assert read_step_tail(tmp_path) is None


@pytest.mark.parametrize("damaged", [0, 5, 50, 98, 99])
def test_a_damaged_record_is_passed_over(tmp_path: Path, damaged: int) -> None:
    path = tmp_path / PACK_NAME / "steps.tbl"
    write_steps(path, 100)
    overwrite(path, HEADER_BYTES + damaged * RECORD_BYTES + 16, b"\xff\xff")
    assert last_steps(path, 100) == [step for step in range(100) if step != damaged]


def test_a_long_file_costs_a_few_small_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / PACK_NAME / "steps.tbl"
    write_steps(path, 100_000)
    sizes: list[int] = []
    pread = os.pread

    def counting_pread(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting_pread)
    assert last_steps(path, 1) == [99_999]
    assert len(sizes) < 25
    sizes.clear()  # the pack's directory is known now: a page for every 2 MiB
    assert last_steps(path, 1) == [99_999]
    assert len(sizes) < 25
    assert sum(sizes) < 16_384


def test_pace_counts_gaps_between_steps(tmp_path: Path) -> None:
    write_steps(tmp_path / PACK_NAME / "steps.tbl", 40)
    assert read_step_tail(tmp_path) == StepTail(
        last_step=39, end_host_mono_ns=1010 + 3900, mean_step_ns=100, input_tokens=32
    )


def test_one_step_has_no_pace(tmp_path: Path) -> None:
    write_steps(tmp_path / PACK_NAME / "steps.tbl", 1)
    assert read_step_tail(tmp_path) == StepTail(
        last_step=0, end_host_mono_ns=1010, mean_step_ns=None, input_tokens=32
    )


def record_rank(run_dir: Path, rank: int, num_steps: int) -> None:
    writer = RankWriter(run_dir, rank, header={}, mapped=True)
    steps = writer.table("steps")
    for step in range(num_steps):
        steps.put(step, 1000 + step * 100, 1010 + step * 100, 1, -1, 32, 0)


def test_a_run_shows_what_its_slowest_sampled_rank_has_done(tmp_path: Path) -> None:
    tail = RunTail(tmp_path)
    assert tail.look() == LiveView(
        num_ranks=0, last_step=None, mean_step_ns=None, tokens_per_s=None
    )
    for rank, num_steps in enumerate([5, 9, 4]):
        record_rank(tmp_path, rank, num_steps)
    assert tail.look() == LiveView(
        num_ranks=3, last_step=3, mean_step_ns=100, tokens_per_s=32 * 1e9 / 100
    )


def test_a_rank_that_has_no_step_yet_holds_the_count_back(tmp_path: Path) -> None:
    tail = RunTail(tmp_path)
    record_rank(tmp_path, 0, 5)
    record_rank(tmp_path, 1, 0)
    view = tail.look()
    assert view.num_ranks == 2
    assert view.last_step is None


def test_attempts_of_earlier_launches_are_not_counted(tmp_path: Path) -> None:
    record_rank(tmp_path, 0, 5)
    record_rank(tmp_path, 1, 5)
    tail = RunTail(tmp_path)
    assert tail.look().num_ranks == 0
    record_rank(tmp_path, 1, 2)
    view = tail.look()
    assert view.num_ranks == 1
    assert view.last_step == 1
