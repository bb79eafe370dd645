"""What autograd keeps for backward, seen through torch's saved-tensor hooks.

While a profiled step runs, each tensor autograd saves is wrapped in a small object that the graph
owns; only a weak reference to it stays here. So what is alive here is what is saved: nothing in
eval or under no_grad, inputs only under reentrant checkpointing, and no more once a node of
backward has run. Where others' hooks are on top (non-reentrant checkpointing, offloading) they are
called as before, and the storages they were given are watched weakly: what they drop is not there.

Torch does not compare versions of tensors that went through a hook; the wrapper does it in its
place, so a program that changes a saved tensor fails as it would without us. What a custom Function
keeps outside of `save_for_backward` is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from meshscope.capture.attribution.storages import (
    Ledger,
    WeakStorages,
    plain_tensors,
    storage_of,
    untraced,
)

ACTIVATIONS = "activations"


class SavedTensor:
    """What the graph holds instead of a tensor."""

    __slots__ = ("__weakref__", "path", "tensor", "version")

    def __init__(self, tensor: Any, path: str) -> None:
        # A saved output that refers to its own node would never be freed.
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.path = path


def _unpack(saved: SavedTensor) -> Any:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tuple(saved.tensor.shape)} is at version {saved.tensor._version}; "
            f"expected version {saved.version} instead"
        )
    return saved.tensor


class SavedTensors:
    """The hooks, and the tensors that went through them and are alive."""

    def __init__(self, torch: Any, find_path: Callable[[], str]) -> None:
        self._torch = torch
        self._autograd = torch._C._autograd
        self._pack: Callable[[Any], SavedTensor] = self._wrap
        self._find_path = find_path
        self._saved: dict[int, weakref.ref[SavedTensor]] = {}
        self._handed_on = WeakStorages(torch)
        self._is_watching = False
        self._is_pushed = False
        self._delegates: list[Any] = []

    def __len__(self) -> int:
        return len(self._saved)

    def begin(self) -> bool:
        """Puts the hooks in; False when others' are there, which are then asked per module."""
        self._is_watching = True
        if self._is_pushed or self._top() is not None:
            return self._is_pushed
        self._pack = untraced(self._torch, self._wrap)
        unpack = untraced(self._torch, _unpack)
        self._autograd._push_saved_tensors_default_hooks(self._pack, unpack)
        self._is_pushed = True
        return True

    def end(self) -> None:
        """Takes the hooks out, unless others came on top of them: then they do nothing from now
        on, and the next `end` tries again."""
        self._is_watching = False
        top = self._top() if self._is_pushed else None
        if top is not None and top[0] == self._pack:
            self._autograd._pop_saved_tensors_default_hooks()
            self._is_pushed = False

    def forget(self) -> None:
        """Forgets what was saved so far."""
        self._saved.clear()
        self._handed_on.clear()

    def enter_module(self) -> bool:
        """Where others' hooks are on top: watches what they are given, until `leave_module`."""
        if not self._is_watching:
            return False
        top = self._top()
        if top is None or top[0] == self._pack or top[0] in self._delegates:
            return False
        pack = untraced(self._torch, self._make_delegate(top[0]))
        self._autograd._push_saved_tensors_default_hooks(pack, top[1])
        self._delegates.append(pack)
        return True

    def leave_module(self) -> None:
        """Takes out what `enter_module` put in."""
        top = self._top()
        if top is not None and top[0] in self._delegates:
            self._autograd._pop_saved_tensors_default_hooks()
            self._delegates.remove(top[0])

    def claim(self, ledger: Ledger) -> None:
        """Adds all that is alive to a ledger."""
        for path, tensor in self._alive():
            ledger.add_tensor(ACTIVATIONS, path, tensor, is_part=False)
        for path, key, num_bytes in self._handed_on.alive():
            ledger.add(ACTIVATIONS, path, key, num_bytes)

    def _alive(self) -> Iterator[tuple[str, Any]]:
        for reference in list(self._saved.values()):
            saved = reference()
            if saved is not None:
                yield saved.path, saved.tensor

    def _top(self) -> Any:
        return self._autograd._top_saved_tensors_default_hooks(True)

    def _wrap(self, tensor: Any) -> SavedTensor:
        saved = SavedTensor(tensor, self._find_path())
        if self._is_watching:
            key, table = id(saved), self._saved
            table[key] = weakref.ref(saved, lambda _: table.pop(key, None))
        return saved

    def _make_delegate(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watch_and_pack(tensor: Any) -> Any:
            # Checkpointing ends a recomputation by raising out of its hook: not ours to catch.
            self._watch(tensor)
            return pack(tensor)

        return watch_and_pack

    def _watch(self, tensor: Any) -> None:
        for plain in plain_tensors(tensor):
            if storage_of(plain) is not None:
                self._handed_on.add(self._find_path(), plain)
