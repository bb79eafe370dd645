"""Operations under way outlive the process that entered them."""

import struct
from pathlib import Path

import pytest

from meshscope.store.write.in_flight import (
    FILE_BYTES,
    NO_SLOT,
    NUM_CHANNELS,
    NUM_SLOTS,
    Channel,
    InFlightWriter,
    channel_code,
    pack_row,
    read_in_flight,
    row_check,
)
from meshscope.store.write.now_file import NOW_NAME, OPEN_STEP_BYTES, NowFile

EPOCH = 10**12


def read_bytes(folder: Path) -> bytes:
    return (folder / NOW_NAME).read_bytes()[OPEN_STEP_BYTES:]


@pytest.fixture(params=[True, False], ids=["mapped", "written"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> InFlightWriter:
    return InFlightWriter(NowFile(tmp_path / NOW_NAME, mapped=request.param), EPOCH)


def read(writer: InFlightWriter, tmp_path: Path):
    writer.flush()
    return read_in_flight(read_bytes(tmp_path))


def test_what_was_entered_and_not_left_is_there(writer, tmp_path):
    row = writer.open_channel(channel_code(3, -1, 0))
    first = writer.enter(row, 6, 1, 2, EPOCH + 4, 6, 7)
    second = writer.enter(row, 7, 1, 9, EPOCH + 5, 12, 13)
    writer.release(first)
    found = read(writer, tmp_path)
    assert found.channels == (
        Channel(
            group_id=3,
            direction=0,
            peer=-1,
            num_entered=7,
            last_host_mono_ns=EPOCH + 5,
            last_kind=1,
        ),
    )
    assert [struct.unpack("<8q", r)[1:] for r in found.records] == [
        (1, 9, EPOCH + 5, EPOCH + 5, -1, 12, 13)
    ]
    writer.release(second)
    assert read(writer, tmp_path).records == ()


def test_peers_and_directions_are_told_apart(writer, tmp_path):
    for direction in (1, 2):
        for peer in (0, 5, 123_456):
            writer.enter(
                writer.open_channel(channel_code(65535, peer, direction)), 1, 8, 0, EPOCH, 0, 0
            )
    found = read(writer, tmp_path)
    assert [(c.direction, c.peer) for c in found.channels] == [
        (d, p) for d in (1, 2) for p in (0, 5, 123_456)
    ]


def test_more_than_fit_are_counted(writer, tmp_path):
    slots = [writer.enter(0, 1, 1, 2, EPOCH, 6, 7) for _ in range(NUM_SLOTS + 3)]
    assert slots.count(NO_SLOT) == 3
    for slot in slots:
        writer.release(slot)
    assert writer.enter(0, 1, 1, 2, EPOCH, 6, 7) != NO_SLOT
    assert read(writer, tmp_path).num_without_slot == 3
    rows = [writer.open_channel(code) for code in range(NUM_CHANNELS + 2)]
    assert rows[-2:] == [0, 0]


def test_every_flipped_byte_of_what_is_in_use_shows(tmp_path):
    writer = InFlightWriter(NowFile(tmp_path / NOW_NAME, mapped=True), EPOCH)
    writer.enter(writer.open_channel(channel_code(3, 4, 1)), 7, 1, 2, EPOCH + 5, 6, 7)
    data = read_bytes(tmp_path)
    good = read_in_flight(data)
    slot_start = 64 * (1 + NUM_CHANNELS)
    for offset in [*range(24), *range(64, 64 + 24), *range(slot_start, slot_start + 64)]:
        spoiled = bytearray(data)
        spoiled[offset] ^= 0x5A
        try:
            found = read_in_flight(bytes(spoiled))
        except ValueError:
            continue
        assert found.num_damaged or found != good, offset
        assert not set(found.channels) - set(good.channels), offset
        assert not set(found.records) - set(good.records), offset


def test_a_short_file_is_refused():
    with pytest.raises(ValueError, match=f"10 bytes, expected {FILE_BYTES}"):
        read_in_flight(bytes(10))


def test_after_a_fork_the_child_writes_nowhere(tmp_path):
    writer = InFlightWriter(NowFile(tmp_path / NOW_NAME, mapped=True), EPOCH)
    row = writer.open_channel(1)
    writer.disarm()
    writer.enter(row, 9, 1, 0, EPOCH, 0, 0)
    writer.enter(0, 1, 1, 2, EPOCH, 6, 7)
    assert read_in_flight(read_bytes(tmp_path)).records == ()


def test_a_blocking_operation_stands_in_its_channels_row(writer, tmp_path):
    row = writer.open_channel(channel_code(3, -1, 0))
    a, b, time_ns, f, g = 1 | 3 << 32, 6, EPOCH + 5, 4096, 77
    words = (7 << 8 | 1) * 257, (time_ns - writer.epoch_ns) * 257, a, b, f, g
    pack_row(writer.buffer, 8 * (row + 1), *words, row_check(row, a, b, time_ns, f, g))
    writer.is_dirty = True
    found = read(writer, tmp_path)
    assert [(c.num_entered, c.last_host_mono_ns, c.last_kind) for c in found.channels] == [
        (7, EPOCH + 5, 1)
    ]
    assert [struct.unpack("<8q", r)[1:] for r in found.records] == [
        (a, b, time_ns, time_ns, -1, f, g)
    ]
    writer.words[row + 7] = 0
    writer.is_dirty = True
    assert read(writer, tmp_path).records == ()


def test_every_flipped_byte_of_a_blocking_operation_shows(tmp_path):
    writer = InFlightWriter(NowFile(tmp_path / NOW_NAME, mapped=True), EPOCH)
    row = writer.open_channel(channel_code(3, -1, 0))
    words = (7 << 8 | 1) * 257, 6 * 257, 5, 6, 7, 8
    check = row_check(row, 5, 6, 6 + writer.epoch_ns, 7, 8)
    pack_row(writer.buffer, 8 * (row + 1), *words, check)
    data = read_bytes(tmp_path)
    good = read_in_flight(data)
    assert len(good.records) == 1
    for offset in range(64, 128):
        spoiled = bytearray(data)
        spoiled[offset] ^= 0x5A
        found = read_in_flight(bytes(spoiled))
        assert found.num_damaged, offset
        assert not set(found.records) - set(good.records), offset
