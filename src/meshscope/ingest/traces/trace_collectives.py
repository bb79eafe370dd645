"""The collectives of a trace: what they moved, for which group, how long, and how much was exposed.

A kernel that carries a collective's arguments says them itself; what it does not say the host's
record of the call (`record_param_comms`) that launched it does. Sizes are in elements of a dtype,
as the profiler has them; a collective without them has a time and no bandwidth. A kernel that
carries several messages at once has them from the host's records (`trace_messages`). Kernel time
includes waiting for the ranks that come late: only traces of several ranks can tell it from
transfer.

Without a device the calls of gloo stand for them: they name no group, so there is one only where
the header lists no two groups of several ranks with different members.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.core.group_axis import OTHER, AxisSource
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_axes import AxisNamer, NamedGroup, find_rank
from meshscope.ingest.traces.trace_kernels import KernelClasses, Work, name_kind
from meshscope.ingest.traces.trace_messages import POINT_TO_POINT, find_batches
from meshscope.ingest.traces.trace_spans import (
    find_ends,
    find_innermost,
    find_named,
    read_arguments,
)
from meshscope.ingest.traces.trace_steps import Places, TraceSteps
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Int32s, Int64s, find_true

DTYPE_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Short": 2,
    "Int": 4,
    "Long": 8,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "ComplexFloat": 8,
}
HOST_TYPE_BYTES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "short": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "bool": 1,
}
"""Types as operators' arguments name them."""
_MAX_ELEMENTS = 1 << 48
_WORD = re.compile(r"[A-Za-z0-9_]+")
_HOST_MESSAGE = re.compile(r"c10d::(?:send|recv_)$")
_TEXTS = (
    "Collective name",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
)
_GROUP_TEXTS = _TEXTS[2:]
_ELEMENTS = ("In msg nelems", "Out msg nelems")
_NUMBERS = (*_ELEMENTS, "Group size", "Seq", "Src Rank", "Dst Rank")


SYMMETRIC = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCollective:
    """One communication kernel, or one call of gloo."""

    row: int
    kind: str
    begin_ns: int
    duration_ns: int
    exposed_ns: int
    """Part of it in which nothing computed on the device."""
    group: str
    """The process group's name in torch; "" when it is not known."""
    description: str
    ranks: tuple[int, ...]
    """Of the group, as far as the trace says."""
    group_size: int | Unavailable
    size_bytes: int | Unavailable
    """The whole array, counted once."""
    dtype: str
    axis: str = "unknown"
    axis_source: AxisSource = AxisSource.NONE
    step: int | None = None
    """The profiler's step that launched it."""
    sequence: int | None = None
    """Which collective of its group it is, as the group counts; None when it is not said."""
    messages: tuple[tuple[int, int], ...] = ()
    """Sender and receiver of each, for what is no collective; () when the trace does not tell."""

    @property
    def end_ns(self) -> int:
        """Begin and length."""
        return self.begin_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One of several that a kernel sends and receives at once."""

    is_send: bool
    peer: int
    """-1: not said."""
    size_bytes: int | Unavailable


def list_collectives(
    trace: Trace,
    classes: KernelClasses,
    rows: Int64s,
    compute: Intervals,
    operator_of: Int32s,
    *,
    namer: AxisNamer | None = None,
    steps: TraceSteps | None = None,
    step_of: Places | None = None,
) -> tuple[TraceCollective, ...]:
    """The communication kernels among `rows`, in order of begin.

    `step_of` is the place of each event's step in `steps`.
    """
    events = trace.events
    picked = rows[classes.work[rows] == int(Work.COMMUNICATION)]
    begin, end = events.begin_ns[picked], find_ends(trace, picked)
    exposed = (end - begin) - compute.within(begin, end)
    numbers: list[int | None] = [None] * len(picked)
    if steps is not None and step_of is not None:
        numbers = steps.numbers_at(step_of[picked])
    kinds = [classes.kinds[kind] for kind in classes.kind[picked].tolist()]
    facts = _Facts(trace, picked, operator_of, namer, kinds)
    return tuple(
        facts.describe(place, row, kind, begin_ns, length, hidden, step)
        for place, (row, kind, begin_ns, length, hidden, step) in enumerate(
            zip(
                picked.tolist(),
                kinds,
                begin.tolist(),
                (end - begin).tolist(),
                exposed.tolist(),
                numbers,
                strict=True,
            )
        )
    )


class _Facts:
    """Arguments of some events, from the operator of each where it does not have them itself."""

    def __init__(
        self,
        trace: Trace,
        picked: Int64s,
        operator_of: Int32s,
        namer: AxisNamer | None,
        kinds: Sequence[str],
    ) -> None:
        rank = find_rank(trace)
        self._rank = None if isinstance(rank, Unavailable) else rank
        self._namer = namer or AxisNamer(trace.groups, world_size=trace.world_size)
        self._widths: dict[str, int | None] = {}
        operator = operator_of[picked].astype(np.int64)
        batches = find_batches(trace, picked, operator_of, kinds)
        for place, records in batches.items():
            operator[place] = records[0]
        own = read_arguments(trace, picked, _TEXTS, _NUMBERS)
        lent = read_arguments(trace, operator, _TEXTS, _NUMBERS)
        self._text = {name: _name(trace, _lend(own.text[name], lent.text[name])) for name in _TEXTS}
        self._number = {name: _lend(own.number[name], lent.number[name]) for name in _NUMBERS}
        self._name_by_stream(trace, picked)
        self._batches = {
            place: self._read_records(trace, records) for place, records in batches.items()
        }

    def _name_by_stream(self, trace: Trace, picked: Int64s) -> None:
        """NCCL gives each group a stream: operations whose call is not in the trace are of the one
        group that their stream is of, where nothing else runs on it."""
        events = trace.events
        track = events.track[picked].tolist()
        said = [
            *zip(
                *(self._text[name] for name in _GROUP_TEXTS),
                self._number["Group size"],
                strict=True,
            )
        ]
        is_open = [not any(texts) and size < 0 for *texts, size in said]
        if not any(is_open):
            return
        found: dict[int, set[tuple[str | int, ...]]] = {}
        for own, group, is_unsaid in zip(track, said, is_open, strict=True):
            if not is_unsaid:
                found.setdefault(own, set()).add(group)
        shared = set(np.unique(events.track[_other_work(trace, picked)]).tolist())
        for place, (own, is_unsaid) in enumerate(zip(track, is_open, strict=True)):
            if is_unsaid and own not in shared and len(found.get(own, ())) == 1:
                *texts, size = next(iter(found[own]))
                for name, text in zip(_GROUP_TEXTS, texts, strict=True):
                    self._text[name][place] = str(text)
                self._number["Group size"][place] = int(size)

    def _read_records(self, trace: Trace, rows: list[int]) -> list[_Message]:
        """What the host's records of messages say."""
        found = read_arguments(trace, np.array(rows, dtype=np.int64), _TEXTS, _NUMBERS)
        names = _name(trace, found.text["Collective name"].tolist())
        dtypes = _name(trace, found.text["dtype"].tolist())
        elements = np.maximum(*(found.number[name] for name in _ELEMENTS)).tolist()
        sources, targets = (found.number[name].tolist() for name in ("Src Rank", "Dst Rank"))
        messages = []
        for place, name in enumerate(names):
            is_send = name.lower().startswith("send")
            messages.append(
                _Message(
                    is_send=is_send,
                    peer=targets[place] if is_send else sources[place],
                    size_bytes=self._size_of(dtypes[place], elements[place]),
                )
            )
        return messages

    def describe(
        self,
        place: int,
        row: int,
        kind: str,
        begin_ns: int,
        duration_ns: int,
        exposed_ns: int,
        step: int | None,
    ) -> TraceCollective:
        size = self._number["Group size"][place]
        group = self._namer.name(
            self._text["Process Group Name"][place],
            self._text["Process Group Description"][place],
            self._text["Process Group Ranks"][place],
            size,
        )
        messages = self._messages(place, kind, group)
        axis, axis_source = group.axis, group.axis_source
        if messages:
            named = {self._namer.name_pair(group, *message) for message in messages}
            axis, axis_source = next(iter(named)) if len(named) == 1 else (OTHER, AxisSource.NONE)
        sequence = self._number["Seq"][place]
        return TraceCollective(
            row=row,
            kind=kind,
            begin_ns=begin_ns,
            duration_ns=duration_ns,
            exposed_ns=exposed_ns,
            group=group.name,
            description=group.description,
            ranks=group.ranks,
            group_size=_group_size(size, group),
            size_bytes=self._size(place),
            dtype=self._text["dtype"][place],
            axis=axis,
            axis_source=axis_source,
            step=step,
            sequence=sequence if sequence >= 0 else None,
            messages=messages,
        )

    def _messages(self, place: int, kind: str, group: NamedGroup) -> tuple[tuple[int, int], ...]:
        """Sender and receiver of each message; in a group of two the other one is the peer."""
        rank = self._rank
        if kind != POINT_TO_POINT or rank is None:
            return ()
        listed = self._batches.get(place)
        if listed is None:
            name = self._text["Collective name"][place].lower()
            is_send, is_receive = name.startswith("send"), name.startswith("recv")
            if is_send == is_receive:
                return ()  # several at once, or it is not said
            peer = self._number["Dst Rank" if is_send else "Src Rank"][place]
            listed = [_Message(is_send=is_send, peer=peer, size_bytes=0)]
        others = [other for other in group.ranks if other != rank]
        found = []
        for one in listed:
            peer = one.peer
            if peer < 0 and len(others) == 1 and len(group.ranks) == 2:
                peer = others[0]
            if peer < 0 or peer == rank:
                return ()
            found.append((rank, peer) if one.is_send else (peer, rank))
        return tuple(found)

    def _size(self, place: int) -> int | Unavailable:
        """The larger side is the whole array, gathered or to be scattered; messages add up."""
        if place in self._batches:
            total = 0
            for one in self._batches[place]:
                if isinstance(one.size_bytes, Unavailable):
                    return one.size_bytes
                total += one.size_bytes
            return total
        elements = max(self._number[name][place] for name in _ELEMENTS)
        return self._size_of(self._text["dtype"][place], elements)

    def _size_of(self, dtype: str, elements: int) -> int | Unavailable:
        if dtype not in self._widths:
            word = _WORD.match(dtype)
            self._widths[dtype] = DTYPE_BYTES.get(word[0] if word else "")
        width = self._widths[dtype]
        if width is None or elements < 0 or elements > _MAX_ELEMENTS:
            return Unavailable("the trace does not say how much was sent")
        return elements * width


def _other_work(trace: Trace, picked: Int64s) -> Int64s:
    category = trace.events.category
    is_work = (category >= int(Category.KERNEL)) & (category <= int(Category.MEMSET))
    is_work[picked] = False
    return find_true(is_work)


def _lend(own: Int64s, lent: Int64s) -> list[int]:
    """Of each event its own value, else its operator's, else -1."""
    found: list[int] = np.where(own >= 0, own, lent).tolist()
    return found


def _name(trace: Trace, places: list[int]) -> list[str]:
    return [trace.strings[place] if place >= 0 else "" for place in places]


def _group_size(size: int, group: NamedGroup) -> int | Unavailable:
    if size > 0:
        return size
    return len(group.ranks) or Unavailable("the trace does not say")


def list_host_collectives(
    trace: Trace,
    rows: Int64s,
    exposed_ns: Int64s,
    *,
    namer: AxisNamer,
    step_of: Sequence[int | None],
) -> tuple[TraceCollective, ...]:
    """Calls of gloo, in order of begin, of which `exposed_ns` were exposed."""
    events = trace.events
    group = namer.only_group()
    said = read_arguments(trace, rows, ("Input Dims", "Input type"), ()).text
    known = find_rank(trace)
    rank = None if isinstance(known, Unavailable) else known
    sizes: dict[tuple[int, int, str], int | Unavailable] = {}
    found = []
    for row, peer, exposed, step, shapes, types in zip(
        rows.tolist(),
        _find_peers(trace, rows),
        exposed_ns.tolist(),
        step_of,
        said["Input Dims"].tolist(),
        said["Input type"].tolist(),
        strict=True,
    ):
        name = trace.strings[events.name[row]]
        kind = name_kind(name)
        key = (shapes, types, kind)
        if key not in sizes:
            texts = _name(trace, [shapes, types])
            sizes[key] = _host_size(texts[0], texts[1], kind, len(group.ranks))
        found.append(
            TraceCollective(
                row=row,
                kind=kind,
                begin_ns=int(events.begin_ns[row]),
                duration_ns=int(events.duration_ns[row]),
                exposed_ns=exposed,
                group=group.name,
                description=group.description,
                ranks=group.ranks,
                group_size=_group_size(-1, group),
                size_bytes=sizes[key],
                dtype="",
                axis=group.axis,
                axis_source=group.axis_source,
                step=step,
                messages=_host_messages(name, kind, rank, group, peer),
            )
        )
    return tuple(found)


def _host_messages(
    name: str, kind: str, rank: int | None, group: NamedGroup, peer_place: int
) -> tuple[tuple[int, int], ...]:
    """`peer_place` is the other's place in the group, -1 where the call does not say."""
    if kind != POINT_TO_POINT or rank is None or rank not in group.ranks:
        return ()
    others = [other for other in group.ranks if other != rank]
    if 0 <= peer_place < len(group.ranks):
        peer = group.ranks[peer_place]
    elif len(others) == 1:
        peer = others[0]
    else:
        return ()
    return ((rank, peer),) if "send" in name else ((peer, rank),)


def _find_peers(trace: Trace, rows: Int64s) -> list[int]:
    """Of gloo's messages whom torch's call for each names, by place in the group; -1 without one:
    values are recorded with shapes only."""
    calls = find_named(trace, _HOST_MESSAGE.match, Category.CPU_OP)
    asked = find_innermost(trace, calls, rows)
    (said,) = read_arguments(trace, asked, ("Concrete Inputs",), ()).text.values()
    read = {place: _read_peer(trace.strings[place]) for place in set(said.tolist()) if place >= 0}
    return [read.get(place, -1) for place in said.tolist()]


def _read_peer(text: str) -> int:
    """Of `["", "", "1", "0"]`: tensors, group, peer, tag."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return -1
    peer = values[2] if isinstance(values, list) and len(values) > 2 else ""
    return int(peer) if isinstance(peer, str) and peer.isdecimal() and len(peer) < 10 else -1


def _host_size(shapes: str, types: str, kind: str, group_size: int) -> int | Unavailable:
    """Of the inputs; what is gathered is as many times larger."""
    absent = Unavailable("the trace does not say how much was sent")
    try:
        dims, names = json.loads(shapes or "null"), json.loads(types or "null")
    except (ValueError, RecursionError):
        return absent
    if not (isinstance(dims, list) and isinstance(names, list) and len(dims) == len(names)):
        return absent
    total = 0
    for sizes, name in zip(dims, names, strict=True):
        width = HOST_TYPE_BYTES.get(name) if isinstance(name, str) else None
        if width is None or not isinstance(sizes, list):
            return absent
        if not all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in sizes):
            return absent
        total += math.prod(sizes) * width
    if kind == "all_gather":
        total *= group_size
    return total if 0 < total < _MAX_ELEMENTS * 8 else absent
