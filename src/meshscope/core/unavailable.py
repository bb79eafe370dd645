"""The value returned where a number or fact could not be had.

Missing is not zero and not a guess: a function that may have nothing to say returns
`T | Unavailable`, and whoever prints the result prints the reason in its place.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Stands for a missing result, with one sentence on why it is missing."""

    reason: str
    """What was not there, and where possible how to get it."""
