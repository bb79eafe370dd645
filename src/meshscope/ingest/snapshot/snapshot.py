"""Reads `torch.cuda.memory._dump_snapshot` files into columns, a buffer at a time.

Blocks and events become rows of numbers as soon as the pickle has them and stacks are kept once, so
that memory stays well below the file's size. What is not of the expected type is left out and
counted. The compiled reader is taken where there is one; both give the same columns.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshscope.errors import TraceError
from meshscope.ingest.snapshot.snapshot_columns import Frame, Snapshot
from meshscope.ingest.snapshot.snapshot_native import NativePickle, load_library
from meshscope.ingest.snapshot.snapshot_pickle import PlainPickle
from meshscope.ingest.snapshot.snapshot_words import MAX_NUMBER, RawColumns, SnapshotReader
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.files import file_size, open_bytes

BUFFER_BYTES = 1 << 21
MAX_NAME, MAX_FILENAME = 500, 1000
"""Characters that are kept."""
_OTHER_FORMATS = {
    b"\x1f\x8b": "it is packed by gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd: unpack it first",
    b"PK\x03\x04": "it is a zip file, such as torch.save writes",
    b"{": "it is text, such as a trace",
    b"[": "it is text, such as a trace",
    b"<": "it is text, such as a page",
}


def make_reader(size_bytes: int, *, use_native: bool | None = None) -> SnapshotReader:
    """A reader for a file of this size; None: the compiled one where there is one."""
    library = load_library() if use_native in (None, True) else None
    if library is not None:
        return NativePickle(library, size_bytes)
    if use_native:
        raise TraceError("the compiled reader of snapshots is not there")
    return PlainPickle(size_bytes)


def read_snapshot(path: Path, *, use_native: bool | None = None) -> Snapshot:
    """The snapshot; TraceError when it is none, or would run code."""
    try:
        size_bytes = file_size(path)
        with open_bytes(path) as file:
            reader = make_reader(size_bytes, use_native=use_native)
            is_cut = not _feed(reader, file, size_bytes)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise TraceError(f"{path} does not fit into memory") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    columns = reader.finish(is_cut=is_cut)
    warnings = ["the file is cut: what follows is of its beginning"] if is_cut else []
    num_rows = len(columns.segments[0]) + len(columns.blocks[0]) + len(columns.event_device)
    if not num_rows and not columns.has_root:
        raise TraceError(f"{path} is not a memory snapshot: it has neither segments nor traces")
    return _make_snapshot(path, columns, warnings)


def _feed(reader: SnapshotReader, file: BinaryIO, size_bytes: int) -> bool:
    """Whether the pickle came to its end before the file did."""
    if not size_bytes:
        raise TraceError("not a memory snapshot: it is empty")
    buffer, num_held = bytearray(min(BUFFER_BYTES, size_bytes + 1)), 0
    left = size_bytes
    while not reader.is_done:
        if reader.needed > num_held + left:
            return False
        if reader.needed > len(buffer):
            buffer = buffer[:num_held] + bytearray(reader.needed - num_held)
        with memoryview(buffer) as view:
            num_read = file.readinto(view[num_held:])  # type: ignore[attr-defined]
        if not num_read:
            return False
        if left == size_bytes:
            _check_beginning(bytes(buffer[:4]))
        left -= num_read
        num_held += num_read
        num_taken = reader.feed(buffer, num_held)
        buffer[: num_held - num_taken] = buffer[num_taken:num_held]
        num_held -= num_taken
    return True


def _check_beginning(start: bytes) -> None:
    """Pickles of protocol 2 and later begin with a byte that nothing else here does."""
    if start[:1] == b"\x80":
        return
    for beginning, reason in _OTHER_FORMATS.items():
        if start.startswith(beginning):
            raise TraceError(f"not a memory snapshot: {reason}")
    raise TraceError("not a memory snapshot: it does not begin as pickles of protocol 2 to 5 do")


def _make_snapshot(path: Path, columns: RawColumns, warnings: list[str]) -> Snapshot:
    if columns.num_odd:
        warnings.append(f"{columns.num_odd} entries are of no known kind")
    segments, blocks = columns.segments, columns.blocks
    return Snapshot(
        path=path,
        segment_device=segments[0],
        segment_total_bytes=segments[2],
        block_segment=blocks[0],
        block_address=_place_blocks(blocks, segments[1]),
        block_bytes=blocks[2],
        block_requested_bytes=blocks[3],
        block_state=blocks[4],
        block_stack=blocks[5],
        event_device=columns.event_device,
        event_action=columns.event_action,
        event_address=columns.event_address,
        event_bytes=columns.event_bytes,
        event_time_us=columns.event_time_us,
        event_stack=columns.event_stack,
        stack_begin=columns.stack_begin,
        stack_frames=columns.stack_frames,
        frames=[_make_frame(*frame) for frame in columns.frames],
        num_odd=columns.num_odd,
        warnings=tuple(warnings),
    )


def _make_frame(name: bytes, filename: bytes, line: int) -> Frame:
    return Frame(
        name.decode("utf-8", "replace")[:MAX_NAME],
        filename.decode("utf-8", "replace")[:MAX_FILENAME],
        line,
    )


def _place_blocks(blocks: tuple[Int64s, ...], segment_address: Int64s) -> Int64s:
    """Addresses; before torch 2.1 blocks have none, and follow one another in their segment."""
    segment, address, size = blocks[:3]
    if not np.any((address < 0) & (segment >= 0)):
        return address
    placed, last_segment, following = address.tolist(), -1, -1
    for row, (owner, num_bytes) in enumerate(zip(segment.tolist(), size.tolist(), strict=True)):
        if owner < 0:
            continue
        if owner != last_segment:
            last_segment, following = owner, int(segment_address[owner])
        if placed[row] < 0:
            placed[row] = following
        following = min(placed[row] + max(num_bytes, 0), MAX_NUMBER)
    return np.array(placed, dtype=np.int64)
