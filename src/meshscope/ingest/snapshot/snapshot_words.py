"""What both readers of snapshot pickles share: known texts, limits, messages and what comes out.

`snapshot_machine.c` has the same numbers; tests hold the two readers against each other.
"""

from dataclasses import dataclass
from typing import Protocol

from meshscope.errors import TraceError
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, STATES
from meshscope.store.read.arrays import Int8s, Int16s, Int32s, Int64s

KEYS = (
    "action",
    "addr",
    "device_free",
    "size",
    "time_us",
    "frames",
    "state",
    "requested_size",
    "address",
    "blocks",
    "total_size",
    "device",
    "segment_type",
    "name",
    "filename",
    "line",
    "history",
    "segments",
    "device_traces",
)
KNOWN_TEXTS = (*KEYS, "", "large", *STATES, *ACTIONS)
"""Numbers of texts: these come first."""
MAX_TEXT_BYTES = 1 << 26
"""Names and settings are short; more is not a snapshot."""
MAX_KEPT_TEXT_BYTES = 1 << 16
MAX_NUMBER_BYTES = 64
MAX_NUMBER = 1 << 59
MAX_FRAMES = 512
"""Frames of one stack that are kept, the innermost."""
MAX_MARKS = 1 << 16
MAX_TRACES = 1 << 15

CODE_NAMES = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}
"""Instructions that would run or look up code."""

(
    RUNS_CODE,
    UNKNOWN,
    PROTOCOL,
    LONG_TEXT,
    LONG_NUMBER,
    INVALID,
    ORDER,
    TOO_MANY,
    NO_MEMORY,
) = range(1, 10)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawColumns:
    """A snapshot as it was read; see `store.snapshot_columns.Snapshot`."""

    segments: tuple[Int64s, ...]
    """Device, address, total bytes, whether large."""
    blocks: tuple[Int64s, ...]
    """Row of the segment, address, bytes, requested bytes, state, stack."""
    event_device: Int16s
    event_action: Int8s
    event_address: Int64s
    event_bytes: Int64s
    event_time_us: Int64s
    event_stack: Int32s
    stack_begin: Int64s
    stack_frames: Int32s
    frames: list[tuple[bytes, bytes, int]]
    """Name, file, line."""
    num_odd: int
    has_root: bool


class SnapshotReader(Protocol):
    """Takes a pickle in pieces."""

    @property
    def is_done(self) -> bool:
        """Whether the pickle's last instruction came."""

    @property
    def needed(self) -> int:
        """Bytes the next instruction has, as far as is known."""

    def feed(self, data: bytearray, size: int) -> int:
        """Takes whole instructions of the first `size` bytes: how many bytes they had.

        TraceError when it is not a pickle of plain values.
        """

    def finish(self, *, is_cut: bool) -> RawColumns:
        """All that was found; of a cut file, open lists take what is there."""


def limit_memo(size_bytes: int) -> int:
    """References a file of this size may keep: each takes several bytes to make."""
    return 4096 + size_bytes // 3


def limit_stack(size_bytes: int) -> int:
    """Values a file of this size may hold open at once: torch's own writer opens all events."""
    return (1 << 16) + size_bytes // 8


def explain(error: int, value: int) -> TraceError:
    """The error in words."""
    if error == RUNS_CODE:
        name = CODE_NAMES[value]
        text = f"refused: the pickle would run code ({name}); a snapshot holds plain values only"
    elif error == UNKNOWN:
        byte = bytes([value])
        text = f"not a pickle of plain values: byte {byte!r} is no instruction that is read"
    elif error == PROTOCOL:
        text = f"pickle protocol {value} is not read; 2 to 5 are"
    elif error == LONG_TEXT:
        text = f"not a snapshot: a text of {value} bytes"
    elif error == LONG_NUMBER:
        text = f"not a snapshot: a number of {value} bytes"
    elif error == ORDER:
        text = "not written by pickle: its references are out of order"
    elif error == TOO_MANY:
        text = "not a snapshot: it keeps too many values open"
    elif error == NO_MEMORY:
        text = "no memory for what it holds"
    else:
        text = "not a valid pickle: an instruction without the values it needs"
    return TraceError(text)
