"""Errors of rules and analyses, kept instead of raised: one that breaks must not take the others.

The one place of the diagnosis that catches every exception. What is caught is never lost: the
runner makes a finding of each `Failure`.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What broke, and where."""

    what: str
    """A rule's code, or the name of an analysis."""
    error: str
    """Type and message of the exception, on one line."""
    place: str
    """File and line in which it was raised, without folders: they would name the machine."""


def attempt_to(what: str, build: Callable[[], T]) -> T | Failure:
    """The result, or the exception as a value."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        return Failure(what=what, error=_describe(error), place=_locate(error))


def _describe(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _locate(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    return f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
