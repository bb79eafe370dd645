"""Finds the compiled parts of the recorder; there are none where it was built without a compiler.

Each has a twin in Python that leaves the same bytes, and hands over to it whatever is not usual.
"""

import importlib
import logging
import os
import sys
from functools import cache
from types import ModuleType

logger = logging.getLogger(__name__)

SWITCH_VARIABLE = "MESHSCOPE_NATIVE"
"""0 keeps the recorder to Python, where compiled parts are suspected of something."""
_VERSION = 4
"""Raised with that of the C files whenever what they and their users know of each other changes."""


def load_native(name: str) -> ModuleType | None:
    """A compiled module by its full name; None without one that fits, or where it is unwanted."""
    return None if os.environ.get(SWITCH_VARIABLE, "1") == "0" else _import_native(name)


@cache
def _import_native(name: str) -> ModuleType | None:
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        module = importlib.import_module(name)
    except ImportError:
        # Not built, or for another machine: the twin in Python does the same.
        return None
    if getattr(module, "VERSION", 0) != _VERSION:
        logger.info("%s was built from other sources, and is not used", name)
        return None
    return module
