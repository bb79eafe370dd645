"""The bytes of a file, plain, gzip, zstd, bzip2 or xz, a piece at a time, whatever its name says.

What is cut off or damaged ends the stream: what came before is given, and `problem` says why there
is no more. A file that expands without end is refused: real traces shrink 10 to 30 times. Text in
UTF-16 or UTF-32, told by its mark, is given as UTF-8.
"""

import bz2
import codecs
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from meshscope.store.read.files import open_bytes

_PIECE_BYTES = 1 << 22
"""Given at a time, at most."""
_START_BYTES = 512
"""Kept of the beginning, to say what a file is that is no trace."""
READ_BYTES = 1 << 18
"""Read from a compressed file at a time."""
_MAX_EXPANSION = 400
"""Bytes out for a byte in, beyond the first FREE_BYTES."""
FREE_BYTES = 1 << 28

_MAGIC_BYTES = 6
"""As many as are needed to tell what a file is."""
_MAX_XZ_BYTES = 1 << 27
"""Of memory; a level 9 file takes 65 MiB."""

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BZIP2_MAGIC = b"BZh"
XZ_MAGIC = b"\xfd7zXZ\x00"
LZMA_MAGIC = b"\x5d\x00\x00"
"""What xz's forerunner writes with its usual settings."""
_ZSTD_SKIPPED = tuple(bytes((0x50 + place,)) + b"\x2a\x4d\x18" for place in range(16))
"""Frames of zstd that hold something else; pzstd begins a file with one."""

_WIDE_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""In this order: the mark of UTF-32 begins with that of UTF-16."""


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


def _make_gzip_unit() -> Unit:
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


def _make_xz_unit() -> Unit:
    """Refuses a file that asks for much memory."""
    return lzma.LZMADecompressor(memlimit=_MAX_XZ_BYTES)


_FORMATS: tuple[tuple[tuple[bytes, ...], Callable[[], Unit]], ...] = (
    ((GZIP_MAGIC,), _make_gzip_unit),
    ((ZSTD_MAGIC, *_ZSTD_SKIPPED), make_zstd_unit),
    ((BZIP2_MAGIC,), bz2.BZ2Decompressor),
    ((XZ_MAGIC, LZMA_MAGIC), _make_xz_unit),
)
"""How a member begins, and what expands it."""
MAGICS = tuple(magic for magics, _ in _FORMATS for magic in magics)


def _find_decoder(first: bytes) -> codecs.IncrementalDecoder | None:
    """For text that is not UTF-8, told by how it begins."""
    name = next((name for mark, name in _WIDE_MARKS if first.startswith(mark)), None)
    return None if name is None else codecs.getincrementaldecoder(name)(errors="replace")


@dataclass(slots=True)
class ByteStream:
    """Gives the bytes of a file once."""

    path: Path
    problem: str = ""
    """Afterwards: why it ended early."""
    num_read: int = 0
    """Bytes of the file."""
    num_given: int = 0
    """Bytes of what is in it."""
    first: bytes = b""
    """How its content begins."""

    def pour(self, find_room: Callable[[], memoryview]) -> Iterator[int]:
        """Writes the content to where `find_room` says, which is asked again for each piece, and
        gives how many bytes it was. A file that is not compressed is read right there: memory that
        stays in the processor's cache costs less than new memory or a copy."""
        with open_bytes(self.path) as file:
            magic = file.read(_MAGIC_BYTES)
            file.seek(0)
            packed = next((known for known in _FORMATS if magic.startswith(known[0])), None)
            if packed is None and _find_decoder(magic) is None:
                yield from self._copy(file, find_room)
                return
            pieces = self._read_all(file) if packed is None else self._expand(file, *packed)
            for piece in self._decode(pieces):
                left = memoryview(piece)
                while left:
                    room = find_room()[: len(left)]
                    room[:] = left[: len(room)]
                    left = left[len(room) :]
                    yield len(room)

    def _copy(self, file: BinaryIO, find_room: Callable[[], memoryview]) -> Iterator[int]:
        while size := file.readinto(room := find_room()):  # type: ignore[attr-defined]
            if not self.first:
                self.first = bytes(room[: min(size, _START_BYTES)])
            self.num_read += size
            self.num_given += size
            yield size

    def _decode(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        decoder = None
        for piece in pieces:
            if not self.first:
                self.first = piece[:_START_BYTES]
                decoder = _find_decoder(self.first)
            yield piece if decoder is None else decoder.decode(piece).encode(errors="replace")

    def _read_all(self, file: BinaryIO) -> Iterator[bytes]:
        while piece := self._read(file):
            self.num_given += len(piece)
            yield piece

    def _expand(
        self, file: BinaryIO, magics: tuple[bytes, ...], make: Callable[[], Unit]
    ) -> Iterator[bytes]:
        """Members follow each other; zeros or anything else behind the last one is padding."""
        unit, data = make(), self._read(file)
        while data:
            yield from self._expand_some(unit, data)
            if self.problem:
                return
            if not unit.eof:
                data = self._read(file)
                continue
            data = unit.unused_data
            if len(data) < _MAGIC_BYTES:  # the beginning of a member may be cut by our reads
                data += self._read(file)
            if not data.startswith(magics):
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
                piece = unit.decompress(data, _PIECE_BYTES)
            except Exception as error:  # noqa: BLE001 - each package has errors of its own
                self.problem = f"it is damaged after {self.num_given:,} bytes: {error}"
                return
            data = b""
            self.num_given += len(piece)
            if self.num_given > max(FREE_BYTES, _MAX_EXPANSION * self.num_read):
                self.problem = f"it expands more than {_MAX_EXPANSION} times, as no trace does"
                return
            if piece:
                yield piece
            if unit.eof or (unit.needs_input and len(piece) < _PIECE_BYTES):
                return
