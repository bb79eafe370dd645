"""The operations a rank is in, and the last one it entered per channel: a part of `now_file`.

A collective is written into its table when its end is known. Until then it stands here in a slot,
so that a process that was killed, stopped or is stuck leaves behind what it was waiting for; and
every channel (a group's collectives, or sends to or receives from one peer) has a row with the
number of operations entered. Reading it takes no time, however long the run has been going on.

    64 bytes                      magic, epoch_host_mono_ns, -epoch, operations without a slot,
                                  1 + the step whose operations are not recorded, times 257
    NUM_CHANNELS x 64 bytes       channel, operations entered and kind of the last, its time; and
                                  the blocking one that is under way, checksum 0: none is
    NUM_SLOTS x 64 bytes          a record as in table `collectives`; checksum 0: a free slot

The first three words of channel rows are stored times 257, as in `open_step`: any flipped byte
shows. A thread that is held up by an operation calls no other one, so most blocking operations
stand in their channel's row and need no slot. Standard library only.
"""

import struct
from dataclasses import dataclass

from meshscope.store.write.now_file import NowFile
from meshscope.store.write.table_file import CHECK_MASK, CHECK_SALT, is_good_record

NUM_CHANNELS = 256
NUM_SLOTS = 512
ROW_BYTES = 64
_ROW_WORDS = ROW_BYTES // 8
_SLOTS_OFFSET = ROW_BYTES * (1 + NUM_CHANNELS)
FILE_BYTES = _SLOTS_OFFSET + ROW_BYTES * NUM_SLOTS
_FACTOR = 257
NO_SLOT = -1
_MAGIC = 0x4C464E49_4853454D
_OVERFLOW_WORD = 3
_REST_WORD = 4
_RECORD = struct.Struct("<Q7q")
_PACK_INTO = _RECORD.pack_into
_ROW = struct.Struct("<6qQ")
pack_row = _ROW.pack_into
"""Fills words 1-7 of a channel's row: what the hot path does for a blocking operation."""
_FIRST_SLOT_WORD = _SLOTS_OFFSET // 8
_SALTS = tuple((slot + 1) * CHECK_SALT for slot in range(NUM_SLOTS))


def channel_code(group_id: int, peer: int, direction: int) -> int:
    """One number for a channel: `direction` is 0 for collectives, 1 for sends, 2 for receives."""
    return group_id | direction << 16 | (peer + 1) << 20


def row_salt(row: int) -> int:
    """What makes the checksum of one row differ from that of another."""
    return (row + 1) * CHECK_SALT


def row_check(row: int, a: int, b: int, time_ns: int, f: int, g: int) -> int:
    """Checksum of the blocking operation in a row, whose first word is number `row`."""
    return (a + b + time_ns + f + g + row_salt(row)) & CHECK_MASK


class InFlightWriter:
    """Slots and channel rows of one rank. `enter` and `release` run inside every operation."""

    def __init__(self, file: NowFile, epoch_ns: int) -> None:
        epoch_ns -= 1  # a time of 0 says that there was none
        self.epoch_ns = epoch_ns
        self._file = file
        self.buffer = file.in_flight
        self.words = self.buffer.cast("q")
        self.words[1:3] = memoryview(struct.pack("<2q", epoch_ns, -epoch_ns)).cast("q")
        self.words[0] = _MAGIC
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._num_rows = 0
        self.is_dirty = True

    def open_channel(self, code: int) -> int:
        """First word of a new row for a channel; 0 when there is no row left."""
        if self._num_rows >= NUM_CHANNELS:
            return 0
        self._num_rows += 1
        row = self._num_rows * _ROW_WORDS
        self.words[row] = (code + 1) * _FACTOR
        return row

    def enter(
        self, row: int, num_entered: int, a: int, b: int, time_ns: int, f: int, g: int
    ) -> int:
        """An operation is called: it gets a slot, and its channel's row says so.

        The words are those of its record; both times in it are `time_ns`, its end is missing.
        Returns NO_SLOT when more are under way than there are slots.
        """
        words = self.words
        if row:
            words[row + 2] = (time_ns - self.epoch_ns) * 257
            words[row + 1] = (num_entered << 8 | a & 0xFF) * 257
        self.is_dirty = True
        if not self._free:
            words[_OVERFLOW_WORD] += 1
            return NO_SLOT
        slot = self._free.pop()
        _PACK_INTO(
            self.buffer,
            _SLOTS_OFFSET + (slot << 6),
            (a + b + time_ns + time_ns - 1 + f + g + _SALTS[slot]) & CHECK_MASK,
            a,
            b,
            time_ns,
            time_ns,
            -1,
            f,
            g,
        )
        return slot

    def release(self, slot: int) -> None:
        """Frees the slot of an operation that ended."""
        if slot >= 0:
            self.words[_FIRST_SLOT_WORD + (slot << 3)] = 0
            self._free.append(slot)
            self.is_dirty = True

    def rest(self, step: int | None) -> None:
        """From `step` on operations are not written here; None: they are."""
        self.words[_REST_WORD] = 0 if step is None else (step + 1) * _FACTOR
        self.is_dirty = True

    def flush(self) -> None:
        """Writes the file where it is not mapped."""
        if self.is_dirty:
            self.is_dirty = False
            self._file.flush()

    def close(self) -> None:
        """After a clean end; the file stays: it says what was entered last."""
        self.flush()
        self.disarm()

    def disarm(self) -> None:
        """In a forked child: the file is the parent's; what is stored from now on goes nowhere."""
        self._file.disarm()
        self.buffer = memoryview(bytearray(FILE_BYTES))
        self.words = self.buffer.cast("q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What a rank has entered on one channel."""

    group_id: int
    direction: int
    """0: collectives of the group; 1: sends to `peer`; 2: receives from it."""
    peer: int
    """Global rank, or -1."""
    num_entered: int
    last_host_mono_ns: int
    last_kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    channels: tuple[Channel, ...]
    records: tuple[bytes, ...]
    """64-byte records of table `collectives` without an end, in no order; word 0 means nothing."""
    num_without_slot: int
    num_damaged: int
    resting_since_step: int | None
    """From this step on operations are not recorded; None: they are."""


def read_in_flight(data: bytes) -> InFlight:
    """What stands in this part. ValueError when it cannot be trusted as a whole."""
    if len(data) != FILE_BYTES:
        raise ValueError(f"{len(data)} bytes, expected {FILE_BYTES}")
    magic, epoch_ns, negated, num_without_slot, rest = struct.unpack_from("<5q", data)
    if magic != _MAGIC or epoch_ns != -negated:
        raise ValueError("its head does not match")
    channels = []
    records = []
    num_damaged = 0
    for row in range(NUM_CHANNELS):
        words = struct.unpack_from("<8q", data, ROW_BYTES * (1 + row))
        if not words[0]:
            break
        if any(word % _FACTOR for word in words[:3]):
            num_damaged += 1
            continue
        code = words[0] // _FACTOR - 1
        channels.append(
            Channel(
                group_id=code & 0xFFFF,
                direction=code >> 16 & 0xF,
                peer=(code >> 20) - 1,
                num_entered=words[1] // _FACTOR >> 8,
                last_host_mono_ns=words[2] // _FACTOR + epoch_ns,
                last_kind=words[1] // _FACTOR & 0xFF,
            )
        )
        if words[7]:
            time_ns = words[2] // _FACTOR + epoch_ns
            a, b, f, g = words[3:7]
            if (words[7] & CHECK_MASK) == row_check(_ROW_WORDS * (1 + row), a, b, time_ns, f, g):
                records.append(_RECORD.pack(0, a, b, time_ns, time_ns, -1, f, g))
            else:
                num_damaged += 1
    for slot in range(NUM_SLOTS):
        record = data[_SLOTS_OFFSET + slot * ROW_BYTES : _SLOTS_OFFSET + (slot + 1) * ROW_BYTES]
        if record[:8] == bytes(8):
            continue
        if is_good_record(slot, record):
            records.append(record)
        else:
            num_damaged += 1
    return InFlight(
        channels=tuple(channels),
        records=tuple(records),
        num_without_slot=num_without_slot,
        num_damaged=num_damaged,
        resting_since_step=rest // _FACTOR - 1 if rest > 0 and not rest % _FACTOR else None,
    )
