"""Reads `torch.cuda.memory._dump_snapshot` files into columns, an entry at a time.

Blocks and events become rows of numbers as soon as the pickle has them, stacks are kept once, and
the dictionaries they came in are emptied, so that memory stays well below the file's size. What is
not of the expected type is left out and counted.
"""

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.errors import TraceError
from meshscope.ingest.snapshot_pickle import CutPickle, PlainPickle
from meshscope.store.snapshot_columns import ACTIONS, NO_STACK, STATES, Frame, Snapshot

MAX_FRAMES = 512
"""Frames of one stack that are kept, the innermost."""
MAX_NUMBER = 1 << 62
_KEY_TYPES = frozenset({str, int, float, bool})


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot; TraceError when it is none, or would run code."""
    builder = _Builder()
    warnings: list[str] = []
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            reader = PlainPickle(
                file, size_bytes, on_dict=builder.fill_dict, on_list=builder.fill_list
            )
            builder.forget = reader.forget
            root = reader.read()
    except CutPickle:
        root = None
        warnings.append("the file is cut: what follows is of its beginning")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    if not builder.has_anything and not isinstance(root, Mapping):
        raise TraceError(f"{path} is not a memory snapshot: it has neither segments nor traces")
    if not builder.has_anything and not {"segments", "device_traces"} & set(map(str, root or ())):
        raise TraceError(f"{path} is not a memory snapshot: it has neither segments nor traces")
    return builder.finish(path, root, warnings)


class _Stack:
    """Stands in the place of a list of frames."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Builder:
    """Turns what the pickle holds into rows."""

    def __init__(self) -> None:
        self.segments = tuple(array("q") for _ in range(4))
        self.blocks = tuple(array("q") for _ in range(6))
        self.events = tuple(array("q") for _ in range(6))
        self._frames: dict[Frame, int] = {}
        self._frame_numbers: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._stacks_by_ids: dict[tuple[int, ...], int] = {}
        self._traces: dict[int, int] = {}
        self._kept: list[Any] = []
        self._shown: list[_Stack] = [_Stack(NO_STACK)]
        self.forget: Callable[[Any, Any], None] = lambda value, instead: None
        """Lets the pickle's reader drop what has become a row."""
        self.num_odd = 0

    @property
    def has_anything(self) -> bool:
        """Whether a segment, block or event was found."""
        return any(len(columns[0]) for columns in (self.segments, self.blocks, self.events))

    def fill_dict(self, target: dict[Any, Any], items: list[Any]) -> None:
        """Instead of `update`: stacks become numbers."""
        keys = items[::2]
        if not _KEY_TYPES.issuperset(map(type, keys)):
            # Hashing nested tuples recurses without a limit.
            raise TraceError("not a snapshot: a key that is neither text nor number")
        target.update(zip(keys, items[1::2], strict=True))
        frames = target.get("frames")
        if type(frames) is list:
            target["frames"] = self._intern(frames)

    def fill_list(self, target: list[Any], items: list[Any]) -> None:
        """Instead of `extend`: blocks, segments and events become rows."""
        for item in items:
            if type(item) is not dict:
                target.append(item)
            elif "action" in item:
                self._add_event(target, item)
            elif "blocks" in item and "total_size" in item:
                self._add_segment(item)
            elif "state" in item and "size" in item:
                target.append(self._add_block(item))
            else:
                target.append(item)

    def _intern(self, frames: list[Any]) -> _Stack:
        # Frames are the same objects in many stacks, and kept: their ids tell stacks apart.
        ids = tuple(map(id, frames))
        known = self._stacks_by_ids.get(ids)
        number = self._number_stack(frames) if known is None else known
        if known is None and all(type(frame) is dict for frame in frames):
            self._stacks_by_ids[ids] = number
        if number == len(self._shown):
            self._shown.append(_Stack(number))
        found = self._shown[number]
        self.forget(frames, found)  # the pickle may refer to this very list again
        return found

    def _number_stack(self, frames: list[Any]) -> int:
        places = tuple(self._frame(frame) for frame in frames[:MAX_FRAMES] if type(frame) is dict)
        return self._stacks.setdefault(places, len(self._stacks))

    def _frame(self, found: dict[Any, Any]) -> int:
        known = self._frame_numbers.get(id(found))
        if known is None:
            line = found.get("line")
            frame = Frame(
                str(found.get("name", ""))[:500],
                str(found.get("filename", ""))[:1000],
                line if type(line) is int and 0 <= line < MAX_NUMBER else 0,
            )
            known = self._frames.setdefault(frame, len(self._frames))
            self._frame_numbers[id(found)] = known
            self._kept.append(found)  # an id is good as long as its object is there
        return known

    def _stack_of(self, item: dict[Any, Any]) -> int:
        frames = item.get("frames")
        if type(frames) is _Stack:
            return frames.number
        history = item.get("history")  # before torch 2.1
        if type(history) is list and history and type(history[0]) is dict:
            return self._stack_of({"frames": history[0].get("frames")})
        return NO_STACK

    def _add_block(self, item: dict[Any, Any]) -> int:
        state = item.get("state")
        _append(
            self.blocks,
            -1,
            _number(item.get("address")),
            _number(item.get("size")),
            _number(item.get("requested_size")),
            STATES.index(state) if state in STATES else -1,
            self._stack_of(item),
        )
        self.num_odd += self.blocks[2][-1] < 0
        self.forget(item, None)
        return len(self.blocks[0]) - 1

    def _add_segment(self, item: dict[Any, Any]) -> None:
        row, address = len(self.segments[0]), _number(item.get("address"))
        _append(
            self.segments,
            max(_number(item.get("device")), 0),
            address,
            _number(item.get("total_size")),
            int(item.get("segment_type") == "large"),
        )
        blocks = item.get("blocks")
        for block in blocks if type(blocks) is list else []:
            if type(block) is int and 0 <= block < len(self.blocks[0]):
                self.blocks[0][block] = row
                if self.blocks[1][block] < 0:
                    self.blocks[1][block] = address
                address = self.blocks[1][block] + max(self.blocks[2][block], 0)
        self.forget(item, None)

    def _add_event(self, target: list[Any], item: dict[Any, Any]) -> None:
        action = item.get("action")
        if id(target) not in self._traces:
            self._traces[id(target)] = len(self._traces)
            self._kept.append(target)
        _append(
            self.events,
            self._traces[id(target)],
            ACTIONS.index(action) if action in ACTIONS else -1,
            _number(item.get("addr", item.get("device_free"))),
            _number(item.get("size")),
            _number(item.get("time_us")),
            self._stack_of(item),
        )
        self.num_odd += self.events[1][-1] < 0
        self.forget(item, None)

    def finish(self, path: Path, root: Any, warnings: list[str]) -> Snapshot:
        """Columns of all that was found."""
        segments, blocks, events = (
            [np.frombuffer(column, dtype=np.int64) for column in columns]
            for columns in (self.segments, self.blocks, self.events)
        )
        traces = root.get("device_traces") if isinstance(root, Mapping) else None
        if type(traces) is list and len(events[0]):
            devices = np.arange(len(self._traces), dtype=np.int64)
            for device, trace in enumerate(traces):
                if id(trace) in self._traces:
                    devices[self._traces[id(trace)]] = device
            events[0] = devices[events[0]]
        if self.num_odd:
            warnings.append(f"{self.num_odd} entries are of no known kind")
        return Snapshot(
            path=path,
            segment_device=segments[0],
            segment_address=segments[1],
            segment_total_bytes=segments[2],
            segment_is_large=segments[3],
            block_segment=blocks[0],
            block_address=blocks[1],
            block_bytes=blocks[2],
            block_requested_bytes=blocks[3],
            block_state=blocks[4],
            block_stack=blocks[5],
            event_device=events[0],
            event_action=events[1],
            event_address=events[2],
            event_bytes=events[3],
            event_time_us=events[4],
            event_stack=events[5],
            stacks=list(self._stacks),
            frames=list(self._frames),
            num_odd=self.num_odd,
            warnings=tuple(warnings),
        )


def _append(columns: tuple["array[int]", ...], *values: int) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < MAX_NUMBER else -1
