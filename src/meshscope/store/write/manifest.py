"""Small JSON documents that carry their own checksum: `run.json` and the compaction's manifest.

The text is indented JSON whose last field, `crc32`, is that of the document without it; a reader
writes the document out again and compares, so that any changed byte shows. Written beside its
place and put there whole: complete or absent, never half. Standard library only.
"""

import errno
import json
import os
import zlib
from pathlib import Path

from meshscope.store.write.access import create_file


def seal(document: dict[str, object]) -> bytes:
    """The document's text, checksum included."""
    body = {key: value for key, value in document.items() if key != "crc32"}
    checksum = zlib.crc32(json.dumps(body, indent=2).encode())
    return json.dumps({**body, "crc32": f"{checksum:08x}"}, indent=2).encode() + b"\n"


def unseal(data: bytes) -> tuple[dict[str, object], bool]:
    """The document, and whether it is as it was written; ValueError when it is not an object."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        return document, seal(document) == data
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def place_new(path: Path, data: bytes) -> bool:
    """Creates a file unless there is one; of several processes, only the first does."""
    draft = _write_draft(path, data)
    try:
        link_into_place(draft, path)
    except FileExistsError:
        return False
    return True


def link_into_place(draft: Path, path: Path) -> None:
    """Gives a finished draft its name, and never another file's; the draft's own name goes."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def replace_whole(path: Path, data: bytes) -> None:
    """Replaces a file, or creates it."""
    os.replace(_write_draft(path, data), path)


def is_draft_of(name: str, found: str) -> bool:
    """Whether a file called `found` is what another process is about to call `name`."""
    return found.startswith(f".{name}.")


def _write_draft(path: Path, data: bytes) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(create_file(draft), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a rename that outlives the data would leave an empty file
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft
