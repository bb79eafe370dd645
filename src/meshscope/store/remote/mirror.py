"""Local copies of what URLs name, made file by file when it is read.

    <cache>/mirror/s3/bucket/runs/a/rank00000/attempt000/steps.tbl      a copy
    <cache>/mirror/s3/bucket/runs/a/rank00000/attempt000/.steps.tbl.of  of which object

`mount` lists what is at a URL and gives the folder (or file) that stands for it. `store.read.files`
asks here about every path: one below a mount is listed by the storage's list, and fetched before it
is opened, unless the copy is of the very object. Readers see files as everywhere else, so they are
as fast as on local disk. Standard library only, but for the storage itself.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath

from meshscope.errors import StorageError
from meshscope.store.remote.archive_list import CHUNK_BYTES, ArchivedFile, merge_archives
from meshscope.store.remote.storage import RemoteFile, Storage, is_url, local_path, split_url

CACHE_VARIABLE = "MESHSCOPE_CACHE"
LIMIT_VARIABLE = "MESHSCOPE_CACHE_BYTES"
_LIMIT_BYTES = 20 << 30
_MARK = ".mount"
_FRESH_S = 5.0
"""A list is asked for again at most this often."""
_THREADS = 16
_TRIES = 3


@cache
def mirror_root() -> Path:
    """The folder of all copies."""
    given = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return (Path(given) if given else Path(base) / "meshscope").absolute() / "mirror"


@cache
def _prefix() -> str:
    return f"{mirror_root()}{os.sep}"


def name_place(path: Path | str) -> str:
    """A path as its user knows it: the URL, for a copy of what is there."""
    text = str(path)
    if not text.startswith(_prefix()):
        return text
    scheme, _, place = text[len(_prefix()) :].partition(os.sep)
    return f"{scheme}://{place}"


def name_places(text: str) -> str:
    """A message in which copies are called by their URLs."""
    prefix = _prefix()
    while prefix in text:
        before, _, after = text.partition(prefix)
        text = before + after.replace(os.sep, "://", 1)
    return text


class Mount:
    """A URL, the folder of its copies, and what was there when it was listed."""

    def __init__(self, url: str) -> None:
        scheme, place = split_url(url)
        if any(part == ".." for part in place.split("/")):
            raise StorageError(f"{url} goes up by ..; write the place itself")
        self.storage = Storage(f"{scheme}://{place}")
        self.folder = mirror_root() / scheme / place.strip("/")
        self._lock = threading.Lock()
        self._files: dict[str, RemoteFile | ArchivedFile] = {}
        self._folders: dict[str, set[str]] = {}
        self._listed_at = -_FRESH_S
        self._is_here: set[str] = set()

    def refresh(self, *, now: bool = False) -> None:
        """Lists it again, unless that was just done."""
        with self._lock:
            if not now and time.monotonic() - self._listed_at < _FRESH_S:
                return
            listed = self.storage.list_files()
            found = merge_archives(listed, self.storage.read)
            before = self._files
            self._files = found
            self._folders = _sort_into_folders(found)
            self._is_here = {name for name in self._is_here if found.get(name) == before.get(name)}
            self._listed_at = time.monotonic()

    @property
    def is_empty(self) -> bool:
        return not self._files

    @property
    def is_file(self) -> bool:
        return set(self._files) == {""}

    def has_file(self, name: str) -> bool:
        return name in self._files

    def has_folder(self, name: str) -> bool:
        return name in self._folders

    def list_names(self, name: str) -> list[str]:
        """What is in a folder. Raises FileNotFoundError."""
        if name not in self._folders:
            raise FileNotFoundError(2, "there is no such folder", f"{self.storage.url}/{name}")
        return sorted(self._folders[name])

    def size_of(self, name: str) -> int:
        return self._find(name).size_bytes

    def change_number(self, name: str) -> int:
        """Another one when a file is, or a folder's list of names."""
        if name in self._folders:
            return hash(tuple(sorted(self._folders[name]))) & (1 << 62) - 1
        return hash(self._find(name).stamp) & (1 << 62) - 1

    def find_files(self, name: str, pattern: str) -> list[str]:
        """Names below a folder that match a pattern of `Path.glob`, sorted as paths."""
        head = f"{name}/" if name else ""
        below = [one[len(head) :] for one in self._files if one.startswith(head)]
        return [head + one for one in sorted(below, key=PurePosixPath) if _matches(one, pattern)]

    def _find(self, name: str) -> RemoteFile | ArchivedFile:
        try:
            return self._files[name]
        except KeyError:
            text = "there is no such file"
            raise FileNotFoundError(2, text, f"{self.storage.url}/{name}") from None

    def names_below(self, name: str) -> list[str]:
        head = f"{name}/" if name else ""
        return [one for one in self._files if one == name or one.startswith(head)]

    def fetch(self, name: str) -> None:
        """Makes the copy good. Raises OSError."""
        if name in self._is_here and (self.folder / name).exists():
            return
        for again in reversed(range(_TRIES)):
            wanted = self._find(name)
            try:
                _fetch(self.storage, name, wanted, self.folder / name)
                break
            except (FileNotFoundError, _Changed) as error:
                if not again:
                    raise OSError(5, f"it changes while it is read: {error}", name) from error
                self.refresh(now=True)
            except StorageError as error:
                raise OSError(5, str(error), name) from error
        self._is_here.add(name)

    def fetch_all(self, names: Iterable[str]) -> None:
        """Many at once. What cannot be had is told when it is read."""

        def try_fetch(name: str) -> None:
            try:
                self.fetch(name)
            except OSError:
                pass

        missing = [name for name in names if name not in self._is_here]
        if not missing:
            return
        from concurrent.futures import ThreadPoolExecutor  # a tenth of what a launch imports

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(try_fetch, missing))


class _Changed(Exception):
    """An object is not the one that was listed."""


_mounts: dict[str, Mount] = {}


def mount(url: str) -> Path:
    """The path that stands for a URL; listed, not yet read. Raises StorageError."""
    plain = local_path(url)
    if plain is not None:
        return plain
    made = Mount(url)
    made.refresh()
    if made.is_empty:
        raise StorageError(f"{url}: nothing is there; check the name and the credentials")
    _mounts[str(made.folder)] = made
    if not made.is_file:
        made.folder.mkdir(parents=True, exist_ok=True)
        (made.folder / _MARK).write_text(made.storage.url, encoding="utf-8")
    else:
        made.folder.parent.mkdir(parents=True, exist_ok=True)
    _make_room()
    return made.folder


def list_mounts() -> tuple[tuple[str, str], ...]:
    """URLs that this process reads, and the folders that stand for them."""
    return tuple((one.storage.url, folder) for folder, one in _mounts.items())


def mount_as(url: str, folder: str) -> None:
    """The same in another process, perhaps on another machine: paths mean what they mean there."""
    if folder in _mounts:
        return
    os.environ[CACHE_VARIABLE] = folder.partition(f"{os.sep}mirror{os.sep}")[0]
    mirror_root.cache_clear()
    _prefix.cache_clear()
    mount(url)


def open_place(place: str | os.PathLike[str]) -> Path:
    """The path of what is named, as a path or by a URL. Raises StorageError."""
    text = os.fspath(place)
    return mount(text) if is_url(text) else Path(place)


def find_mount(path: Path) -> tuple[Mount, str] | None:
    """Whose copy a path is, and its name there; None for every path that is no copy."""
    text = str(path)
    if not text.startswith(_prefix()):
        return None
    for place in (text, *map(str, Path(text).parents)):
        if len(place) < len(_prefix()):
            return None
        found = _mounts.get(place)
        if found is None and os.path.isfile(os.path.join(place, _MARK)):
            # Another process listed it: a worker, or the one before a fork.
            mount(name_place(place))
            found = _mounts[place]
        if found is not None:
            return found, text[len(place) :].lstrip(os.sep)
    return None


def _sort_into_folders(files: Iterable[str]) -> dict[str, set[str]]:
    folders: dict[str, set[str]] = {}
    for name in files:
        while name:
            parent, _, own = name.rpartition("/")
            known = folders.setdefault(parent, set())
            if own in known:
                break
            known.add(own)
            name = parent
    return folders


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch(name.rpartition("/")[2], pattern[3:])
    return "/" not in name and fnmatch(name, pattern)


def _fetch(storage: Storage, name: str, wanted: RemoteFile | ArchivedFile, target: Path) -> None:
    """A copy, under another name until it is whole."""
    note = target.with_name(f".{target.name}.of")
    if target.is_file() and _read_note(note).get("stamp") == wanted.stamp:
        os.utime(note)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        if isinstance(wanted, ArchivedFile):
            _join_chunks(storage, wanted, draft, target, _read_note(note).get("chunks"))
        else:
            storage.download(name, draft)
            if draft.stat().st_size != wanted.size_bytes:
                raise _Changed(f"{draft.stat().st_size} bytes instead of {wanted.size_bytes}")
        note.unlink(missing_ok=True)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    kept = {"stamp": wanted.stamp}
    if isinstance(wanted, ArchivedFile):
        kept["chunks"] = list(wanted.chunks)  # type: ignore[assignment]
    note.write_text(json.dumps(kept), encoding="utf-8")


def _join_chunks(
    storage: Storage, wanted: ArchivedFile, draft: Path, target: Path, known: object
) -> None:
    """The chunks that changed are fetched, and each is checked; the others are here already."""
    before = known if isinstance(known, list) and target.is_file() else []
    if before:
        shutil.copyfile(target, draft)
    with draft.open("r+b" if before else "wb") as file:
        for index, digest in enumerate(wanted.chunks):
            if index < len(before) and before[index] == digest:
                continue
            data = storage.read(wanted.object_name(digest))
            if sha256(data).hexdigest() != digest:
                raise OSError(5, "an archived chunk does not match its checksum", str(target))
            file.seek(index * CHUNK_BYTES)
            file.write(data)
        file.truncate(wanted.size_bytes)


def _read_note(note: Path) -> dict[str, object]:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _make_room() -> None:
    """Removes the copies that were used longest ago, while they are more than the limit."""
    try:
        limit = int(os.environ.get(LIMIT_VARIABLE) or _LIMIT_BYTES)
    except ValueError:
        limit = _LIMIT_BYTES
    copies: list[tuple[float, int, Path]] = []
    for note in mirror_root().rglob(".*.of"):
        copy = note.with_name(note.name[1 : -len(".of")])
        try:
            copies.append((note.stat().st_mtime, copy.stat().st_size, note))
        except OSError:
            continue
    excess = sum(size for _, size, _ in copies) - limit
    for _, size, note in sorted(copies, key=lambda one: one[0]):
        if excess <= 0:
            break
        note.unlink(missing_ok=True)
        note.with_name(note.name[1 : -len(".of")]).unlink(missing_ok=True)
        excess -= size
