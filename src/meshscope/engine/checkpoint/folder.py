"""Checkpoints on disk: one folder for each, complete or not there.

    checkpoints/
      step-00000100/           files of torch.distributed.checkpoint, and
        meshscope.json         what they are: format, step, state, sizes and checksums of the files
      .incomplete-step-…/      being written; what a killed run left, until the next save
      .replaced-step-…/        the old one, while a checkpoint of the same step takes its place
      .damaged-step-…/         one that a resume passed over
      .lock                    held by the job that saves here (`folder_lock`)

A checkpoint is written under another name, flushed to disk, and renamed when every rank has
succeeded. Whoever writes holds the folder: two jobs would take each other's unfinished checkpoints
for what a killed run left.
"""

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshscope.errors import MeshscopeError, UsageError

FORMAT_VERSION = 1
_MANIFEST = "meshscope.json"
DESCRIPTION = ".metadata"
"""Where torch keeps which tensor is where in which file."""

Json = Any
"""None, bool, int, float, str, and lists and mappings (by str) of them."""

_INCOMPLETE = ".incomplete-"
_REPLACED = ".replaced-"
_DAMAGED = ".damaged-"
_MAX_MANIFEST_BYTES = 256 << 20
_STEP_FOLDER = re.compile(r"(\.replaced-)?step-(\d{8,})")
_BLOCK_BYTES = 16 << 20

logger = logging.getLogger(__name__)


class CheckpointError(MeshscopeError):
    """A checkpoint could not be written or read. Raised by all ranks alike."""

    exit_code = 3


class DamagedCheckpointError(CheckpointError):
    """Its files are not as they were written. Nothing was changed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    path: Path
    step: int
    """Steps taken when it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Name, size and checksum a file must have."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands in a checkpoint beside its tensors."""

    step: int
    num_ranks: int
    optimizers: list[str]
    """Kinds of those whose state is there; empty: none is."""
    files: dict[str, StoredFile]
    state: dict[str, Json]
    torch_version: str


# --- which are there ------------------------------------------------------------------------------


def find_checkpoints(folder: Path | str) -> list[SavedCheckpoint]:
    """The complete checkpoints in a folder, by step; none when the folder is not there."""
    found: dict[int, SavedCheckpoint] = {}
    for path in sorted(Path(folder).glob("*step-*")):
        match = _STEP_FOLDER.fullmatch(path.name)
        # A replaced one counts only where its successor is missing: "." sorts before "s".
        if match and (path / _MANIFEST).is_file():
            found[int(match[2])] = SavedCheckpoint(path=path, step=int(match[2]))
    return [found[step] for step in sorted(found)]


def find_latest(folder: Path | str) -> SavedCheckpoint | None:
    """The complete checkpoint of the highest step."""
    return next(reversed(find_checkpoints(folder)), None)


def remove_old(folder: Path | str, *, keep: int) -> list[Path]:
    """Deletes all complete checkpoints but the latest `keep`; call it on one rank only."""
    if keep < 1:
        raise UsageError(f"keep is {keep}; expected at least 1, or no call")
    removed = [checkpoint.path for checkpoint in find_checkpoints(folder)[:-keep]]
    for path in removed:
        doomed = path.with_name(_INCOMPLETE + path.name)
        path.rename(doomed)  # first, so that one deleted by half is not taken for complete
        shutil.rmtree(doomed)
    return removed


# --- writing --------------------------------------------------------------------------------------


def final_path(folder: Path | str, step: int) -> Path:
    """Path of the complete checkpoint of a step."""
    return Path(folder) / f"step-{step:08d}"


def incomplete_path(final: Path) -> Path:
    """Path of the checkpoint while it is written."""
    return final.with_name(_INCOMPLETE + final.name)


def start_writing(final: Path) -> Path:
    """An empty folder to write into; removes what killed runs left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(_INCOMPLETE + "*"):
        shutil.rmtree(leftover)
    for replaced in final.parent.glob(_REPLACED + "*"):
        successor = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if (successor / _MANIFEST).is_file():
            shutil.rmtree(replaced)
        else:
            replaced.rename(successor)
    incomplete = incomplete_path(final)
    incomplete.mkdir()
    return incomplete


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that no later save counts it among those to keep."""
    aside = path.with_name(_DAMAGED + path.name.removeprefix(_REPLACED))
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def discard(incomplete: Path) -> None:
    """Frees the disk after a failed save, as far as possible."""
    shutil.rmtree(incomplete, ignore_errors=True)


def publish(incomplete: Path, final: Path, manifest: Manifest) -> None:
    """Makes a checkpoint complete, in place of an older one of the same step."""
    _require_files(incomplete, manifest)
    _write_manifest(incomplete / _MANIFEST, manifest)
    _flush_folder(incomplete)
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        final.rename(replaced)
    incomplete.rename(final)
    _flush_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old_if_possible(folder: Path, keep: int) -> None:
    """As `remove_old`; a checkpoint that cannot be removed is no reason to stop training."""
    try:
        remove_old(folder, keep=keep)
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", folder, error)


def describe_file(path: Path) -> StoredFile:
    """Size and checksum of a file as it is now."""
    checksum = size_bytes = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            size_bytes += len(block)
    return StoredFile(size_bytes=size_bytes, crc32=checksum)


def _require_files(folder: Path, manifest: Manifest) -> None:
    """Checks that this rank sees the files of all ranks: disks may be local."""
    missing = [
        name
        for name, file in manifest.files.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.size_bytes
    ]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(manifest.files)} files written by other ranks are not in "
            f"{folder} as seen from rank 0 ({missing[0]}, …); save to a folder that all ranks share"
        )


def _write_manifest(path: Path, manifest: Manifest) -> None:
    content = json.loads(json.dumps(asdict(manifest)))
    text = json.dumps(
        {"format": FORMAT_VERSION, "crc32": _checksum_json(content), **content}, indent=1
    )
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_json(content: Json) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# --- reading --------------------------------------------------------------------------------------


def read_manifest(path: Path | str) -> Manifest:
    """Reads a checkpoint's description. Raises CheckpointError when there is none."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}; {_describe_found(path.parent)}")
    if not (path / _MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is no complete checkpoint, as it has no {_MANIFEST}; {_describe_found(path)}"
        )
    damaged = DamagedCheckpointError(
        f"{path / _MANIFEST} is damaged; load another checkpoint: {_describe_found(path.parent)}"
    )
    if (path / _MANIFEST).stat().st_size > _MAX_MANIFEST_BYTES:
        raise damaged
    try:
        content = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        version = content.pop("format")
        checksum = content.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, but this meshscope reads up to {FORMAT_VERSION}; "
            "load it with a newer meshscope"
        )
    if checksum != _checksum_json(content):
        raise damaged
    files = {name: StoredFile(**file) for name, file in content.pop("files").items()}
    return Manifest(files=files, **content)


def require_undamaged(path: Path, files: Mapping[str, StoredFile], names: Iterable[str]) -> None:
    """Reads the named files and raises CheckpointError when one is not as it was written."""
    problems = []
    for name in names:
        if not (path / name).is_file():
            problems.append(f"{name} is missing")
            continue
        size_bytes, expected = (path / name).stat().st_size, files[name]
        if size_bytes != expected.size_bytes:
            problems.append(f"{name} has {size_bytes} bytes instead of {expected.size_bytes}")
        elif describe_file(path / name) != expected:
            problems.append(f"{name} has another checksum than when it was written")
    if problems:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {'; '.join(problems)}; load another one "
            f"({_describe_found(path.parent)})"
        )


def _describe_found(folder: Path) -> str:
    names = [checkpoint.path.name for checkpoint in find_checkpoints(folder)]
    if not names:
        return f"{folder} holds no complete checkpoint"
    return f"{folder} holds {len(names)}, the latest is {names[-1]}"
