"""A page to be shared: without hosts, paths and command lines.

Hosts become `host 1`, `host 2` wherever their names stand, also inside of sentences. Of a path its
last part is left. Command lines are dropped, and what differs between two. Everything else is as it
was: names of groups, phases and logged numbers are the program's own.
"""

import re
from collections.abc import Mapping
from typing import Any

_ABSOLUTE = re.compile(r"(?<![\w./:])(?:~|\.{1,2})?(?:/[^\s/'\",;:()\[\]{}<>|]+)+/?")
"""A path inside of a sentence."""
_WHOLE = re.compile(r"[^\s]*/[^\s]*")
"""A text that is nothing but a path."""
_PATH_KEYS = frozenset(("path", "file", "run", "name", "a", "b", "filename"))
"""What may be a relative path, which a sentence does not show."""
_PATH_MAPS = frozenset(("values",))
_SCHEMA_KEY = re.compile(r"[a-z_0-9]+")
_ARGUMENTS = "arguments"
"""Subject of a difference between two command lines."""


def redact(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The same JSON values without what names a machine or its user."""
    hosts = sorted(_find_hosts(plain))
    names = {host: f"host {index + 1}" for index, host in enumerate(hosts)}
    found: dict[str, Any] = _Redaction(names).clean(plain)
    return {**found, "meta": {**found["meta"], "is_redacted": True}}


def _find_hosts(value: Any) -> set[str]:
    """Texts that stand under the key `host`, anywhere."""
    found: set[str] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            host = one.get("host")
            found |= {host} if isinstance(host, str) and host else set()
            pending += one.values()
        elif isinstance(one, list) and one and isinstance(one[0], (dict, list)):
            pending += one
    return found


class _Redaction:
    def __init__(self, hosts: Mapping[str, str]) -> None:
        self._hosts = hosts
        longest = sorted(hosts, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest))
        self._pattern = re.compile(rf"(?<![\w.-])(?:{pattern})(?![\w-])") if longest else None

    def clean(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            inner = key if key in _PATH_MAPS else ""
            return {
                name if _SCHEMA_KEY.fullmatch(name) else self._say(name, ""): self.clean(
                    entry, inner or name
                )
                for name, entry in value.items()
            }
        if isinstance(value, list):
            return self._clean_list(value, key)
        if isinstance(value, str) and not key.endswith("_layer"):
            return self._say(value, key)
        return value

    def _clean_list(self, values: list[Any], key: str) -> list[Any]:
        if key == "argv":
            return []
        if values and isinstance(values[0], (int, float)):
            return values
        return [
            self.clean(entry, key)
            for entry in values
            if not (isinstance(entry, Mapping) and entry.get("subject") == _ARGUMENTS)
        ]

    def _say(self, text: str, key: str) -> str:
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: self._hosts[found[0]], text)
        if (key in _PATH_KEYS or key in _PATH_MAPS) and _WHOLE.fullmatch(text):
            return _take_last(text)
        return _ABSOLUTE.sub(lambda found: _take_last(found[0]), text)


def _take_last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
