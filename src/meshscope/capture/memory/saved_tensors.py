"""What autograd keeps for backward, seen through torch's saved-tensor hooks.

While a profiled step runs, each tensor autograd saves is wrapped in a small object that the graph
owns; only a weak reference to it stays here. So what is alive here is what is saved: nothing in
eval or under no_grad, inputs only under reentrant checkpointing, and no more once a node of
backward has run. Where others' hooks are on top (non-reentrant checkpointing, offloading) they are
called as before, and the storages they were given are watched weakly: what they drop is not there.

Torch does not compare versions of tensors that went through a hook; the wrapper does it in its
place, so a program that changes a saved tensor fails as it would without us. What a custom Function
keeps outside of `save_for_backward` is not seen.

Hooks are taken out while torch would refuse them (`torch.func.grad`), and while a custom Function
saves: without hooks its backward is given the very parameter it saved, with the attributes the
program put there (Megatron's `main_grad`), with hooks a copy. What it saved is watched weakly.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.memory.storages import (
    Ledger,
    WeakStorages,
    in_backward,
    plain_tensors,
    storage_of,
    untraced,
)

ACTIVATIONS = "activations"
SITE = "memory of activations"


class _SavedTensor:
    """What the graph holds instead of a tensor."""

    __slots__ = ("__weakref__", "is_delicate", "path", "tensor", "version")

    def __init__(self, tensor: Any, version: int, path: str, *, is_delicate: bool) -> None:
        self.tensor = tensor
        self.version = version
        self.path = path
        self.is_delicate = is_delicate


class SavedTensors:
    """The hooks, and the tensors that went through them and are alive."""

    def __init__(
        self,
        torch: Any,
        find_path: Callable[[], str],
        guard: Guard,
        *,
        is_delicate: Callable[[], bool] = lambda: False,
        on_unpack: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`is_delicate`: whether what is saved now is used by a delicate part of backward;
        `on_unpack` gets the answer before it is used."""
        self._torch = torch
        self._autograd = torch._C._autograd
        self._pack: Callable[[Any], _SavedTensor] = self._wrap
        self._unpack_hook: Callable[[_SavedTensor], Any] = self._unwrap
        self._find_path = find_path
        self._is_delicate = is_delicate
        self._tell_unpack = guard.protect(SITE, on_unpack)
        self._keep = guard.protect(SITE, self._make_saved)
        self._watch_guarded = guard.protect(SITE, self._watch)
        self._thread_id = 0
        self._plain_types = (torch.Tensor, torch.nn.Parameter)
        self._saved: dict[int, weakref.ref[_SavedTensor]] = {}
        self._handed_on = WeakStorages(torch)
        self._is_watching = False
        self._is_pushed = False
        self._delegates: list[Any] = []

    def __len__(self) -> int:
        return len(self._saved)

    def begin(self) -> bool:
        """Puts the hooks in; False when others' are there, which are then asked per module."""
        self._is_watching = True
        if self._is_pushed or in_backward(self._torch):
            return self._is_pushed
        if self._top() is not None or self._are_refused():
            return False
        self._pack = untraced(self._torch, self._wrap)
        self._unpack_hook = untraced(self._torch, self._unwrap)
        self._push()
        self._is_pushed = True
        self._thread_id = threading.get_ident()
        return True

    def end(self) -> None:
        """Takes the hooks out, unless others came on top of them, or this is another thread: then
        they do nothing from now on, and the next `end` tries again."""
        self._is_watching = False
        is_here = threading.get_ident() == self._thread_id and not in_backward(self._torch)
        if self._is_pushed and is_here and self._is_on_top():
            self._autograd._pop_saved_tensors_default_hooks()
            self._is_pushed = False

    @property
    def is_out(self) -> bool:
        return not self._is_pushed

    def suspend(self) -> bool:
        """Takes the hooks out for a while, if they are on top in this thread; whether they were."""
        if not self._is_pushed or not self._is_on_top():
            return False
        self._autograd._pop_saved_tensors_default_hooks()
        return True

    def resume(self) -> None:
        """Undoes a `suspend` that has taken them out; after `end`, they stay out."""
        is_here = threading.get_ident() == self._thread_id and not in_backward(self._torch)
        if is_here and not self._is_watching:
            self._is_pushed = False
        else:
            self._push()

    def watch_function(self, outputs: Any) -> None:
        """What a custom Function has saved, while it is there. Not where reading would drop it."""
        for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
            node: Any = getattr(tensor, "grad_fn", None)
            function = getattr(node, "_forward_cls", None)
            if function is None or getattr(function, "clear_saved_tensors_on_access", False):
                continue
            for saved in node.saved_tensors:
                if saved is not None:
                    self._watch(saved)
            return

    def _push(self) -> None:
        self._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack_hook)

    def _is_on_top(self) -> bool:
        top = self._top()
        return top is not None and top[0] == self._pack

    def _are_refused(self) -> bool:
        find_message = self._autograd._saved_tensors_hooks_get_disabled_error_message
        return find_message() is not None

    def forget(self) -> None:
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

    def _wrap(self, tensor: Any) -> _SavedTensor:
        # The graph gets its value even if something went wrong here.
        return self._keep(tensor) or _SavedTensor(tensor, tensor._version, "", is_delicate=False)

    def _make_saved(self, tensor: Any) -> _SavedTensor:
        # A saved output that refers to its own node would never be freed. Modes of others must not
        # see a call that is not the program's.
        if type(tensor) in self._plain_types:
            with self._torch._C._DisableTorchDispatch():
                detached = tensor.detach()
        else:
            detached = tensor.detach()
        is_delicate = self._is_watching and self._is_delicate()
        saved = _SavedTensor(detached, tensor._version, self._find_path(), is_delicate=is_delicate)
        if self._is_watching:
            key, table = id(saved), self._saved
            table[key] = weakref.ref(saved, lambda _: table.pop(key, None))
        return saved

    def _unwrap(self, saved: _SavedTensor) -> Any:
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(saved.tensor.shape)} is at version "
                f"{saved.tensor._version}; expected version {saved.version} instead"
            )
        self._tell_unpack(saved.is_delicate)
        return saved.tensor

    def _make_delegate(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        watch = self._watch_guarded

        def watch_and_pack(tensor: Any) -> Any:
            watch(tensor)
            # Checkpointing ends a recomputation by raising out of its hook: not ours to catch.
            return pack(tensor)

        return watch_and_pack

    def _watch(self, tensor: Any) -> None:
        for plain in plain_tensors(tensor):
            if storage_of(plain) is not None:
                self._handed_on.add(self._find_path(), plain)
