"""What torch.distributed.checkpoint says of the tensors it has stored, read without running code.

torch writes its description (`.metadata`) as a pickle. Here nothing but the plain values that it is
made of may come out of it; anything else in there raises.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshscope.engine.checkpoint.folder import DESCRIPTION, CheckpointError

_NUM_LISTED = 4
"""Names that a message lists before it only counts."""


class DescribedReader(FileSystemReader):
    """Reads tensors by a description that was read before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _DescriptionUnpickler(pickle.Unpickler):
    """torch's description is a pickle; nothing but the values it is made of may be built."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Data classes and enums of torch.distributed.checkpoint, and what stands in them."""
        if (module_name, global_name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
        }:
            return super().find_class(module_name, global_name)
        if module_name.startswith("pathlib") and global_name in {"PosixPath", "WindowsPath"}:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return super().find_class(module_name, global_name)
        if module_name.startswith("torch.distributed.checkpoint."):
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a checkpoint")


def read_description(path: Path) -> Metadata:
    try:
        found = _DescriptionUnpickler(io.BytesIO((path / DESCRIPTION).read_bytes())).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path / DESCRIPTION} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path / DESCRIPTION} is no description of tensors")
    return found


def describe_tensors(path: Path, metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Every tensor of the checkpoint; all of each must be there."""
    found = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    partial = [
        key
        for key, value in found.items()
        if sum(chunk.sizes.numel() for chunk in value.chunks) != value.size.numel()
    ]
    if partial:
        raise CheckpointError(f"{path}: {'; '.join(list_names('parts are missing of', partial))}")
    return found


def list_names(
    what: str, keys: Sequence[str], describe: Callable[[str], str] = lambda key: ""
) -> list[str]:
    """A part of a message that names the first few of the keys; nothing for none."""
    if not keys:
        return []
    named = sorted((key.split("/", 1)[1], key) for key in keys)
    listed = ", ".join(name + describe(key) for name, key in named[:_NUM_LISTED])
    more = f" and {len(keys) - _NUM_LISTED} more" if len(keys) > _NUM_LISTED else ""
    return [f"{what} {listed}{more}"]
