"""Storages: what tensors of all kinds really hold, each counted once.

A tensor is a view of a storage; two tensors of one storage cost its bytes once. Tensors that wrap
others (DTensor, AsyncCollectiveTensor, quantised ones) are taken apart by torch's own protocol, so
that of a sharded parameter only the local part counts. Meta and fake tensors hold nothing.

Wrong where memory is held that no storage owns: workspaces of libraries, and what a wrapper keeps
outside of the tensors it names.
"""

import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

MAX_DEPTH = 6
"""How deep containers and objects are searched for tensors."""
_MAX_OBJECTS = 20_000
"""How many values one search looks at."""
_MIN_SWEEP = 256
"""Storages remembered before those that are gone are looked for."""

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(torch: Any, function: Function) -> Function:
    """A function that the compiler does not look into, in a program that uses it."""
    if "torch._dynamo" not in sys.modules:
        return function
    hidden: Function = torch.compiler.disable(function)
    return hidden


def in_backward(torch: Any) -> bool:
    """Whether this thread runs a backward. At its end torch puts modes and hooks of the thread back
    to what they were: what is put in or taken out there is not."""
    return bool(torch._C._current_graph_task_id() >= 0)


StorageKey = tuple[str, int]
"""Device and address: unique among storages that are alive."""


def plain_tensors(tensor: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors with their own storage that make up `tensor`."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and depth < MAX_DEPTH:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if hasattr(inner, "untyped_storage"):  # a DTensor names its mesh as well
                yield from plain_tensors(inner, depth + 1)
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    elif tensor.device.type != "meta" and getattr(tensor, "fake_mode", None) is None:
        yield tensor


def storage_of(tensor: Any) -> tuple[StorageKey, int] | None:
    """Key and bytes of a plain tensor's storage; None if it holds no memory."""
    try:
        storage = tensor.untyped_storage()
        num_bytes = int(storage.nbytes())
        address = int(storage.data_ptr())
    except (RuntimeError, NotImplementedError):
        return None  # fake, or of a layout without a storage
    if num_bytes <= 0 or address == 0:
        return None
    return (str(tensor.device), address), num_bytes


def tensors_in(torch: Any, value: Any, *, with_objects: bool = False) -> Iterator[Any]:
    """Every tensor in nested containers and dataclasses; with `with_objects`, also in attributes
    of other objects, modules apart."""
    seen: set[int] = set()
    pending = [(value, 0)]
    while pending and len(seen) < _MAX_OBJECTS:
        here, depth = pending.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, torch.Tensor):
            yield here
        elif depth < MAX_DEPTH:
            parts = _parts_of(torch, here, with_objects=with_objects)
            pending += [(part, depth + 1) for part in reversed(parts)]


def _parts_of(torch: Any, value: Any, *, with_objects: bool) -> list[Any]:
    if value is None or isinstance(value, (str, bytes, int, float, bool, type)):
        return []
    # Not any Mapping: a program's own may load something when it is asked for its values.
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    if not with_objects or callable(value) or isinstance(value, torch.nn.Module):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [getattr(value, name, None) for name in slots if isinstance(name, str)]
    return values + list(getattr(value, "__dict__", {}).values())


class WeakStorages:
    """Storages seen at some time, without keeping them: which are still there?"""

    def __init__(self, torch: Any) -> None:
        self._storage_type = torch.UntypedStorage
        self._make_reference = torch.multiprocessing.reductions.StorageWeakRef
        self._seen: dict[int, tuple[Any, str, str]] = {}
        self._next_sweep = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, path: str, tensor: Any) -> None:
        """Remembers the storages of a tensor; of one seen before, the first path stays."""
        for plain in plain_tensors(tensor):
            self.add_plain(path, plain)

    def add_plain(self, path: str, plain: Any) -> int:
        """Remembers the storage of a plain tensor; its bytes, 0 of one seen before."""
        found = storage_of(plain)
        if found is None or self.knows(plain):
            return 0
        if len(self._seen) >= self._next_sweep:
            self._sweep()
        reference = self._make_reference(plain.untyped_storage())
        self._seen[reference.cdata] = (reference, path, found[0][0])
        return found[1]

    def knows(self, plain: Any) -> bool:
        """Whether the storage of a plain tensor was seen before."""
        try:
            # A storage that is gone keeps its address as long as there is a reference here.
            return plain.untyped_storage()._cdata in self._seen
        except (RuntimeError, NotImplementedError):
            return False

    def _sweep(self) -> None:
        """Forgets what is gone, so that the table grows with what is alive only."""
        gone = [cdata for cdata, (reference, _, _) in self._seen.items() if reference.expired()]
        for cdata in gone:
            del self._seen[cdata]
        self._next_sweep = max(_MIN_SWEEP, 2 * len(self._seen))

    def alive(self) -> Iterator[tuple[str, StorageKey, int]]:
        """Path, key and bytes of each that is alive; forgets the others."""
        for cdata, (reference, path, device) in list(self._seen.items()):
            storage = self._storage_type._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[cdata]
                continue
            num_bytes, address = int(storage.nbytes()), int(storage.data_ptr())
            if num_bytes > 0 and address:
                yield path, (device, address), num_bytes

    def clear(self) -> None:
        self._seen.clear()


class Ledger:
    """Bytes by category and path. A storage belongs to the first that claims it.

    Several tensors may cut one storage into parts (gradients in a bucket): each path gets what its
    tensor covers, the first one what is left over.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.categories: dict[str, dict[str, int]] = {}
        self.elsewhere: dict[str, int] = {}
        """Bytes by category that are on another device."""
        self._left: dict[StorageKey, int] = {}
        self._owners: dict[StorageKey, tuple[str, str]] = {}

    def add_tensor(self, category: str, path: str, tensor: Any, *, is_part: bool = True) -> None:
        """Claims what a tensor covers of its storages, or with `is_part=False` all of them."""
        for plain in plain_tensors(tensor):
            found = storage_of(plain)
            if found is None:
                continue
            key, num_bytes = found
            covered = plain.numel() * plain.element_size() if is_part else num_bytes
            self.add(category, path, key, num_bytes, covered)

    def add(
        self, category: str, path: str, key: StorageKey, num_bytes: int, covered: int | None = None
    ) -> None:
        """Claims a storage, or the part of it that is unclaimed in this category."""
        owner = self._owners.get(key)
        if owner is None:
            self._owners[key] = owner = (category, path)
            self._left[key] = num_bytes
        if owner[0] != category:
            return
        taken = min(self._left[key], num_bytes if covered is None else covered)
        self._left[key] -= taken
        if taken:
            self._put(category, path, key, taken)

    def _put(self, category: str, path: str, key: StorageKey, num_bytes: int) -> None:
        if key[0] != self.device:
            self.elsewhere[category] = self.elsewhere.get(category, 0) + num_bytes
            return
        paths = self.categories.setdefault(category, {})
        paths[path] = paths.get(path, 0) + num_bytes

    def add_bytes(self, category: str, path: str, num_bytes: int) -> None:
        """Memory on this device whose tensors cannot be reached, by its known size."""
        if num_bytes > 0:
            self._put(category, path, (self.device, 0), num_bytes)

    def settle(self) -> None:
        """Gives what is left of cut storages to their first owners."""
        for key, left in self._left.items():
            if left:
                self._put(*self._owners[key], key, left)
                self._left[key] = 0

    def claims(self, key: StorageKey) -> bool:
        return key in self._owners

    @property
    def total_bytes(self) -> int:
        """All that is attributed on this device."""
        return sum(sum(paths.values()) for paths in self.categories.values())
