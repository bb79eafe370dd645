"""What an archive of a run has, as its lists say.

    URL/archive/WRITER.json        every file of the run: length, chunks; sealed as run.json is
    URL/objects/WRITER/SHA256      a chunk of CHUNK_BYTES or less, named by its content

A chunk never changes, and a list is replaced as a whole when all it names is there: a reader sees a
run as it was at some moment. Several nodes of a job may each keep a list, of their own ranks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshscope.errors import StorageError
from meshscope.store.remote.storage import RemoteFile
from meshscope.store.write.manifest import seal, unseal

FORMAT = "meshscope-archive"
VERSION = 1
CHUNK_BYTES = 4 << 20
LISTS = "archive"
OBJECTS = "objects"
_MAX_LIST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """A file of an archived run."""

    size_bytes: int
    chunks: tuple[str, ...]
    """SHA-256 of each."""
    home: str
    """Where its chunks are, below the URL that was listed."""

    @property
    def stamp(self) -> str:
        return f"{self.size_bytes} {' '.join(self.chunks)}"

    def object_name(self, digest: str) -> str:
        return f"{self.home}/{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveList:
    """What one writer says of a run."""

    writer: str
    updated_unix_ns: int
    is_final: bool
    """Whether the run was over when it was written."""
    files: Mapping[str, tuple[int, tuple[str, ...]]]
    """Name to length and chunks."""

    def encode(self) -> bytes:
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "writer": self.writer,
            "updated_unix_ns": self.updated_unix_ns,
            "is_final": self.is_final,
            "chunk_bytes": CHUNK_BYTES,
            "files": {
                name: {"bytes": size, "chunks": list(chunks)}
                for name, (size, chunks) in sorted(self.files.items())
            },
        }
        return seal(fields)


def decode_list(data: bytes, where: str) -> ArchiveList:
    """Raises StorageError for what is no such list, or is damaged."""
    try:
        fields, is_intact = unseal(data)
        if not is_intact:
            raise StorageError(f"{where}: its checksum does not match; archive the run again")
        if fields.get("format") != FORMAT or fields.get("chunk_bytes") != CHUNK_BYTES:
            raise StorageError(f"{where} is no list of an archive of this version of meshscope")
        listed = fields["files"]
        assert isinstance(listed, dict)
        files = {
            _check_name(name): (int(one["bytes"]), tuple(map(_check_digest, one["chunks"])))
            for name, one in listed.items()
        }
        return ArchiveList(
            writer=str(fields["writer"]),
            updated_unix_ns=int(str(fields["updated_unix_ns"])),
            is_final=fields["is_final"] is True,
            files=files,
        )
    except (ValueError, KeyError, TypeError, AssertionError, json.JSONDecodeError) as error:
        raise StorageError(f"{where} is no list of an archive: {error}") from error


def merge_archives(
    listed: Mapping[str, RemoteFile], read: Callable[[str], bytes]
) -> dict[str, RemoteFile | ArchivedFile]:
    """Objects by name, those of archives replaced by the files they make up."""
    roots: dict[str, list[str]] = {}
    for name in listed:
        root, is_list = _root_of_list(name)
        if is_list:
            roots.setdefault(root, []).append(name)
    hidden = tuple(f"{root}{part}/" for root in roots for part in (LISTS, OBJECTS))
    found: dict[str, RemoteFile | ArchivedFile] = {
        name: file for name, file in listed.items() if not name.startswith(hidden)
    }
    for root, names in roots.items():
        lists = [decode_list(_read_list(listed, name, read), name) for name in names]
        for one in sorted(lists, key=lambda one: one.updated_unix_ns):
            home = f"{root}{OBJECTS}/{one.writer}"
            for name, (size, chunks) in one.files.items():
                found[root + name] = ArchivedFile(size_bytes=size, chunks=chunks, home=home)
    return found


def _read_list(listed: Mapping[str, RemoteFile], name: str, read: Callable[[str], bytes]) -> bytes:
    if listed[name].size_bytes > _MAX_LIST_BYTES:
        raise StorageError(f"{name} has {listed[name].size_bytes} bytes: no list of an archive")
    return read(name)


def _root_of_list(name: str) -> tuple[str, bool]:
    folder, _, own = name.rpartition("/")
    root, slash, last = folder.rpartition("/")
    return root + slash, last == LISTS and own.endswith(".json")


def _check_name(name: str) -> str:
    parts = name.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in parts):
        raise ValueError(f"{name!r} is no name of a file in a run")
    return name


def _check_digest(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is no checksum")
    return digest
