"""Which module is being run, by forward hooks on all of them, put in for a step and taken out.

Each thread has its own stack: under checkpointing, modules run again in autograd's threads.
The nodes of autograd's graph that a module made get a hook (a module's full backward hook would
forbid in-place operations after it), so that backward is seen node by node: each gradient on its
way, also one that waits for a second contribution. Nodes are marked in their own metadata and never
held: a graph that is dropped goes at once.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from meshscope.capture.guard import Guard
from meshscope.capture.memory.storages import tensors_in, untraced
from meshscope.capture.steps.module_hook import ModuleHook

_MARK = "meshscope_memory"
_MAX_NODES = 1_000_000
"""Nodes searched for one module."""


def is_compiled(module: Any) -> bool:
    """Whether torch.compile runs it, as a wrapper or in place."""
    compiled = module.__dict__.get("_compiled_call_impl")
    return compiled is not None or type(module).__name__ == "OptimizedModule"


def eager_modules(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Paths and modules, without what is inside of compiled ones: hooks there would cut what was
    compiled as one, and so change what is measured."""
    seen: set[int] = set()
    pending = [(prefix, module)]
    while pending:
        path, here = pending.pop()
        if id(here) in seen or is_compiled(here):
            continue
        seen.add(id(here))
        yield path, here
        below = [(name, child) for name, child in here.named_children()]
        pending += [(f"{path}.{name}" if path else name, child) for name, child in reversed(below)]


def keep_eager(torch: Any, module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that the compiler does not look into, where the module is compiled."""
    return untraced(torch, hook) if is_compiled(module) else hook


class _CallWatcher(Protocol):
    """Listens to calls of modules."""

    def module_begins(self) -> bool: ...

    def module_ends(self, path: str, outputs: list[Any], *, has_begun: bool) -> None: ...

    def gradients_arrive(self, path: str, gradients: Sequence[Any]) -> None: ...


class ModuleCalls:
    """The stack of modules, and the hooks that keep it."""

    def __init__(self, torch: Any, watcher: _CallWatcher, guard: Guard) -> None:
        self._torch = torch
        self._watcher = watcher
        self._guard = guard
        self._local = threading.local()
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        """Of the innermost module that runs in this thread, or whose part of backward does; empty
        outside of all."""
        stack = self._stack
        return stack[-1][0] if stack else getattr(self._local, "node_path", "")

    @property
    def _stack(self) -> list[tuple[str, bool]]:
        stack: list[tuple[str, bool]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def install(self, modules: Sequence[tuple[str, Any]]) -> None:
        """Installs hooks on each module, under its path."""
        for path, module in modules:
            enter = self._guard.protect("memory attribution", partial(self._enter, path))
            leave = self._guard.protect("memory attribution", partial(self._leave, path))
            self._handles.append(module.register_forward_pre_hook(ModuleHook(enter)))
            self._handles.append(module.register_forward_hook(ModuleHook(leave), always_call=True))

    def remove(self) -> None:
        """Removes the hooks. A call that is under way gets no end."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._local.stack = []

    def _enter(self, path: str, _module: Any, _args: Any) -> None:
        self._stack.append((path, False))
        self._stack[-1] = (path, self._watcher.module_begins())

    def _leave(self, path: str, _module: Any, _args: Any, output: Any) -> None:
        stack = self._stack
        # What raised on its way out may have left some behind.
        while stack:
            found, has_begun = stack.pop()
            tensors = list(tensors_in(self._torch, output)) if found == path else []
            self._watcher.module_ends(found, tensors, has_begun=has_begun)
            if found == path:
                break

    def watch_graph(self, path: str, outputs: Sequence[Any]) -> None:
        """Calls `gradients_arrive` after each node of backward that leads to these tensors and has
        no hook yet: children have theirs, so a node belongs to the innermost module."""
        pending = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        for _ in range(_MAX_NODES):
            if not pending:
                return
            node = pending.pop()
            if node is None or _MARK in node.metadata or hasattr(node, "variable"):
                continue  # the end of the graph is a parameter, whose gradient is its own
            node.metadata[_MARK] = True
            node.register_prehook(self._make_node_prehook(path))
            node.register_hook(self._make_node_hook(path))
            pending += [following for following, _ in node.next_functions]

    def _make_node_prehook(self, path: str) -> Callable[[Any], None]:
        def before_node(_given: Any) -> None:
            self._local.node_path = path

        return self._guard.protect("memory attribution", before_node)

    def _make_node_hook(self, path: str) -> Callable[[Any, Any], None]:
        def after_node(results: Any, given: Any) -> None:
            self._local.node_path = ""
            self._watcher.gradients_arrive(path, (*results, *given))

        return self._guard.protect("memory attribution", after_node)
