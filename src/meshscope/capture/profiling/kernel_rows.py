"""Turns what torch's profiler saw into rows of the table `kernels`, a few at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from meshscope.store.kernel_table import KernelKind
from meshscope.store.schema import MISSING

_MAX_NAME = 160
_LONG_CALL_NS = 100_000
"""A call of the runtime that takes longer is worth a row."""
_COMMUNICATION = ("nccl", "rccl", "oneccl", "mscclpp", "nvshmem")
_LAUNCHES = ("launch", "memcpy", "memset", "graphexec")
_PROMPT_NS = 50_000
"""Work that begins sooner after the call that launched it found an idle device."""
_MAX_PROMPT_RATIO = 0.1
"""0 where the host is ahead of the device; 0.5 and more where the device waits for it."""
_MAX_STREAM = 0x7FFFFFFF
_NO_WORK = -1
_NO_CALL = (MISSING, MISSING, 0, False)

Row = tuple[str, int, int, int, int, int, int, int, int, int]
"""Name, kind, thread, stream, start, duration, launch, launch duration, is graph, bytes; times on
the profiler's clock."""


class KernelRows:
    """Goes through the events twice: first the host's calls, then what they launched.

    Programs have few names and many events: what a name means is found once.
    """

    def __init__(self, result: Any) -> None:
        self._events = result.events()
        self._calls: dict[int, tuple[int, int, int, bool]] = {}
        self._threads: dict[int, int] = {}
        self._call_kinds: dict[str, tuple[bool, bool, bool]] = {}
        self._work_kinds: dict[str, int] = {}
        self._num_launched = self._num_prompt = 0

    @property
    def call_names(self) -> list[str]:
        """Of what the host called in the window; all of them once every event is looked at."""
        return list(self._call_kinds)

    @property
    def is_host_late(self) -> bool:
        """Whether the device waits for the host more than now and then; likewise."""
        return self._num_prompt > _MAX_PROMPT_RATIO * self._num_launched

    def __len__(self) -> int:
        return len(self._events)

    def walk(self) -> Iterator[Row | None]:
        """One item per event looked at; None where it has no row."""
        device_events = []
        for event in self._events:
            if int(event.device_type()):  # 0 is the host
                device_events.append(event)
            else:
                yield self._note_call(event)
        for event in device_events:
            yield self._make_row(event)

    def _note_call(self, event: Any) -> Row | None:
        name = event.name()
        found = self._call_kinds.get(name)
        if found is None:
            short = name.lower()
            is_graph = "graphlaunch" in short
            is_launch = is_graph or any(part in short for part in _LAUNCHES)
            found = self._call_kinds[name] = (is_launch, is_graph, "synchronize" in short)
        is_launch, is_graph, is_synchronising = found
        duration_ns = event.duration_ns()
        is_long = duration_ns >= _LONG_CALL_NS
        if not (is_launch or is_synchronising or is_long):
            return None
        start_ns = event.start_ns()
        thread = self._threads.setdefault(event.device_resource_id(), len(self._threads)) & 0xFF
        if is_launch:
            self._calls[event.correlation_id()] = (start_ns, duration_ns, thread, is_graph)
        if not (is_synchronising or is_long):
            return None
        kind = KernelKind.SYNCHRONISATION if is_synchronising else KernelKind.UNLAUNCHED
        return (name[:_MAX_NAME], kind, thread, 0, start_ns, duration_ns,
                MISSING, MISSING, 0, MISSING)  # fmt: skip

    def _make_row(self, event: Any) -> Row | None:
        name = event.name()
        kind = self._work_kinds.get(name)
        if kind is None:
            found = find_kind(name)
            kind = self._work_kinds[name] = _NO_WORK if found is None else int(found)
        if kind == _NO_WORK:
            return None
        call = self._calls.get(event.correlation_id())
        launch_ns, launch_duration_ns, thread, is_graph = call or _NO_CALL
        stream = event.device_resource_id() & _MAX_STREAM
        start_ns = event.start_ns()
        if call is not None:
            self._num_launched += 1
            self._num_prompt += start_ns - launch_ns - launch_duration_ns < _PROMPT_NS
        return (name[:_MAX_NAME], kind, thread, stream, start_ns, event.duration_ns(),
                launch_ns, launch_duration_ns, int(is_graph), MISSING)  # fmt: skip


def find_kind(name: str) -> KernelKind | None:
    """Of work of the device, by its name; None for what is no work."""
    short = name[:40].lower()
    if short.startswith("memcpy"):
        return KernelKind.COPY
    if short.startswith("memset"):
        return KernelKind.FILL
    if any(part in short for part in _COMMUNICATION):
        return KernelKind.COMMUNICATION
    if short.endswith(" synchronize") or short.startswith(("context sync", "stream wait")):
        return None  # what CUPTI tells about waits on the device
    return KernelKind.COMPUTE


def put_rows(
    rows: Iterator[Row | None],
    *,
    put: Callable[..., None],
    name_id: Callable[[str], int],
    offset_ns: int,
    sample: int,
    clock: Callable[[], int],
    until_ns: int,
) -> tuple[int, bool]:
    """Writes rows until the time is up; how many, and whether all are done.

    `offset_ns` is the profiler's clock less the host's monotonic one.
    """
    num_written = 0
    for count, row in enumerate(rows):
        if row is not None:
            name, kind, thread, stream, start_ns, duration_ns, launch, launch_ns, graph, size = row
            put(
                name_id(name) | int(kind) << 16 | thread << 24 | stream << 32,
                start_ns - offset_ns,
                duration_ns,
                launch - offset_ns if launch != MISSING else MISSING,
                launch_ns,
                sample | graph << 32,
                size,
            )
            num_written += 1
        if not count % 16 and clock() >= until_ns:
            return num_written, False
    return num_written, True
