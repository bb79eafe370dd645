"""Loaded by every Python process below `meshscope run`, because this folder leads its PYTHONPATH.

It waits for torch to be imported and then calls `meshscope.capture.boot_hook`. Most processes
never import torch, so nothing is imported here that the interpreter has not loaded already
(meshscope itself would cost 11 ms, importlib.util 4 ms). Training must not notice a failure: what
goes wrong is one line on stderr. A sitecustomize that this one hides is run in its place, last,
so that its errors are reported as they would be without us.

Nothing happens without MESHSCOPE_RUN_DIR; a child that unsets it is left alone.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class TorchWatcher:
    """First in sys.meta_path: starts the recorder when torch has been imported to its end."""

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec another finder has for torch, with a loader that tells us when it is done."""
        # Other import hooks may ask all finders as well, us included: answer only the first.
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = _ask_others(self, name, path, target)
        finally:
            self._is_searching = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _attempt(lambda: self._watch(spec.loader))
        return spec

    def _watch(self, loader: Any) -> None:
        """Shadows one loader's exec_module; afterwards the loader is as it was."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run_module(module)  # if it raises, the next import of torch comes by here again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _attempt(_begin_recording)

        loader.exec_module = exec_module


class LauncherSource:
    """Last in sys.meta_path: meshscope as the launcher has it, where it is not installed.

    Not an entry in sys.path: the folder may be another interpreter's site-packages.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of meshscope itself; its submodules are found through it."""
        return PathFinder.find_spec(name, [self._folder]) if name == "meshscope" else None


def _ask_others(asking: object, name: str, path: Any, target: Any) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = None if finder is asking else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find else None
        if spec is not None:
            return spec
    return None


def _attempt(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - in someone else's process, before their program
        sys.stderr.write(f"meshscope: not recording: {type(error).__name__}: {error}\n")


def _begin_recording() -> None:
    from meshscope.capture import boot_hook

    boot_hook.begin_recording()


def _install() -> None:
    if not os.environ.get("MESHSCOPE_RUN_DIR"):
        return
    if os.environ.get("MESHSCOPE_SOURCE"):
        sys.meta_path.append(LauncherSource(os.environ["MESHSCOPE_SOURCE"]))
    if "torch" in sys.modules:  # by a .pth file, say
        _begin_recording()
    else:
        sys.meta_path.insert(0, TorchWatcher())


def _run_hidden_sitecustomize() -> None:
    folders = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # the import under way hands out what stands here
    spec.loader.exec_module(module)


_attempt(_install)
_run_hidden_sitecustomize()
