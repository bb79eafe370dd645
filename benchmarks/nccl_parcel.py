"""Packs folders into tar files that grow as a benchmark goes on, and unpacks them elsewhere.

Runs are recorded where the GPUs are and analysed where the packages are. Each folder becomes one
compressed member of a tar file, added when it is complete, so that a time limit loses nothing; no
file becomes much larger than `MAX_BYTES`, as there are limits to what comes back.
"""

import io
import tarfile
from pathlib import Path

MAX_BYTES = 14 << 20


def pack(folder: Path, parcel: Path) -> None:
    """Adds a folder under its own name to `parcel`; once it is full, to one with a number."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as inner:
        inner.add(folder, arcname=folder.name)
    content = buffer.getvalue()
    path, number = parcel, 1
    while path.exists() and path.stat().st_size + len(content) > MAX_BYTES:
        number += 1
        path = parcel.with_name(f"{parcel.stem}-{number}{parcel.suffix}")
    with tarfile.open(path, "a:") as outer:
        member = tarfile.TarInfo(f"{folder.name}.tar.gz")
        member.size = len(content)
        outer.addfile(member, io.BytesIO(content))


def unpack(parcels: list[Path], folder: Path) -> list[Path]:
    """The folders, in the order in which they were packed; the last of a name counts."""
    found: dict[str, Path] = {}
    for parcel in parcels:
        with tarfile.open(parcel) as outer:
            for member in outer:
                content = outer.extractfile(member)
                if content is None:
                    continue
                with tarfile.open(fileobj=content, mode="r:gz") as inner:
                    inner.extractall(folder, filter="data")
                name = member.name.removesuffix(".tar.gz")
                found[name] = folder / name
    return list(found.values())
