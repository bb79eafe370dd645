"""Reads sizes as people write them: `200GB`, `1.5GiB`, `64k`. Standard library only."""

import re

from meshscope.errors import UsageError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(text: str, name: str) -> int:
    """Bytes; `name` is what the user called it by. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    if match is None or not float(match[1]):
        raise UsageError(f"{name} is {text[:40]!r}, expected a size such as 200GB or 64MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])
