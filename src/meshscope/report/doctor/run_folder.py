"""Where a run would be written: permission, space, and how the file system takes it."""

import os
import shutil
import tempfile
from pathlib import Path

from meshscope.core.unit_text import memory
from meshscope.report.doctor.check import Check, State
from meshscope.store.write.writer import file_system_type, is_mappable

_LITTLE_BYTES = 1 << 30
_NUM_TRIED_BYTES = 64 << 10


def find_existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_permission(folder: Path) -> Check:
    """Writes a file without a name there, and reads it."""
    where = find_existing(folder)
    name = str(where)

    def refuse(found: str) -> Check:
        return Check(
            name="permission",
            state=State.BROKEN,
            found=found,
            meaning="nothing can be recorded there",
            command="meshscope run -o ANOTHER_FOLDER -- …",
        )

    if not where.is_dir():
        return refuse(f"{name} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            file.write(bytes(_NUM_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return refuse(f"{name} cannot be written: {error.strerror}")
    return Check(name="permission", state=State.OK, found=f"{name} can be written")


def check_space(folder: Path) -> Check:
    usage = shutil.disk_usage(find_existing(folder))
    found = f"{memory(usage.free)} of {memory(usage.total)} free"
    if usage.free >= _LITTLE_BYTES:
        return Check(name="space", state=State.OK, found=found)
    return Check(
        name="space",
        state=State.LIMITED,
        found=found,
        meaning="when the disk is full records are dropped and counted; training goes on",
        command="meshscope compact RUN --remove-raw turns finished runs into smaller files",
    )


def check_file_system(folder: Path) -> Check:
    """Whether records go through a mapping, which outlives SIGKILL, or are written now and then."""
    where = find_existing(folder)
    kind = file_system_type(where) or "unknown"
    if is_mappable(where):
        return Check(name="file system", state=State.OK, found=f"{kind}: records are mapped")
    return Check(
        name="file system",
        state=State.LIMITED,
        found=f"{kind}: records are appended every 0.2 s",
        meaning="a rank that is killed may lose its last 0.2 s",
        command="meshscope run -o FOLDER_ON_A_LOCAL_DISK -- …, where that matters",
    )
