"""The one place that talks to fsspec: a URL becomes a `Storage`, and every error one sentence."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshscope.errors import StorageError, StorageNeedsPackage

T = TypeVar("T")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""What reads a kind of URL, where an extra of ours installs it."""
_LOCAL = ("file", "local")


def is_url(text: str) -> bool:
    """Whether it names something by a URL; a chain such as `zip::s3://…` is none we take."""
    return _URL.fullmatch(text) is not None


def local_path(url: str) -> Path | None:
    """The path that a `file://` URL means; None for other URLs."""
    scheme, rest = split_url(url)
    return Path(rest) if scheme in _LOCAL else None


def split_url(url: str) -> tuple[str, str]:
    """Scheme in small letters, and what follows `://`, without slashes at its end."""
    match = _URL.fullmatch(url)
    if match is None:
        raise StorageError(f"{url!r} is no URL; expected SCHEME://PLACE, such as s3://bucket/run")
    return match[1].lower(), match[2].rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """An object, as a listing shows it."""

    size_bytes: int
    stamp: str
    """Another one when the content is: the storage's own tag, else length and time of change."""


@dataclass(slots=True)
class Storage:
    """What is at a URL and below it. Names are relative to it; "" is the object itself."""

    url: str
    _systems: dict[int, Any] = field(default_factory=dict)
    """By process: a connection does not survive a fork."""

    def check(self) -> None:
        """Raises StorageError, or ModuleNotFoundError, where the URL cannot be opened at all."""
        self._system()

    def list_files(self) -> dict[str, RemoteFile]:
        """Every object at or below the URL by name. None of them has a name that leads outside."""

        def find(system: Any) -> dict[str, dict[str, Any]]:
            system.invalidate_cache()
            found: dict[str, dict[str, Any]] = system.find(self._root, detail=True)
            return found

        root = self._root
        listed: dict[str, RemoteFile] = {}
        try:
            found = self._call(find)
        except FileNotFoundError:  # no such bucket
            return {}
        for key, entry in found.items():
            name = key[len(root) :].lstrip("/") if key.startswith(root) else None
            if name is not None and entry.get("type") == "file" and _is_plain(name):
                listed[name] = _describe(entry)
        return listed

    def read(self, name: str) -> bytes:
        """An object whole; FileNotFoundError where it is not there."""
        data: bytes = self._call(lambda system: system.cat_file(self._key(name)))
        return data

    def download(self, name: str, target: Path) -> None:
        """An object to a local file, in parts."""
        self._call(lambda system: system.get_file(self._key(name), str(target)))

    def write(self, name: str, data: bytes) -> None:
        """An object, there whole or not at all (as its storage has it)."""
        key = self._key(name)
        self._put(lambda system: system.pipe_file(key, data), key)

    def upload(self, source: Path, name: str) -> None:
        """A local file to an object."""
        key = self._key(name)
        self._put(lambda system: system.put_file(str(source), key), key)

    def _put(self, work: Callable[[Any], None], key: str) -> None:
        def put(system: Any) -> None:
            _make_folder(system, key)
            work(system)

        try:
            self._call(put)
        except FileNotFoundError as error:
            raise StorageError(f"{self.url}: {_first_line(error)}; make the place first") from error

    def remove(self, names: list[str]) -> None:
        """Objects; one that is not there is none to remove."""
        for name in names:
            self._call(partial(_remove, self._key(name)))

    @property
    def _root(self) -> str:
        root: str = self._system()._strip_protocol(self.url)
        return root.rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _system(self) -> Any:
        pid = os.getpid()
        if pid not in self._systems:
            self._systems[pid] = _open_system(self.url)
        return self._systems[pid]

    def _call(self, work: Callable[[Any], T]) -> T:
        """`work` with the file system; what goes wrong is one sentence, but for absent objects."""
        try:
            return work(self._system())
        except (StorageError, FileNotFoundError, ModuleNotFoundError):
            raise
        except PermissionError as error:
            raise StorageError(
                f"{self.url}: access denied ({_first_line(error)}); check credentials and rights"
            ) from error
        except Exception as error:
            raise StorageError(f"{self.url}: {_explain(error)}") from error


def _open_system(url: str) -> Any:
    import fsspec

    scheme, place = split_url(url)
    if not place and scheme != "memory":
        raise StorageError(f"{url} names no place; expected {scheme}://PLACE")
    if scheme not in fsspec.available_protocols():
        raise StorageError(
            f"{url}: no storage is called {scheme}; known are s3, gs, az, http, file and others"
        )
    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        if package is not None:
            raise ModuleNotFoundError(f"{url} needs {package}", name=package) from error
        hint = "install it beside meshscope"
        raise StorageNeedsPackage(f"{url}: {_first_line(error)}; {hint}") from error
    except (ValueError, TypeError) as error:
        raise StorageError(f"{url} cannot be opened: {_first_line(error)}") from error


def _remove(key: str, system: Any) -> None:
    try:
        system.rm_file(key)
    except FileNotFoundError:
        pass


def _make_folder(system: Any, key: str) -> None:
    """Where folders are real, an object needs one."""
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    if protocol in (*_LOCAL, "memory"):
        system.makedirs(key.rpartition("/")[0], exist_ok=True)


def _describe(entry: dict[str, Any]) -> RemoteFile:
    size = int(entry.get("size") or 0)
    tags = (entry.get("ETag"), entry.get("etag"), entry.get("md5Hash"), entry.get("content_md5"))
    tag = next((str(tag).strip('"') for tag in tags if tag), "")
    times = (entry.get("LastModified"), entry.get("mtime"), entry.get("created"))
    when = next((str(time) for time in times if time), "")
    return RemoteFile(size_bytes=size, stamp=f"{size} {tag or when}")


def _is_plain(name: str) -> bool:
    """Whether a name may become a path below a folder."""
    if not name:
        return True
    parts = name.split("/")
    return not any(part in {"", ".", ".."} or "\0" in part for part in parts)


def _explain(error: Exception) -> str:
    name, line = type(error).__name__, _first_line(error)
    if "redential" in name or "redential" in line:
        return f"no credentials were found ({line}); set them as for the storage's own tools"
    return f"it cannot be reached or read: {name}: {line}"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
