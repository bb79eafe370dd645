"""The bytes of a file, plain, gzip or zstd, a piece at a time, whatever its name says.

What is cut off or damaged ends the stream: what came before is given, and `problem` says why there
is no more. A file that expands without end is refused: real traces shrink 10 to 30 times.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

PIECE_BYTES = 1 << 22
"""Given at a time, at most."""
READ_BYTES = 1 << 18
"""Read from a compressed file at a time."""
MAX_EXPANSION = 400
"""Bytes out for a byte in, beyond the first FREE_BYTES."""
FREE_BYTES = 1 << 28

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Unit(Protocol):
    """Expands one member of a file; keeps what it was given and has not used yet."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _ZlibUnit:
    """The standard library's, for where isal is not installed."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def make_gzip_unit() -> Unit:
    """Three times as fast with isal."""
    try:
        from isal import igzip_lib
    except ImportError:
        return _ZlibUnit()
    unit: Unit = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return unit


def make_zstd_unit() -> Unit:
    """From the package that the standard library took over in Python 3.14."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    unit: Unit = zstd.ZstdDecompressor()
    return unit


@dataclass(slots=True)
class ByteStream:
    """Iterates over the bytes of a file once."""

    path: Path
    problem: str = ""
    """Afterwards: why it ended early."""
    num_read: int = 0
    """Bytes of the file."""
    num_given: int = 0
    """Bytes of what is in it."""

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            magic = file.read(len(ZSTD_MAGIC))
            file.seek(0)
            if magic.startswith(GZIP_MAGIC):
                yield from self._expand(file, make_gzip_unit, GZIP_MAGIC)
            elif magic == ZSTD_MAGIC:
                yield from self._expand(file, make_zstd_unit, ZSTD_MAGIC)
            else:
                yield from self._copy(file)

    def _copy(self, file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(PIECE_BYTES):
            self.num_read += len(piece)
            self.num_given += len(piece)
            yield piece

    def _expand(self, file: BinaryIO, make: Callable[[], Unit], magic: bytes) -> Iterator[bytes]:
        """Members follow each other; zeros or anything else behind the last one is padding."""
        unit, data = make(), self._read(file)
        while data:
            yield from self._expand_some(unit, data)
            if self.problem:
                return
            if not unit.eof:
                data = self._read(file)
                continue
            data = unit.unused_data or self._read(file)
            if not data.startswith(magic):
                return
            unit = make()
        self.problem = f"it is cut off after {self.num_given:,} bytes of its content"

    def _read(self, file: BinaryIO) -> bytes:
        data = file.read(READ_BYTES)
        self.num_read += len(data)
        return data

    def _expand_some(self, unit: Unit, data: bytes) -> Iterator[bytes]:
        while not self.problem:
            try:
                piece = unit.decompress(data, PIECE_BYTES)
            except Exception as error:  # noqa: BLE001 - each package has errors of its own
                self.problem = f"it is damaged after {self.num_given:,} bytes: {error}"
                return
            data = b""
            self.num_given += len(piece)
            if self.num_given > max(FREE_BYTES, MAX_EXPANSION * self.num_read):
                self.problem = f"it expands more than {MAX_EXPANSION} times, as no trace does"
                return
            if piece:
                yield piece
            if unit.eof or (unit.needs_input and len(piece) < PIECE_BYTES):
                return
