"""Calls a function when a module has been imported to its end; nothing is imported for it.

A finder in front of the others, as `boot/sitecustomize.py` has one for torch: modules that nobody
waits for cost one look into a dictionary.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ModuleWatch:
    """Watches imports of some modules, and takes those that are loaded already at once."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], object]]) -> None:
        """What to call by module name; the functions must not raise."""
        self._actions = actions
        self._searching: set[str] = set()
        self._loading: set[str] = set()
        """Modules that were half imported when the watch began: torch is imported by them."""

    def install(self) -> None:
        """Safe to call again."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            self._loading = {name for name in self._actions if name in sys.modules}
            self.visit()

    def visit(self) -> None:
        """Takes modules that have been imported to their end since the watch began."""
        for name in list(self._loading):
            module = sys.modules.get(name)
            if module is None or not _is_loading(module):
                self._loading.discard(name)
                if module is not None:
                    self._actions[name](module)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec another finder has, with a loader that tells us when it is done."""
        if self._loading:
            self.visit()
        act = self._actions.get(name)
        if act is None or name in self._searching:
            return None
        self._searching.add(name)  # other import hooks may ask all finders as well, us included
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._searching.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _call_when_loaded(spec.loader, act)
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None


def _call_when_loaded(loader: Any, act: Callable[[ModuleType], object]) -> None:
    """Shadows one loader's exec_module; afterwards the loader is as it was."""
    run_module = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        run_module(module)
        act(module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without attributes of its own: not ours to watch
        return


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
