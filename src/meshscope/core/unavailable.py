"""The value returned where a number or fact could not be had.

Missing is not zero and not a guess: a function that may have nothing to say returns
`T | Unavailable`, and the report prints the reason where the number would be.

Inside such a function, `need(value)` goes on with a value or leaves with its reason, and
`@or_unavailable` on the function turns that into the returned `Unavailable`:

    @or_unavailable
    def measure_bubble(times: Times | Unavailable) -> Bubble:
        return Bubble(need(times).cost_ns)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Stands for a missing result, with one sentence on why it is missing."""

    reason: str
    """What was not there, and where possible how to get it."""


class Missing(Exception):
    """Leaves a function that cannot give its result; `or_unavailable` catches it."""

    def __init__(self, reason: str | Unavailable) -> None:
        self.value = reason if isinstance(reason, Unavailable) else Unavailable(reason)
        super().__init__(self.value.reason)


def need(value: T | Unavailable) -> T:
    """The value; raises Missing with the reason where there is none."""
    if isinstance(value, Unavailable):
        raise Missing(value)
    return value


def known(value: T | Unavailable) -> T | None:
    """The value, or None where the reason does not matter."""
    return None if isinstance(value, Unavailable) else value


def or_unavailable(function: Callable[P, T]) -> Callable[P, T | Unavailable]:
    """The same function, which returns why it has no result where it raises Missing."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | Unavailable:
        try:
            return function(*args, **kwargs)
        except Missing as missing:
            return missing.value

    return call
