"""A pickle reader that can make plain values only: dict, list, tuple, str, bytes, numbers, None.

Pickles are programs; this machine has no instruction that imports, calls or builds anything else.
Such an instruction ends the reading with a TraceError before anything was looked up. Protocols 2 to
5. Nothing recurses, lengths are checked against what is left of the file, and `on_dict` and
`on_list` let the caller shrink what was just filled, so that a file need not fit into memory.
"""

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from meshscope.errors import TraceError

BUFFER_BYTES = 1 << 22
MAX_STRING_BYTES = 1 << 26
"""Names and settings are short; more is not a snapshot."""
MAX_INTEGER_BYTES = 64
MAX_STACK = 1 << 24

_CODE = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"i": "INST",
    b"o": "OBJ",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"P": "PERSID",
    b"Q": "BINPERSID",
}
"""Instructions that would run or look up code."""


class CutPickle(Exception):
    """The file ends before the pickle does."""


Filled = Callable[[Any, list[Any]], None]


class PlainPickle:
    """Reads one pickle. `on_dict(dict, items)` and `on_list(list, items)` are called instead of
    filling, with keys and values in turn, or elements."""

    def __init__(
        self, file: BinaryIO, size_bytes: int, *, on_dict: Filled, on_list: Filled
    ) -> None:
        self._file = file
        self._left = size_bytes
        self._buffer = b""
        self._at = 0
        self._on_dict = on_dict
        self._on_list = on_list
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Where argument lists begin in the stack."""
        self._memo: list[Any] = []
        self._places: dict[int, int] = {}
        """Of dicts and lists in the memo, by id."""
        self._is_done = False
        self._actions = self._make_actions()

    def read(self) -> Any:
        """The value; CutPickle when the file ends too early, TraceError when it is not plain."""
        while not self._is_done:
            code = b""
            try:
                self._run_usual()
                code = self._take(1)
                action = self._actions.get(code)
                if action is None:
                    raise TraceError(_refuse(code))
                action()
            except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
                raise TraceError(
                    f"not a valid pickle: {type(error).__name__} at {code!r}"
                ) from None
            if len(self._stack) > MAX_STACK or len(self._marks) > MAX_STACK:
                raise TraceError("not a snapshot: it keeps too many values open")
        return self._stack.pop() if self._stack else None

    def _run_usual(self) -> None:
        """The instructions snapshots are made of, as long as they and what they need lie in the
        buffer; everything else is left to `_actions`. Millions of them: no calls in between."""
        buffer, at, stack, memo = self._buffer, self._at, self._stack, self._memo
        end = len(buffer) - 300  # the longest of these: a text of 255 bytes
        while at < end:
            code = buffer[at]
            if code == 104:  # BINGET
                stack.append(memo[buffer[at + 1]])
                at += 2
            elif code == 106:  # LONG_BINGET
                stack.append(memo[int.from_bytes(buffer[at + 1 : at + 5], "little")])
                at += 5
            elif code == 148:  # MEMOIZE
                self._remember(len(memo))
                at += 1
            elif code == 75:  # BININT1
                stack.append(buffer[at + 1])
                at += 2
            elif code == 77:  # BININT2
                stack.append(buffer[at + 1] | buffer[at + 2] << 8)
                at += 3
            elif code == 74:  # BININT
                stack.append(int.from_bytes(buffer[at + 1 : at + 5], "little", signed=True))
                at += 5
            elif code == 138 and buffer[at + 1] <= MAX_INTEGER_BYTES:  # LONG1
                last = at + 2 + buffer[at + 1]
                stack.append(int.from_bytes(buffer[at + 2 : last], "little", signed=True))
                at = last
            elif code == 140:  # SHORT_BINUNICODE
                last = at + 2 + buffer[at + 1]
                stack.append(buffer[at + 2 : last].decode("utf-8", "replace"))
                at = last
            elif code == 40:  # MARK
                self._marks.append(len(stack))
                at += 1
            elif code == 125 or code == 93:  # EMPTY_DICT, EMPTY_LIST
                stack.append({} if code == 125 else [])
                at += 1
            elif code == 117:  # SETITEMS
                items = self._pop_to_mark()
                self._on_dict(_as(dict, stack[-1]), items)
                at += 1
            elif code == 101:  # APPENDS
                items = self._pop_to_mark()
                self._on_list(_as(list, stack[-1]), items)
                at += 1
            else:
                break
        self._at = at

    def forget(self, value: Any, instead: Any) -> None:
        """From now on a reference to this dict or list gives `instead`; it is held here no more."""
        place = self._places.pop(id(value), None)
        if place is not None:
            self._memo[place] = instead

    # --- bytes --------------------------------------------------------------------------------

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            self._fill(num_bytes)
            end = self._at + num_bytes
        found = self._buffer[self._at : end]
        self._at = end
        return found

    def _fill(self, num_bytes: int) -> None:
        rest = self._buffer[self._at :]
        if num_bytes > len(rest) + self._left:
            raise CutPickle
        self._buffer = rest + self._file.read(max(BUFFER_BYTES, num_bytes - len(rest)))
        self._left -= len(self._buffer) - len(rest)
        self._at = 0
        if len(self._buffer) < num_bytes:
            raise CutPickle

    def _unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _sized(self, num_length_bytes: int) -> bytes:
        length = self._unsigned(num_length_bytes)
        if length > MAX_STRING_BYTES:
            raise TraceError(f"not a snapshot: a text of {length} bytes")
        return self._take(length)

    # --- instructions -------------------------------------------------------------------------

    def _make_actions(self) -> dict[bytes, Callable[[], None]]:
        push = self._push
        simple: dict[bytes, Callable[[], None]] = {
            b"\x80": self._check_protocol,
            b"\x95": lambda: self._skip(8),
            b".": self._stop,
            b"(": lambda: self._marks.append(len(self._stack)),
            b"0": self._pop,
            b"1": self._pop_to_mark_only,
            b"N": lambda: push(None),
            b"\x88": lambda: push(True),
            b"\x89": lambda: push(False),
            b"}": lambda: push({}),
            b"]": lambda: push([]),
            b")": lambda: push(()),
            b"J": lambda: push(struct.unpack("<i", self._take(4))[0]),
            b"K": lambda: push(self._unsigned(1)),
            b"M": lambda: push(self._unsigned(2)),
            b"G": lambda: push(struct.unpack(">d", self._take(8))[0]),
            b"\x8a": lambda: self._long(1),
            b"\x8b": lambda: self._long(4),
            b"\x8c": lambda: self._text(1),
            b"X": lambda: self._text(4),
            b"\x8d": lambda: self._text(8),
            b"C": lambda: push(self._sized(1)),
            b"B": lambda: push(self._sized(4)),
            b"\x8e": lambda: push(self._sized(8)),
        }
        return simple | self._make_container_actions()

    def _make_container_actions(self) -> dict[bytes, Callable[[], None]]:
        return {
            b"\x94": self._memoize,
            b"q": lambda: self._put(1),
            b"r": lambda: self._put(4),
            b"h": lambda: self._get(1),
            b"j": lambda: self._get(4),
            b"t": lambda: self._push(tuple(self._pop_to_mark())),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"l": self._list,
            b"d": self._dict,
            b"a": self._append,
            b"e": self._appends,
            b"s": self._set_item,
            b"u": self._set_items,
        }

    def _check_protocol(self) -> None:
        protocol = self._unsigned(1)
        if not 2 <= protocol <= 5:
            raise TraceError(f"pickle protocol {protocol} is not read; 2 to 5 are")

    def _skip(self, num_bytes: int) -> None:
        self._take(num_bytes)

    def _stop(self) -> None:
        self._is_done = True

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        place = self._marks.pop()
        items = self._stack[place:]
        del self._stack[place:]
        return items

    def _pop_to_mark_only(self) -> None:
        self._pop_to_mark()

    def _long(self, num_length_bytes: int) -> None:
        length = self._unsigned(num_length_bytes)
        if length > MAX_INTEGER_BYTES:
            raise TraceError(f"not a snapshot: a number of {length} bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def _text(self, num_length_bytes: int) -> None:
        self._push(self._sized(num_length_bytes).decode("utf-8", "replace"))

    def _memoize(self) -> None:
        self._remember(len(self._memo))

    def _put(self, num_bytes: int) -> None:
        self._remember(self._unsigned(num_bytes))

    def _remember(self, place: int) -> None:
        value, memo = self._stack[-1], self._memo
        if place == len(memo):
            memo.append(value)
        elif place < len(memo):
            memo[place] = value
        else:
            raise TraceError("not written by pickle: its references are out of order")
        if type(value) is dict or type(value) is list:
            self._places[id(value)] = place

    def _get(self, num_bytes: int) -> None:
        self._push(self._memo[self._unsigned(num_bytes)])

    def _tuple(self, length: int) -> None:
        items = tuple(self._stack[-length:])
        if len(items) < length:
            raise IndexError
        self._stack[-length:] = [items]

    def _list(self) -> None:
        items = self._pop_to_mark()
        self._fill_list([], items)

    def _dict(self) -> None:
        items = self._pop_to_mark()
        target: dict[Any, Any] = {}
        self._on_dict(target, items)
        self._push(target)

    def _fill_list(self, target: list[Any], items: list[Any]) -> None:
        self._on_list(target, items)
        self._push(target)

    def _append(self) -> None:
        value = self._stack.pop()
        self._on_list(_as(list, self._stack[-1]), [value])

    def _appends(self) -> None:
        items = self._pop_to_mark()
        self._on_list(_as(list, self._stack[-1]), items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._on_dict(_as(dict, self._stack[-1]), [key, value])

    def _set_items(self) -> None:
        items = self._pop_to_mark()
        self._on_dict(_as(dict, self._stack[-1]), items)


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _refuse(code: bytes) -> str:
    name = _CODE.get(code)
    if name is not None:
        return f"refused: the pickle would run code ({name}); a snapshot holds plain values only"
    return f"not a pickle of plain values: byte {code!r} is no instruction that is read"
