"""Types of arguments that name a place: a path, or a URL of any storage (docs/storage.md).

What a URL names for reading becomes the path of a copy that is made while it is read. What is to be
written to one is written here first, and sent when the command is done.
"""

import tempfile
from pathlib import Path
from typing import Any

import click

from meshscope.errors import UsageError
from meshscope.store.remote.mirror import mount
from meshscope.store.remote.storage import Storage, is_url, local_path


class ReadPlace(click.Path):
    """Something that is read. Whether it may be is seen when it is opened: that it may not is no
    wrong use of the command, and has an exit code of its own."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(path_type=Path, exists=exists, readable=exists)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return (
            mount(value)
            if isinstance(value, str) and is_url(value)
            else super().convert(value, param, ctx)
        )


class WritePlace(click.Path):
    """A file, or where `file_okay` is false a folder, that is written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not is_url(value) or ctx is None:
            return super().convert(value, param, ctx)
        plain = local_path(value)
        if plain is not None:
            return super().convert(str(plain), param, ctx)
        storage = Storage(value)
        storage.check()
        folder = ctx.with_resource(tempfile.TemporaryDirectory(prefix="meshscope-"))
        staged = Path(folder) / (value.rstrip("/").rpartition("/")[2] or "output")
        ctx.call_on_close(lambda: _send(staged, storage))
        return staged


class LocalPlace(click.Path):
    """A run that the command changes, or whose processes it talks to: here and nowhere else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and is_url(value):
            plain = local_path(value)
            if plain is None:
                name = "this command" if ctx is None else f"meshscope {ctx.info_name}"
                raise UsageError(f"{name} needs a run on this machine, and got {value}")
            value = str(plain)
        return super().convert(value, param, ctx)


def _send(staged: Path, storage: Storage) -> None:
    """What the command wrote; nothing where it failed before."""
    if staged.is_file():
        storage.upload(staged, "")
    elif staged.is_dir():
        for file in sorted(staged.rglob("*")):
            if file.is_file():
                storage.upload(file, file.relative_to(staged).as_posix())


READ = ReadPlace()
READ_THERE = ReadPlace(exists=True)
LOCAL = LocalPlace(path_type=Path, readable=False)
WRITE_FILE = WritePlace(path_type=Path, dir_okay=False)
WRITE_FOLDER = WritePlace(path_type=Path, file_okay=False)
