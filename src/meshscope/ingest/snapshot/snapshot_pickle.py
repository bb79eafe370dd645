"""A reader of snapshot pickles in Python, where none could be compiled.

Pickles are programs; this machine has no instruction that imports, calls or builds anything. Such
an instruction ends the reading with a TraceError before anything was looked up. Protocols 2 to 5.
It does what `snapshot_machine.c` does, and its values are the same words: a tag in four bits and a
number. A dict becomes a row or a frame when it is filled and a list of frames a stack, so that
memory stays below the file's size and nothing recurses.
"""

import re
from array import array
from collections.abc import Callable

import numpy as np

from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, NO_STACK, STATES
from meshscope.ingest.snapshot.snapshot_words import (
    CODE_NAMES,
    INVALID,
    KEYS,
    KNOWN_TEXTS,
    LONG_NUMBER,
    LONG_TEXT,
    MAX_FRAMES,
    MAX_KEPT_TEXT_BYTES,
    MAX_MARKS,
    MAX_NUMBER,
    MAX_NUMBER_BYTES,
    MAX_TEXT_BYTES,
    MAX_TRACES,
    ORDER,
    PROTOCOL,
    RUNS_CODE,
    TOO_MANY,
    UNKNOWN,
    RawColumns,
    explain,
    limit_memo,
    limit_stack,
)

(
    OPAQUE,  # a value that is not read: None, float, tuple, a number that does not fit
    INT,
    TEXT,
    DICT,  # empty, or of no known kind; its index in the memo + 1, or 0; so for LIST
    LIST,
    FRAME,
    EVENT,
    BLOCK,
    SEGMENT,
    HISTORY,  # stack of an entry in a block's history, before torch 2.1
    STACK,
    TRACE,
    BLOCKS,
    LISTS,
) = range(14)
_FIRST_STATE = len(KEYS) + 2
_FIRST_ACTION = _FIRST_STATE + len(STATES)
_EMPTY_TEXT, _LARGE = len(KEYS), (len(KEYS) + 1) << 4 | TEXT
_KEY_WORDS = {number << 4 | TEXT: name for number, name in enumerate(KEYS)}
_WIDTHS = {0x8A: 1, 0x8B: 4, 0x8C: 1, 88: 4, 0x8D: 8, 67: 1, 66: 4, 0x8E: 8}
"""Bytes of the length, of instructions with one."""
_SIZES = {104: 2, 106: 5, 113: 2, 114: 5, 75: 2, 77: 3, 74: 5, 71: 9, 0x80: 2, 0x95: 9}
"""Bytes of instructions that have always so many; the others have one."""
_REFERENCES = re.compile(rb"\]\x94\((?:j.{4}|h.)+e", re.DOTALL)
"""EMPTY_LIST, MEMOIZE, MARK, any number of LONG_BINGET and BINGET, APPENDS."""
_REFERENCE = re.compile(rb"j.{4}|h.", re.DOTALL)
_MAX_KNOWN_LISTS = 1 << 14
_Fields = dict[str, int]


class PlainPickle:
    def __init__(self, size_bytes: int) -> None:
        self.is_done = False
        self.needed = 1
        self._max_memo, self._max_stack = limit_memo(size_bytes), limit_stack(size_bytes)
        self._stack: list[int] = []
        self._marks: list[int] = []
        """Where argument lists begin in the stack."""
        self._memo = array("q")
        self._num_odd = 0
        self._has_root = False
        self._segments = tuple(array("q") for _ in range(4))
        self._blocks = tuple(array("q") for _ in range(6))
        self._events = tuple(array(code) for code in "hbqqqi")
        self._texts = {text.encode(): number for number, text in enumerate(KNOWN_TEXTS)}
        self._frames: dict[tuple[int, int, int], int] = {}
        self._stacks: dict[bytes, int] = {b"": NO_STACK}
        """Stacks by the numbers of their frames."""
        self._known_lists: dict[bytes, int] = {}
        """Stacks by the instructions that make them."""
        self._trace_device = array("q")
        self._blocks_segment = array("q")
        self._lists_length: list[int] = []
        self._actions = self._make_actions()

    def feed(self, data: bytearray, size: int) -> int:
        view = bytes(memoryview(data)[:size])
        offset = 0
        while not self.is_done:
            try:
                offset = self._run_common_codes(view, offset)
                code_size = self._measure(view, offset)
                if not code_size:
                    break
                self._run(view[offset], view[offset + 1 : offset + code_size])
                offset += code_size
            except (IndexError, OverflowError):
                raise explain(INVALID, 0) from None
            if len(self._stack) > self._max_stack or len(self._marks) > MAX_MARKS:
                raise explain(TOO_MANY, 0)
        return offset

    def _run_common_codes(self, data: bytes, offset: int) -> int:
        """The instructions snapshots are made of, as long as they lie in the data; everything else
        is left to `_run`. Millions of them: no calls in between."""
        stack, memo, texts = self._stack, self._memo, self._texts
        end = len(data) - 300  # the longest of these: a text of 255 bytes
        max_stack = self._max_stack
        while offset < end:
            code = data[offset]
            if code == 104:  # BINGET
                stack.append(memo[data[offset + 1]])
                offset += 2
            elif code == 106:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[offset + 1 : offset + 5], "little")])
                offset += 5
            elif code == 148:  # MEMOIZE
                self._put(len(memo))
                offset += 1
            elif code == 75:  # BININT1
                stack.append(data[offset + 1] << 4 | INT)
                offset += 2
            elif code == 77:  # BININT2
                stack.append((data[offset + 1] | data[offset + 2] << 8) << 4 | INT)
                offset += 3
            elif code == 74:  # BININT
                value = int.from_bytes(data[offset + 1 : offset + 5], "little", signed=True)
                stack.append(value << 4 | INT)
                offset += 5
            elif code == 138 and data[offset + 1] <= 8:  # LONG1
                last = offset + 2 + data[offset + 1]
                stack.append(_word_of(data[offset + 2 : last]))
                offset = last
            elif code == 140:  # SHORT_BINUNICODE
                last = offset + 2 + data[offset + 1]
                text = data[offset + 2 : last]
                stack.append(texts.setdefault(text, len(texts)) << 4 | TEXT)
                offset = last
            elif code == 40:  # MARK
                self._marks.append(len(stack))
                offset += 1
                if len(stack) > max_stack or len(self._marks) > MAX_MARKS:
                    break
            elif code == 125:  # EMPTY_DICT
                stack.append(DICT)
                offset += 1
            elif code == 93:  # EMPTY_LIST
                last = self._take_references(data, offset)
                if last == offset:
                    stack.append(LIST)
                    last += 1
                offset = last
            elif code == 117:  # SETITEMS
                self._fill_from_mark(self._fill_dict)
                offset += 1
            elif code == 101:  # APPENDS
                self._fill_from_mark(self._fill_list)
                offset += 1
            else:
                break
        return offset

    def _take_references(self, data: bytes, offset: int) -> int:
        """A whole list of frames that were there before, in one go: most of a file is such lists.

        Where it ends; `offset` when there is none.
        """
        match = _REFERENCES.match(data, offset)
        if match is None or len(self._memo) >= self._max_memo:
            return offset
        word = self._known_lists.get(match[0])
        if word is None:
            numbers = [_unsigned(one[1:]) for one in _REFERENCE.findall(match[0], 3)]
            items = [self._memo[number] for number in numbers]
            if any(item & 15 != FRAME for item in items):
                return offset
            word = self._make_stack(items)
            if len(self._known_lists) < _MAX_KNOWN_LISTS:
                self._known_lists[match[0]] = word
        self._stack.append(word)
        self._memo.append(word)
        return match.end()

    # --- instructions -------------------------------------------------------------------------

    def _measure(self, data: bytes, offset: int) -> int:
        """Bytes of the instruction at `offset`; 0: not all there."""
        left = len(data) - offset
        if left < 1:
            self.needed = 1
            return 0
        code = data[offset]
        size = _SIZES.get(code, 1)
        width = _WIDTHS.get(code)
        if width is not None:
            size = 1 + width
            if left >= size:
                length = int.from_bytes(data[offset + 1 : offset + size], "little")
                is_number = code in (0x8A, 0x8B)
                if length > (MAX_NUMBER_BYTES if is_number else MAX_TEXT_BYTES):
                    raise explain(LONG_NUMBER if is_number else LONG_TEXT, min(length, 2**63 - 1))
                size += length
        self.needed = size
        return size if left >= size else 0

    def _run(self, code: int, argument: bytes) -> None:
        action = self._actions.get(code)
        if action is None:
            raise explain(RUNS_CODE if code in CODE_NAMES else UNKNOWN, code)
        action(argument)

    def _make_actions(self) -> dict[int, Callable[[bytes], None]]:
        push = self._stack.append
        return {
            ord("h"): self._get,
            ord("j"): self._get,
            0x94: lambda _: self._put(len(self._memo)),
            ord("q"): lambda a: self._put(_unsigned(a)),
            ord("r"): lambda a: self._put(_unsigned(a)),
            ord("K"): lambda a: push(_unsigned(a) << 4 | INT),
            ord("M"): lambda a: push(_unsigned(a) << 4 | INT),
            ord("J"): lambda a: push(int.from_bytes(a, "little", signed=True) << 4 | INT),
            0x8A: lambda a: push(_word_of(a[1:])),
            0x8B: lambda a: push(_word_of(a[4:])),
            0x8C: lambda a: self._push_text(a[1:]),
            ord("X"): lambda a: self._push_text(a[4:]),
            0x8D: lambda a: self._push_text(a[8:]),
            **{code: lambda _: push(OPAQUE) for code in b"CB\x8eN\x88\x89)G"},
            ord("("): lambda _: self._marks.append(len(self._stack)),
            ord("}"): lambda _: push(DICT),
            ord("]"): lambda _: push(LIST),
            ord("u"): lambda _: self._fill_from_mark(self._fill_dict),
            ord("e"): lambda _: self._fill_from_mark(self._fill_list),
            ord("s"): lambda _: self._fill_with(2, self._fill_dict),
            ord("a"): lambda _: self._fill_with(1, self._fill_list),
            **self._make_container_actions(),
        }

    def _make_container_actions(self) -> dict[int, Callable[[bytes], None]]:
        return {
            ord("t"): lambda _: self._make_from_mark(OPAQUE, lambda index, items: None),
            ord("l"): lambda _: self._make_from_mark(LIST, self._fill_list),
            ord("d"): lambda _: self._make_from_mark(DICT, self._fill_dict),
            **{code: self._make_tuple_action(code - 0x84) for code in (0x85, 0x86, 0x87)},
            ord("0"): lambda _: self._pop(1),
            ord("1"): lambda _: self._pop_to_mark(),
            0x80: self._check_protocol,
            0x95: lambda _: None,
            ord("."): self._stop,
        }

    def _make_tuple_action(self, length: int) -> Callable[[bytes], None]:
        def make_tuple(_: bytes) -> None:
            self._pop(length)
            self._stack.append(OPAQUE)

        return make_tuple

    def _check_protocol(self, argument: bytes) -> None:
        if not 2 <= argument[0] <= 5:
            raise explain(PROTOCOL, argument[0])

    def _stop(self, _: bytes) -> None:
        self.is_done = True

    def _push_text(self, text: bytes) -> None:
        if len(text) > MAX_KEPT_TEXT_BYTES:
            self._stack.append(OPAQUE)
        else:
            self._stack.append(self._texts.setdefault(text, len(self._texts)) << 4 | TEXT)

    def _put(self, index: int) -> None:
        word, memo = self._stack[-1], self._memo
        if index > len(memo):
            raise explain(ORDER, 0)
        if index >= self._max_memo:
            raise explain(TOO_MANY, 0)
        if word & 15 in (DICT, LIST):
            word = self._stack[-1] = index + 1 << 4 | word & 15
        if index == len(memo):
            memo.append(word)
        else:
            memo[index] = word
            self._known_lists.clear()  # what they refer to may be another now

    def _get(self, argument: bytes) -> None:
        self._stack.append(self._memo[_unsigned(argument)])

    def _pop(self, num: int) -> None:
        if len(self._stack) < num:
            raise IndexError
        del self._stack[-num:]

    def _pop_to_mark(self) -> None:
        del self._stack[self._pop_mark() :]

    def _pop_mark(self) -> int:
        mark = self._marks.pop()
        if mark > len(self._stack):
            raise IndexError
        return mark

    def _fill_from_mark(self, fill: Callable[[int, list[int]], None]) -> None:
        mark = self._pop_mark()
        if mark == 0:
            raise IndexError
        fill(mark - 1, self._stack[mark:])
        del self._stack[mark:]

    def _fill_with(self, num: int, fill: Callable[[int, list[int]], None]) -> None:
        if len(self._stack) < num + 1:
            raise IndexError
        fill(len(self._stack) - num - 1, self._stack[-num:])
        del self._stack[-num:]

    def _make_from_mark(self, word: int, fill: Callable[[int, list[int]], None]) -> None:
        mark = self._pop_mark()
        items = self._stack[mark:]
        self._stack[mark:] = [word]
        fill(mark, items)

    # --- entries ------------------------------------------------------------------------------

    def _fill_dict(self, index: int, items: list[int]) -> None:
        target = self._stack[index]
        if len(items) % 2:
            raise IndexError
        if target & 15 != DICT:
            if not FRAME <= target & 15 <= HISTORY:
                raise IndexError
            self._num_odd += 1  # filled twice: not by pickle
            return
        names = _KEY_WORDS
        fields = {
            names[key]: value
            for key, value in zip(items[::2], items[1::2], strict=True)
            if key in names
        }
        now = self._take_dict(fields, target)
        if now != target:
            self._replace_container(index, now)

    def _replace_container(self, index: int, now: int) -> None:
        """The container there became something; a reference to it gives that too."""
        before = self._stack[index]
        memo_index = (before >> 4) - 1
        self._stack[index] = now
        if 0 <= memo_index < len(self._memo) and self._memo[memo_index] == before:
            self._memo[memo_index] = OPAQUE if now & 15 in (EVENT, BLOCK, SEGMENT) else now

    def _take_dict(self, fields: _Fields, target: int) -> int:
        """What a dict is by its keys."""
        if "action" in fields:
            return self._add_event(fields)
        if "blocks" in fields and "total_size" in fields:
            return self._add_segment(fields)
        if "state" in fields and "size" in fields:
            return self._add_block(fields)
        if "filename" in fields:
            return self._add_frame(fields)
        if "frames" in fields:
            return _stack_of(fields) << 4 | HISTORY
        if "segments" in fields or "device_traces" in fields:
            self._has_root = True
        return target

    def _add_event(self, fields: _Fields) -> int:
        action = _index_among(fields["action"], _FIRST_ACTION, len(ACTIONS))
        address = fields.get("addr", fields.get("device_free", OPAQUE))
        self._num_odd += action < 0
        device, actions, addresses, sizes, times, stacks = self._events
        device.append(-1)
        actions.append(action)
        addresses.append(_positive(address))
        sizes.append(_positive(fields.get("size", OPAQUE)))
        times.append(_positive(fields.get("time_us", OPAQUE)))
        stacks.append(_stack_of(fields))
        return len(device) - 1 << 4 | EVENT

    def _add_block(self, fields: _Fields) -> int:
        values = (
            -1,
            _positive(fields.get("address", OPAQUE)),
            _positive(fields["size"]),
            _positive(fields.get("requested_size", OPAQUE)),
            _index_among(fields["state"], _FIRST_STATE, len(STATES)),
            _stack_of(fields),
        )
        self._num_odd += values[2] < 0
        for column, value in zip(self._blocks, values, strict=True):
            column.append(value)
        return len(self._blocks[0]) - 1 << 4 | BLOCK

    def _add_segment(self, fields: _Fields) -> int:
        values = (
            max(_positive(fields.get("device", OPAQUE)), 0),
            _positive(fields.get("address", OPAQUE)),
            _positive(fields["total_size"]),
            int(fields.get("segment_type") == _LARGE),
        )
        for column, value in zip(self._segments, values, strict=True):
            column.append(value)
        row, blocks = len(self._segments[0]) - 1, fields["blocks"]
        if blocks & 15 == BLOCKS and self._blocks_segment[blocks >> 4] < 0:
            self._blocks_segment[blocks >> 4] = row
        return row << 4 | SEGMENT

    def _add_frame(self, fields: _Fields) -> int:
        name, file = (_text_or_empty(fields.get(key, OPAQUE)) for key in ("name", "filename"))
        line = max(_positive(fields.get("line", OPAQUE)), 0)
        number = self._frames.setdefault((name, file, line), len(self._frames))
        return number << 4 | FRAME

    def _fill_list(self, index: int, items: list[int]) -> None:
        target = self._stack[index]
        kind = target & 15
        if kind == LIST:
            target = self._take_list(items, target)
            kind = target & 15
            if kind == LIST:
                return
            self._replace_container(index, target)
        elif kind < STACK:
            raise IndexError
        # Pickle fills by the thousand: of a stack more than MAX_FRAMES are there.
        if kind != STACK:
            self._add_to_list(kind, target >> 4, items)

    def _take_list(self, items: list[int], target: int) -> int:
        """What a list is by the first of its elements that is of a known kind."""
        word = next((word for word in items if word & 15 >= LIST), OPAQUE)
        kind = word & 15
        if kind == FRAME:
            return self._make_stack(items)
        if kind == HISTORY:
            return word >> 4 << 4 | STACK
        if kind == EVENT:
            if len(self._trace_device) >= MAX_TRACES:
                raise explain(TOO_MANY, 0)
            self._trace_device.append(-1)
            return len(self._trace_device) - 1 << 4 | TRACE
        if kind == BLOCK:
            self._blocks_segment.append(-1)
            return len(self._blocks_segment) - 1 << 4 | BLOCKS
        if kind == LIST or kind >= STACK:
            self._lists_length.append(0)
            return len(self._lists_length) - 1 << 4 | LISTS
        return target

    def _make_stack(self, items: list[int]) -> int:
        frames = array("i", [word >> 4 for word in items if word & 15 == FRAME])
        self._num_odd += len(items) - len(frames)
        return (
            self._stacks.setdefault(frames[:MAX_FRAMES].tobytes(), len(self._stacks)) << 4 | STACK
        )

    def _add_to_list(self, kind: int, number: int, items: list[int]) -> None:
        wanted, owners = (EVENT, self._events[0]) if kind == TRACE else (BLOCK, self._blocks[0])
        for word in items:
            row = word >> 4
            if kind == LISTS:
                device = self._lists_length[number]
                self._lists_length[number] += 1
                if word & 15 == TRACE and self._trace_device[row] < 0 and device < MAX_TRACES:
                    self._trace_device[row] = device
            elif word & 15 == wanted and owners[row] < 0:
                owners[row] = number
            else:
                self._num_odd += 1

    # --- the end ------------------------------------------------------------------------------

    def finish(self, *, is_cut: bool) -> RawColumns:
        while is_cut and self._marks:
            mark = self._marks.pop()
            if mark > len(self._stack):
                break
            if mark and (self._stack[mark - 1] & 15 == LIST or self._stack[mark - 1] & 15 >= STACK):
                self._fill_list(mark - 1, self._stack[mark:])
            del self._stack[mark:]
        self._memo = array("q")
        texts = list(self._texts)
        events = [np.frombuffer(column, dtype=column.typecode) for column in self._events]
        events[0] = self._find_devices(events[0])
        blocks = [np.frombuffer(column, dtype=np.int64) for column in self._blocks]
        segment_of = np.array([*self._blocks_segment, -1], dtype=np.int64)
        blocks[0] = segment_of[blocks[0]]
        lengths = [len(frames) // 4 for frames in self._stacks]
        return RawColumns(
            segments=tuple(np.frombuffer(column, dtype=np.int64) for column in self._segments),
            blocks=tuple(blocks),
            event_device=events[0],
            event_action=events[1],
            event_address=events[2],
            event_bytes=events[3],
            event_time_us=events[4],
            event_stack=events[5],
            stack_begin=np.cumsum([0, *lengths], dtype=np.int64),
            stack_frames=np.frombuffer(b"".join(self._stacks), dtype=np.int32),
            frames=[(texts[name], texts[file], line) for name, file, line in self._frames],
            num_odd=self._num_odd,
            has_root=self._has_root,
        )

    def _find_devices(
        self, trace: "np.ndarray[tuple[int], np.dtype[np.int16]]"
    ) -> "np.ndarray[tuple[int], np.dtype[np.int16]]":
        self._num_odd += int((trace < 0).sum())
        devices = [
            number if found < 0 else found for number, found in enumerate(self._trace_device)
        ]
        return np.array([*devices, -1], dtype=np.int16)[trace]


def _unsigned(argument: bytes) -> int:
    return int.from_bytes(argument, "little")


def _word_of(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    return value << 4 | INT if -MAX_NUMBER < value < MAX_NUMBER else OPAQUE


def _positive(word: int) -> int:
    return word >> 4 if word & 15 == INT and word >= 0 else -1


def _text_or_empty(word: int) -> int:
    return word >> 4 if word & 15 == TEXT else _EMPTY_TEXT


def _index_among(word: int, first: int, num: int) -> int:
    index = (word >> 4) - first
    return index if word & 15 == TEXT and 0 <= index < num else -1


def _stack_of(fields: _Fields) -> int:
    for key in ("frames", "history"):
        word = fields.get(key, OPAQUE)
        if word & 15 == STACK:
            return word >> 4
    return NO_STACK
